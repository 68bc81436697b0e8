# mypy: disable-error-code="untyped-decorator"
# (triton ships no types)
"""RMSNorm: each row divided by its root mean square, with or without a residual added first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.errors import KernelInputError
from kernels.launch import check_floats, check_rows, check_shape, next_power_of_two, output_like

MAX_ROW = 65536


@triton.jit
def normalise(row: tl.tensor, weight: tl.tensor, epsilon: float, SIZE: tl.constexpr) -> tl.tensor:
    """The row, float32 and zero beyond SIZE, over its root mean square, times the weight."""
    mean_square = tl.sum(row * row, 0) / SIZE
    return row * tl.rsqrt(mean_square + epsilon) * weight.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    output: tl.tensor,
    hidden: tl.tensor,
    weight: tl.tensor,
    epsilon: float,
    hidden_stride: int,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    source = hidden + token * hidden_stride + columns
    row = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    target = output + token * SIZE + columns
    tl.store(target, normalise(row, scale, epsilon, SIZE), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    output: tl.tensor,
    residual_output: tl.tensor,
    hidden: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    epsilon: float,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one token. The sum is read from registers, not again from memory."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = token * SIZE + columns
    row = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    row += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0)  # not behind a store, see rotary.py
    tl.store(residual_output + at, row, mask=inside)
    tl.store(output + at, normalise(row, scale, epsilon, SIZE), mask=inside)


def rms_norm_warps(size: int) -> int:
    """Warps for one row: eight values, 16 bytes in half precision, a thread, up to 16 warps."""
    return min(max(next_power_of_two(size) // 256, 1), 16)


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return hidden / sqrt(mean(hidden**2) + epsilon) * weight, over the last dimension.

    hidden         [num_tokens, size], a token's row contiguous, rows may lie apart
    weight         [size], contiguous
    out, returned  the shape of hidden, contiguous; fresh if None
    dtypes         one of float32, float16, bfloat16 for all; computed in float32, rounded once

    Raises KernelInputError on any other shape, stride, dtype or device.

    Zhang & Sennrich 2019.
    """
    check_floats(hidden=hidden, weight=weight)
    if hidden.dim() != 2:
        raise KernelInputError(f"hidden has {hidden.dim()} dimensions, not 2")
    num_tokens, size = hidden.shape
    _check_sizes(hidden, weight)
    check_rows(hidden=hidden)
    out = output_like(out, tuple(hidden.shape), hidden)
    rms_norm_kernel[(num_tokens,)](
        out,
        hidden,
        weight,
        epsilon,
        hidden.stride(0),
        SIZE=size,
        BLOCK=next_power_of_two(size),
        num_warps=rms_norm_warps(size),
    )
    return out


def add_rms_norm(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm of the sum, the sum) of hidden and residual, each read once.

    hidden, residual  [num_tokens, size], contiguous
    weight            [size], contiguous
    out, residual_out and the results: [num_tokens, size], contiguous; fresh if None.
                      residual_out may be `residual` itself: the sum then replaces it in place
    dtypes            one of float32, float16, bfloat16 for all; the sum is normalised before it
                      is rounded

    Raises KernelInputError on any other shape, stride, dtype or device.
    """
    check_floats(hidden=hidden, residual=residual, weight=weight)
    if hidden.dim() != 2:
        raise KernelInputError(f"hidden has {hidden.dim()} dimensions, not 2")
    num_tokens, size = hidden.shape
    check_shape("residual", residual, (num_tokens, size))
    _check_sizes(hidden, weight)
    if not (hidden.is_contiguous() and residual.is_contiguous()):
        raise KernelInputError(
            f"hidden has strides {hidden.stride()}, residual {residual.stride()}:"
            " both must be contiguous"
        )
    out = output_like(out, (num_tokens, size), hidden)
    residual_out = output_like(residual_out, (num_tokens, size), hidden)
    add_rms_norm_kernel[(num_tokens,)](
        out,
        residual_out,
        hidden,
        residual,
        weight,
        epsilon,
        SIZE=size,
        BLOCK=next_power_of_two(size),
        num_warps=rms_norm_warps(size),
    )
    return out, residual_out


def _check_sizes(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    size = hidden.shape[-1]
    check_shape("weight", weight, (size,))
    if not weight.is_contiguous():
        raise KernelInputError(f"weight has stride {weight.stride()}; it must be contiguous")
    if not (hidden.numel() > 0 and size <= MAX_ROW):
        raise KernelInputError(
            f"hidden has shape {tuple(hidden.shape)}:"
            f" need a row at least, of at most {MAX_ROW} values"
        )
