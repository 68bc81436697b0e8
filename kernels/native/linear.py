"""The linear layer in C: see linear.c for how the weight lies and how a sum is added up."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kernels.errors import KernelInputError
from kernels.native.memory import in_large_pages
from kernels.native.pointers import floats

WIDTH = 16
"""Outputs of a panel: WIDTH in tile.h."""


class NativeLinear:
    """rows @ weight.T + bias, with the weight packed once, in the order in which it is read.

    panels  see pack
    bias    [out_features], or None

    A row's result has the same bits alone and among any other rows.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a copy. weight [out_features, in_features], bias [out_features], float32 on the CPU.

        Raises KernelInputError on any other dtype, shape or device.
        """
        if weight.dim() != 2:
            raise KernelInputError(f"weight has {weight.dim()} dimensions, not 2")
        floats("weight", weight, *weight.shape)
        self.out_features, self.in_features = weight.shape
        self.panels = pack(weight)
        self.bias = bias
        self._addresses = (
            self.panels.data_ptr(),
            None if bias is None else floats("bias", bias, self.out_features),
        )
        self._linear = library.linear

    def __call__(self, rows: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]. Raises KernelInputError."""
        num_rows = rows.shape[0]
        result = rows.new_empty(num_rows, self.out_features)
        self._linear(
            floats("rows", rows, num_rows, self.in_features),
            *self._addresses,
            result.data_ptr(),
            num_rows,
            self.in_features,
            self.out_features,
        )
        return result


def pack(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> [panels, inputs, 16]; behind the last output there are zeros."""
    outputs, inputs = weight.shape
    num_panels = -(-outputs // WIDTH)
    panels = in_large_pages(num_panels * inputs * WIDTH).view(num_panels, inputs, WIDTH)
    whole = outputs // WIDTH
    panels[:whole] = weight[: whole * WIDTH].view(whole, WIDTH, inputs).transpose(1, 2)
    if whole < len(panels):
        panels[whole, :, : outputs % WIDTH] = weight[whole * WIDTH :].t()
    return panels
