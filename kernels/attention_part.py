"""Rows that attend in one call of torch, out of the paged cache; see attention_plan.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""A layer's keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that attend in one call: n sequences, m rows each.

    rows       which of the step's rows, a slice where they lie side by side
    slots      [n, num_keys] int64: where the keys lie that a sequence's rows see
    mask       [n, 1, m, num_keys], -inf where a row does not see a key, else 0; None: it sees all
               of them, or as is_causal says
    is_causal  row i sees the keys 0 to i
    """

    rows: slice | Tensor
    slots: Tensor
    mask: Tensor | None = None
    is_causal: bool = False

    def attend(self, query: Tensor, cache: Pair) -> Tensor:
        """Softmax(q k / sqrt(head_dim)) v of its rows: [n * m, num_heads, head_dim]."""
        output = F.scaled_dot_product_attention(
            *self._inputs(query, cache), self.mask, is_causal=self.is_causal, enable_gqa=True
        )
        return output.transpose(1, 2).flatten(0, 1)

    def attend_in_part(self, query: Tensor, cache: Pair) -> tuple[Tensor, Tensor]:
        """The same, and l: [n * m, num_heads, 1], the log of each row's sum(exp(s)).

        What the CPU's scaled_dot_product_attention calls; only this name tells the l.
        """
        output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *self._inputs(query, cache), is_causal=self.is_causal, attn_mask=self.mask
        )
        return (
            output.transpose(1, 2).flatten(0, 1),
            weight.transpose(1, 2).flatten(0, 1)[..., None],
        )

    def _inputs(self, query: Tensor, cache: Pair) -> tuple[Tensor, Tensor, Tensor]:
        """Query, keys and values: [n, heads, m or num_keys, head_dim]."""
        own = query[self.rows].view(len(self.slots), -1, *query.shape[1:])
        keys, values = (self._gather(pool).transpose(1, 2) for pool in cache)
        return own.transpose(1, 2), keys, values

    def _gather(self, pool: Tensor) -> Tensor:
        """Out of [num_blocks, block_size, heads, head_dim]: [n, num_keys, heads, head_dim]."""
        gathered = pool.flatten(0, 1).index_select(0, self.slots.flatten())
        return gathered.view(*self.slots.shape, *pool.shape[2:])


@dataclass(frozen=True, slots=True)
class SharingPart:
    """A part that several sequences share, and their own parts.

    rows  those of `own`, one after another, which are those of `shared` in their order
    """

    rows: slice | Tensor
    shared: Part
    own: list[Part]

    def attend(self, query: Tensor, cache: Pair) -> Tensor:
        """The mean of both, as the module says: [len(rows), num_heads, head_dim]."""
        pairs = [part.attend_in_part(query, cache) for part in self.own]
        own, own_weight = (torch.cat(results) for results in zip(*pairs, strict=True))
        shared, shared_weight = self.shared.attend_in_part(query, cache)
        return torch.lerp(own, shared, torch.sigmoid(shared_weight - own_weight))


AttentionPart = Part | SharingPart
