"""Runs a file of tests in Triton's interpreter, in a process of its own.

TRITON_INTERPRET is read when triton is imported. Such a file is not called test_*: pytest takes
it only when it is named.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_in_interpreter(file: str, report: Path) -> None:
    """Fail with the child's output unless all tests of the file ran and passed."""
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
        pytest.fail(f"{child.stdout}\n{child.stderr[-4000:]}", pytrace=False)
    cases = list(ET.parse(report).getroot().iter("testcase"))
    skipped = [case.get("name") for case in cases for _ in case.iter("skipped")]
    assert cases, "the file has no tests"
    assert not skipped
