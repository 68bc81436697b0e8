"""What stands between the matrix products: one name each, in plain torch or as a fused kernel.

A GPU spends a decode step reading weights, keys and values; what comes between costs it a launch
and a trip through memory each time. So the kernels do in one pass what torch does in several.
Which of the two a model uses is chosen once, when it is built.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.native.ops import NativeOps
from minivllm.model.backend import native_library


class Ops(NamedTuple):
    """Functions of rows; a result has the dtype of its input.

    rms_norm      (x [num_tokens, size], weight [size], eps) -> x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm  (update, x, weight, eps) -> (rms_norm of x + update, x + update);
                  all [num_tokens, size]
    silu_and_mul  [num_tokens, 2 * size], gate and up side by side -> silu(gate) * up
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised in float32 and rounded before the weight is applied, as the models were trained.

    The kernel rounds once, at the end: in half precision the two differ by a rounding.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(update: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See Ops."""
    total = x + update
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See Ops."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


TORCH_OPS = Ops(rms_norm, add_rms_norm, silu_and_mul)


def select_ops(backend: str) -> Ops:
    """The functions that go with the attention backend of the same name."""
    if backend == "torch":
        return TORCH_OPS
    if backend == "native":
        native = NativeOps(native_library())
        return Ops(native.rms_norm, native.add_rms_norm, native.silu_and_mul)
    # Imported late: there is no triton on every machine.
    from kernels import rms_norm as norms
    from kernels.silu_and_mul import silu_and_mul as fused_silu_and_mul

    return Ops(norms.rms_norm, norms.add_rms_norm, fused_silu_and_mul)
