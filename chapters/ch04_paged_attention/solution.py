"""Chapter 4. PagedAttention: keys and values lie in blocks, a kernel reads them through a table.

A kernel is one function that runs many times side by side. Each run, a program, knows its place
in a grid and computes one piece of the output. Block size 4, table [7, 2], context 6:

    position         0   1   2   3   4   5
    logical block    0   0   0   0   1   1     position // 4
    physical block   7   7   7   7   2   2     table[logical block]
    slot            28  29  30  31   8   9     physical block * 4 + position % 4

Slots 10 and 11 are in its table, too, but nothing has been written to them yet. They hold what
memory happened to hold, NaN for instance, and 0 * NaN is NaN: a kernel must not even load them.
"""

import triton
import triton.language as tl
from torch import Tensor

from chapters.ch04_paged_attention import launch


class TableError(ValueError):
    """A block table that a kernel would follow to memory that is not meant."""


def check_tables(
    block_tables: Tensor, context_lens: Tensor, num_blocks: int, block_size: int
) -> None:
    """Raise TableError unless a kernel may follow these tables.

    block_tables  [num_sequences, max_blocks] int32
    context_lens  [num_sequences] int32

    A sequence needs the first ceil(context_len / block_size) entries of its row. Those behind are
    padding, and may be anything. Block size 4, ten blocks, rows of two entries:

        row        context   the error's message names the sequence and
        [7, 2]     6         - (no error)
        [7, -1]    4         - (no error)
        [7, -1]    5         logical block 1, block -1
        [10, 2]    1         logical block 0, block 10
        [7, 2]     9         context 9, 3 blocks needed, 2 in its row
        [7, 2]     0         context 0
    """
    # task 4.1
    rows = zip(block_tables.tolist(), context_lens.tolist(), strict=True)
    for sequence, (table, context_len) in enumerate(rows):
        who = f"sequence {sequence}, context {context_len}"
        if context_len < 1:
            raise TableError(f"{who}: there must be a key to see")
        num_needed = -(-context_len // block_size)
        if num_needed > len(table):
            raise TableError(f"{who}: needs {num_needed} blocks, its row has {len(table)}")
        for logical, block in enumerate(table[:num_needed]):
            if not 0 <= block < num_blocks:
                raise TableError(f"{who}: logical block {logical} is {block}, of {num_blocks}")
    # end of task


# Store


@triton.jit
def store_kv_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    ROW: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
) -> None:
    """Program (i): copy row i of key and of value to slot slot_mapping[i] of their caches.

    All tensors come as pointers to their first element, and all are dense. A token's row, like a
    slot, is ROW = num_kv_heads * head_dim neighbouring elements. BLOCK_ROW is the next power of
    two: lanes from ROW on must neither load nor store.
    """
    # task 4.2
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, BLOCK_ROW)
    inside = columns < ROW
    key_row = tl.load(key + token * ROW + columns, mask=inside)
    value_row = tl.load(value + token * ROW + columns, mask=inside)
    tl.store(key_cache + slot * ROW + columns, key_row, mask=inside)
    tl.store(value_cache + slot * ROW + columns, value_row, mask=inside)
    # end of task


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write row i of key and value to slot slot_mapping[i] of their caches, in place.

    key, value              [num_tokens, num_kv_heads, head_dim]
    key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    slot_mapping            [num_tokens] int64: block * block_size + offset, none of them twice

    Raises ValueError for a slot that the caches do not have, and if the shapes do not fit.
    """
    launch.store(store_kv_kernel, key, value, key_cache, value_cache, slot_mapping)


# Attention


@triton.jit
def slots_of(
    block_table: tl.tensor, keys: tl.tensor, written: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """The slots of a tile of key positions, as int64: see the top of this file.

    block_table  pointer to the first entry of a sequence's row, int32
    keys         [TILE] int32, positions
    written      [TILE] bool, False where a position is behind the context: its entry must not be
                 loaded, and its slot is not used
    """
    # task 4.3
    block = tl.load(block_table + keys // BLOCK_SIZE, mask=written, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
    # end of task


@triton.jit
def paged_decode_kernel(
    output: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    scale: float,
    max_blocks: int,
    num_kv_heads: int,
    group_size: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (sequence, head): one row of the output, softmax(scale * q k) v over all its keys.

    Shapes are those of paged_decode; row i of query and output is sequence i. A row of
    block_tables has max_blocks entries. BLOCK_D is HEAD_DIM or the next power of two, at least 16.
    Head h uses KV head h // group_size. Convert what you load to float32, and sum in float32.

    Online softmax (Milakov & Gimelshein 2018): go through the keys in tiles, and keep a running
    maximum of the scores, a running total of the weights exp(score - maximum), and an
    accumulator, the sum of weight * value. When a tile raises the maximum, what was summed before
    is too large, by a factor of exp(new - old). Scores 0, 0 | 3, 0 and values 1, 2 | 3, 4 in tiles
    of two:

        tile   maximum   total                     accumulator
        0, 0   0         1 + 1                     1 + 2
        3, 0   3         2 exp(-3) + 1 + exp(-3)   3 exp(-3) + 3 + 4 exp(-3)
    """
    # task 4.3
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // group_size
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    elements = (sequence * tl.num_programs(1) + head) * HEAD_DIM + dims
    query_row = tl.load(query + elements, mask=inside, other=0.0).to(tl.float32)
    block_table = block_tables + sequence * max_blocks
    context_len = tl.load(context_lens + sequence)

    maximum = float("-inf")
    total = 0.0
    accumulator = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, context_len, TILE):
        keys = first + tl.arange(0, TILE)
        written = keys < context_len
        slots = slots_of(block_table, keys, written, BLOCK_SIZE)
        offsets = (slots * num_kv_heads + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        loaded = written[:, None] & inside[None, :]

        key = tl.load(key_cache + offsets, mask=loaded, other=0.0).to(tl.float32)
        scores = tl.sum(query_row[None, :] * key, 1) * scale
        # A lane without a key has score 0 here, and exp(0 - maximum) would count as a weight.
        scores = tl.where(written, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        shrink = tl.exp(maximum - new_maximum)
        weights = tl.exp(scores - new_maximum)
        maximum = new_maximum

        value = tl.load(value_cache + offsets, mask=loaded, other=0.0).to(tl.float32)
        total = total * shrink + tl.sum(weights, 0)
        accumulator = accumulator * shrink + tl.sum(weights[:, None] * value, 0)
    tl.store(output + elements, accumulator / total, mask=inside)
    # end of task


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token to all its keys; their KV is stored already.

    query                   [num_sequences, num_heads, head_dim]
    key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    block_tables            [num_sequences, max_blocks] int32, padded with anything
    context_lens            [num_sequences] int32: keys to see, its own included
    out, returned           shape and dtype of query, contiguous; a fresh tensor if None

    The scale of the scores is head_dim ** -0.5. Raises, before a kernel runs, TableError, or
    ValueError if the shapes do not fit.
    """
    check_tables(block_tables, context_lens, *key_cache.shape[:2])
    grid = (len(query), query.shape[1])
    tables = (block_tables, context_lens)
    return launch.attention(paged_decode_kernel, grid, out, query, key_cache, value_cache, tables)


@triton.jit
def paged_prefill_kernel(
    output: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    scale: float,
    max_blocks: int,
    num_kv_heads: int,
    group_size: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (sequence, head, tile): up to TILE rows of one sequence, each over the keys it sees.

    Shapes are those of paged_prefill. As in paged_decode_kernel, but with a maximum and a total
    for each row, and with matrix products, tl.dot(..., input_precision="ieee"), in place of sums.
    The grid has as many tiles as the longest query: a program whose tile lies behind its
    sequence's rows has nothing to do, and a sequence's last tile may be in part.

    Causal by absolute position: a row sees the keys up to its own, and the last row stands at
    context_len - 1. Query starts 0, 2, 5; context lengths 2, 6:

        row         0  1  2  3  4
        sequence    0  0  1  1  1
        position    0  1  3  4  5      row 2 sees the keys 0, 1, 2, 3
    """
    # task 4.4
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // group_size
    query_start = tl.load(query_starts + sequence)
    num_rows = tl.load(query_starts + sequence + 1) - query_start
    first_row = tl.program_id(2) * TILE
    if first_row >= num_rows:
        return

    rows = first_row + tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    heads = (query_start + rows) * tl.num_programs(1) + head
    elements = heads[:, None] * HEAD_DIM + dims[None, :]
    own = (rows < num_rows)[:, None] & inside[None, :]
    query_tile = tl.load(query + elements, mask=own, other=0.0).to(tl.float32)
    block_table = block_tables + sequence * max_blocks
    context_len = tl.load(context_lens + sequence)
    positions = context_len - num_rows + rows

    maximum = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    accumulator = tl.zeros([TILE, BLOCK_D], tl.float32)
    # No row of this tile sees a key behind the position of its last row.
    end_key = min(context_len, context_len - num_rows + first_row + TILE)
    for first in range(0, end_key, TILE):
        keys = first + tl.arange(0, TILE)
        written = keys < context_len
        slots = slots_of(block_table, keys, written, BLOCK_SIZE)
        offsets = (slots * num_kv_heads + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        loaded = written[:, None] & inside[None, :]

        key = tl.load(key_cache + offsets, mask=loaded, other=0.0).to(tl.float32)
        scores = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scale
        # A row's own position is written, so this hides the lanes behind the context, too.
        visible = keys[None, :] <= positions[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp(maximum - new_maximum)
        weights = tl.exp(scores - new_maximum[:, None])
        maximum = new_maximum

        value = tl.load(value_cache + offsets, mask=loaded, other=0.0).to(tl.float32)
        total = total * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None] + tl.dot(weights, value, input_precision="ieee")
    tl.store(output + elements, accumulator / total[:, None], mask=own)
    # end of task


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the rows of several sequences; their KV is stored already.

    query         [num_tokens, num_heads, head_dim], the rows of all sequences one after another
    query_starts  [num_sequences + 1] int32: sequence i owns the rows query_starts[i] up to
                  query_starts[i + 1], its last positions; at least one, at most its context
    context_lens  [num_sequences] int32: keys that its last row sees

    The rest, and the errors, as in paged_decode.
    """
    check_tables(block_tables, context_lens, *key_cache.shape[:2])
    num_tiles = launch.tiles_of_longest_query(query_starts, context_lens, len(query))
    grid = (len(context_lens), query.shape[1], num_tiles)
    tables = (block_tables, query_starts, context_lens)
    return launch.attention(paged_prefill_kernel, grid, out, query, key_cache, value_cache, tables)
