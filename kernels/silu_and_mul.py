# mypy: disable-error-code="untyped-decorator"
# (triton ships no types)
"""SiLU of the gate times up: the element-wise middle of a gated feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.errors import KernelInputError
from kernels.launch import check_floats, check_rows, output_like

BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(
    output: tl.tensor, gate_up: tl.tensor, stride: int, size: int, BLOCK: tl.constexpr
) -> None:
    """One program: BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + token * stride + columns, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * stride + size + columns, mask=inside).to(tl.float32)
    tl.store(output + token * size + columns, gate * tl.sigmoid(gate) * up, mask=inside)


def silu_warps(block: int) -> int:
    """Warps for a block of columns: eight values, 16 bytes in half precision, a thread."""
    return max(block // 256, 1)


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, where gate is the first half of each row and up the second.

    gate_up        [num_tokens, 2 * size], a row contiguous, rows may lie apart
    out, returned  [num_tokens, size], contiguous; fresh if None
    dtypes         one of float32, float16, bfloat16; computed in float32, rounded once

    Raises KernelInputError on any other shape, stride, dtype or device.

    SwiGLU, of GLU variants (Shazeer 2020).
    """
    check_floats(gate_up=gate_up)
    if not (gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and gate_up.numel() > 0):
        raise KernelInputError(
            f"gate_up has shape {tuple(gate_up.shape)}, not [num_tokens, 2 * size]"
        )
    check_rows(gate_up=gate_up)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = output_like(out, (num_tokens, size), gate_up)
    silu_and_mul_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        out, gate_up, gate_up.stride(0), size, BLOCK=BLOCK, num_warps=silu_warps(BLOCK)
    )
    return out
