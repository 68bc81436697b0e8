"""Where kernel tests run: see kernel_testing.py."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from program_watch import ProgramWatch

ROOT = Path(__file__).resolve().parents[2]
# This folder is called `kernels`, too: the package must be found before it.
sys.path.insert(0, str(ROOT))


def can_launch_here():
    if importlib.util.find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    import torch

    return torch.cuda.is_available()


def pytest_ignore_collect(collection_path):
    # Neither an interpreter nor a GPU in this process: test_kernels_interpreted.py starts
    # another one for these.
    return True if "launched" in collection_path.parts and not can_launch_here() else None


@pytest.fixture(scope="session", autouse=True)
def _programs_are_watched():
    """In the interpreter: see program_watch.py."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            ProgramWatch().install(patch)
        yield


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu_only: the interpreter cannot compute this")
    config.addinivalue_line("markers", "interpreter_only: says something of the interpreter")


def pytest_collection_modifyitems(config, items):
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    elsewhere = "gpu_only" if is_interpreted else "interpreter_only"
    for item in items:
        if "launched" in item.path.parts:
            item.add_marker(pytest.mark.kernels)
    # Not skipped: there is nothing to be done about it here, and the other place has them.
    deselected = [item for item in items if item.get_closest_marker(elsewhere)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
