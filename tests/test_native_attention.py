"""PagedAttention in C against the reference in float64, and its promise: a row's bits never change.

Not with who is in the batch, which blocks are shared, where a cached prefix ends, how a prompt is
cut into chunks, how large a block or a bundle is, or how many threads there are.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.errors import KernelInputError
from kernels.native.attention import Bundles, NativeAttention, Span, spans_of
from tests import native_checks as checks
from tests.native import library, needs_native
from tests.native_checks import Computed, Line, Story, assert_same_bits, numbers, threads

BLOCK_SIZES = (1, 8, 16, 32, 48, 64, 128, 256)
HEADS = ((1, 1), (2, 2), (4, 2), (9, 3), (15, 5), (14, 2), (16, 1))
HEAD_DIMS = st.sampled_from([64, 80, 96, 128, 256, 20]) | st.integers(1, 128).map(lambda n: 2 * n)

LONG = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@st.composite
def stories(draw, max_lines=5, head_dims=HEAD_DIMS):
    """A block size and sequences whose ends lie at edges; some begin as an earlier one does.

    A line is [its parent's | computed by itself before | computed now]: without the first two a
    prefill, with one position in the last a decode.
    """
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    edges = [edge + by for edge in (block_size, 64, 128) for by in (-1, 0, 1) if edge + by > 0]
    befores = st.sampled_from([0, 0, 0, *edges]) | st.integers(0, 150)
    queries = st.just(1) | st.sampled_from([e for e in edges if e < 70]) | st.integers(1, 150)
    lines = []
    for index in range(draw(st.integers(1, max_lines))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        common = 0
        if parent is not None:
            most = lines[parent].end
            whole = st.integers(0, most // block_size).map(lambda n: n * block_size)
            common = draw(st.just(most) | whole | st.integers(0, most))
        start = common + draw(befores)
        lines.append(Line(start, start + draw(queries), parent, common))
    return block_size, Story(
        lines, draw(st.sampled_from(HEADS)), draw(head_dims), seed=draw(st.integers(0, 2**31))
    )


# Results.


@needs_native
@given(
    drawn=stories(),
    seed=st.integers(0, 1000),
    most_rows=st.sampled_from([1, 5, 64, 64, 1000]),
    items=st.sampled_from([1, 4]),
)
@settings(max_examples=150, **LONG)
def test_a_mixed_batch_equals_the_reference_whatever_the_bundles(drawn, seed, most_rows, items):
    block_size, story = drawn
    with checks.bundled(most_rows, items):
        checks.check_attention(library(), story, block_size, seed=seed)


FIXED = [
    checks.check_prefill,
    checks.check_head_sizes,
    checks.check_groups,
    checks.check_a_largest_score_that_moves,
    checks.check_neighbours,
    checks.check_unlike_lengths,
    checks.check_padding_like_block_0,
    checks.check_a_neighbour_further_ahead,
    checks.check_bits_of_a_prefill,
    checks.check_bits_of_a_mixed_batch,
    checks.check_rotary_of_a_mixed_batch,
]


@needs_native
@pytest.mark.parametrize("check", FIXED, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_rare_cases(check):
    check(library())


@needs_native
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_length_at_an_edge_of_a_block_or_a_chunk_equals_the_reference(block_size):
    edges = {edge + by for edge in (1, block_size, 64, 128, 256) for by in (-1, 0, 1)}
    lines = [Line(end - 1, end) for end in sorted(edges) if end > 0]
    checks.check_attention(library(), Story(lines, heads=(2, 1), head_dim=16), block_size)
    lines = [Line(0, end) for end in sorted(edges) if end > 0]
    checks.check_attention(library(), Story(lines, heads=(1, 1), head_dim=8), block_size)


@needs_native
def test_long_contexts_equal_the_reference():
    lines = [Line(4000, 4001), Line(3000, 3070), Line(3500, 3501, 0, 3400), Line(5, 6)]
    checks.check_attention(library(), Story(lines, heads=(4, 2), head_dim=64))


@needs_native
def test_a_step_of_one_row_at_position_0_returns_its_value():
    story = Story([Line(0, 1)], heads=(3, 1), head_dim=10)
    (output,) = checks.attend(library(), checks.lay(story, 1))
    assert_same_bits(output[0], story.values[0].expand(1, 3, 10)[0], "the value")


# Bits.


@needs_native
@given(drawn=stories(max_lines=4), also=st.lists(st.sampled_from(BLOCK_SIZES), max_size=2))
@settings(max_examples=60, **LONG)
def test_a_row_has_the_same_bits_however_it_is_computed(drawn, also):
    block_size, story = drawn
    checks.check_bits(library(), story, block_size, also=also, pieces=(5, 64))


@needs_native
@given(drawn=stories(max_lines=4))
@settings(max_examples=20, **LONG)
def test_a_row_has_the_same_bits_with_two_threads(drawn):
    block_size, story = drawn
    laid = checks.lay(story, block_size)
    want = torch.cat(checks.attend(library(), laid))
    with threads(2):
        got = torch.cat(checks.attend(library(), laid))
    assert_same_bits(got, want, "with two threads")


@needs_native
def test_long_contexts_have_the_same_bits_in_every_block_size():
    lines = [Line(1000, 1001), Line(900, 970, 0, 896), Line(1020, 1030, 1, 960)]
    story = Story(lines, heads=(4, 2), head_dim=64)
    checks.check_bits(library(), story, 16, also=BLOCK_SIZES, pieces=(9,), num_threads=2)


@needs_native
def test_every_row_of_a_prompt_has_the_bits_of_a_decode():
    story = Story([Line(0, 140)], heads=(3, 1), head_dim=24)
    checks.check_bits(library(), story, 16, pieces=())
    (whole,) = checks.attend(library(), checks.lay(story))
    for row in range(140):
        laid = checks.lay(story, ranges={0: (row, row + 1)})
        assert_same_bits(checks.attend(library(), laid)[0][0], whole[row], f"row {row}")


# Rotation, and what is stored.


@needs_native
@given(drawn=stories(max_lines=4), apart=st.booleans())
@settings(max_examples=60, **LONG)
def test_queries_are_turned_and_keys_and_values_go_to_their_slots_alone(drawn, apart):
    block_size, story = drawn
    # Angles are made for 400 positions: longer lines compute what they can.
    story.lines = [line._replace(start=0, end=min(line.end, 400)) for line in story.lines]
    checks.check_rotary(library(), story, block_size, apart=apart)


@needs_native
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_prompt_stored_and_attended_in_chunks_has_the_bits_of_one_prefill(num_threads):
    """As an engine does it: rotate_and_store, then attend, step after step."""
    num_tokens, table, (num_heads, num_kv_heads, head_dim) = 150, list(range(10)), (4, 2, 20)
    query = numbers(num_tokens, num_heads, head_dim)
    key, value = (numbers(num_tokens, num_kv_heads, head_dim, seed=seed) for seed in (1, 2))
    angles = numbers(num_tokens, head_dim // 2, seed=3)

    def steps(ranges):
        cache = tuple(torch.full((10, 16, num_kv_heads, head_dim), checks.NAN) for _ in range(2))
        rows = []
        for start, end in ranges:
            step = NativeAttention.begin_step(library(), [Computed(start, end, table)], cache)
            parts = [part[start:end] for part in (query, key, value)]
            turned = step.rotate_and_store(parts, (angles.cos(), angles.sin()), cache)
            rows.append(step.attend(turned, cache))
        return torch.cat(rows), *(part.flatten(0, 1)[:num_tokens] for part in cache)

    want = steps([(0, num_tokens)])
    with threads(num_threads):
        for size in (1, 7, 16, 64, 100) if num_threads == 1 else (7, 100):
            got = steps(checks.in_pieces(0, num_tokens, size))
            for name, part, right in zip(("output", "keys", "values"), got, want, strict=True):
                assert_same_bits(part, right, f"{name} in chunks of {size}")


# What must not reach C.


class Uncalled:
    """A library that must not be used."""

    def __getattr__(self, _):
        return lambda *_: pytest.fail("C was called")


CACHE = (torch.zeros(10, 4, 1, 6), torch.zeros(10, 4, 1, 6))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([Computed(0, 4, [10])], "sequence 0 has block 10 at logical block 0"),
        ([Computed(0, 4, [0]), Computed(4, 8, [3, -1])], "sequence 1 has block -1"),
        ([Computed(0, 9, [0, 1])], "a context of 9 positions; its table covers 2 blocks"),
        ([Computed(2, 2, [0])], r"computes \[2, 2\)"),
        ([Computed(-1, 2, [0])], r"computes \[-1, 2\)"),
        ([Computed(0, 1, [])], "covers 0 blocks"),
        ([], "at least one"),
        ([Computed(0, 2, [3]), Computed(4, 6, [5, 3])], "block 3 is written twice"),
        ([Computed(0, 8, [3, 3])], "block 3 is written twice"),
    ],
)
def test_a_table_that_must_not_be_followed_is_refused_before_anything_is_called(sequences, message):
    with pytest.raises(KernelInputError, match=message):
        NativeAttention.begin_step(Uncalled(), sequences, CACHE)


GOOD = {
    "query": torch.ones(2, 3, 6),
    "key": torch.ones(2, 1, 6),
    "value": torch.ones(2, 1, 6),
    "cos": torch.ones(9, 3),
    "sin": torch.ones(9, 3),
    "keys": CACHE[0],
    "values": CACHE[1],
}
ANYWHERE = {
    "query": (
        (GOOD["query"].double(), "float64"),
        (GOOD["query"].to("meta"), "meta"),
        (torch.ones(2, 6, 3).transpose(1, 2), "contiguous"),
    ),
    "keys": (
        (CACHE[0].half(), "float16"),
        (torch.ones(10, 4, 1, 12)[..., :6], "contiguous"),
        # Not the cache that the step was made for: block 7 is not in it, or lies elsewhere.
        (torch.ones(3, 4, 1, 6), r"must be \[10, 4, 1, 6\]"),
        (torch.ones(40, 1, 1, 6), r"must be \[10, 4, 1, 6\]"),
    ),
    "values": (
        (CACHE[0].bfloat16(), "bfloat16"),
        (torch.ones(10, 4, 1, 12)[..., ::2], "contiguous"),
        (torch.ones(9, 4, 1, 6), r"must be \[10, 4, 1, 6\]"),
        (torch.ones(10, 4, 1, 8), r"must be \[10, 4, 1, 6\]"),
    ),
}
ROTATED = {
    "query": (
        (torch.ones(5, 3, 6), r"must be \[2, 3, 6\]"),
        (torch.ones(1, 3, 6), r"must be \[2, 3, 6\]"),
        (torch.ones(2, 3, 4), r"must be \[2, 3, 6\]"),
    ),
    "key": (
        (torch.ones(3, 1, 6), r"must be \[2, 1, 6\]"),
        (torch.ones(2, 2, 6), r"must be \[2, 1, 6\]"),
        (torch.ones(2, 1, 4), r"must be \[2, 1, 6\]"),
        (torch.ones(2, 1, 12)[..., ::2], "a row must be contiguous"),
        (torch.ones(2, 1, 6).int(), "int32"),
    ),
    "value": (
        (torch.ones(1, 1, 6), r"must be \[2, 1, 6\]"),
        (torch.ones(2, 1, 6).half(), "float16"),
        (torch.ones(2, 1, 12)[..., ::2], "a row must be contiguous"),
    ),
    "cos": (
        (torch.ones(9, 6), r"must be \[9, 3\]"),
        (torch.ones(9, 6)[:, :3], "contiguous"),
        (torch.ones(9, 3).double(), "float64"),
        (torch.ones(4, 3), "a row a position"),
    ),
    "sin": ((torch.ones(8, 3), r"must be \[9, 3\]"), (torch.ones(9, 3).to("meta"), "meta")),
}
ATTENDED = {
    "query": (
        (torch.ones(3, 3, 6), r"must be \[2, 3, 6\]"),
        (torch.ones(2, 3, 4), r"must be \[2, 3, 6\]"),
        (torch.ones(2, 3, 9)[..., :6], "contiguous"),
    )
}


def cases(*tables):
    return [
        pytest.param(name, tensor, why, id=f"{name}-{index}")
        for table in tables
        for name, wrongs in table.items()
        for index, (tensor, why) in enumerate(wrongs)
    ]


def step_of_two_rows():
    return NativeAttention.begin_step(Uncalled(), [Computed(3, 5, [7, 2])], CACHE)


@pytest.mark.parametrize(("name", "tensor", "why"), cases(ANYWHERE, ROTATED))
def test_what_cannot_be_turned_and_stored_is_refused_by_name(name, tensor, why):
    given_ = GOOD | {name: tensor}
    query, key, value, cos, sin, keys, values = given_.values()
    with pytest.raises(KernelInputError, match=f"^{name} .*{why}"):
        step_of_two_rows().rotate_and_store((query, key, value), (cos, sin), (keys, values))


@pytest.mark.parametrize(("name", "tensor", "why"), cases(ANYWHERE, ATTENDED))
def test_what_cannot_be_attended_is_refused_by_name(name, tensor, why):
    given_ = GOOD | {name: tensor}
    with pytest.raises(KernelInputError, match=f"^{name} .*{why}"):
        step_of_two_rows().attend(given_["query"], (given_["keys"], given_["values"]))


@pytest.mark.parametrize("num_heads", [0, 1, 3])
def test_heads_that_the_kv_heads_do_not_divide_are_refused(num_heads):
    cache = (torch.ones(10, 4, 2, 6), torch.ones(10, 4, 2, 6))
    step = NativeAttention.begin_step(Uncalled(), [Computed(3, 5, [7, 2])], cache)
    with pytest.raises(KernelInputError, match=f"^query has {num_heads} heads.*2 KV heads"):
        step.attend(torch.ones(2, num_heads, 6), cache)


def test_an_odd_head_cannot_be_turned():
    cache = (torch.ones(10, 4, 1, 5), torch.ones(10, 4, 1, 5))
    step = NativeAttention.begin_step(Uncalled(), [Computed(3, 5, [7, 2])], cache)
    heads, angles = torch.ones(2, 1, 5), torch.ones(9, 2)
    with pytest.raises(KernelInputError, match="head_dim / 2 channels"):
        step.rotate_and_store((heads, heads, heads), (angles, angles), cache)


def test_threads_that_get_no_memory_are_a_memory_error():
    step = NativeAttention.begin_step(
        SimpleNamespace(attend=lambda *_: 1), [Computed(3, 5, [7, 2])], CACHE
    )
    with pytest.raises(MemoryError):
        step.attend(GOOD["query"], CACHE)


# Spans and bundles.


def test_the_example_of_spans_of_positions_4_to_10_in_threes():
    spans = spans_of([Computed(4, 11, [0])], 3)
    assert spans == [Span(0, 0, 4, 3), Span(0, 3, 7, 3), Span(0, 6, 10, 1)]


def test_sequences_with_the_same_blocks_are_neighbours_and_keep_their_rows():
    sequences = [Computed(3, 4, [7, 2, 5, 4]), Computed(0, 2, [3, 9]), Computed(8, 9, [7, 2, 6, 1])]
    assert spans_of(sequences, 64) == [Span(1, 1, 0, 2), Span(0, 0, 3, 1), Span(2, 3, 8, 1)]


def test_a_bundle_takes_spans_while_they_fit():
    spans = [Span(0, 0, 0, 2), Span(1, 2, 0, 2), Span(2, 4, 0, 1), Span(3, 5, 0, 4)]
    bundles = Bundles.of(spans, 4)
    assert bundles.starts.tolist() == [0, 2, 3, 4]
    assert bundles.max_rows == 4
    assert bundles.spans.tolist() == [list(span) for span in spans]
    assert bundles.spans.dtype is bundles.starts.dtype is torch.int32


def test_a_span_larger_than_a_bundle_has_one_of_its_own():
    bundles = Bundles.of([Span(0, 0, 0, 1), Span(1, 1, 0, 9), Span(2, 10, 0, 1)], 4)
    assert (bundles.starts.tolist(), bundles.max_rows) == ([0, 1, 2, 3], 9)


@given(drawn=stories(), most_rows=st.integers(1, 70))
@settings(max_examples=50, deadline=None)
def test_every_row_is_in_one_span_of_one_bundle(drawn, most_rows):
    sequences = checks.lay(*reversed(drawn)).sequences
    spans = spans_of(sequences, most_rows)
    rows = sorted(row for span in spans for row in range(span[1], span[1] + span.num_rows))
    assert rows == list(range(sum(sequence.end - sequence.start for sequence in sequences)))
    bundles = Bundles.of(spans, most_rows)
    starts = bundles.starts.tolist()
    assert (starts[0], starts[-1]) == (0, len(spans))
    sizes = [sum(span.num_rows for span in spans[start:end]) for start, end in pairwise(starts)]
    assert min(sizes) > 0
    assert max(sizes) == bundles.max_rows <= most_rows


@pytest.mark.parametrize(
    ("num_rows", "num_threads", "largest"), [(8, 1, 2), (8, 2, 1), (400, 1, 64), (1, 2, 1)]
)
def test_a_step_has_bundles_enough_for_its_threads_and_none_too_large(
    num_rows, num_threads, largest
):
    cache = (torch.zeros(30, 16, 1, 2),) * 2
    with threads(num_threads):
        step = NativeAttention.begin_step(
            Uncalled(), [Computed(0, num_rows, list(range(30)))], cache
        )
    assert step.bundles.max_rows == largest
