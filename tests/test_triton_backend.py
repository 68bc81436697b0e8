"""The whole engine on the Triton kernels, in Triton's interpreter.

TRITON_INTERPRET is read when triton is imported: engine_interpreted.py runs in its own process.
"""

import importlib.util

import pytest

from tests.interpreter import run_in_interpreter


@pytest.mark.kernels
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton exists for Linux only"
)
def test_the_engine_in_the_interpreter(tmp_path):
    run_in_interpreter("tests/engine_interpreted.py", tmp_path / "report.xml")
