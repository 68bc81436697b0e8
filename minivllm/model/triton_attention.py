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
from kernels.rotary import rotary_store_kv
from minivllm.core.batch import ScheduledSequence
from minivllm.model.rope import Rotation

KVPair = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys and values; attention.KVCache is one (attention.py stands above this file)."""


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """StepAttention by the kernels. `batch` holds the ranges and tables as they read them."""

    batch: PagedBatch

    @classmethod
    def begin_step(cls, sequences: Sequence[ScheduledSequence], cache: KVPair) -> TritonAttention:
        """An AttentionBackend. Raises KernelInputError for tables a kernel must not follow."""
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
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        cache: KVPair,
    ) -> torch.Tensor:
        """See StepAttention. One pass: the turned key is written only to its slot."""
        return rotary_store_kv(query, key, value, *rotation.table, *cache, self.batch)

    def attend(self, query: torch.Tensor, cache: KVPair) -> torch.Tensor:
        """See StepAttention."""
        return attention(query, *cache, self.batch)
