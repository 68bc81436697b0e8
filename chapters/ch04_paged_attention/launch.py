"""What stands between torch tensors and a kernel: shapes are checked, sizes are chosen.

Given to the reader. `kernel[grid](...)` starts one program for each place of the grid.
"""

from typing import Any

import torch
from torch import Tensor

# Keys, and query rows, that a program loads at a time: a matrix product sums over at least 16.
TILE = 16


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not less: Triton's vectors have no other lengths."""
    return 1 << (number - 1).bit_length()


def store(
    kernel: Any,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """One program a token. Raises ValueError for a wrong slot, or if the shapes do not fit."""
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    wrong = slot_mapping[(slot_mapping < 0) | (slot_mapping >= num_slots)]
    if len(wrong):
        raise ValueError(f"slot {int(wrong[0])} is asked for; there are 0 to {num_slots - 1}")
    check_caches(key_cache, value_cache)
    expected = (len(slot_mapping), *key_cache.shape[2:])
    if key.shape != expected or value.shape != expected:
        raise ValueError(
            f"key and value are {tuple(key.shape)} and {tuple(value.shape)}, not {expected}"
        )
    row = key_cache[0, 0].numel()
    kernel[(len(slot_mapping),)](
        key.contiguous(),
        value.contiguous(),
        key_cache,
        value_cache,
        slot_mapping.to(torch.int64),  # slot * ROW passes 2**31 in a cache of a few gigabytes
        ROW=row,
        BLOCK_ROW=next_power_of_two(row),
    )


def attention(
    kernel: Any,
    grid: tuple[int, ...],
    out: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: tuple[Tensor, ...],
) -> Tensor:
    """Run an attention kernel; returns `out`, or a fresh tensor like query.

    tables  all int32: block tables, for a prefill query starts, context lengths

    Raises ValueError if the shapes do not fit.
    """
    check_caches(key_cache, value_cache)
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if head_dim != key_cache.shape[3] or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} heads of size {head_dim} do not fit"
            f" {num_kv_heads} KV heads of size {key_cache.shape[3]}"
        )
    if len(tables[0]) != grid[0]:
        raise ValueError(f"{len(tables[0])} block tables for {grid[0]} sequences")
    output = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    if output.shape != query.shape or not output.is_contiguous():
        raise ValueError(f"out is {tuple(output.shape)}, not {tuple(query.shape)} and contiguous")
    kernel[grid](
        output,
        query.contiguous(),
        key_cache,
        value_cache,
        *(table.contiguous() for table in tables),
        head_dim**-0.5,
        tables[0].shape[1],
        num_kv_heads,
        num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=TILE,
        BLOCK_D=next_power_of_two(max(head_dim, 16)),
    )
    return output


def tiles_of_longest_query(query_starts: Tensor, context_lens: Tensor, num_tokens: int) -> int:
    """How many tiles of rows the longest query has.

    Raises ValueError unless the queries are all rows, each with 1 to context_len of them.
    """
    num_rows = query_starts.diff()
    fits = bool(((num_rows >= 1) & (num_rows <= context_lens)).all())
    if not fits or (int(query_starts[0]), int(query_starts[-1])) != (0, num_tokens):
        raise ValueError(
            f"query_starts {query_starts.tolist()} do not fit {num_tokens} rows in contexts of"
            f" {context_lens.tolist()}"
        )
    return -(-int(num_rows.max()) // TILE)


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """ValueError unless both are alike, contiguous, and have four dimensions."""
    for cache in (key_cache, value_cache):
        if cache.dim() != 4 or cache.shape != key_cache.shape or not cache.is_contiguous():
            raise ValueError(
                f"caches are {tuple(key_cache.shape)} and {tuple(value_cache.shape)}; need two"
                " contiguous [num_blocks, block_size, num_kv_heads, head_dim]"
            )
