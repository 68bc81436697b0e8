"""RMSNorm, and the gated half of a feed-forward layer, in C: one pass over the rows each."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelInputError
from kernels.native.pointers import floats, rows


@dataclass(frozen=True, slots=True)
class NativeOps:
    """Functions of float32 rows on the CPU. Each raises KernelInputError on anything else."""

    library: ctypes.CDLL

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return hidden / sqrt(mean(hidden**2) + epsilon) * weight, over the last dimension.

        hidden   [num_rows, size], or [num_rows, num_heads, size] to normalise each head; a row is
                 contiguous, rows may lie apart
        weight   [size]

        Zhang & Sennrich 2019.
        """
        if hidden.dim() not in (2, 3):
            raise KernelInputError(f"hidden has {hidden.dim()} dimensions, not 2 or 3")
        size = hidden.shape[-1]
        result = hidden.new_empty(hidden.shape)
        self.library.rms_norm(
            rows("hidden", hidden, *hidden.shape),
            floats("weight", weight, size),
            result.data_ptr(),
            epsilon,
            hidden.shape[0],
            hidden.shape[1] if hidden.dim() == 3 else 1,
            size,
            hidden.stride(0),
        )
        return result

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm of the sum, the sum) of hidden and residual, both [num_rows, size]."""
        if hidden.dim() != 2:
            raise KernelInputError(f"hidden has {hidden.dim()} dimensions, not 2")
        num_rows, size = hidden.shape
        result, total = torch.empty_like(hidden), torch.empty_like(hidden)
        self.library.add_rms_norm(
            floats("hidden", hidden, num_rows, size),
            floats("residual", residual, num_rows, size),
            floats("weight", weight, size),
            result.data_ptr(),
            total.data_ptr(),
            epsilon,
            num_rows,
            size,
        )
        return result, total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [num_rows, 2 * size], gate and up side by side -> [num_rows, size]."""
        if gate_up.dim() != 2 or gate_up.shape[1] % 2:
            shape = list(gate_up.shape)
            raise KernelInputError(f"gate_up has shape {shape}; it must be two halves a row")
        num_rows, both = gate_up.shape
        result = gate_up.new_empty(num_rows, both // 2)
        self.library.silu_and_mul(
            floats("gate_up", gate_up, num_rows, both), result.data_ptr(), num_rows, both // 2
        )
        return result
