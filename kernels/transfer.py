"""Numbers from the host to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

Numbers: TypeAlias = Sequence[float] | Sequence[Sequence[float]]


def to_device(
    numbers: Numbers, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A tensor of `numbers` on `device`.

    Anything else, `torch.tensor(numbers, device=...)` or a list as an index, lets the host wait
    until a GPU has done all that was asked of it before. From pinned memory nobody waits.
    """
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
