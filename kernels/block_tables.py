"""A step's block tables and ranges: from lists to arrays, and checked where numbers can be read.

Here they still are on the host. Arrays, because 256 sequences of 1,024 tokens have 16,000 table
entries: too many for Python to look at one by one, while a GPU waits for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.errors import KernelInputError

INT32_END = 2**31
Integers: TypeAlias = npt.NDArray[np.int64]


class StepTables(NamedTuple):
    """The tables and ranges of all sequences of a step. Make it with `checked`.

    blocks        [sum of table_lens]   all tables, one after another
    table_starts  [num_sequences]       where each begins in `blocks`
    table_lens    [num_sequences]       blocks of each
    starts, ends  [num_sequences]       the range [start, end) of positions of each
    positions     [num_tokens]          those of all ranges, one after another
    """

    blocks: Integers
    table_starts: Integers
    table_lens: Integers
    starts: Integers
    ends: Integers
    positions: Integers

    @classmethod
    def checked(
        cls,
        block_tables: Sequence[Sequence[int]],
        ranges: Sequence[tuple[int, int]],
        *,
        num_blocks: int,
        block_size: int,
    ) -> StepTables:
        """Make it from lists. Raises KernelInputError, see validate_block_tables."""
        _check_counts(len(block_tables), len(ranges), num_blocks, block_size)
        blocks = np.fromiter(chain.from_iterable(block_tables), np.int64)
        table_lens = np.fromiter(map(len, block_tables), np.int64, len(ranges))
        starts, ends = np.fromiter(chain.from_iterable(ranges), np.int64).reshape(-1, 2).T
        _check_ranges(starts, ends, table_lens, block_size)
        table_starts = table_lens.cumsum() - table_lens
        step = cls(blocks, table_starts, table_lens, starts, ends, _spans(starts, ends))
        _check_blocks(step, num_blocks)
        _check_one_writer(step, block_size)
        return step

    @property
    def query_lens(self) -> Integers:
        """[num_sequences]: how many positions each computes."""
        return self.ends - self.starts

    def slots(self, block_size: int) -> Integers:
        """[num_tokens]: where the KV of each of `positions` goes; see slots_of."""
        logical = self.positions // block_size
        blocks = self.blocks[np.repeat(self.table_starts, self.query_lens) + logical]
        slots: Integers = blocks * block_size + self.positions % block_size
        return slots


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
    """Raise KernelInputError unless a kernel may follow these tables. On the host, no device.

    - There is a sequence, there are as many tables as ranges, and a slot fits 31 bits.
    - 0 <= start < end: each sequence computes something, and no query is longer than its context.
    - A table covers [0, end), and each of its block ids lies in [0, num_blocks).
    - No block is written twice in one step: a shared block is only read, and programs would race.
    """
    StepTables.checked(block_tables, ranges, num_blocks=num_blocks, block_size=block_size)


def _spans(starts: Integers, ends: Integers) -> Integers:
    """All [start, end), one after another: [3, 8], [5, 11] -> [3, 4, 8, 9, 10]."""
    lens = ends - starts
    spans_end = lens.cumsum()
    # Numbered through, and each span moved from where it stands to where it starts.
    return np.repeat(starts - (spans_end - lens), lens) + np.arange(spans_end[-1])


def _check_counts(num_tables: int, num_ranges: int, num_blocks: int, block_size: int) -> None:
    if block_size < 1:
        raise KernelInputError(f"block_size is {block_size}; it must be at least 1")
    if num_blocks * block_size >= INT32_END:
        raise KernelInputError(
            f"{num_blocks} blocks x {block_size} slots: a slot must fit 31 bits; at most"
            f" {(INT32_END - 1) // block_size} blocks do"
        )
    if num_tables != num_ranges or not num_ranges:
        raise KernelInputError(
            f"{num_tables} block tables for {num_ranges} ranges: one each, at least one"
        )


def _check_ranges(starts: Integers, ends: Integers, table_lens: Integers, block_size: int) -> None:
    covered = table_lens * block_size
    right = (starts >= 0) & (starts < ends) & (ends <= covered)
    if right.all():
        return
    index = right.argmin()
    start, end, num_blocks = starts[index], ends[index], table_lens[index]
    if not 0 <= start < end:
        raise KernelInputError(
            f"sequence {index} computes [{start}, {end}): need 0 <= start < end, or the query"
            " is empty or longer than its context"
        )
    raise KernelInputError(
        f"sequence {index} has a context of {end} positions; its table covers"
        f" {num_blocks} blocks x {block_size} = {covered[index]}:"
        f" it needs {-(-end // block_size)} blocks"
    )


def _check_blocks(step: StepTables, num_blocks: int) -> None:
    if step.blocks.min() >= 0 and step.blocks.max() < num_blocks:
        return
    at = ((step.blocks < 0) | (step.blocks >= num_blocks)).argmax()
    index = step.table_starts.searchsorted(at, side="right") - 1
    raise KernelInputError(
        f"sequence {index} has block {step.blocks[at]} at logical block"
        f" {at - step.table_starts[index]}; the cache has blocks 0 to {num_blocks - 1}"
    )


def _check_one_writer(step: StepTables, block_size: int) -> None:
    first, end = step.starts // block_size, -(-step.ends // block_size)
    written = step.blocks[_spans(step.table_starts + first, step.table_starts + end)]
    if len(set(written.tolist())) == len(written):
        return
    order = written.argsort(kind="stable")
    at = (written[order[1:]] == written[order[:-1]]).argmax()
    writers = np.repeat(np.arange(len(first)), end - first)[order[at : at + 2]]
    raise KernelInputError(
        f"block {written[order[at]]} is written twice, by sequences {writers[0]} and"
        f" {writers[1]}: a block may be shared only where it is read"
    )
