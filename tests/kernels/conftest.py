"""Where kernel tests run: see kernel_testing.py."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

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


def pytest_collection_modifyitems(items):
    for item in items:
        if "launched" in item.path.parts:
            item.add_marker(pytest.mark.kernels)
