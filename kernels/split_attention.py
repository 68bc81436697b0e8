# mypy: disable-error-code="untyped-decorator"
# (triton ships no types)
"""Attention of few rows over long contexts: the context is split among programs.

One program a tile of rows and KV head leaves most of a GPU idle when there are few of them: a
decode of few sequences, or the rest of a prompt behind a long cached prefix. Here several programs
each attend to a part of the context, and a second kernel merges what they found (Flash-Decoding,
Dao et al. 2023). A part's result is its output and the logarithm of its sum of weights, and that
is enough: softmax over all is the parts' outputs weighted by their sums.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.batch import PagedBatch
from kernels.errors import KernelInputError
from kernels.launch import Tile, capability, next_power_of_two, padded_head_dim, shared_memory
from kernels.paged_attention import attend, attention_tile, check_attention, count_tiles, find_tile

MAX_SPLITS = 64


class Parts(NamedTuple):
    """What parts a kind of tile is worth.

    least_keys  of a part: with fewer, merging would cost more than it saves
    room        programs that run side by side on one multiprocessor, see kernel_table
    """

    least_keys: int
    room: int


SHORT = Parts(256, 4)
"""Tiles of 16 rows: decodes."""

TALL = Parts(512, 3)
"""Tiles of a prompt: the more rows, the more there is to merge."""


def split_tile(head_dim: int, dtype: torch.dtype, num_rows: int, capability: int) -> Tile:
    """The program's shape, see attention_tile; a prompt's is half as tall, for half of the warps.

    Parts are stored in float32, whose addresses take registers; and few rows are not to wait for
    one program. (64 rows are too few for eight warps: they would multiply scores twice.)
    """
    tile = attention_tile(head_dim, dtype, num_rows, capability)
    if tile.block_m <= 64:
        return tile
    return Tile(64, 32, 4, 3 if shared_memory(capability) < 128 * 1024 else 5)


@triton.jit(do_not_specialize=["num_sequences", "max_blocks"])
def split_attention_kernel(
    partial_outputs: tl.tensor,
    partial_sums: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    scale: float,
    query_stride: int,
    num_sequences: int,
    max_blocks: int,
    num_kv_heads: int,
    group_size: int,
    SINGLES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: the rows of paged_attention_kernel's, and one part of the keys they see.

    partial_outputs  [num_tokens, num_heads, NUM_SPLITS, head_dim] float32, divided by the sum
    partial_sums     [num_tokens, num_heads, NUM_SPLITS] float32, log2 of the sum of weights;
                     -inf for a part of which a row sees no key
    """
    # Side by side run the heads of one part, whose keys lie side by side.
    kv_head = tl.program_id(0) % num_kv_heads
    tile = tl.program_id(0) // num_kv_heads
    split = tl.program_id(1)
    sequence, query_start, query_len, first_row = find_tile(
        tile, query_starts, num_sequences, group_size, SINGLES, BLOCK_M
    )
    if first_row >= query_len * group_size:
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = (query_start + rows // group_size).to(tl.int64)
    heads = kv_head * group_size + rows % group_size
    has_row = rows < query_len * group_size
    inside = has_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = tokens[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    query_tile = tl.load(query + query_offsets, mask=inside, other=0.0)

    # Equal parts of the keys that the tile's last row sees, each a whole number of steps.
    context_len = tl.load(context_lens + sequence)
    start = context_len - query_len
    positions = start + rows // group_size
    num_keys = min(context_len, start + (first_row + BLOCK_M - 1) // group_size + 1)
    part = tl.cdiv(tl.cdiv(num_keys, NUM_SPLITS), BLOCK_N) * BLOCK_N
    first_key = min(split * part, num_keys)
    end_key = min(first_key + part, num_keys)

    block_table = block_tables + tl.cast(sequence, tl.int64) * max_blocks
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max, row_sum, accumulator = attend(
        query_tile,
        positions,
        row_max,
        row_sum,
        accumulator,
        key_cache,
        value_cache,
        block_table,
        kv_head,
        num_kv_heads,
        first_key,
        end_key,
        scale,
        MASKED=True,
        HEAD_DIM=HEAD_DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
    )
    # From the tile's first token on 32 bits are enough, and addresses take half the registers.
    first_token = query_start + first_row // group_size
    above = (rows // group_size - first_row // group_size) * num_kv_heads * group_size
    num_before = tl.cast(first_token, tl.int64) * num_kv_heads * group_size * NUM_SPLITS + split
    row = (above + heads) * NUM_SPLITS
    tl.store(partial_sums + num_before + row, row_max + tl.log2(row_sum), mask=has_row)
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    first = partial_outputs + num_before * HEAD_DIM
    output_offsets = row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(first + output_offsets, accumulator / row_sum[:, None], mask=inside)


@triton.jit
def merge_splits_kernel(
    output: tl.tensor,
    partial_outputs: tl.tensor,
    partial_sums: tl.tensor,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: one query head of one token; a weighted mean over its parts."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    sums = tl.load(partial_sums + row * NUM_SPLITS + splits)
    largest = tl.max(sums, 0)
    # All parts empty (padding): zero, not NaN.
    weights = tl.where(sums == float("-inf"), 0.0, tl.exp2(sums - largest))
    offsets = (row * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(partial_outputs + offsets, mask=inside[None, :], other=0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(output + row * HEAD_DIM + dims, merged, mask=inside)


def merge_warps(num_splits: int, head_dim: int) -> int:
    """Warps for the parts of a head: at most 64 numbers a thread, so that none is spilled.

    As few as that: one warp adds up in registers, and several meet in shared memory.
    """
    return min(max(num_splits * padded_head_dim(head_dim) // 2048, 1), 8)


def choose_num_splits(
    num_tiles: int,
    num_kv_heads: int,
    max_context_len: int,
    num_multiprocessors: int,
    parts: Parts = SHORT,
) -> int:
    """Into how many parts to split the contexts; 1 means that splitting would not help.

    As many as the multiprocessors have room for, but no part under parts.least_keys. A power of
    two: each count is a compilation. num_tiles counts tiles of rows; of decodes, one a sequence.

    A recorded step is split for the longest context that may come: short ones have shorter parts.
    With 132 multiprocessors (H100), 8 KV heads and decodes:

        sequences   context   programs unsplit   splits
                1     4,096                  8       16   (528 / 8 = 66 would have room, but
                1    32,768                  8       64    256 keys a part allow 16 and 128)
                8     4,096                 64        8
               64     4,096                512        1
                8       200                 64        1

    The last 64 tokens of a prompt behind 32,768 others, 2 heads each: 3 tiles and 16 splits.
    """
    most = min(
        parts.room * num_multiprocessors // (num_tiles * num_kv_heads),
        max_context_len // parts.least_keys,
        MAX_SPLITS,
    )
    return 1 << (max(most, 1).bit_length() - 1)


def split_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    num_splits: int,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """What paged_attention computes, each context in num_splits parts.

    Shapes, strides and dtypes are those of paged_attention; num_splits is a power of two up to
    64. Parts are kept in float32. Raises KernelInputError.
    """
    scale, out, group_size = check_attention(query, key_cache, value_cache, batch, scale, out)
    if not (1 <= num_splits <= MAX_SPLITS and num_splits == next_power_of_two(num_splits)):
        raise KernelInputError(
            f"num_splits is {num_splits}; it must be a power of two from 1 to {MAX_SPLITS}"
        )
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    tile = tile or split_tile(
        head_dim, query.dtype, batch.max_query_len * group_size, capability(query.device)
    )
    num_tiles = count_tiles(batch, group_size, tile)
    shape = (batch.num_tokens, num_heads, num_splits)
    partial_outputs = query.new_empty((*shape, head_dim), dtype=torch.float32)
    partial_sums = query.new_empty(shape, dtype=torch.float32)
    split_attention_kernel[(num_tiles * num_kv_heads, num_splits)](
        partial_outputs,
        partial_sums,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        scale * math.log2(math.e),
        query.stride(0),
        batch.num_sequences,
        batch.block_tables.shape[1],
        num_kv_heads,
        group_size,
        SINGLES=batch.max_query_len == 1,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=batch.block_size,
        NUM_SPLITS=num_splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge_splits_kernel[(batch.num_tokens * num_heads,)](
        out,
        partial_outputs,
        partial_sums,
        HEAD_DIM=head_dim,
        NUM_SPLITS=num_splits,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=merge_warps(num_splits, head_dim),
    )
    return out
