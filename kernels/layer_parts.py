"""What a decoder layer is made of, for whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""[num_rows, inputs] -> [num_rows, outputs]."""


RMSNorm = Callable[[Tensor, Tensor, float], Tensor]
"""(x [..., size], weight [size], epsilon) -> x / sqrt(mean(x^2) + epsilon) * weight."""


class HeadNorms(NamedTuple):
    """RMSNorms of each query head and of each key head, before they are turned (Qwen3 has them).

    query, key  [head_dim], weights
    epsilon     of both
    """

    query: Tensor
    key: Tensor
    epsilon: float

    def applied(self, rms_norm: RMSNorm, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both normalised by a function of their own, for who does not do it in passing."""
        return rms_norm(query, self.query, self.epsilon), rms_norm(key, self.key, self.epsilon)


class LayerParts(NamedTuple):
    """Linear layers, weights of norms, and sizes.

    query_key_value           hidden -> query, key and value heads, side by side
    output                    query heads -> hidden
    gate_up                   hidden -> gate and up, side by side
    down                      half of that -> hidden
    attention_norm, mlp_norm  [hidden]
    query_norm, key_norm      [head_dim]; None where a model has none
    epsilon                   of all norms
    """

    query_key_value: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    epsilon: float
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def split_heads(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, each [num_rows, heads, head_dim], of query_key_value's rows."""
        heads = rows.view(len(rows), -1, self.head_dim)
        return heads.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of query and key heads; None where a model has none."""
        if self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorms(self.query_norm, self.key_norm, self.epsilon)
