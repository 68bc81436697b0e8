"""The memory that kernels are given: the tensors of a launch, and nothing beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.ptx.parse import PtxError
from benchmarks.ptx.shared_memory import WARP, Numbers

SECTOR = 32
"""Bytes that a GPU's memory moves at least: a request for one of them brings all."""


class GlobalMemory:
    """Tensors at their own addresses on this machine, in which programs read and write.

    tensors  by name; each stands for its whole storage, so that a view of a larger one reads what
             lies around it, and no further

    Raises PtxError for an address outside of all of them, or one that is not a multiple of what is
    read at once: a GPU ends such a launch with "illegal address" or "misaligned address".

    num_requests  sectors that were asked for: those of one instruction of one warp count once
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._regions = sorted(
            {
                tensor.untyped_storage().data_ptr(): _Region.of(name, tensor)
                for name, tensor in tensors.items()
                if tensor.untyped_storage().nbytes()
            }.values()
        )
        self._starts = np.array([region.start for region in self._regions])
        self._ends = np.array([region.end for region in self._regions])
        self._kept = list(tensors.values())  # as long as their addresses are in use
        self.num_requests = 0

    @property
    def bytes_moved(self) -> int:
        """Of all sectors that were asked for."""
        return SECTOR * self.num_requests

    @property
    def bytes_touched(self) -> int:
        """The same, each sector once."""
        return SECTOR * sum(int(region.touched.sum()) for region in self._regions)

    def read(self, addresses: Numbers, width: int, threads: Numbers) -> npt.NDArray[np.uint8]:
        """[n, width] bytes from each address on; `threads` says whose access each is."""
        found = np.empty((len(addresses), width), np.uint8)
        for region, who in self._asked(addresses, width, threads):
            at = addresses[who] - region.start
            found[who] = region.content[at[:, None] + np.arange(width)]
        return found

    def write(self, addresses: Numbers, values: npt.NDArray[np.uint8], threads: Numbers) -> None:
        """Bytes [n, width] to each address on."""
        width = values.shape[1]
        for region, who in self._asked(addresses, width, threads):
            at = addresses[who] - region.start
            region.content[at[:, None] + np.arange(width)] = values[who]

    def _asked(
        self, addresses: Numbers, width: int, threads: Numbers
    ) -> list[tuple[_Region, Numbers]]:
        """(tensor, indices into `addresses`) of each tensor that is asked for; counts them."""
        if (addresses % width).any():
            raise PtxError(f"misaligned address: {width} bytes at {addresses[0]:#x}")
        regions = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (regions < 0) | (addresses + width > self._ends[regions])
        if outside.any():
            raise PtxError(f"illegal address: {self._nearest(int(addresses[outside][0]))}")
        asked = [(self._regions[i], np.flatnonzero(regions == i)) for i in np.unique(regions)]
        for region, who in asked:
            # An access is aligned and no wider than a sector: it lies in one.
            sectors = (addresses[who] - region.start) // SECTOR
            region.touched[sectors] = True
            self.num_requests += len(
                np.unique(threads[who] // WARP * len(region.touched) + sectors)
            )
        return asked

    def _nearest(self, address: int) -> str:
        """Where a wild address lies, by the tensor nearest to it."""
        distances = [
            (each.start - address if address < each.start else address - each.end, each.name)
            for each in self._regions
        ]
        distance, name = min(distances)
        return f"{distance:,} bytes outside of {name}"


class _Region(NamedTuple):
    """The bytes of a tensor's storage, [start, end), and which sectors somebody asked for."""

    start: int
    end: int
    name: str
    content: npt.NDArray[np.uint8]
    touched: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Region:
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        content = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        return cls(start, start + size, name, content, np.zeros(-(-size // SECTOR), np.bool_))
