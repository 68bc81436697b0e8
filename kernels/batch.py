"""What one step computes, as the kernels read it; checked on the host, then copied in one piece.

A device tensor cannot be checked without waiting for the device. So the check stands where the
numbers still are Python lists, and the only way to the launchers leads through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from kernels.errors import KernelInputError

# Each tensor starts at a multiple of four int32, as a fresh allocation would: a kernel is
# compiled anew for pointers that are not 16-byte aligned.
ALIGNMENT = 4
INT32_END = 2**31


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The sequences of one step. Make it with `from_host`, which checks every number in it.

    block_tables   [num_sequences, max_blocks] int32   logical block -> physical block
    query_starts   [num_sequences + 1] int32           sequence i owns the token rows
                                                       [query_starts[i], query_starts[i + 1])
    context_lens   [num_sequences] int32               positions whose KV is written after the step
    positions      [num_tokens] int32                  absolute position of each token row
    slots          [num_tokens] int32                  where its KV goes; -1: nowhere
    num_blocks, block_size                             of the cache the tables point into
    max_query_len, max_context_len                     the longest of each, known without a GPU

    Block size 4; A prefills [0, 6) in blocks 7 and 2, B decodes [5, 6) in blocks 7 and 9:

        token row      0   1   2   3   4   5     6
        position       0   1   2   3   4   5     5
        slot          28  29  30  31   8   9    37      row 4: block 2 * 4 + position 4 % 4
        query_starts   0                         6   7
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    num_blocks: int
    block_size: int
    max_query_len: int
    max_context_len: int
    packed: torch.Tensor
    """All five tensors in one allocation; they are views of it."""

    @classmethod
    def from_host(
        cls,
        block_tables: Sequence[Sequence[int]],
        ranges: Sequence[tuple[int, int]],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        num_sequences: int | None = None,
        max_blocks: int | None = None,
    ) -> PagedBatch:
        """Check the step's numbers, and copy them to `device` without waiting for it.

        block_tables    one table a sequence, covering at least [0, end)
        ranges          one half-open range [start, end) of positions to compute a sequence
        num_sequences   pad to so many sequences, with ones of a single token whose context is
                        empty and whose KV goes nowhere: a CUDA graph has a fixed number
        max_blocks      pad the tables to so many columns, for the same reason

        Raises KernelInputError, see validate_block_tables; also if the padding is too small.
        """
        validate_block_tables(block_tables, ranges, num_blocks=num_blocks, block_size=block_size)
        num_real = len(ranges)
        num_padding = (num_sequences or num_real) - num_real
        widest = max(map(len, block_tables))
        width = max_blocks or widest
        if num_padding < 0 or width < widest:
            raise KernelInputError(
                f"{num_real} sequences with up to {widest} blocks do not fit"
                f" num_sequences={num_sequences}, max_blocks={max_blocks}"
            )

        tables = np.zeros((num_real + num_padding, width), np.int32)
        for row, table in zip(tables, block_tables, strict=False):
            row[: len(table)] = table
        query_lens = [end - start for start, end in ranges] + [1] * num_padding
        positions = [position for span in ranges for position in range(*span)]
        slots = list(
            chain.from_iterable(
                slots_of(table, span, block_size)
                for table, span in zip(block_tables, ranges, strict=True)
            )
        )
        parts = (
            tables,
            np.concatenate(([0], np.cumsum(query_lens))),
            np.array([end for _, end in ranges] + [0] * num_padding),
            np.array(positions + [0] * num_padding),
            np.array(slots + [-1] * num_padding),
        )
        packed, views = _pack(parts, torch.device(device))
        block_tables_view, query_starts, context_lens, positions_view, slots_view = views
        return cls(
            block_tables=block_tables_view,
            query_starts=query_starts,
            context_lens=context_lens,
            positions=positions_view,
            slots=slots_view,
            num_blocks=num_blocks,
            block_size=block_size,
            max_query_len=max(query_lens),
            max_context_len=max(end for _, end in ranges),
            packed=packed,
        )

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch, padding included."""
        return self.context_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Token rows, all sequences together."""
        return self.slots.shape[0]

    def copy_from(self, other: PagedBatch) -> None:
        """Take over the numbers of `other`, in place: a CUDA graph replays these addresses.

        Contexts may be longer than they were at capture; max_context_len keeps its old value.
        Raises KernelInputError if the shapes differ or a query is longer than it was promised.
        """
        mine = (self.block_tables.shape, self.num_tokens, self.num_blocks, self.block_size)
        its = (other.block_tables.shape, other.num_tokens, other.num_blocks, other.block_size)
        if mine != its:
            raise KernelInputError(f"a batch of {its} cannot be copied into one of {mine}")
        if other.max_query_len > self.max_query_len:
            raise KernelInputError(
                f"the longest query has {other.max_query_len} tokens;"
                f" this batch was made for {self.max_query_len}"
            )
        self.packed.copy_(other.packed, non_blocking=True)


def slots_of(table: Sequence[int], span: tuple[int, int], block_size: int) -> list[int]:
    """Where the positions [start, end) lie: table [7, 2], (2, 5), block size 4 -> [30, 31, 8]."""
    return [table[p // block_size] * block_size + p % block_size for p in range(*span)]


def validate_block_tables(
    block_tables: Sequence[Sequence[int]],
    ranges: Sequence[tuple[int, int]],
    *,
    num_blocks: int,
    block_size: int,
) -> None:
    """Raise KernelInputError unless a kernel may follow these tables. Plain Python, no device.

    - There is a sequence, there are as many tables as ranges, and a slot fits 31 bits.
    - 0 <= start < end: each sequence computes something, and no query is longer than its context.
    - A table covers [0, end), and each of its block ids lies in [0, num_blocks).
    - No block is written twice in one step: a shared block is only read, and programs would race.
    """
    if block_size < 1:
        raise KernelInputError(f"block_size is {block_size}; it must be at least 1")
    if num_blocks * block_size >= INT32_END:
        raise KernelInputError(
            f"{num_blocks} blocks x {block_size} slots: a slot must fit 31 bits; at most"
            f" {(INT32_END - 1) // block_size} blocks do"
        )
    if len(block_tables) != len(ranges) or not ranges:
        raise KernelInputError(
            f"{len(block_tables)} block tables for {len(ranges)} ranges: one each, at least one"
        )
    for index, (table, (start, end)) in enumerate(zip(block_tables, ranges, strict=True)):
        if not 0 <= start < end:
            raise KernelInputError(
                f"sequence {index} computes [{start}, {end}): need 0 <= start < end,"
                " or the query is empty or longer than its context"
            )
        if end > len(table) * block_size:
            raise KernelInputError(
                f"sequence {index} has a context of {end} positions; its table covers"
                f" {len(table)} blocks x {block_size} = {len(table) * block_size}:"
                f" it needs {-(-end // block_size)} blocks"
            )
        if min(table) < 0 or max(table) >= num_blocks:
            wrong = next(block for block in table if not 0 <= block < num_blocks)
            raise KernelInputError(
                f"sequence {index} has block {wrong} at logical block {table.index(wrong)};"
                f" the cache has blocks 0 to {num_blocks - 1}"
            )
    _check_one_writer(block_tables, ranges, block_size)


def _check_one_writer(
    block_tables: Sequence[Sequence[int]], ranges: Sequence[tuple[int, int]], block_size: int
) -> None:
    writers: dict[int, int] = {}
    for index, (table, (start, end)) in enumerate(zip(block_tables, ranges, strict=True)):
        for block in table[start // block_size : -(-end // block_size)]:
            if block in writers:
                raise KernelInputError(
                    f"block {block} is written twice, by sequences {writers[block]} and {index}:"
                    " a block may be shared only where it is read"
                )
            writers[block] = index


def _pack(
    parts: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy all arrays to the device as one int32 tensor, and return it with a view of each."""
    starts, total = [], 0
    for part in parts:
        starts.append(total)
        total += -(-part.size // ALIGNMENT) * ALIGNMENT
    # From pinned memory the copy runs beside whatever the device still computes.
    host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    for start, part in zip(starts, parts, strict=True):
        numbers[start : start + part.size] = part.ravel()
    packed = host.to(device, non_blocking=True)
    views = [
        packed[start : start + part.size].view(part.shape)
        for start, part in zip(starts, parts, strict=True)
    ]
    return packed, views
