"""Addresses of tensors for C, checked: C believes whatever it is told."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.errors import KernelInputError


def floats(name: str, tensor: Tensor, *shape: int) -> int:
    """The address of a contiguous float32 tensor of this shape on the CPU.

    Raises KernelInputError if it is anything else.
    """
    # A step asks for hundreds of addresses: what is right is seen in one expression.
    if (
        tensor.shape == shape
        and tensor.dtype is torch.float32
        and tensor.is_contiguous()
        and tensor.is_cpu
    ):
        return tensor.data_ptr()
    _check(name, tensor, shape)
    raise KernelInputError(f"{name} has strides {tensor.stride()}: it must be contiguous")


def rows(name: str, tensor: Tensor, *shape: int) -> int:
    """The same for a tensor whose rows may lie apart: what is in a row must lie side by side.

    Raises KernelInputError.
    """
    stride = tensor.stride()
    lies_close = stride[-1] == 1 and (len(stride) < 3 or stride[1] == tensor.shape[2])
    if not lies_close and tensor.numel():
        raise KernelInputError(f"{name} has strides {stride}: a row must be contiguous")
    _check(name, tensor, shape)
    return tensor.data_ptr()


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not torch.float32 or not tensor.is_cpu:
        raise KernelInputError(f"{name} is {tensor.dtype} on {tensor.device}; float32 on cpu only")
    if tensor.shape != shape:
        raise KernelInputError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
