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
from torch import Tensor

from kernels.attention_part import AttentionPart
from kernels.attention_plan import attention_parts
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


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """StepAttention in plain torch, for any device.

    slot_mapping  [num_tokens] int64   block * block_size + offset each row is stored at
    parts         which rows attend together to which keys
    """

    slot_mapping: Tensor
    parts: list[AttentionPart]

    @classmethod
    def begin_step(cls, sequences: Sequence[ScheduledSequence], cache: KVCache) -> TorchAttention:
        """An AttentionBackend: bring ranges and tables to the device of the cache."""
        block_size = cache.keys.shape[1]
        slots = [
            sequence.block_table[position // block_size] * block_size + position % block_size
            for sequence in sequences
            for position in range(sequence.start, sequence.end)
        ]
        slot_mapping = torch.tensor(slots, device=cache.keys.device)
        return cls(slot_mapping, attention_parts(sequences, cache))

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
        output = torch.empty_like(query)
        for part in self.parts:
            output[part.rows] = part.attend(query, cache)
        return output


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
