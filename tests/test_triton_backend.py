"""The whole engine on the Triton kernels, in Triton's interpreter."""

import pytest

from tests.interpreter import needs_interpreter, run_in_interpreter


@pytest.mark.kernels
@needs_interpreter
def test_the_engine_in_the_interpreter(tmp_path):
    run_in_interpreter("tests/engine_interpreted.py", tmp_path / "report.xml")
