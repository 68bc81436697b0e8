"""What one step computes, as the kernels read it; checked on the host, then copied in one piece.

A device tensor cannot be checked without waiting for the device. So the check stands where the
numbers still are Python lists, and the only way to the launchers leads through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kernels.block_tables import StepTables
from kernels.errors import KernelInputError

# Each tensor starts at a multiple of four int32, as a fresh allocation would: a kernel is
# compiled anew for pointers that are not 16-byte aligned.
ALIGNMENT = 4

Numbers: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The sequences of one step. Make it with `from_host`, which checks every number in it.

    query_starts   [num_sequences + 1] int32           sequence i owns the token rows
                                                       [query_starts[i], query_starts[i + 1])
    context_lens   [num_sequences] int32               positions whose KV is written after the step
    positions      [num_tokens] int32                  absolute position of each token row
    slots          [num_tokens] int32                  where its KV goes; -1: nowhere
    block_tables   [num_sequences, max_blocks] int32   logical block -> physical block
    num_blocks, block_size                             of the cache the tables point into
    max_query_len, max_context_len                     the longest of each, known without a GPU
    num_singles                                        how many sequences of one token lead it
    longest_contexts                                   (of those, of the others); 0: there are none

    Block size 4; A prefills [0, 6) in blocks 7 and 2, B decodes [5, 6) in blocks 7 and 9:

        token row      0   1   2   3   4   5     6
        position       0   1   2   3   4   5     5
        slot          28  29  30  31   8   9    37      row 4: block 2 * 4 + position 4 % 4
        query_starts   0                         6   7
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    num_blocks: int
    block_size: int
    max_query_len: int
    max_context_len: int
    num_singles: int
    longest_contexts: tuple[int, int]
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
        step = StepTables.checked(
            block_tables, ranges, num_blocks=num_blocks, block_size=block_size
        )
        num_real, widest = len(ranges), int(step.table_lens.max())
        num_rows, width = num_sequences or num_real, max_blocks or widest
        if num_rows < num_real or width < widest:
            raise KernelInputError(
                f"{num_real} sequences with up to {widest} blocks do not fit"
                f" num_sequences={num_sequences}, max_blocks={max_blocks}"
            )
        num_tokens = len(step.positions) + num_rows - num_real
        sections = _sections((num_rows + 1, num_rows, num_tokens, num_tokens, num_rows * width))
        num_singles = int((np.append(step.query_lens, 2) > 1).argmax())
        contexts = step.ends[:num_singles], step.ends[num_singles:]
        device = torch.device(device)
        # From pinned memory the copy runs beside whatever the device still computes.
        host = torch.zeros(sum(sections), dtype=torch.int32, pin_memory=device.type == "cuda")
        _write(step, block_size, *(part.numpy() for part in _parts(host, sections)))
        packed = host.to(device, non_blocking=True)
        query_starts, context_lens, positions, slots, tables = _parts(packed, sections)
        return cls(
            query_starts=query_starts,
            context_lens=context_lens,
            positions=positions,
            slots=slots,
            block_tables=tables.view(num_rows, width),
            num_blocks=num_blocks,
            block_size=block_size,
            max_query_len=int(step.query_lens.max()),
            max_context_len=int(step.ends.max()),
            num_singles=num_singles,
            longest_contexts=(int(contexts[0].max(initial=0)), int(contexts[1].max(initial=0))),
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

    def parts(self) -> tuple[tuple[slice, PagedBatch], ...]:
        """(token rows, batch) of the sequences of one token that lead, and of the others.

        Attention to one row wants another kernel than attention to many. The parts are good for
        attention only, and of a batch that is all of one kind there is one part, itself.
        """
        first = self.num_singles
        if first == 0 or self.max_query_len == 1:
            return ((slice(None), self),)
        rows = slice(first), slice(first, None)
        longest, others_longest = self.longest_contexts
        singles = replace(self, **self._of(rows[0]), max_query_len=1, max_context_len=longest)
        others = self._of(rows[1])
        # Attention reads these. Fresh ones: a kernel is compiled anew for an unaligned pointer.
        others["query_starts"] = others["query_starts"] - first
        for name in ("context_lens", "block_tables"):
            others[name] = others[name].clone()
        rest = replace(self, **others, num_singles=0, max_context_len=others_longest)
        return (rows[0], singles), (rows[1], rest)

    def _of(self, which: slice) -> dict[str, Any]:
        """The tensors of the sequences before or from the one at which a slice is cut.

        Up to there each has one token, so that rows are cut at the same number.
        """
        end = None if which.stop is None else which.stop + 1
        return {
            "query_starts": self.query_starts[which.start : end],
            "context_lens": self.context_lens[which],
            "positions": self.positions[which],
            "slots": self.slots[which],
            "block_tables": self.block_tables[which],
        }

    def copy_from(self, other: PagedBatch) -> None:
        """Take over the numbers of `other`, in place: a CUDA graph replays these addresses.

        Its tables may have fewer columns. What is left of an old table behind them is read by
        nobody, as every kernel stops at the context's end. Contexts may be longer than they were
        at capture; max_context_len keeps its old value.

        Raises KernelInputError if it does not fit or a query is longer than it was promised.
        """
        mine = (self.num_sequences, self.num_tokens, self.num_blocks, self.block_size)
        its = (other.num_sequences, other.num_tokens, other.num_blocks, other.block_size)
        width, most = other.block_tables.shape[1], self.block_tables.shape[1]
        if mine != its or width > most:
            raise KernelInputError(
                f"a batch of {its} with {width} blocks cannot be copied into one of {mine}"
                f" with {most}"
            )
        if other.max_query_len > self.max_query_len:
            raise KernelInputError(
                f"the longest query has {other.max_query_len} tokens;"
                f" this batch was made for {self.max_query_len}"
            )
        tables_at = self.block_tables.storage_offset()  # the tables come last
        self.packed[:tables_at].copy_(other.packed[:tables_at], non_blocking=True)
        self.block_tables[:, :width].copy_(other.block_tables, non_blocking=True)


def _write(
    step: StepTables,
    block_size: int,
    query_starts: Numbers,
    context_lens: Numbers,
    positions: Numbers,
    slots: Numbers,
    block_tables: Numbers,
) -> None:
    """Fill the arrays, which are zero: first the sequences of the step, then the padding."""
    num_real, num_tokens = len(step.ends), len(step.positions)
    query_starts[1 : num_real + 1] = step.query_lens.cumsum()
    query_starts[num_real:] = range(num_tokens, len(positions) + 1)
    context_lens[:num_real] = step.ends
    positions[:num_tokens] = step.positions
    slots[:num_tokens] = step.slots(block_size)
    slots[num_tokens:] = -1
    tables = block_tables.reshape(len(context_lens), -1)[:num_real]
    tables[np.arange(tables.shape[1]) < step.table_lens[:, None]] = step.blocks


def _sections(sizes: Sequence[int]) -> list[int]:
    """Behind each size the gap up to the next multiple of ALIGNMENT: [5, 4] -> [5, 3, 4, 0]."""
    return [length for size in sizes for length in (size, -size % ALIGNMENT)]


def _parts(packed: torch.Tensor, sections: list[int]) -> tuple[torch.Tensor, ...]:
    """Views of all sections but the gaps."""
    return packed.split_with_sizes(sections)[::2]
