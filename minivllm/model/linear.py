"""The linear layer: one call, rows @ weight.T + bias, behind which a backend may pack its weights.

A decoder asks a LinearFactory for each of its layers and never looks inside. A backend for
quantised weights is one more class here, and one more line in select_linear.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""[num_rows, in_features] -> [num_rows, out_features], in the dtype of the rows."""

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


class PackedLinear:
    """The weights copied into the order in which oneDNN reads them: float32 on an x86 CPU.

    A decode step reads every weight for a few rows, and a plain product rearranges them each time.
    torch's compiler packs weights with the same two functions.
    """

    # For how many rows oneDNN chooses the order. What it chooses for 8 serves every number of
    # rows; what it chooses for 1, or for an unknown number, is slow at 8 to 32.
    _ROWS = 8

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, self._ROWS)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply the layer to every row."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return product


def packed_if_wide(weight: Tensor, bias: Tensor | None) -> Linear:
    """Pack what has at least twice as many outputs as inputs: gate and up, and the head.

    There packing brings most. Everywhere it would bring little more, and cost precision: oneDNN
    adds up the terms of a sum in one chain, with 1.7 times the rounding error of F.linear.
    """
    out_features, in_features = weight.shape
    return (PackedLinear if out_features >= 2 * in_features else DenseLinear)(weight, bias)


def select_linear(device: torch.device, dtype: torch.dtype) -> LinearFactory:
    """Packed weights where oneDNN has them: in float32, on an x86 CPU."""
    is_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    packs = is_x86 and has_onednn and device.type == "cpu" and dtype is torch.float32
    return packed_if_wide if packs else DenseLinear
