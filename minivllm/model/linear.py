"""The linear layer: one call, rows @ weight.T + bias, behind which a backend may pack its weights.

A decoder asks a LinearFactory for each of its layers and never looks inside. A backend for
quantised weights is one more class here, and one more line in select_linear.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from kernels.layer_parts import Linear
from kernels.native.linear import NativeLinear
from minivllm.model.backend import native_library

LinearFactory = Callable[[Tensor, Tensor | None], Linear]
"""(weight [out_features, in_features], bias [out_features] or None) -> the layer."""


class DenseLinear:
    """The weights as they are, one matrix product a call. Any device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply the layer to every row."""
        return F.linear(rows, self._weight, self._bias)


def select_linear(backend: str) -> LinearFactory:
    """The layer that goes with the attention backend of that name."""
    return partial(NativeLinear, native_library()) if backend == "native" else DenseLinear
