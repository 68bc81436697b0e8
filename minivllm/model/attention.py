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

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import ATTENTION_BACKENDS
from minivllm.core.batch import ScheduledSequence
from minivllm.errors import ConfigError
from minivllm.model.rope import Rotation, rotate

ENVIRONMENT_VARIABLE = "MINIVLLM_ATTENTION"


class KVCache(NamedTuple):
    """One layer's paged keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


class StepAttention(Protocol):
    """Attention for the rows of one step: made once a step, shared by all layers."""

    def rotate_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, cache: KVCache
    ) -> Tensor:
        """Turn query and key by their positions; write key and value to each row's slot.

        query       [num_tokens, num_heads, head_dim]
        key, value  [num_tokens, num_kv_heads, head_dim], dtype and device of the cache
        returns     the turned query
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


class _Span(NamedTuple):
    """One sequence's share of the step.

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
class TorchAttention:
    """StepAttention in plain torch, sequence by sequence; any device.

    A sequence is attended to alone and without padding, so its result does not depend on which
    others are in the batch.

    slot_mapping  [num_tokens] int64   block * block_size + offset each row is stored at
    spans         one a sequence, in the order of their rows
    """

    slot_mapping: Tensor
    spans: tuple[_Span, ...]

    @classmethod
    def begin_step(cls, sequences: Sequence[ScheduledSequence], cache: KVCache) -> TorchAttention:
        """An AttentionBackend: bring ranges and tables to the device of the cache."""
        block_size, device = cache.keys.shape[1], cache.keys.device
        slots = torch.cat([_slots(sequence, block_size) for sequence in sequences])
        spans = tuple(_span(sequence, block_size, device) for sequence in sequences)
        return cls(slots.to(device), spans)

    def rotate_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, cache: KVCache
    ) -> Tensor:
        """See StepAttention."""
        self.store(cache, rotate(key, rotation), value)
        return rotate(query, rotation)

    def store(self, cache: KVCache, keys: Tensor, values: Tensor) -> None:
        """Write each row's key and value to its slot; [num_tokens, num_kv_heads, head_dim]."""
        cache.keys.flatten(0, 1).index_copy_(0, self.slot_mapping, keys)
        cache.values.flatten(0, 1).index_copy_(0, self.slot_mapping, values)

    def attend(self, query: Tensor, cache: KVCache) -> Tensor:
        """See StepAttention."""
        rows_of = torch.split(query, [span.num_rows for span in self.spans])
        each = zip(rows_of, self.spans, strict=True)
        return torch.cat([_attend(rows, cache, span) for rows, span in each])


def _slots(sequence: ScheduledSequence, block_size: int) -> Tensor:
    """The slot of each position in [start, end): [end - start] int64."""
    positions = torch.arange(sequence.start, sequence.end)
    table = torch.tensor(sequence.block_table)
    return table[positions // block_size] * block_size + positions % block_size


def _span(sequence: ScheduledSequence, block_size: int, device: torch.device) -> _Span:
    num_rows, context_len = sequence.end - sequence.start, sequence.end
    num_blocks = -(-context_len // block_size)
    mask = None
    if num_rows > 1:
        # Row i has the absolute position start + i and sees the keys 0 .. start + i.
        mask = torch.ones(num_rows, context_len, dtype=torch.bool, device=device)
        mask = mask.tril(sequence.start)
    table = torch.tensor(sequence.block_table[:num_blocks], device=device)
    return _Span(num_rows, context_len, table, mask)


def _attend(rows: Tensor, cache: KVCache, span: _Span) -> Tensor:
    """One sequence: gather its blocks in logical order, cut off what is not written, attend."""
    blocks = [part.index_select(0, span.table).flatten(0, 1) for part in cache]
    keys, values = (_heads_first(slots[: span.context_len]) for slots in blocks)
    query = _heads_first(rows)
    output = F.scaled_dot_product_attention(query, keys, values, span.mask, enable_gqa=True)
    return output[0].transpose(0, 1)


def _heads_first(rows: Tensor) -> Tensor:
    """[n, heads, head_dim] -> [1, heads, n, head_dim], as torch wants it."""
    return rows.transpose(0, 1)[None]


def choose_backend(requested: str, device: torch.device) -> str:
    """Torch or triton: what EngineConfig.attention_backend or MINIVLLM_ATTENTION comes to.

    Auto is triton on a GPU that has it. Raises ConfigError for an unknown name, and for triton
    where it cannot run.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE) or requested
    if name not in ATTENTION_BACKENDS:
        allowed = ", ".join(ATTENTION_BACKENDS)
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} is {name!r}; it must be one of {allowed}")
    missing = _missing_for_triton(device)
    if name == "triton" and missing:
        raise ConfigError(f"attention_backend is 'triton', but {missing}; use auto or torch")
    if name == "auto":
        return "triton" if device.type == "cuda" and not missing else "torch"
    return name


def select_attention_backend(requested: str, device: torch.device) -> AttentionBackend:
    """The backend that choose_backend names. Raises ConfigError."""
    if choose_backend(requested, device) == "torch":
        return TorchAttention.begin_step
    # Imported late: there is no triton on every machine.
    from kernels.step_attention import TritonAttention

    return TritonAttention.begin_step


def _missing_for_triton(device: torch.device) -> str | None:
    """The first thing that the Triton backend lacks here; None: it can run."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        slowly = "(TRITON_INTERPRET=1 in the environment runs it on a CPU, slowly)"
        return f"it needs a CUDA GPU and the device is {device.type} {slowly}"
    return None
