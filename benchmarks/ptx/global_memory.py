"""The memory that kernels are given: the tensors of a launch, and nothing beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.ptx.parse import PtxError
from benchmarks.ptx.shared_memory import WARP

SECTOR = 32
"""Bytes that a GPU's memory moves at least: a request for one of them brings all."""

Numbers = npt.NDArray[np.int64]


class GlobalMemory:
    """Tensors at their own addresses on this machine, in which programs read and write.

    tensors  by name; each stands for its whole storage, so that a view of a larger one reads what
             lies around it, and no further

    Raises PtxError for an address outside of all of them, or one that is not a multiple of what is
    read at once: a GPU ends such a launch with "illegal address" or "misaligned address".

    sectors_read, sectors_written  how many sectors each tensor's accesses asked for: those of one
                                   warp's one instruction count once
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        storages = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
        spans: dict[int, tuple[int, str]] = {}
        for name, storage in storages.items():
            if storage.nbytes():
                spans.setdefault(storage.data_ptr(), (storage.nbytes(), name))
        self._kept = list(tensors.values())  # as long as their addresses are in use
        self._starts = np.array(sorted(spans), dtype=np.int64)
        self._ends = np.array([start + spans[start][0] for start in sorted(spans)], dtype=np.int64)
        self._names = [spans[start][1] for start in sorted(spans)]
        self._bytes = [
            np.ctypeslib.as_array((ctypes.c_uint8 * spans[start][0]).from_address(start))
            for start in sorted(spans)
        ]
        self.sectors_read = dict.fromkeys(self._names, 0)
        self.sectors_written = dict.fromkeys(self._names, 0)

    def read(self, addresses: Numbers, width: int, threads: Numbers) -> npt.NDArray[np.uint8]:
        """[n, width] bytes from each address on; `threads` says whose access each is."""
        found = np.empty((len(addresses), width), np.uint8)
        for region, who in self._regions(addresses, width):
            at = addresses[who] - self._starts[region]
            found[who] = self._bytes[region][at[:, None] + np.arange(width)]
            self.sectors_read[self._names[region]] += _num_sectors(addresses[who], threads[who])
        return found

    def write(self, addresses: Numbers, values: npt.NDArray[np.uint8], threads: Numbers) -> None:
        """Bytes [n, width] to each address on."""
        width = values.shape[1]
        for region, who in self._regions(addresses, width):
            at = addresses[who] - self._starts[region]
            self._bytes[region][at[:, None] + np.arange(width)] = values[who]
            self.sectors_written[self._names[region]] += _num_sectors(addresses[who], threads[who])

    def _regions(self, addresses: Numbers, width: int) -> list[tuple[int, Numbers]]:
        """(tensor, indices into `addresses`) of each tensor that is asked for."""
        if (addresses % width).any():
            raise PtxError(f"misaligned address: {width} bytes at {addresses[0]:#x}")
        regions = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (regions < 0) | (addresses + width > self._ends[regions])
        if outside.any():
            raise PtxError(f"illegal address: {self._describe(int(addresses[outside][0]))}")
        return [(int(region), np.flatnonzero(regions == region)) for region in np.unique(regions)]

    def _describe(self, address: int) -> str:
        """Where a wild address lies, by the tensor nearest to it."""
        distances = [
            (start - address if address < start else address - end, name)
            for start, end, name in zip(self._starts, self._ends, self._names, strict=True)
        ]
        distance, name = min(distances)
        return f"{distance:,} bytes outside of {name}"


def _num_sectors(addresses: Numbers, threads: Numbers) -> int:
    """Different ones of each warp. An access is aligned and no wider than one: it lies in one."""
    sectors = (addresses - addresses.min()) // SECTOR
    return len(np.unique(threads // WARP * (sectors.max() + 1) + sectors))
