# mypy: disable-error-code="untyped-decorator"
# (triton ships no types)
"""Scatter the new keys and values of a step into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.batch import PagedBatch
from kernels.launch import check_cache, check_floats, check_rows, check_shape, next_power_of_two


@triton.jit
def store_kv_kernel(
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    key_stride: int,
    value_stride: int,
    ROW: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
) -> None:
    """One program: one token, all its KV heads. Its row of the cache is one contiguous piece."""
    token = tl.program_id(0).to(tl.int64)
    # 64 bits: slot * ROW passes 2**31 in a cache of a few gigabytes.
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:  # padding: this token's KV goes nowhere
        return
    columns = tl.arange(0, BLOCK_ROW)
    inside = columns < ROW
    key_row = tl.load(key + token * key_stride + columns, mask=inside)
    value_row = tl.load(value + token * value_stride + columns, mask=inside)
    tl.store(key_cache + slot * ROW + columns, key_row, mask=inside)
    tl.store(value_cache + slot * ROW + columns, value_row, mask=inside)


def store_kv_warps(row: int) -> int:
    """Warps for one row of num_kv_heads * head_dim values: eight values, 16 bytes, a thread."""
    return min(max(next_power_of_two(row) // 256, 1), 8)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """Write row i of `key` and `value` to slot batch.slots[i] of the caches, in place.

    key, value              [num_tokens, num_kv_heads, head_dim], a token's row contiguous;
                            rows may lie apart (slices of one qkv matrix)
    key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    dtypes                  one of float32, float16, bfloat16 for all four

    A slot of -1 is skipped. Raises KernelInputError on any other shape, stride, dtype, device.

    The cache in blocks and the mapping of slots: PagedAttention (Kwon et al. 2023).
    """
    check_floats(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    check_cache(key_cache, value_cache, batch)
    for name, tensor in (("key", key), ("value", value)):
        check_shape(name, tensor, (batch.num_tokens, *key_cache.shape[2:]))
    check_rows(key=key, value=value)
    row = key_cache.shape[2] * key_cache.shape[3]
    store_kv_kernel[(batch.num_tokens,)](
        key_cache,
        value_cache,
        key,
        value,
        batch.slots,
        key.stride(0),
        value.stride(0),
        ROW=row,
        BLOCK_ROW=next_power_of_two(row),
        num_warps=store_kv_warps(row),
    )
