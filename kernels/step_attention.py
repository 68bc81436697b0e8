"""Attention by our own kernels: on a GPU, or in Triton's interpreter on a CPU.

A step's ranges and block tables are checked on the host and copied to the device in one piece;
after that nothing waits for the device, and the kernels find everything else by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention import attention
from kernels.batch import PagedBatch
from kernels.layer_parts import HeadNorms
from kernels.rotary import rotary_store_kv
from kernels.sequence import StepSequence

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """One step's attention, shared by all layers, as an engine's decoder asks for it.

    batch  the ranges and tables as the kernels read them
    parts  (token rows, batch) of its decodes and of the rest: a decode among prompts would be
           computed as if it had as many rows as they have
    cache  of each call: a layer's keys and values, [num_blocks, block_size, num_kv_heads, head_dim]
    """

    batch: PagedBatch
    parts: tuple[tuple[slice, PagedBatch], ...]

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
        return cls.of(batch)

    @classmethod
    def of(cls, batch: PagedBatch) -> TritonAttention:
        """For a batch that is on the device already."""
        return cls(batch, batch.parts())

    def rotate_and_store(
        self,
        heads: Sequence[torch.Tensor],
        angles: Pair,
        cache: Pair,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Normalise and turn query and key, write key and value: the key goes only to its slot.

        heads     query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads,
                  head_dim]; rows may lie apart
        angles    cos and sin by absolute position, each [num_positions, head_dim / 2] float32
        """
        query, key, value = heads
        return rotary_store_kv(query, key, value, *angles, *cache, self.batch, norms=norms)

    def attend(self, query: torch.Tensor, cache: Pair) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim] in and out, causal by absolute position."""
        if len(self.parts) == 1:
            return attention(query, *cache, self.batch)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for rows, part in self.parts:
            attention(query[rows], *cache, part, out=output[rows])
        return output
