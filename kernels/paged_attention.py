# mypy: disable-error-code="untyped-decorator"
# (triton ships no types)
"""Attention of any query range over keys and values that lie in blocks."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.batch import PagedBatch
from kernels.errors import KernelInputError
from kernels.launch import (
    MAX_GROUP_SIZE,
    Tile,
    capability,
    check_cache,
    check_floats,
    check_rows,
    check_shape,
    output_like,
    padded_head_dim,
    shared_memory,
)


@triton.jit
def attend(
    query: tl.tensor,
    positions: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    accumulator: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    kv_head: int,
    num_kv_heads: int,
    first_key: int,
    end_key: int,
    scale: float,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Let a tile of query rows see the keys [first_key, end_key); return the new state.

    Online softmax (Milakov & Gimelshein 2018) tile by tile (FlashAttention, Dao et al. 2022):
    row_max is the running maximum, row_sum the running sum of weights, accumulator the output
    not yet divided by it. When a tile raises the maximum, both shrink by 2**(old - new).
    `scale` includes log2(e), so that weights are powers of two, which the hardware computes.

    first_key is a multiple of BLOCK_N, if there is a key. Without MASKED every row sees every key,
    and end_key is a multiple, too.
    """
    dims = tl.arange(0, BLOCK_D)
    steps = tl.arange(0, BLOCK_N)
    row_size = num_kv_heads * HEAD_DIM
    for tile in range(first_key, end_key, BLOCK_N):
        keys = tile + steps
        # An unwritten slot may hold NaN, and 0 * NaN is NaN: not a single one may be loaded.
        written = keys < end_key if MASKED else tl.full([BLOCK_N], True, tl.int1)
        # Where a step is whole blocks, a key's place in its block is the same in each step, and
        # the compiler takes it out of the loop: `tile` is a multiple of BLOCK_N.
        if BLOCK_N % BLOCK_SIZE == 0:
            logical, within = tile // BLOCK_SIZE + steps // BLOCK_SIZE, steps % BLOCK_SIZE
        else:
            logical, within = keys // BLOCK_SIZE, keys % BLOCK_SIZE
        block = tl.load(block_table + logical, mask=written, other=0).to(tl.int64)
        place = within.to(tl.int64) * row_size + kv_head * HEAD_DIM
        offsets = place[:, None] + dims[None, :]
        blocks = (block * (BLOCK_SIZE * row_size))[:, None]
        inside = written[:, None] & (dims < HEAD_DIM)[None, :]

        key = tl.load(key_cache + offsets + blocks, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        # A row that has seen no key yet has no maximum, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        shrink = tl.exp2(row_max - shift)
        weights = tl.exp2(scores * scale - shift[:, None])
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        row_max = new_max

        value = tl.load(value_cache + offsets + blocks, mask=inside, other=0.0)
        accumulator = tl.dot(
            weights.to(value.dtype), value, accumulator * shrink[:, None], input_precision="ieee"
        )
    return row_max, row_sum, accumulator


@triton.jit
def find_tile(
    tile: int,
    query_starts: tl.tensor,
    num_sequences: int,
    group_size: int,
    SINGLES: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(sequence, its first token row, how many it has, the tile's first row in it).

    Where each sequence has one token (SINGLES), tile i is sequence i. Otherwise the rows of all
    sequences together fill at most rows // BLOCK_M + num_sequences tiles: sequence i owns those
    from query_starts[i] * group_size // BLOCK_M + i on. The grid depends on no single length,
    and a tile finds its sequence by counting. A tile that is one too many finds a first row
    that its sequence does not have.
    """
    if SINGLES:
        sequence, query_start, query_len, first_row = tile, tile, 1, 0
    else:
        sequence = -1
        for first in range(0, num_sequences, 128):
            candidates = first + tl.arange(0, 128)
            exists = candidates < num_sequences
            starts = tl.load(query_starts + candidates, mask=exists, other=0)
            owned_before = (starts * group_size // BLOCK_M + candidates <= tile) & exists
            sequence += tl.sum(owned_before.to(tl.int32), 0)
        query_start = tl.load(query_starts + sequence)
        query_len = tl.load(query_starts + sequence + 1) - query_start
        first_row = (tile - query_start * group_size // BLOCK_M - sequence) * BLOCK_M
    return sequence, query_start, query_len, first_row


# The two counts change from step to step: compile once, not again for 1 or for multiples of 16.
@triton.jit(do_not_specialize=["num_sequences", "max_blocks"])
def paged_attention_kernel(
    output: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: BLOCK_M query rows of one sequence, all of one KV head.

    A row is a (token, query head) pair, the heads that share the KV head side by side. So each
    key is loaded once for the whole group, whatever its size. Three heads, tokens t0 t1 t2:

        row      0      1      2      3      4      5      6      7      8
               t0 h0  t0 h1  t0 h2  t1 h0  t1 h1  t1 h2  t2 h0  t2 h1  t2 h2
    """
    # Side by side run the heads of one tile, whose keys lie side by side. The last tiles see the
    # most keys: started first, they do not run on alone at the end.
    kv_head = tl.program_id(0) % num_kv_heads
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_kv_heads
    sequence, query_start, query_len, first_row = find_tile(
        tile, query_starts, num_sequences, group_size, SINGLES, BLOCK_M
    )
    if first_row >= query_len * group_size:
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = (query_start + rows // group_size).to(tl.int64)
    heads = kv_head * group_size + rows % group_size
    inside = (rows < query_len * group_size)[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = tokens[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    query_tile = tl.load(query + query_offsets, mask=inside, other=0.0)

    # [0, context_len) is written; a row sees the keys up to its own absolute position.
    context_len = tl.load(context_lens + sequence)
    start = context_len - query_len
    positions = start + rows // group_size
    # Every row sees the keys [0, full_end); only from there on is a mask needed. A tile of 16
    # rows waits for memory anyway: it masks all keys and keeps its loads in one loop.
    full_end = (start + first_row // group_size + 1) // BLOCK_N * BLOCK_N if BLOCK_M > 16 else 0
    end_key = min(context_len, start + (first_row + BLOCK_M - 1) // group_size + 1)

    block_table = block_tables + tl.cast(sequence, tl.int64) * max_blocks
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for masked in tl.static_range(0 if BLOCK_M > 16 else 1, 2):
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
            full_end if masked else 0,
            end_key if masked else full_end,
            scale,
            MASKED=masked,
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
        )
    # A padding sequence has no key at all; its rows become zero, not 0 / 0.
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    output_rows = tokens * num_kv_heads * group_size + heads
    output_offsets = output_rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output + output_offsets, accumulator / row_sum[:, None], mask=inside)


def attention_tile(head_dim: int, dtype: torch.dtype, num_rows: int, capability: int) -> Tile:
    """The program's shape; `num_rows` is the longest query times the group size.

    Up to 16 rows is decode: one tile of 16, and time goes into loading keys. More is
    prefill: a tall tile loads each key for more rows. An address waits for its block id,
    so the compiler spends two stages on one tile in flight: 5 stages keep two key tiles
    under way, 3 keep one.

    Chosen from what the compiler reports (benchmarks/kernel_table.py) and from what its code does
    (benchmarks/kernel_counts.py): nothing spills in half precision, and shared memory stays below
    the target's. float32 is for checking: exact products use no tensor core, so its tiles are
    small.
    """
    if dtype == torch.float32:
        if num_rows <= 16:
            return Tile(16, 32 if head_dim <= 64 else 16, 4 if head_dim <= 128 else 8, 5)
        return Tile(64, 32, 8, 3) if head_dim <= 64 else Tile(32, 16, 8, 3)
    if num_rows <= 16:
        return Tile(16, 64 if head_dim <= 64 else 32, 4, 5)
    if head_dim == 256:
        # Four warps would do for 64 rows; but they have no registers for the sums, so that eight
        # share these and multiply the scores twice.
        return Tile(64, 32, 8, 3 if shared_memory(capability) < 128 * 1024 else 5)
    # Hopper's products read keys from shared memory, and leave registers for a wider step.
    if 90 <= capability < 120:
        return Tile(128, 64, 8, 5)
    # Elsewhere each warp fetches all keys: few warps with many rows each fetch them less often,
    # where the rows find room.
    if head_dim <= 64 and capability < 90:
        return Tile(128, 32, 4, 5)
    return Tile(128, 64 if head_dim <= 64 else 32, 8, 5)


def count_tiles(batch: PagedBatch, group_size: int, tile: Tile) -> int:
    """How many tiles of rows a launch has for each KV head; a few may find no row, see find_tile.

    Where each sequence has one token, one tile each is enough.
    """
    if batch.max_query_len == 1:
        return batch.num_sequences
    return batch.num_tokens * group_size // tile.block_m + batch.num_sequences


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Causal attention of every row of the batch over its sequence's cached keys and values.

    query                   [num_tokens, num_heads, head_dim], the rows of all sequences one after
                            another, each token's row contiguous; rows may lie apart
    key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_dim], contiguous; they hold
                            the step's own keys and values already
    scale                   of the scores; 1 / sqrt(head_dim) if None
    out, returned           [num_tokens, num_heads, head_dim], contiguous; fresh if None
    dtypes                  one of float32, float16, bfloat16 for all; softmax and sums in float32
    num_heads               1 to 16 times num_kv_heads; head h reads KV head h // group_size

    Prefill, chunk, suffix over a cached prefix and decode differ only in [start, end), so one
    batch may mix them. Raises KernelInputError on any other shape, stride, dtype or device.

    The table of blocks: PagedAttention (Kwon et al. 2023).
    """
    scale, out, group_size = check_attention(query, key_cache, value_cache, batch, scale, out)
    num_kv_heads, head_dim = key_cache.shape[2:]
    tile = tile or attention_tile(
        head_dim, query.dtype, batch.max_query_len * group_size, capability(query.device)
    )
    num_tiles = count_tiles(batch, group_size, tile)
    paged_attention_kernel[(num_tiles * num_kv_heads,)](
        out,
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
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def check_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float | None,
    out: torch.Tensor | None,
) -> tuple[float, torch.Tensor, int]:
    """(scale, output, group size), once query, caches and batch are known to fit together."""
    check_floats(query=query, key_cache=key_cache, value_cache=value_cache)
    check_cache(key_cache, value_cache, batch)
    num_kv_heads, head_dim = key_cache.shape[2:]
    if query.dim() != 3:
        raise KernelInputError(f"query has {query.dim()} dimensions, not 3")
    num_heads = query.shape[1]
    check_shape("query", query, (batch.num_tokens, num_heads, head_dim))
    check_rows(query=query)
    group_size = num_heads // num_kv_heads
    if not (num_heads == group_size * num_kv_heads and 1 <= group_size <= MAX_GROUP_SIZE):
        raise KernelInputError(
            f"{num_heads} query heads for {num_kv_heads} KV heads:"
            f" need 1 to {MAX_GROUP_SIZE} for each"
        )
    scale = head_dim**-0.5 if scale is None else scale
    # Scaling after the maximum is taken keeps its order only if the scale is positive.
    if not scale > 0:
        raise KernelInputError(f"scale is {scale}; it must be positive")
    return scale, output_like(out, tuple(query.shape), query), group_size
