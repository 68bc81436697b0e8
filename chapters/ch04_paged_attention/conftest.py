"""How this chapter's kernels run in a test: in Triton's interpreter, on the CPU.

TRITON_INTERPRET is read when triton is imported, so it is set here, before anything does that.
With TRITON_INTERPRET=0 in the environment the same tests run on a GPU.
"""

import importlib.util
import os
import sys

import pytest

from kernels.available import why_no_interpreter

os.environ.setdefault("TRITON_INTERPRET", "1")
# An error in a kernel as it was raised, not inside another one.
os.environ.setdefault("TRITON_FRONT_END_DEBUGGING", "1")

HAS_TRITON = importlib.util.find_spec("triton") is not None
IMPORTED_BEFORE = "triton" in sys.modules


def pytest_runtest_setup() -> None:
    """Say in one line why a kernel cannot run here."""
    if not HAS_TRITON:
        pytest.skip("chapter 4 needs triton, which exists for Linux only: nothing is checked here")
    problem = _why_it_cannot_run()
    if problem:
        pytest.exit(problem, returncode=pytest.ExitCode.USAGE_ERROR)


def _why_it_cannot_run() -> str | None:
    if os.environ["TRITON_INTERPRET"] == "1":
        if not IMPORTED_BEFORE or _is_interpreted():
            return why_no_interpreter()
        return (
            "triton was imported before chapters/ch04_paged_attention/conftest.py could choose its"
            " interpreter: run this chapter alone, or with TRITON_INTERPRET=1 in the environment"
        )
    import torch

    if torch.cuda.is_available():
        return None
    return "TRITON_INTERPRET=0 asks for a GPU, and torch sees none"


def _is_interpreted() -> bool:
    """True if triton made its own functions for the interpreter when it was imported."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(tl.sum, InterpretedFunction)


@pytest.fixture
def kernels(stage: object) -> object:
    """The stage without its table check: a kernel can be tried before task 4.1 is written.

    The tests that ask for it hand over valid tables.
    """
    stage.check_tables = lambda *arguments: None  # type: ignore[attr-defined]
    return stage
