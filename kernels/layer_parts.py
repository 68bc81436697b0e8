"""What a decoder layer is made of, for whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""[num_rows, inputs] -> [num_rows, outputs]."""


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
