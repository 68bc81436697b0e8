# mypy: disable-error-code="untyped-decorator"
# (triton ships no types)
"""Decode attention for few sequences with long contexts: the context is split among programs.

One program a sequence and KV head leaves most of a GPU idle when there are few of them. Here
several programs each attend to a part of the context, and a second kernel merges what they found
(Flash-Decoding, Dao et al. 2023). A part's result is its output and the logarithm of its sum
of weights, and that is enough: softmax over all is the parts' outputs weighted by their sums.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.batch import PagedBatch
from kernels.errors import KernelInputError
from kernels.launch import Tile, capability, next_power_of_two, padded_head_dim
from kernels.paged_attention import attend, attention_tile, check_attention

MIN_KEYS_PER_SPLIT = 256
MAX_SPLITS = 64


@triton.jit(do_not_specialize=["max_blocks"])
def split_attention_kernel(
    partial_outputs: tl.tensor,
    partial_sums: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    scale: float,
    query_stride: int,
    max_blocks: int,
    num_kv_heads: int,
    group_size: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: one sequence's query token, one KV head with its group, one part of the keys.

    partial_outputs  [num_sequences, num_heads, NUM_SPLITS, head_dim] float32, divided by the sum
    partial_sums     [num_sequences, num_heads, NUM_SPLITS] float32, log2 of the sum of weights;
                     -inf for a part without keys, which a short context leaves
    """
    # Side by side run the heads of one part, whose keys lie side by side.
    kv_head = tl.program_id(0) % num_kv_heads
    sequence = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    split = tl.program_id(1)

    # Equal parts, each a whole number of tiles, from this sequence's own length.
    context_len = tl.load(context_lens + sequence)
    part = tl.cdiv(tl.cdiv(context_len, NUM_SPLITS), BLOCK_N) * BLOCK_N
    first_key = min(split * part, context_len)
    end_key = min(first_key + part, context_len)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * group_size + rows
    inside = (rows < group_size)[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = sequence * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    query_tile = tl.load(query + query_offsets, mask=inside, other=0.0)
    positions = tl.zeros([BLOCK_M], tl.int32) + context_len - 1

    block_table = block_tables + sequence * max_blocks
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
    row = (sequence * num_kv_heads * group_size + heads) * NUM_SPLITS + split
    tl.store(partial_sums + row, row_max + tl.log2(row_sum), mask=rows < group_size)
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    output_offsets = row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(partial_outputs + output_offsets, accumulator / row_sum[:, None], mask=inside)


@triton.jit
def merge_splits_kernel(
    output: tl.tensor,
    partial_outputs: tl.tensor,
    partial_sums: tl.tensor,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: one query head of one sequence; a weighted mean over its parts."""
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


def choose_num_splits(
    num_sequences: int, num_kv_heads: int, max_context_len: int, num_multiprocessors: int
) -> int:
    """Into how many parts to split the context; 1 means that splitting would not help.

    As many as give each multiprocessor two programs, but no part under 256 keys, where merging
    would cost more than it saves. Rounded up to a power of two: each count is a compilation.
    With 132 multiprocessors (H100) and 8 KV heads:

        sequences   context   programs unsplit   splits
                1     4,096                  8       16   (two a multiprocessor ask for 64,
                1    32,768                  8       64    256 keys a part allow 16 and 128)
                8     4,096                 64        8
               64     4,096                512        1
                8       200                 64        1
    """
    wanted = 2 * num_multiprocessors / (num_sequences * num_kv_heads)
    allowed = max_context_len // MIN_KEYS_PER_SPLIT
    splits = min(next_power_of_two(max(math.ceil(wanted), 1)), MAX_SPLITS)
    while splits > max(allowed, 1):
        splits //= 2
    return splits


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
    """What paged_attention computes, for a batch of single query tokens, in num_splits parts.

    Shapes, strides and dtypes are those of paged_attention; batch.max_query_len must be 1 and
    num_splits a power of two up to 64. Parts are kept in float32. Raises KernelInputError.
    """
    scale, out, group_size = check_attention(query, key_cache, value_cache, batch, scale, out)
    if batch.max_query_len != 1:
        raise KernelInputError(
            f"the longest query has {batch.max_query_len} tokens; split_attention takes single ones"
        )
    if not (1 <= num_splits <= MAX_SPLITS and num_splits == next_power_of_two(num_splits)):
        raise KernelInputError(
            f"num_splits is {num_splits}; it must be a power of two from 1 to {MAX_SPLITS}"
        )
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    tile = tile or attention_tile(head_dim, query.dtype, group_size, capability(query.device))
    shape = (batch.num_sequences, num_heads, num_splits)
    partial_outputs = query.new_empty((*shape, head_dim), dtype=torch.float32)
    partial_sums = query.new_empty(shape, dtype=torch.float32)
    split_attention_kernel[(batch.num_sequences * num_kv_heads, num_splits)](
        partial_outputs,
        partial_sums,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.context_lens,
        scale * math.log2(math.e),
        query.stride(0),
        batch.block_tables.shape[1],
        num_kv_heads,
        group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=batch.block_size,
        NUM_SPLITS=num_splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge_splits_kernel[(batch.num_sequences * num_heads,)](
        out,
        partial_outputs,
        partial_sums,
        HEAD_DIM=head_dim,
        NUM_SPLITS=num_splits,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=4,
    )
    return out
