# mypy: disable-error-code="untyped-decorator"
# (triton ships no types)
"""Rotary position embedding of query and key, the rotated key stored in the same pass.

Where a model normalises its heads first, that happens here too: a head is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.batch import PagedBatch
from kernels.errors import KernelInputError
from kernels.launch import (
    MAX_GROUP_SIZE,
    check_cache,
    check_floats,
    check_rows,
    check_shape,
    next_power_of_two,
    output_like,
)
from kernels.layer_parts import HeadNorms


@triton.jit
def normalise_head(
    first: tl.tensor,
    second: tl.tensor,
    weight: tl.tensor,
    epsilon: float,
    paired: tl.tensor,
    HEAD_DIM: tl.constexpr,
    AXIS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """RMSNorm of heads that are given as two halves, each half along AXIS, zero beyond `paired`."""
    squares = tl.sum(first * first + second * second, AXIS, keep_dims=True)
    scale = tl.rsqrt(squares / HEAD_DIM + epsilon)
    of_first = tl.load(weight, mask=paired, other=0.0).to(tl.float32)
    of_second = tl.load(weight + HEAD_DIM // 2, mask=paired, other=0.0).to(tl.float32)
    return first * scale * of_first, second * scale * of_second


@triton.jit
def rotary_store_kv_kernel(
    output: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos_table: tl.tensor,
    sin_table: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    epsilon: float,
    query_stride: int,
    key_stride: int,
    value_stride: int,
    num_kv_heads: int,
    group_size: int,
    NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """One program: one token, one KV head: its key, its value, and the query heads that use it.

    A head is turned as HEAD_DIM / 2 pairs (x[i], x[i + HEAD_DIM / 2]), the layout of Llama's
    and Qwen's checkpoints on the hub. Norms, angles and arithmetic are float32; the norms are
    read only if NORMED.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    pairs = tl.arange(0, BLOCK_HALF)
    paired = pairs < HALF
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_table + position * HALF + pairs, mask=paired, other=0.0)
    sin = tl.load(sin_table + position * HALF + pairs, mask=paired, other=0.0)

    # Every load comes before the first store: the compiler moves none over a store, and each
    # would wait for memory on its own. A padding row has key and value like any other.
    slot = tl.load(slots + token).to(tl.int64)
    members = tl.arange(0, BLOCK_GROUP)
    inside = (members < group_size)[:, None] & paired[None, :]
    offsets = (kv_head * group_size + members)[:, None] * HEAD_DIM + pairs[None, :]
    heads = query + token * query_stride + offsets
    first = tl.load(heads, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + HALF, mask=inside, other=0.0).to(tl.float32)
    head = key + token * key_stride + kv_head * HEAD_DIM + pairs
    first_key = tl.load(head, mask=paired, other=0.0).to(tl.float32)
    second_key = tl.load(head + HALF, mask=paired, other=0.0).to(tl.float32)
    head = value + token * value_stride + kv_head * HEAD_DIM + pairs
    first_value = tl.load(head, mask=paired)
    second_value = tl.load(head + HALF, mask=paired)
    if NORMED:
        weight = query_norm + pairs
        first, second = normalise_head(first, second, weight, epsilon, paired, HEAD_DIM, 1)
        weight = key_norm + pairs
        first_key, second_key = normalise_head(
            first_key, second_key, weight, epsilon, paired, HEAD_DIM, 0
        )

    turned = output + token * num_kv_heads * group_size * HEAD_DIM + offsets
    tl.store(turned, first * cos[None, :] - second * sin[None, :], mask=inside)
    tl.store(turned + HALF, second * cos[None, :] + first * sin[None, :], mask=inside)
    if slot < 0:  # padding: this token's KV goes nowhere
        return
    cached = (slot * num_kv_heads + kv_head) * HEAD_DIM + pairs
    tl.store(key_cache + cached, first_key * cos - second_key * sin, mask=paired)
    tl.store(key_cache + cached + HALF, second_key * cos + first_key * sin, mask=paired)
    tl.store(value_cache + cached, first_value, mask=paired)
    tl.store(value_cache + cached + HALF, second_value, mask=paired)


def rotary_warps(head_dim: int, group_size: int) -> int:
    """Warps for a tile of group_size half heads: four pairs a thread."""
    pairs = next_power_of_two(group_size) * next_power_of_two(head_dim // 2)
    return min(max(pairs // 128, 1), 4)


def rotary_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    norms: HeadNorms | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate query and key by batch.positions, store key and value, return the rotated query.

    query                   [num_tokens, num_heads, head_dim]      a token's row contiguous, rows
    key, value              [num_tokens, num_kv_heads, head_dim]   may lie apart (one qkv matrix)
    cos, sin                [num_positions, head_dim / 2] float32, contiguous; row p is position p
    key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    norms                   of each query head and each key head, before it is rotated; None: none
    out, returned           [num_tokens, num_heads, head_dim], contiguous; fresh if None
    dtypes                  one of float32, float16, bfloat16 for all but cos and sin

    The rotated key is written only where attention will read it: to slot batch.slots[i], or
    nowhere if that is -1. Raises KernelInputError on any other shape, stride, dtype or device,
    or if the tables of angles end before the batch's longest context.

    RoFormer (Su et al. 2021). Normalised heads: Henry et al. 2020, with RMSNorm as in Qwen3.
    """
    check_floats(query=query, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    check_cache(key_cache, value_cache, batch)
    num_kv_heads, head_dim = key_cache.shape[2:]
    for name, tensor in (("key", key), ("value", value)):
        check_shape(name, tensor, (batch.num_tokens, num_kv_heads, head_dim))
    if query.dim() != 3:
        raise KernelInputError(f"query has {query.dim()} dimensions, not 3")
    num_heads = query.shape[1]
    check_shape("query", query, (batch.num_tokens, num_heads, head_dim))
    check_rows(query=query, key=key, value=value)
    group_size = num_heads // num_kv_heads
    if not (num_heads == group_size * num_kv_heads and 1 <= group_size <= MAX_GROUP_SIZE):
        raise KernelInputError(
            f"{num_heads} query heads for {num_kv_heads} KV heads:"
            f" need 1 to {MAX_GROUP_SIZE} for each"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, (cos.shape[0], head_dim // 2))
        if not (
            table.dtype == torch.float32 and table.is_contiguous() and table.device == query.device
        ):
            raise KernelInputError(
                f"{name} is {table.dtype} on {table.device} with strides {table.stride()}:"
                f" need contiguous float32 on {query.device}"
            )
    if cos.shape[0] < batch.max_context_len:
        raise KernelInputError(
            f"cos and sin hold {cos.shape[0]} positions; the longest context has"
            f" {batch.max_context_len}"
        )
    if norms is not None:
        check_floats(query=query, query_norm=norms.query, key_norm=norms.key)
        for name, weight in (("query_norm", norms.query), ("key_norm", norms.key)):
            check_shape(name, weight, (head_dim,))
            if not weight.is_contiguous():
                raise KernelInputError(f"{name} has stride {weight.stride()}: not contiguous")
    out = output_like(out, tuple(query.shape), query)
    # Without norms something must stand in their places; it is not read.
    query_norm, key_norm, epsilon = norms or (query, query, 0.0)
    rotary_store_kv_kernel[(batch.num_tokens, num_kv_heads)](
        out,
        key_cache,
        value_cache,
        query,
        key,
        value,
        cos,
        sin,
        query_norm,
        key_norm,
        batch.positions,
        batch.slots,
        epsilon,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        num_kv_heads,
        group_size,
        NORMED=norms is not None,
        HEAD_DIM=head_dim,
        BLOCK_GROUP=next_power_of_two(group_size),
        BLOCK_HALF=next_power_of_two(head_dim // 2),
        num_warps=rotary_warps(head_dim, group_size),
    )
    return out
