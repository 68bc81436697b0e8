"""Attention by our own kernels: on a GPU, or in Triton's interpreter on a CPU.

A step's ranges and block tables are checked on the host and copied to the device in one piece;
after that nothing waits for the device, and the kernels find everything else by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.attention import attention
from kernels.batch import PagedBatch
from kernels.layer_parts import HeadNorms
from kernels.rotary import rotary_store_kv
from kernels.sequence import StepSequence

Pair = tuple[torch.Tensor, torch.Tensor]


class Rotation(Protocol):
    """What is needed of a step's rotation: cos and sin by absolute position."""

    @property
    def table(self) -> Pair:
        """Each [num_positions, head_dim / 2] float32."""


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """One step's attention, shared by all layers, as an engine's decoder asks for it.

    batch  the ranges and tables as the kernels read them
    cache  of each call: a layer's keys and values, [num_blocks, block_size, num_kv_heads, head_dim]
    """

    batch: PagedBatch

    @classmethod
    def begin_step(cls, sequences: Sequence[StepSequence], cache: Pair) -> TritonAttention:
        """Bring the step to the device. KernelInputError: a table no kernel must follow."""
        keys, _ = cache
        batch = PagedBatch.from_host(
            [sequence.block_table for sequence in sequences],
            [(sequence.start, sequence.end) for sequence in sequences],
            num_blocks=keys.shape[0],
            block_size=keys.shape[1],
            device=keys.device,
        )
        return cls(batch)

    def rotate_and_store(
        self,
        heads: Sequence[torch.Tensor],
        rotation: Rotation,
        cache: Pair,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Normalise and turn query and key, write key and value: the key goes only to its slot.

        heads  query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads,
               head_dim]; rows may lie apart
        """
        query, key, value = heads
        return rotary_store_kv(query, key, value, *rotation.table, *cache, self.batch, norms=norms)

    def attend(self, query: torch.Tensor, cache: Pair) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim] in and out, causal by absolute position."""
        return attention(query, *cache, self.batch)
