"""Runs a file of tests in Triton's interpreter, in a process of its own.

TRITON_INTERPRET is read when triton is imported, and a kernel that follows a wild address takes
its process with it. Such a file lies in a folder launched/, or is not called test_*: pytest takes
it only when it is named.
"""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kernels.available import why_no_interpreter

ROOT = Path(__file__).resolve().parent.parent
NO_INTERPRETER = why_no_interpreter()

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)
needs_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1",
    reason="TRITON_INTERPRET is set: Triton compiles nothing in this process",
)
needs_interpreter = pytest.mark.skipif(NO_INTERPRETER is not None, reason=str(NO_INTERPRETER))


def run_in_interpreter(file: str, report: Path) -> None:
    """Fail with the child's output unless all tests of the file, a path from ROOT, passed."""
    command = [sys.executable, "-m", "pytest", file, "-q", "--no-header", "--color=no"]
    child = subprocess.run(
        [*command, f"--junitxml={report}"],
        cwd=ROOT,
        # Tensors are small: torch's threads would only wait for each other.
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        signal = " (killed by a signal: a wild address?)" if child.returncode < 0 else ""
        pytest.fail(
            f"TRITON_INTERPRET=1 python -m pytest {file} ended with {child.returncode}{signal}\n"
            f"{child.stdout}\n{child.stderr[-4000:]}",
            pytrace=False,
        )
    cases = list(ET.parse(report).getroot().iter("testcase"))
    skips = [skip.get("message") for case in cases for skip in case.iter("skipped")]
    assert cases, "the file has no tests"
    # A skip in a process of its own would go unseen.
    assert not skips, f"skipped in {file}: {skips}"
