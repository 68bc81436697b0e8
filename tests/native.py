"""The kernels in C, for tests: compiled once, or a visible reason why they are not."""

import pytest
import torch

from minivllm.model.backend import native_library, why_not

WHY_NOT = why_not("native", torch.device("cpu"), torch.float32)

needs_native = pytest.mark.skipif(WHY_NOT is not None, reason=f"no kernels in C: {WHY_NOT}")


def library():
    """The compiled kernels. Raises NativeError; mark the test with needs_native."""
    return native_library()
