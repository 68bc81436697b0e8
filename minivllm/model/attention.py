"""Attention through block tables: one call for a mixed batch, behind which stands a backend.

A row is one token to compute. The rows of all sequences lie one after another, and a sequence may
bring one row (decode), its whole prompt (prefill), a part of it (chunk), or what follows a cached
prefix (suffix). All four are one case: rows at positions [start, end) attend to the keys at
[0, their own position], and those lie in the blocks of the sequence's table.

Block size 4, block table [7, 2], start 5, end 7:

    row   position   slot it writes        keys it reads: positions 0 .. its own
      0          5   2 * 4 + 1 = 9         slots 28 29 30 31 8 9
      1          6   2 * 4 + 2 = 10        slots 28 29 30 31 8 9 10
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.gathered_attention import GatheredAttention
from kernels.layer_parts import HeadNorms
from kernels.native.attention import NativeAttention
from minivllm.core.batch import ScheduledSequence
from minivllm.model.backend import native_library
from minivllm.model.ops import rms_norm
from minivllm.model.rope import Angles, angles_at, rotate


class KVCache(NamedTuple):
    """One layer's paged keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


class StepAttention(Protocol):
    """Attention for the rows of one step: made once a step, shared by all layers."""

    def rotate_and_store(
        self, heads: Sequence[Tensor], angles: Angles, cache: KVCache, norms: HeadNorms | None
    ) -> Tensor:
        """Turn query and key by their positions; write key and value to each row's slot.

        angles   by absolute position; a step knows the positions of its rows
        heads    query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads,
                 head_dim], dtype and device of the cache
        norms    of the heads of query and key, applied first; None where a model has none
        returns  the turned query
        """

    def attend(self, query: Tensor, cache: KVCache) -> Tensor:
        """softmax(q k / sqrt(head_dim)) v over the positions 0 up to each row's own.

        query    [num_tokens, num_heads, head_dim]; head h reads KV head h // group, where
                 group = num_heads / num_kv_heads (grouped-query attention, Ainslie et al. 2023)
        returns  the same shape and dtype
        """


AttentionBackend = Callable[[Sequence[ScheduledSequence], KVCache], StepAttention]
"""(the scheduled sequences, any layer's cache) -> attention for this step.

The cache tells device, number of blocks and block size. A backend turns the sequences' ranges and
block tables into whatever its kernels read, once for all layers.
"""


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """StepAttention in plain torch, for any device and dtype.

    gathered  where each row is stored, and what each sequence's rows read
    """

    gathered: GatheredAttention

    @classmethod
    def begin_step(cls, sequences: Sequence[ScheduledSequence], cache: KVCache) -> TorchAttention:
        """An AttentionBackend: bring ranges and tables to the device of the cache."""
        return cls(GatheredAttention.of(sequences, cache))

    def rotate_and_store(
        self, heads: Sequence[Tensor], angles: Angles, cache: KVCache, norms: HeadNorms | None
    ) -> Tensor:
        """See StepAttention."""
        query, key, value = heads
        if norms is not None:
            query, key = norms.applied(rms_norm, query, key)
        of_rows = angles_at(self.gathered.positions, angles, query.dtype)
        self.gathered.store(rotate(key, of_rows), value, cache)
        return rotate(query, of_rows)

    def attend(self, query: Tensor, cache: KVCache) -> Tensor:
        """See StepAttention."""
        return self.gathered.attend(query, cache)


def select_attention_backend(name: str) -> AttentionBackend:
    """The backend of that name, which choose_backend has found to run here."""
    if name == "torch":
        return TorchAttention.begin_step
    if name == "native":
        return partial(NativeAttention.begin_step, native_library())
    # Imported late: there is no triton on every machine.
    from kernels.step_attention import TritonAttention

    return TritonAttention.begin_step
