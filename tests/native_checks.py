"""Checks of the C kernels that leave nothing to chance: tests run them, and planted faults fail.

A check takes the compiled library and raises AssertionError. Each plays one rare case outright.

Two traps are laid in every call. What a kernel must fill is NaN before, so an element left out
shows; and on both sides of it lies memory that must not change. What a cache holds at a slot that
nobody has written is NaN, which spreads from a single look.
"""

import math
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import torch

from kernels import reference
from kernels.batch import PagedBatch
from kernels.block_tables import slots_of
from kernels.layer_parts import LayerParts
from kernels.native import attention
from kernels.native.attention import NativeAttention
from kernels.native.layer import NativeLayer
from kernels.native.linear import WIDTH, NativeLinear
from kernels.native.ops import NativeOps
from minivllm.model.layer import DecoderLayer

NAN = math.nan
GUARD = 1234.0
# Odd, so that nothing the kernels write begins where a vector would like to.
NUM_GUARDS = 37


@contextmanager
def guarded():
    """Tensors that a kernel makes for its results are NaN, and lie between guards."""
    made = []

    def new(shape):
        whole = torch.full((math.prod(shape) + 2 * NUM_GUARDS,), GUARD)
        inside = whole[NUM_GUARDS:-NUM_GUARDS].fill_(NAN)
        made.append(whole)
        return inside.view(shape)

    def new_empty(_, *shape):
        return new(shape[0] if isinstance(shape[0], tuple) else shape)

    with (
        mock.patch.object(torch.Tensor, "new_empty", new_empty),
        mock.patch.object(torch, "empty_like", lambda tensor: new(tensor.shape)),
    ):
        yield
    assert made, "the results were made in another way: these traps hold nothing"
    for whole in made:
        sides = (whole[:NUM_GUARDS], whole[-NUM_GUARDS:])
        assert all((side == GUARD).all() for side in sides), "memory beside a result was written"


@contextmanager
def threads(number):
    """Torch and the kernels compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got, want, tolerance=1e-5):
    """Equal up to rounding, or both NaN or the same infinity; a failure names the first place."""
    torch.testing.assert_close(
        got.double(), want.double(), atol=tolerance, rtol=tolerance, equal_nan=True
    )


def assert_same_bits(got, want, what):
    if torch.equal(got, want):
        return
    where = tuple(int(index) for index in (got != want).nonzero()[0])
    raise AssertionError(f"{what}: element {where} is {got[where]!r} and not {want[where]!r}")


# The linear layer.


def linear(library, rows, weight, bias=None):
    with guarded():
        return NativeLinear(library, weight, bias)(rows)


def check_linear(library, num_rows, inputs, outputs, *, biased=True, seed=0):
    """Each result is within what float32 can lose at most on chains of 128 terms."""
    rows, weight = numbers(num_rows, inputs, seed=seed), numbers(outputs, inputs, seed=seed + 1)
    bias = numbers(outputs, seed=seed + 2) if biased else None
    got = linear(library, rows, weight, bias).double()
    added = 0 if bias is None else bias.double()
    want = rows.double() @ weight.double().t() + added
    most = rows.double().abs() @ weight.double().abs().t() + (0 if bias is None else added.abs())
    wrong = ~((got - want).abs() <= 140 * 2**-24 * most)  # NaN is wrong, too
    assert got.shape == want.shape
    assert not wrong.any(), f"(row, output) {wrong.nonzero()[0].tolist()} of {list(got.shape)}"


def check_linear_sizes(library):
    """Rows of every tile and at a block's edges; chains and panels that are not whole."""
    for num_rows in (0, *range(1, 9), 32, 96, 97, 200):
        check_linear(library, num_rows, 24, 19)
    for inputs in (1, 7, 127, 128, 129, 256, 300, 400):
        check_linear(library, 5, inputs, 33)
    for outputs in (1, 15, 16, 17, 31, 48):
        check_linear(library, 3, 20, outputs, biased=False)


def check_linear_bits(library):
    """A row alone has the bits it has among 2 to 200, wherever it stands."""
    rows, weight, bias = numbers(200, 300), numbers(37, 300, seed=1), numbers(37, seed=2)
    layer = NativeLinear(library, weight, bias)
    alone = torch.cat([layer(row[None]) for row in rows])
    for num_rows in (2, 3, 4, 5, 6, 7, 8, 11, 13, 32, 96, 97, 200):
        assert_same_bits(layer(rows[:num_rows]), alone[:num_rows], f"among {num_rows} rows")
        assert_same_bits(layer(rows[-num_rows:]), alone[-num_rows:], f"among the last {num_rows}")


# RMSNorm and the gated half.


def columns(tensor, before=5, behind=3):
    """The same values as a part of wider rows of NaN: what a split of a qkv matrix is."""
    size = tensor[0].numel()
    wide = torch.full((len(tensor), before + size + behind), NAN)
    part = wide[:, before : before + size]
    part.copy_(tensor.reshape(len(tensor), size))
    return part.view(tensor.shape)


def rms_norm(library, hidden, weight, epsilon):
    with guarded():
        return NativeOps(library).rms_norm(hidden, weight, epsilon)


def add_rms_norm(library, hidden, residual, weight, epsilon):
    with guarded():
        return NativeOps(library).add_rms_norm(hidden, residual, weight, epsilon)


def silu_and_mul(library, gate_up):
    with guarded():
        return NativeOps(library).silu_and_mul(gate_up)


def check_rms_norm(library, shape, *, scale=1.0, epsilon=1e-5, seed=0):
    """Rows that lie apart, and the same contiguous."""
    hidden, weight = numbers(*shape, seed=seed) * scale, numbers(shape[-1], seed=seed + 1)
    want = reference.rms_norm(hidden.double(), weight.double(), epsilon)
    got = rms_norm(library, hidden, weight, epsilon)
    assert_close(got, want, 3e-6)
    assert_same_bits(rms_norm(library, columns(hidden), weight, epsilon), got, "rows apart")


def check_rms_norm_sizes(library):
    for size in (1, 7, 8, 9, 16, 20, 67):
        check_rms_norm(library, (3, size))
        check_rms_norm(library, (10, 3, size))


def check_rms_norm_of_small_rows(library):
    """Where epsilon decides: a row of 0 stays 0, and one of 1e-4 does not become one of 1."""
    check_rms_norm(library, (4, 24), scale=1e-4)
    check_rms_norm(library, (4, 24), scale=0.0)


def check_add_rms_norm(library, num_rows, size, seed=0):
    hidden, residual = numbers(num_rows, size, seed=seed), numbers(num_rows, size, seed=seed + 1)
    weight = numbers(size, seed=seed + 2)
    got, total = add_rms_norm(library, hidden, residual, weight, 1e-5)
    assert_same_bits(total, hidden + residual, "the sum")
    assert_close(got, reference.rms_norm(total.double(), weight.double(), 1e-5), 3e-6)


def check_add_rms_norm_sizes(library):
    for num_rows, size in ((1, 1), (2, 7), (3, 8), (9, 9), (20, 67), (1, 129)):
        check_add_rms_norm(library, num_rows, size)


EDGES = (
    0.0,
    -0.0,
    1e-30,
    -1e-30,
    0.5,
    -0.5,
    1.0,
    -1.0,
    15.0,
    -15.0,
    86.9,
    -86.9,
    87.1,
    -87.1,
    88.0,
)
EDGES += (-88.0, 89.0, -89.0, 100.0, -100.0, 3e38, math.inf, -math.inf, NAN)


def check_silu_at_the_edges(library):
    """Each in a vector's lane, and behind the last whole vector."""
    for size in (8, 5, 13):
        gate = torch.tensor(EDGES)[:, None].expand(-1, size)
        gate_up = torch.cat((gate, torch.full_like(gate, 1.5)), dim=1)
        got = silu_and_mul(library, gate_up)
        want = reference.silu_and_mul(gate_up.double()).float()
        for index, edge in enumerate(EDGES):
            both = (got[index].tolist(), want[index].tolist())
            assert torch.allclose(*map(torch.tensor, both), 1e-6, 1e-6, equal_nan=True), (
                edge,
                both,
            )


def check_silu_and_mul(library, num_rows, size, seed=0):
    gate_up = numbers(num_rows, 2 * size, seed=seed) * 4
    want = reference.silu_and_mul(gate_up.double())
    assert_close(silu_and_mul(library, gate_up), want, 1e-6)


def check_silu_sizes(library):
    for num_rows, size in ((1, 1), (2, 7), (3, 8), (5, 9), (4, 40), (3, 67)):
        check_silu_and_mul(library, num_rows, size)


# Linear layers of a gate and an up, and what becomes of them.


def gated_linear(library, rows, weight, bias):
    """What C makes of interleaved panels; memory beside the result must stay."""
    inner = len(weight) // 2
    panels = NativeLinear(library, weight, None).panels.view(2, -1, rows.shape[1], WIDTH)
    panels = panels.transpose(0, 1).contiguous()
    with guarded():
        result = rows.new_empty(len(rows), inner)
        library.gated_linear(
            rows.data_ptr(),
            panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            result.data_ptr(),
            len(rows),
            rows.shape[1],
            inner,
        )
    return result


def check_gated_linear(library, num_rows, inputs, inner, *, biased, seed=0):
    """The bits of the linear layer and the gated half, one after the other."""
    rows, weight = numbers(num_rows, inputs, seed=seed), numbers(2 * inner, inputs, seed=seed + 1)
    bias = numbers(2 * inner, seed=seed + 2) if biased else None
    want = NativeOps(library).silu_and_mul(NativeLinear(library, weight, bias)(rows))
    assert_same_bits(gated_linear(library, rows, weight, bias), want, "gate and up in one")


def check_gated_linear_sizes(library):
    for biased in (False, True):
        for num_rows in (0, 1, 2, 6, 7, 32, 200):
            check_gated_linear(library, num_rows, 24, 48, biased=biased)
        for inputs, inner in ((1, 16), (96, 16), (97, 32), (300, 64)):
            check_gated_linear(library, 5, inputs, inner, biased=biased)


# Attention.


class Computed(NamedTuple):
    """A sequence of a step."""

    start: int
    end: int
    block_table: list
    token_ids: tuple = ()


class Line(NamedTuple):
    """A sequence that computes [start, end); the first `common` positions are its parent's."""

    start: int
    end: int
    parent: int | None = None
    common: int = 0


@dataclass
class Story:
    """Sequences and what their positions hold, before there are blocks: replayed in many ways.

    heads  query heads and KV heads
    loud   position -> the score that every row gives its key, roughly
    """

    lines: list
    heads: tuple = (6, 2)
    head_dim: int = 20
    loud: dict = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        num_heads, num_kv_heads = self.heads
        generator = torch.Generator().manual_seed(self.seed)
        self.queries, self.keys, self.values = [], [], []
        for line in self.lines:
            query = 2 * torch.randn(line.end, num_heads, self.head_dim, generator=generator)
            if self.loud:
                query[..., 0] = self.head_dim**0.5
            self.queries.append(query)
            for of_all in (self.keys, self.values):
                own = torch.randn(line.end, num_kv_heads, self.head_dim, generator=generator)
                if line.parent is not None:
                    own[: line.common] = of_all[line.parent][: line.common]
                of_all.append(own)
            for position, score in self.loud.items():
                self.keys[-1][position : position + 1, :, 0] = score


@dataclass
class Laid:
    """A story in blocks: what a step gets."""

    sequences: list
    query: torch.Tensor
    cache: tuple

    def batch(self):
        num_blocks, block_size = self.cache[0].shape[:2]
        return PagedBatch.from_host(
            [sequence.block_table for sequence in self.sequences],
            [(sequence.start, sequence.end) for sequence in self.sequences],
            num_blocks=num_blocks,
            block_size=block_size,
        )

    def split(self, output):
        return output.split([sequence.end - sequence.start for sequence in self.sequences])


def lay(story, block_size=16, *, only=None, ranges=None, shared=True, seed=0, tables=None):
    """Put the lines in blocks, in random order unless there are `tables`; two blocks are spare.

    only    which lines there are; all of them if it is None
    ranges  line -> what it computes here, where that differs
    shared  whole blocks of common positions are the parent's, if it is there; else copies
    """
    lines = range(len(story.lines)) if only is None else only
    spans = {line: (ranges or {}).get(line, story.lines[line][:2]) for line in lines}
    if tables is None:
        tables, num_blocks = _tables(story, block_size, spans, shared, seed)
    else:
        num_blocks = max(map(max, tables)) + 3
    num_kv_heads = story.heads[1]
    shape = (num_blocks, block_size, num_kv_heads, story.head_dim)
    cache = torch.full(shape, NAN), torch.full(shape, NAN)
    for line, table in zip(spans, tables, strict=True):
        end = spans[line][1]
        slots = slots_of(table, (0, end), block_size)
        for part, contents in zip(cache, (story.keys, story.values), strict=True):
            part.flatten(0, 1)[slots] = contents[line][:end]
    query = torch.cat([story.queries[line][start:end] for line, (start, end) in spans.items()])
    sequences = [Computed(*span, table) for span, table in zip(spans.values(), tables, strict=True)]
    return Laid(sequences, query, cache)


def _tables(story, block_size, spans, shared, seed):
    num_blocks = sum(-(-end // block_size) for _, end in spans.values()) + 2
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    of_line = {}
    for line, (start, end) in spans.items():
        _, _, parent, common = story.lines[line]
        # A block that this step writes has one writer.
        whole = min(common, start) // block_size if shared and parent in of_line else 0
        first = of_line[parent][:whole] if whole else []
        of_line[line] = first + [free.pop() for _ in range(-(-end // block_size) - len(first))]
    return list(of_line.values()), num_blocks


@contextmanager
def bundled(most_rows=64, items=4):
    """Bundles of so many rows at most; so many items a thread, if there are rows enough."""
    with (
        mock.patch.object(attention, "_MOST_ROWS", most_rows),
        mock.patch.object(attention, "_ITEMS_A_THREAD", items),
    ):
        yield


def attend(library, laid):
    """The rows of each sequence; nothing but the results is written."""
    before = [part.clone() for part in laid.cache]
    step = NativeAttention.begin_step(library, laid.sequences, laid.cache)
    with guarded():
        output = step.attend(laid.query, laid.cache)
    for part, old in zip(laid.cache, before, strict=True):
        assert torch.equal(part.view(torch.int32), old.view(torch.int32)), "the cache was written"
    return laid.split(output)


def expected(laid):
    keys, values = (part.double() for part in laid.cache)
    return laid.split(reference.paged_attention(laid.query.double(), keys, values, laid.batch()))


def check_attention(library, story, block_size=16, **how):
    laid = lay(story, block_size, **how)
    for index, pair in enumerate(zip(attend(library, laid), expected(laid), strict=True)):
        error = (pair[0] - pair[1]).abs() / (1 + pair[1].abs())
        wrong = ~(error < 1e-5)  # NaN is wrong, too
        where = wrong.nonzero()[0].tolist() if wrong.any() else None
        assert where is None, f"sequence {index}, (row, head, column) {where} of {laid.sequences}"


def check_prefill(library):
    """Every row sees the keys up to its own: rows from 0 on, and rows that straddle a chunk."""
    for block_size in (1, 16, 64, 128):
        check_attention(library, Story([Line(0, 130)]), block_size)
        check_attention(library, Story([Line(30, 150)]), block_size)


def check_head_sizes(library):
    """Whole vectors and panels, and not: keys are turned by eights, values copied by sixteens."""
    for head_dim in (2, 6, 8, 10, 16, 20, 24, 44, 80):
        check_attention(library, Story([Line(0, 20), Line(70, 71)], head_dim=head_dim))


def check_groups(library):
    for heads in ((1, 1), (3, 3), (9, 3), (15, 5), (16, 1), (32, 2)):
        check_attention(library, Story([Line(0, 20), Line(70, 71)], heads=heads))


def check_a_largest_score_that_moves(library):
    """Scores rise from chunk to chunk, or fall, or fall so far that nothing is left of them."""
    decode, prefill = [Line(199, 200)], [Line(0, 200)]
    for loud in (
        {10: 5.0, 70: 30.0, 150: 60.0},
        {10: 60.0, 70: 30.0, 150: 5.0},
        {10: 30.0, 20: -75.0},
        {position: 300.0 if position == 10 else -50.0 for position in range(200)},
        {position: 300.0 if position == 190 else -50.0 for position in range(200)},
    ):
        for lines in (decode, prefill):
            check_attention(library, Story(lines, loud=loud))
    # The loud one in each lane of a vector.
    for loudest in range(24, 32):
        loud = {position: 300.0 if position == loudest else -50.0 for position in range(40)}
        check_attention(library, Story([Line(39, 40)], loud=loud))


def check_neighbours(library):
    """Decodes in one bundle that share all, some or none of the blocks of a chunk."""
    with bundled(items=1):
        for common in (0, 16, 32, 48, 64, 80, 112, 128):
            lines = [Line(140, 141), Line(139, 140, 0, common), Line(130, 131, 0, common)]
            check_attention(library, Story(lines, heads=(2, 1)))
        # Block 5 of 24 positions begins behind the edge of the chunk in which block 2 ends.
        for common in range(24, 193, 24):
            lines = [Line(195, 196), Line(200, 201, 0, common)]
            check_attention(library, Story(lines, heads=(2, 1)), 24)


def check_unlike_lengths(library):
    """A short sequence in a bundle with a long one, whichever is first."""
    with bundled(items=1):
        for lengths in ((3, 200), (200, 3), (64, 65), (65, 64), (3, 200, 70)):
            lines = [Line(end - 1, end) for end in lengths]
            tables = [list(range(20 * i, 20 * i + -(-end // 16))) for i, end in enumerate(lengths)]
            check_attention(library, Story(lines, heads=(2, 1)), tables=tables)


def check_padding_like_block_0(library):
    """A short table is padded with 0, and block 0 is where its neighbour's next chunk lies."""
    with bundled(items=1):
        story = Story([Line(15, 16), Line(70, 71)], heads=(2, 1))
        check_attention(library, story, tables=[[1], [2, 3, 4, 5, 0]])


def check_a_neighbour_further_ahead(library):
    """One writes into a block that another has behind it: the keys of both are looked up."""
    with bundled(items=1):
        story = Story([Line(15, 16), Line(70, 71, 0, 16)], heads=(2, 1))
        check_attention(library, story, 64, tables=[[1], [1, 2]])


def in_pieces(start, end, size):
    cuts = [*range(start, end, size), end]
    return list(pairwise(cuts))


def check_bits(library, story, block_size=16, *, also=(), pieces=(1, 7, 40), num_threads=1):
    """Every row of the story has the same bits in each of the ways in which it may be computed.

    also    other block sizes
    pieces  sizes of the chunks in which a line is computed alone
    """
    want = attend(library, lay(story, block_size))

    def compare(got, which, what):
        for index, rows in zip(which, got, strict=True):
            assert_same_bits(rows[-len(want[index]) :], want[index], f"line {index} {what}")

    every = range(len(story.lines))
    for size in also:
        compare(attend(library, lay(story, size)), every, f"in blocks of {size}")
    compare(attend(library, lay(story, block_size, seed=1)), every, "in other blocks")
    compare(attend(library, lay(story, block_size, shared=False)), every, "in blocks of its own")
    for most_rows, items in ((1, 4), (3, 1), (64, 1), (1000, 1)):
        with bundled(most_rows, items):
            what = f"in bundles of {most_rows}"
            compare(attend(library, lay(story, block_size)), every, what)
    if num_threads > 1:
        with threads(num_threads):
            what = f"with {num_threads} threads"
            compare(attend(library, lay(story, block_size)), every, what)
    backwards = list(reversed(every))
    compare(attend(library, lay(story, block_size, only=backwards)), backwards, "in other order")
    for index, (start, end, *_) in enumerate(story.lines):
        alone = {"only": [index]}
        compare(attend(library, lay(story, block_size, **alone)), [index], "alone")
        whole = attend(library, lay(story, block_size, **alone, ranges={index: (0, end)}))
        compare(whole, [index], "as one prefill")
        for size in pieces:
            if (end - start) / size > 40:
                continue
            rows = [
                attend(library, lay(story, block_size, **alone, ranges={index: piece}))[0]
                for piece in in_pieces(start, end, size)
            ]
            compare([torch.cat(rows)], [index], f"in chunks of {size}")


def check_bits_of_a_prefill(library):
    check_bits(library, Story([Line(0, 130)], heads=(3, 1)), also=(8, 64))


def check_bits_of_a_mixed_batch(library):
    """A prefill, a chunk, a suffix behind a shared prefix, and decodes that share two blocks.

    With one query head a KV head, a row may be alone in a tile; with two it is never.
    """
    lines = [Line(0, 70), Line(60, 100), Line(64, 80, 0, 64), Line(90, 91), Line(95, 96, 3, 40)]
    for heads in ((4, 2), (2, 2)):
        check_bits(library, Story(lines, heads=heads), also=(8, 64))


# Rotation, and what is stored.


def check_rotary(library, story, block_size=16, *, apart=True):
    """The query is turned; each slot holds its turned key and its value, and no other changes."""
    laid = lay(story, block_size)
    num_tokens = len(laid.query)
    num_kv_heads, head_dim = story.heads[1], story.head_dim
    key, value = (numbers(num_tokens, num_kv_heads, head_dim, seed=seed) for seed in (1, 2))
    angles = torch.rand(400, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    table = angles.cos(), angles.sin()
    exact = [part.double() for part in laid.cache]
    want = reference.rotary_store_kv(
        laid.query.double(),
        key.double(),
        value.double(),
        *(part.double() for part in table),
        *exact,
        laid.batch(),
    )
    got = rotate_and_store(library, laid, key, value, table, apart=apart)
    assert_close(got, want, 1e-6)
    for name, part, right in zip(("keys", "values"), laid.cache, exact, strict=True):
        assert torch.equal(part.isnan(), right.isnan()), f"{name}: another slot was written"
        assert_close(part, right, 1e-6)


def rotate_and_store(library, laid, key, value, table, *, apart=False):
    step = NativeAttention.begin_step(library, laid.sequences, laid.cache)
    inputs = (laid.query, key, value)
    if apart:
        inputs = [columns(tensor, 3 + i, 2 * i) for i, tensor in enumerate(inputs)]
    with guarded():
        return step.rotate_and_store(inputs, table, laid.cache)


def check_rotary_of_a_mixed_batch(library):
    lines = [Line(0, 20), Line(30, 50), Line(32, 40, 1, 30), Line(90, 91)]
    for head_dim in (2, 6, 16, 20, 64):
        for apart in (False, True):
            check_rotary(library, Story(lines, head_dim=head_dim), apart=apart)
    check_rotary(library, Story([Line(5, 6)], heads=(1, 1)), 1)


# A layer.


class Shape(NamedTuple):
    """Of a layer: hidden size, heads, KV heads, head size and inner size."""

    hidden: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 20
    inner: int = 32


SHAPE = Shape()


def layer_parts(library, shape=SHAPE, *, biased=False, head_norms=False, seed=0):
    """A layer of random weights; every other one that a model may lack is there or not."""
    hidden, num_heads, num_kv_heads, head_dim, inner = shape
    seeds = iter(range(100 * seed, 100 * seed + 100))

    def linear_of(inputs, outputs):
        weight = numbers(outputs, inputs, seed=next(seeds)) / inputs**0.5
        bias = numbers(outputs, seed=next(seeds)) if biased else None
        return NativeLinear(library, weight, bias)

    def norm_of(size):
        return 1 + numbers(size, seed=next(seeds)) / 4

    return LayerParts(
        linear_of(hidden, (num_heads + 2 * num_kv_heads) * head_dim),
        linear_of(num_heads * head_dim, hidden),
        linear_of(hidden, 2 * inner),
        linear_of(inner, hidden),
        norm_of(hidden),
        norm_of(hidden),
        norm_of(head_dim) if head_norms else None,
        norm_of(head_dim) if head_norms else None,
        1e-5,
        num_heads,
        num_kv_heads,
        head_dim,
    )


class GuardedScratch:
    """A Scratch that gives NaN between guards, anew each time."""

    def __init__(self):
        self.made = []

    def rows(self, _, num_rows, size):
        whole = torch.full((num_rows * size + 2 * NUM_GUARDS,), GUARD)
        self.made.append(whole)
        return whole[NUM_GUARDS:-NUM_GUARDS].fill_(NAN).view(num_rows, size)

    def check(self):
        for whole in self.made:
            sides = (whole[:NUM_GUARDS], whole[-NUM_GUARDS:])
            assert all((side == GUARD).all() for side in sides), "memory beside was written"


def layer_in_one(library, parts, x, update, rotation, cache, step):
    """(x, heads, x, update): what both calls return, and nothing else is written."""
    scratch = GuardedScratch()
    layer = NativeLayer(library, scratch, parts)
    x, kept = x.clone(), update.clone()
    x, heads = layer.attend(x, update, rotation, cache, step)
    after_attention, kept_heads = x.clone(), heads.clone()
    x, last = layer.finish(x, heads)
    scratch.check()
    assert_same_bits(update, kept, "the update that was given")
    assert_same_bits(heads, kept_heads, "the heads that were given back")
    return after_attention, heads, x, last


def layer_by_parts(library, parts, x, update, rotation, cache, step):
    """The same, part by part."""
    layer = DecoderLayer(NativeOps(library), parts)
    after_attention, heads = layer.attend(x, update, rotation, cache, step)
    return after_attention, heads, *layer.finish(after_attention, heads)


def check_layer(library, lines, shape=SHAPE, block_size=16, **kinds):
    """One layer and its parts, to the bit, and what they leave in the cache."""
    parts = layer_parts(library, shape, **kinds)
    laid = lay(Story(lines, shape[1:3], shape.head_dim), block_size)
    num_rows, seed = len(laid.query), kinds.get("seed", 0)
    x, update = (numbers(num_rows, shape.hidden, seed=seed + at) for at in (7, 8))
    angles = numbers(400, shape.head_dim // 2, seed=9)
    rotation = angles.cos(), angles.sin()
    results = []
    for compute in (layer_in_one, layer_by_parts):
        cache = tuple(part.clone() for part in laid.cache)
        step = NativeAttention.begin_step(library, laid.sequences, cache)
        results.append((*compute(library, parts, x, update, rotation, cache, step), *cache))
    names = ("x after attention", "heads", "x", "update", "keys", "values")
    for name, got, want in zip(names, *results, strict=True):
        assert_same_bits(got.view(torch.int32), want.view(torch.int32), name)


def check_layer_of_every_kind(library):
    """With biases and norms of heads, and without; a batch of all kinds of rows, and one row."""
    lines = [Line(0, 20), Line(30, 50), Line(32, 40, 1, 30), Line(90, 91)]
    for biased in (False, True):
        for head_norms in (False, True):
            kind = {"biased": biased, "head_norms": head_norms}
            check_layer(library, lines, **kind)
            check_layer(library, [Line(5, 6)], Shape(16, 3, 1, 6, 16), 1, **kind)
