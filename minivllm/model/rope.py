"""Rotary position embedding (RoFormer, Su et al. 2021).

Each pair of a head's channels is rotated by an angle that grows with the token's absolute
position, so a query and a key meet at an angle that depends only on how far apart they are.

Channel i is paired with channel i + head_dim / 2, the layout in which Hugging Face folders store
q and k (GGUF files interleave the pairs, see gguf_convert.py).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.model.model_config import Llama3Scaling, RopeConfig


class Angles(NamedTuple):
    """cos and sin of every position's angles, each [num_positions, head_dim / 2] float32."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each channel pair: [head_dim / 2] float32, on the CPU.

    Pair i turns by theta ** (-2 i / head_dim) a position (RoFormer, section 3.2.2).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    return frequencies if rope.scaling is None else _stretch(frequencies, rope.scaling)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1's scaling to a longer context (Meta's llama-models repository, apply_scaling).

    A pair that turns at least high_freq_factor times within the original context tells near
    positions apart and is kept; one that turns fewer than low_freq_factor times is slowed down by
    `factor`; between the two, the frequency is blended linearly in the number of turns.
    """
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotary_table(inv_frequencies: Tensor, num_positions: int) -> Angles:
    """The angles of positions 0 to num_positions - 1; inv_frequencies [head_dim / 2] float32."""
    angles = torch.arange(num_positions).float()[:, None] * inv_frequencies
    return Angles(angles.cos(), angles.sin())


def angles_at(positions: Tensor, table: Angles, dtype: torch.dtype) -> Angles:
    """The angles of every row, [num_tokens, 1, head_dim / 2]; rounded to `dtype` once.

    positions  [num_tokens] absolute positions
    """
    return Angles(*(angles[positions][:, None].to(dtype) for angles in table))


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """Turn each pair (x_i, x_{i + head_dim/2}) by its row's angle. [num_tokens, heads, head_dim].

    angles  as angles_at gives them; all heads of a row turn alike
    """
    first, second = heads.chunk(2, dim=-1)
    cos, sin = angles
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
