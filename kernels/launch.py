"""What all launchers share: the checks before a launch, and the sizes a launch is made of."""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import torch

from kernels.batch import PagedBatch
from kernels.errors import KernelInputError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_GROUP_SIZE = 16
MAX_HEAD_DIM = 256
MAX_BLOCK_NUMBERS = 2**31 - 1
"""Of the keys of one block, all heads together: a kernel holds this size in 32 bits."""


class Tile(NamedTuple):
    """How one attention program is shaped. Any choice is right; only its speed differs.

    block_m      query rows: (token, head) pairs
    block_n      keys of one step of the loop
    num_warps    groups of 32 threads that share the program
    num_stages   how many loop steps ahead loads are started: 5 keep two steps' keys under way,
                 since the block ids that say where they lie come first
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        """As tables name it: "128x64 8w 5s"."""
        return f"{self.block_m}x{self.block_n} {self.num_warps}w {self.num_stages}s"


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not less: Triton's vectors have no other lengths."""
    return 1 << (number - 1).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile that holds heads; a product of tiles sums over 16 at least."""
    return next_power_of_two(max(head_dim, 16))


@cache  # torch looks it up anew, and a step asks once a layer
def capability(device: torch.device) -> int:
    """80 for an A100, 89 for an RTX 4090, 90 for an H100, 120 for an RTX 5090.

    What is no NVIDIA GPU counts as 80: the interpreter's CPU, and AMD, whose numbers mean something
    else.
    """
    if device.type != "cuda" or torch.version.hip:
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory(capability: int) -> int:
    """Bytes of shared memory that one program may have, at most.

    By NVIDIA's CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    if capability in (86, 89) or capability >= 120:
        return 99 * 1024
    return (163 if capability < 90 else 227) * 1024


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs the device runs side by side without sharing; a CPU counts as 1."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_floats(**tensors: torch.Tensor) -> None:
    """All on one device that can run kernels, all of one dtype the kernels know."""
    (first, model), *_ = tensors.items()
    for name, tensor in tensors.items():
        if (tensor.device, tensor.dtype) != (model.device, model.dtype):
            raise KernelInputError(
                f"{name} is {tensor.dtype} on {tensor.device},"
                f" {first} is {model.dtype} on {model.device}: they must agree"
            )
    if model.dtype not in DTYPES:
        raise KernelInputError(f"{first} is {model.dtype}; the kernels know {DTYPES}")
    if not (model.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise KernelInputError(
            f"{first} is on {model.device}: move it to a CUDA device,"
            " or set TRITON_INTERPRET=1 before the first import of triton"
        )


def check_rows(**tensors: torch.Tensor) -> None:
    """[num_tokens, ...] whose rows are dense; rows may lie apart, as in a slice of a qkv matrix."""
    for name, tensor in tensors.items():
        # Usually the whole is, and no view needs to be made.
        if tensor.dim() < 2 or not (tensor.is_contiguous() or tensor[:1].is_contiguous()):
            raise KernelInputError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}:"
                " each token's row must be contiguous"
            )


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Exactly this shape."""
    if tensor.shape != shape:
        raise KernelInputError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")


def check_cache(key_cache: torch.Tensor, value_cache: torch.Tensor, batch: PagedBatch) -> None:
    """Both contiguous [num_blocks, block_size, num_kv_heads, head_dim], as the batch says."""
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not (tensor.dim() == 4 and tensor.is_contiguous()):
            raise KernelInputError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}:"
                " need a contiguous [num_blocks, block_size, num_kv_heads, head_dim]"
            )
        check_shape(name, tensor, (batch.num_blocks, batch.block_size, *key_cache.shape[2:]))
    head_dim = key_cache.shape[3]
    if not (head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0):
        raise KernelInputError(
            f"head size is {head_dim}; it must be even and at most {MAX_HEAD_DIM}"
        )
    of_a_block = key_cache.shape[1:].numel()
    if of_a_block > MAX_BLOCK_NUMBERS:
        raise KernelInputError(
            f"a block of {batch.block_size:,} slots holds {of_a_block:,} numbers of keys;"
            f" it may hold {MAX_BLOCK_NUMBERS:,}: make blocks smaller"
        )
    if batch.slots.device != key_cache.device:
        raise KernelInputError(
            f"the batch is on {batch.slots.device}, the cache on {key_cache.device}"
        )


def output_like(
    out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor:
    """`out` once it is known to fit, or a fresh tensor: contiguous, dtype and device of `like`."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    check_shape("out", out, shape)
    if not out.is_contiguous():
        raise KernelInputError(f"out has strides {out.stride()}: it must be contiguous")
    if (out.dtype, out.device) != (like.dtype, like.device):
        raise KernelInputError(
            f"out is {out.dtype} on {out.device}, not {like.dtype} on {like.device}"
        )
    return out
