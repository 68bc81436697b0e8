"""Numbers from the host to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Numbers: TypeAlias = Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[Any]


def to_device(
    numbers: Numbers, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A tensor of `numbers` on `device`.

    Anything else, `torch.tensor(numbers, device=...)` or a list as an index, lets the host wait
    until a GPU has done all that was asked of it before. From pinned memory nobody waits.
    """
    host = torch.as_tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def places_on(
    device: torch.device, columns: Mapping[int, Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """An index of many elements at once, (rows, columns): {3: [7, 9]} -> ([3, 3], [7, 9])."""
    rows = np.repeat(np.fromiter(columns, np.int64), [len(each) for each in columns.values()])
    flat = np.fromiter(chain.from_iterable(columns.values()), np.int64)
    return to_device(rows, device), to_device(flat, device)
