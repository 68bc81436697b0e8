"""Paged attention in plain torch, any device and dtype: store, gather blocks, attend.

A sequence is attended to alone and without padding, so its result does not depend on which others
are in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.block_tables import slots_of
from kernels.sequence import StepSequence
from kernels.transfer import to_device

Pair = tuple[Tensor, Tensor]
"""A layer's keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]."""


class Part(NamedTuple):
    """One sequence's share of a step.

    num_rows     rows to compute: positions [context_len - num_rows, context_len)
    context_len  keys its last row sees
    table        [ceil(context_len / block_size)] int64, on the device
    mask         [num_rows, context_len], True where a row sees a key; None: one row sees them all
    """

    num_rows: int
    context_len: int
    table: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """One step, shared by all layers.

    positions     [num_tokens] int64   absolute position of each row
    slot_mapping  [num_tokens] int64   block * block_size + offset each row is stored at
    parts         one a sequence, in the order of their rows
    """

    positions: Tensor
    slot_mapping: Tensor
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, sequences: Sequence[StepSequence], cache: Pair) -> GatheredAttention:
        """Bring ranges and tables to the device of the cache, that of any layer."""
        keys, _ = cache
        block_size, device = keys.shape[1], keys.device
        ranges = [(each.block_table, (each.start, each.end)) for each in sequences]
        slots = [slot for table, span in ranges for slot in slots_of(table, span, block_size)]
        positions = [position for each in sequences for position in range(each.start, each.end)]
        return cls(
            to_device(positions, device),
            to_device(slots, device),
            tuple(_part(each, block_size, device) for each in sequences),
        )

    def store(self, key: Tensor, value: Tensor, cache: Pair) -> None:
        """Write each row's key and value to its slot; [num_tokens, num_kv_heads, head_dim]."""
        for rows, pool in zip((key, value), cache, strict=True):
            pool.flatten(0, 1).index_copy_(0, self.slot_mapping, rows)

    def attend(self, query: Tensor, cache: Pair) -> Tensor:
        """[num_tokens, num_heads, head_dim] in and out, causal by absolute position."""
        rows_of = torch.split(query, [part.num_rows for part in self.parts])
        return torch.cat([_attend(*each, cache) for each in zip(rows_of, self.parts, strict=True)])


def _part(sequence: StepSequence, block_size: int, device: torch.device) -> Part:
    num_rows, context_len = sequence.end - sequence.start, sequence.end
    num_blocks = -(-context_len // block_size)
    mask = None
    if num_rows > 1:
        # Row i has the absolute position start + i and sees the keys 0 .. start + i.
        mask = torch.ones(num_rows, context_len, dtype=torch.bool, device=device)
        mask = mask.tril(sequence.start)
    table = to_device(sequence.block_table[:num_blocks], device)
    return Part(num_rows, context_len, table, mask)


def _attend(rows: Tensor, part: Part, cache: Pair) -> Tensor:
    """One sequence: gather its blocks in logical order, cut off what is not written, attend."""
    blocks = [pool.index_select(0, part.table).flatten(0, 1) for pool in cache]
    keys, values = (_heads_first(slots[: part.context_len]) for slots in blocks)
    output = F.scaled_dot_product_attention(
        _heads_first(rows), keys, values, part.mask, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def _heads_first(rows: Tensor) -> Tensor:
    """[n, heads, head_dim] -> [1, heads, n, head_dim], as torch wants it."""
    return rows.transpose(0, 1)[None]
