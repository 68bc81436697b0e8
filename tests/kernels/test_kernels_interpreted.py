"""Runs the files of launched/ in Triton's interpreter, each in a process of its own.

The variable that chooses the interpreter is read when triton is imported, and a kernel that
follows a wild address takes its process with it.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from kernel_testing import HAS_TRITON, NO_TRITON

HERE = Path(__file__).parent
FILES = sorted((HERE / "launched").glob("test_*.py"))

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_in_the_interpreter(file, tmp_path):
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", str(file), "-q", "--no-header", "--color=no"]
    child = subprocess.run(
        [*command, f"--junitxml={report}"],
        cwd=HERE.parents[1],
        # Tensors are small: torch's threads would only wait for each other.
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        signal = " (killed by a signal: a wild address?)" if child.returncode < 0 else ""
        pytest.fail(
            f"TRITON_INTERPRET=1 python -m pytest {file.relative_to(HERE.parents[1])}"
            f" ended with {child.returncode}{signal}\n{child.stdout}\n{child.stderr[-4000:]}",
            pytrace=False,
        )
    cases = list(ET.parse(report).getroot().iter("testcase"))
    skips = [skip.get("message") for case in cases for skip in case.iter("skipped")]
    assert cases, "the file has no tests"
    # A skip in a process of its own would go unseen.
    assert not skips, f"skipped in {file.name}: {skips}"
