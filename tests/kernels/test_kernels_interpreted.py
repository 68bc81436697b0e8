"""Runs the files of launched/ in Triton's interpreter, each in a process of its own."""

from pathlib import Path

import pytest

from tests.interpreter import ROOT, needs_interpreter, run_in_interpreter

FILES = sorted((Path(__file__).parent / "launched").glob("test_*.py"))


@pytest.mark.kernels
@needs_interpreter
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_in_the_interpreter(file, tmp_path):
    run_in_interpreter(str(file.relative_to(ROOT)), tmp_path / "report.xml")
