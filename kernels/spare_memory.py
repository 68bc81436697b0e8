"""What a GPU has to spare for the paged cache, beside the memory that a step computes in."""

from __future__ import annotations

from typing import Protocol

import torch

SHARE = 0.9
"""Of what is free. The rest is for recordings, for libraries, and for gaps between allocations."""

BYTES_A_SCORE = 64
"""Of each sequence and token of the vocabulary, when top-k and top-p choose among all of them: the
scores in half and in single precision, sorted, their ids, and running sums in double precision."""

MOST_BLOCKS = 1 << 20
"""An engine has list entries for each: a tiny model on a large GPU would have a hundred million."""


class Network(Protocol):
    """The sizes of a model that a step's memory grows with."""

    @property
    def hidden_size(self) -> int:
        """Of the hidden states."""

    @property
    def intermediate_size(self) -> int:
        """Of a gate, and of what it multiplies."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys, and of values."""

    @property
    def head_dim(self) -> int:
        """Of each head."""

    @property
    def vocab_size(self) -> int:
        """Scores a sequence."""


class Limits(Protocol):
    """The most that a step may have."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens, all sequences together."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences."""


def spare_memory(device: torch.device, held: int) -> int:
    """Bytes of this GPU that may be taken, if `held` bytes are given back before."""
    # What torch keeps for later counts as taken otherwise.
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(SHARE * (free + held))


def out_of_memory(device: torch.device) -> type[RuntimeError]:
    """What torch raises when memory is short: on a GPU an error of its own, a bare one on a CPU."""
    return torch.OutOfMemoryError if device.type == "cuda" else RuntimeError


def step_bytes(network: Network, limits: Limits, value_size: int) -> int:
    """Bytes that the largest step computes in: rows on their way through a layer, and scores.

    value_size  bytes of a number, 2 in half precision
    """
    heads = (3 * network.num_heads + 2 * network.num_kv_heads) * network.head_dim
    # All that a layer makes of a row, as if nothing were given back before its end.
    values = 5 * network.hidden_size + heads + 3 * network.intermediate_size
    scores = limits.max_num_seqs * network.vocab_size * BYTES_A_SCORE
    return limits.max_num_batched_tokens * values * value_size + scores
