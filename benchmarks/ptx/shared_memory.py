"""The memory that the threads of one program share; whoever races for it is found out."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.ptx.parse import PtxError

NUM_BANKS = 32
WORD = 4  # bytes of a bank
CELL = 2  # bytes that are watched as one: the least that our kernels write
WARP = 32
_NOBODY, _MANY = -1, -2

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class _Copy(NamedTuple):
    """A copy from global memory that is under way."""

    addresses: Numbers
    values: Bytes
    threads: Numbers


class SharedMemory:
    """Bytes from address 0 on, full of 0xFF before anybody writes: as floats they are NaN.

    A GPU runs warps in any order between two barriers. So what one warp writes, no other may read
    or write before the next barrier, and what one has read, no other may write. Copies with
    cp.async arrive as late as they may: when they are waited for. Until then nobody may touch
    where they go. Tensor cores that read here go another way to memory, which a fence must have
    joined with the usual one, and nobody may write what they read before they are waited for.
    PtxError says who did. (Not seen: lanes of one warp that meet without bar.warp.sync.)

    num_bytes         what the compiler asks for
    wavefronts        turns that accesses took. In one turn each of 32 banks gives 4 bytes: threads
                      of a warp that ask one bank for different words take a turn each
    least_wavefronts  the same if no two had met at a bank
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.wavefronts = self.least_wavefronts = 0
        num_cells = -(-num_bytes // CELL)
        self._bytes = np.full(num_cells * CELL, 0xFF, np.uint8)
        self._epoch = 1  # a barrier begins a new one
        # Who did it last, and in which epoch.
        self._writer = np.full(num_cells, _NOBODY)
        self._written = np.zeros(num_cells, np.int64)
        self._reader = np.full(num_cells, _NOBODY)
        self._read = np.zeros(num_cells, np.int64)
        # How many copies are under way to each cell; the last of the groups is still open.
        self._arriving = np.zeros(num_cells, np.int64)
        self._last = np.zeros(num_cells, np.uint16)
        # Written since the last fence; and how many products under way read it.
        self._is_unfenced = np.zeros(num_cells, np.bool_)
        self._held = np.zeros(num_cells, np.int64)
        self._groups: deque[list[_Copy]] = deque([[]])

    def barrier(self) -> None:
        """All threads of the program have come here."""
        self._epoch += 1

    def fence(self) -> None:
        """fence.proxy.async, by all threads: tensor cores see what was written before."""
        self._is_unfenced[:] = False

    def read(self, addresses: Numbers, width: int, threads: Numbers) -> Bytes:
        """[n, width] bytes from each address on; `threads` says whose access each is."""
        cells, warps = self._cells(addresses, width, threads)
        late = (self._written[cells] == self._epoch) & (self._writer[cells] != warps)
        _refuse(late, cells, "read what another warp has written since the last barrier")
        _refuse(self._arriving[cells] > 0, cells, "read before the copy was waited for")
        again = (self._read[cells] == self._epoch) & (self._reader[cells] != warps)
        readers = np.where(again, _MANY, warps)
        self._reader[cells] = readers
        # One cell for several warps at once: the last one is noted, and they are many.
        self._reader[cells[self._reader[cells] != readers]] = _MANY
        self._read[cells] = self._epoch
        self._count(addresses, width, threads)
        return np.asarray(self._bytes[addresses[:, None] + np.arange(width)])

    def hold(self, addresses: Numbers, width: int) -> Bytes:
        """The same for tensor cores, which read for several warps, until release().

        No turns are counted.
        """
        cells, _ = self._cells(addresses, width, np.zeros_like(addresses))
        _refuse(self._written[cells] == self._epoch, cells, "read before a barrier")
        _refuse(self._arriving[cells] > 0, cells, "read before the copy was waited for")
        _refuse(self._is_unfenced[cells], cells, "read by tensor cores before a fence")
        self._reader[cells], self._read[cells] = _MANY, self._epoch
        np.add.at(self._held, cells, 1)
        return np.asarray(self._bytes[addresses[:, None] + np.arange(width)])

    def release(self, addresses: Numbers, width: int) -> None:
        """The product that read these has been waited for."""
        cells, _ = self._cells(addresses, width, np.zeros_like(addresses))
        np.subtract.at(self._held, cells, 1)

    def write(self, addresses: Numbers, values: Bytes, threads: Numbers) -> None:
        """Bytes [n, width] to each address on."""
        self._claim(addresses, values, threads)
        self._bytes[addresses[:, None] + np.arange(values.shape[1])] = values

    def begin_copy(self, addresses: Numbers, values: Bytes, threads: Numbers) -> None:
        """cp.async: the values are read now, and are here only once they are waited for."""
        cells = self._claim(addresses, values, threads)
        np.add.at(self._arriving, cells, 1)
        self._groups[-1].append(_Copy(addresses, values, threads))

    def commit_group(self) -> None:
        """The copies begun since the last call are a group."""
        self._groups.append([])

    def wait_group(self, num_pending: int) -> None:
        """All but the newest `num_pending` groups arrive."""
        while len(self._groups) - 1 > num_pending:
            for addresses, values, threads in self._groups.popleft():
                cells, warps = self._cells(addresses, values.shape[1], threads)
                np.subtract.at(self._arriving, cells, 1)
                self._bytes[addresses[:, None] + np.arange(values.shape[1])] = values
                # Only the warp that has waited may read them before the next barrier.
                self._writer[cells], self._written[cells] = warps, self._epoch
                self._is_unfenced[cells] = True

    def finish(self) -> None:
        """The program has ended. Raises PtxError if copies are under way that nobody waited for."""
        if any(self._groups):
            raise PtxError("the program ended with copies under way")

    def _claim(self, addresses: Numbers, values: Bytes, threads: Numbers) -> Numbers:
        """Note who writes; nobody else may have been there since the last barrier."""
        width = values.shape[1]
        cells, warps = self._cells(addresses, width, threads)
        taken = (self._written[cells] == self._epoch) & (self._writer[cells] != warps)
        _refuse(taken, cells, "written by two warps between two barriers")
        read = (self._read[cells] == self._epoch) & (self._reader[cells] != warps)
        _refuse(read, cells, "written where another warp has read since the last barrier")
        _refuse(self._arriving[cells] > 0, cells, "written where a copy is to arrive")
        _refuse(self._held[cells] > 0, cells, "written while tensor cores read it")
        self._is_unfenced[cells] = True
        self._writer[cells], self._written[cells] = warps, self._epoch
        # Several threads may have the same number for one place, and it is no matter who wins.
        self._last[cells] = numbers = values.view(np.uint16).ravel()
        _refuse(self._last[cells] != numbers, cells, "given two values at once")
        self._count(addresses, width, threads)
        return cells

    def _cells(self, addresses: Numbers, width: int, threads: Numbers) -> tuple[Numbers, Numbers]:
        """The cells of all accesses, and which warp asks for each."""
        if (addresses % width).any() or width % CELL:
            raise PtxError(f"shared memory: {width} bytes at an address that is no multiple of it")
        if len(addresses) and (addresses.min() < 0 or addresses.max() + width > self.num_bytes):
            raise PtxError(f"shared memory: an address outside of its {self.num_bytes:,} bytes")
        each = np.arange(width // CELL)
        return (addresses[:, None] // CELL + each).ravel(), np.repeat(threads // WARP, len(each))

    def _count(self, addresses: Numbers, width: int, threads: Numbers) -> None:
        """Turns of the banks. 128 bytes are one turn, so wider accesses of a warp go in parts."""
        each = np.arange(max(width // WORD, 1))
        words = (addresses[:, None] // WORD + each).ravel()
        turns = np.repeat(threads * max(width, WORD) // (NUM_BANKS * WORD), len(each))
        asked = np.unique(turns * self._writer.size + words)
        turns, words = np.divmod(asked, self._writer.size)
        _, turns = np.unique(turns, return_inverse=True)
        of_a_bank = np.bincount(turns * NUM_BANKS + words % NUM_BANKS)
        padding = np.zeros(-len(of_a_bank) % NUM_BANKS, np.int64)
        banks = np.concatenate((of_a_bank, padding)).reshape(-1, NUM_BANKS)
        self.wavefronts += int(banks.max(axis=1).sum())
        self.least_wavefronts += int((-(-banks.sum(axis=1) // NUM_BANKS)).sum())


def _refuse(wrong: npt.NDArray[np.bool_], cells: Numbers, what: str) -> None:
    if wrong.any():
        raise PtxError(f"race: shared memory at {CELL * int(cells[wrong][0])} is {what}")
