"""Memory in large pages, where the system has them: 2 MB at a time instead of 4 KB.

A processor looks up where each page lies, and keeps only some thousand answers: 500 MB of weights,
read once a step, are 130,000 small pages or 250 large ones.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_ANONYMOUS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def in_large_pages(num_floats: int) -> Tensor:
    """[num_floats] float32 zeros. Linux is asked for large pages, and may give small ones."""
    if num_floats == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_floats)
    memory = mmap.mmap(-1, num_floats * torch.float32.itemsize, flags=_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)
