"""What must not reach a kernel is refused on the host, by name, with what would have been right."""

import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.batch import PagedBatch
from kernels.block_tables import slots_of, validate_block_tables
from kernels.errors import KernelInputError

POOL = {"num_blocks": 10, "block_size": 4}


@pytest.mark.parametrize(
    ("tables", "ranges", "message"),
    [
        ([[10]], [(0, 4)], r"sequence 0 has block 10 at logical block 0; .* blocks 0 to 9"),
        ([[0], [3, -1]], [(0, 4), (4, 8)], r"sequence 1 has block -1 at logical block 1"),
        ([[0, 1, 10]], [(0, 4)], r"block 10 at logical block 2"),  # beyond the context, too
        ([[0, 1]], [(0, 9)], r"a context of 9 positions; its table covers 2 blocks x 4 = 8: .* 3"),
        ([[]], [(0, 1)], r"its table covers 0 blocks"),
        ([[0]], [(2, 2)], r"computes \[2, 2\)"),
        ([[0]], [(-1, 2)], r"computes \[-1, 2\).* longer than its context"),
        ([[0]], [], r"1 block tables for 0 ranges"),
        ([], [], r"at least one"),
        ([[3], [5, 3]], [(0, 2), (4, 6)], r"block 3 is written twice, by sequences 0 and 1"),
        ([[3, 3]], [(0, 8)], r"block 3 is written twice, by sequences 0 and 0"),
    ],
)
def test_a_batch_a_kernel_would_misread_is_refused(tables, ranges, message):
    with pytest.raises(KernelInputError, match=message):
        validate_block_tables(tables, ranges, **POOL)
    with pytest.raises(KernelInputError, match=message):
        PagedBatch.from_host(tables, ranges, **POOL)


def test_a_block_that_is_only_read_may_be_shared():
    validate_block_tables([[3, 1], [3, 2]], [(4, 6), (7, 8)], **POOL)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"num_blocks": 2**27, "block_size": 16}, "at most 134217727 blocks"),
        ({"num_blocks": 1, "block_size": 0}, "at least 1"),
    ],
)
def test_a_pool_whose_slots_cannot_be_counted_is_refused(pool, message):
    with pytest.raises(KernelInputError, match=message):
        validate_block_tables([[0]], [(0, 1)], **pool)


def test_a_batch_holds_what_its_docstring_shows():
    batch = PagedBatch.from_host([[7, 2], [7, 9]], [(0, 6), (5, 6)], **POOL)
    assert batch.slots.tolist() == [28, 29, 30, 31, 8, 9, 37]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 5]
    assert batch.query_starts.tolist() == [0, 6, 7]
    assert batch.context_lens.tolist() == [6, 6]
    assert batch.block_tables.tolist() == [[7, 2], [7, 9]]
    assert (batch.num_tokens, batch.num_sequences) == (7, 2)
    assert (batch.max_query_len, batch.max_context_len) == (6, 6)
    assert {tensor.dtype for tensor in (batch.slots, batch.block_tables)} == {torch.int32}
    assert slots_of([7, 2], (2, 5), 4) == [30, 31, 8]


@st.composite
def steps(draw):
    """A block size, and some (table, (start, end)): no block is written by two of them."""
    block_size = draw(st.integers(1, 5))
    unused = draw(st.permutations(range(40)))
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        num_read, num_written = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        written, unused = unused[:num_written], unused[num_written:]
        read = draw(st.lists(st.integers(0, 39), min_size=num_read, max_size=num_read))
        first = num_read * block_size
        start = draw(st.integers(first, first + block_size - 1))
        end = draw(st.integers(start + 1, first + num_written * block_size))
        sequences.append((read + written, (start, end)))
    return block_size, sequences


@given(steps(), st.integers(0, 3), st.integers(0, 3))
@example((4, [([7, 2], (0, 6)), ([7, 9], (5, 6))]), 0, 0)
def test_a_batch_says_what_its_sequences_say_one_by_one(step, num_padding, num_columns):
    block_size, sequences = step
    tables, ranges = map(list, zip(*sequences, strict=True))
    num_sequences, width = len(tables) + num_padding, max(map(len, tables)) + num_columns
    batch = PagedBatch.from_host(
        tables,
        ranges,
        num_blocks=40,
        block_size=block_size,
        num_sequences=num_sequences,
        max_blocks=width,
    )
    slots, positions, query_starts = [], [], [0]
    for table, (start, end) in sequences:
        slots += slots_of(table, (start, end), block_size)
        positions += range(start, end)
        query_starts.append(len(slots))
    assert batch.slots.tolist() == slots + [-1] * num_padding
    assert batch.positions.tolist() == positions + [0] * num_padding
    ends_of_padding = range(len(slots) + 1, len(slots) + num_padding + 1)
    assert batch.query_starts.tolist() == query_starts + list(ends_of_padding)
    assert batch.context_lens.tolist() == [end for _, end in ranges] + [0] * num_padding
    rows = [table + [0] * (width - len(table)) for table in tables]
    assert batch.block_tables.tolist() == rows + [[0] * width] * num_padding
    assert batch.max_query_len == max(end - start for start, end in ranges)
    assert batch.max_context_len == max(end for _, end in ranges)


@given(steps(), st.data())
def test_a_block_that_two_sequences_write_is_found_wherever_it_stands(step, data):
    block_size, sequences = step
    writers = {
        block: index
        for index, (table, (start, end)) in enumerate(sequences)
        for block in table[start // block_size : -(-end // block_size)]
    }
    table, (start, end) = data.draw(st.sampled_from(sequences))
    one_more = list(table)
    place = data.draw(st.integers(start // block_size, (end - 1) // block_size))
    one_more[place] = data.draw(st.sampled_from(list(writers)))
    tables = [*(each for each, _ in sequences), one_more]
    ranges = [*(span for _, span in sequences), (start, end)]
    with pytest.raises(KernelInputError, match="is written twice") as caught:
        validate_block_tables(tables, ranges, num_blocks=40, block_size=block_size)
    block, first, second = map(int, re.findall(r"\d+", str(caught.value)))
    assert block in one_more[start // block_size : -(-end // block_size)]
    assert (first, second) == (writers[block], len(sequences))


def test_each_tensor_of_a_batch_is_16_byte_aligned():
    batch = PagedBatch.from_host([[7, 2, 1], [7, 9]], [(0, 6), (5, 6)], **POOL)
    base = batch.packed.data_ptr()
    for tensor in (batch.block_tables, batch.query_starts, batch.context_lens, batch.slots):
        assert (tensor.data_ptr() - base) % 16 == 0


def test_padding_sequences_compute_nothing_and_are_stored_nowhere():
    batch = PagedBatch.from_host([[7]], [(2, 3)], num_sequences=3, max_blocks=5, **POOL)
    assert batch.context_lens.tolist() == [3, 0, 0]
    assert batch.slots.tolist() == [30, -1, -1]
    assert batch.block_tables.shape == (3, 5)
    assert batch.max_query_len == 1


@pytest.mark.parametrize("padding", [{"num_sequences": 1}, {"max_blocks": 1}])
def test_a_batch_that_does_not_fit_its_padding_is_refused(padding):
    with pytest.raises(KernelInputError, match="do not fit"):
        PagedBatch.from_host([[7], [1, 2]], [(2, 3), (6, 7)], **padding, **POOL)


def test_only_a_batch_of_the_same_shape_can_be_copied_in():
    static = PagedBatch.from_host([[7]], [(2, 3)], num_sequences=3, **POOL)
    with pytest.raises(KernelInputError, match="cannot be copied"):
        static.copy_from(PagedBatch.from_host([[7]], [(2, 3)], num_sequences=2, **POOL))
    with pytest.raises(KernelInputError, match=r"with 2 blocks cannot be copied .* with 1"):
        static.copy_from(PagedBatch.from_host([[7, 2]], [(5, 6)], num_sequences=3, **POOL))
    tables = [[7], [1]]
    static = PagedBatch.from_host(tables, [(0, 2), (2, 4)], **POOL)
    with pytest.raises(KernelInputError, match="the longest query has 3 tokens"):
        static.copy_from(PagedBatch.from_host(tables, [(0, 3), (3, 4)], **POOL))


def test_the_decodes_of_a_mixed_batch_are_a_batch_of_their_own():
    tables = [[7, 2], [5], [3, 1], [6]]
    ranges = [(5, 6), (2, 3), (4, 7), (0, 1)]
    batch = PagedBatch.from_host(tables, ranges, **POOL)
    (rows, decodes), (other_rows, others) = batch.parts()
    assert (rows, other_rows) == (slice(2), slice(2, None))
    assert decodes.query_starts.tolist() == [0, 1, 2]
    assert decodes.context_lens.tolist() == [6, 3]
    assert decodes.block_tables.tolist() == [[7, 2], [5, 0]]
    assert (decodes.num_sequences, decodes.num_tokens, decodes.max_query_len) == (2, 2, 1)
    # The last one has one token, too, and stays where it is.
    assert others.query_starts.tolist() == [0, 3, 4]
    assert others.context_lens.tolist() == [7, 1]
    assert others.block_tables.tolist() == [[3, 1], [6, 0]]
    assert (others.num_sequences, others.num_tokens, others.max_query_len) == (2, 4, 3)
    assert others.query_starts.data_ptr() % 16 == others.context_lens.data_ptr() % 16 == 0
    assert (decodes.max_context_len, others.max_context_len) == (6, 7)
    assert batch.query_starts.tolist() == [0, 1, 2, 5, 6]  # as it was


@pytest.mark.parametrize("ranges", [[(5, 6), (2, 3)], [(0, 6), (2, 3)], [(0, 6), (0, 3)]])
def test_a_batch_of_one_kind_is_not_taken_apart(ranges):
    batch = PagedBatch.from_host([[7, 2], [5]], ranges, **POOL)
    ((rows, part),) = batch.parts()
    assert rows == slice(None)
    assert part is batch


@settings(deadline=None)  # the first call is slow
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=5))
def test_attention_to_the_parts_is_attention_to_the_whole(drawn):
    ranges = [(start, start + rows) for start, rows in sorted(drawn, key=lambda pair: pair[1])]
    tables = [[4 * index + block for block in range(3)] for index in range(len(ranges))]
    batch = PagedBatch.from_host(tables, ranges, num_blocks=20, block_size=4)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 20, 4, 1, 8, generator=generator)
    query = torch.randn(batch.num_tokens, 2, 8, generator=generator)
    parts = [reference.paged_attention(query[at], key, value, part) for at, part in batch.parts()]
    torch.testing.assert_close(
        torch.cat(parts), reference.paged_attention(query, key, value, batch)
    )


def test_the_reference_equals_attention_over_contiguous_keys():
    generator = torch.Generator().manual_seed(0)
    table, (start, end) = [6, 1, 3], (5, 11)
    batch = PagedBatch.from_host([table], [(start, end)], **POOL)
    key, value = torch.randn(2, end, 2, 8, generator=generator, dtype=torch.float64)
    query = torch.randn(end - start, 6, 8, generator=generator, dtype=torch.float64)
    caches = torch.full((2, 10, 4, 2, 8), float("nan"), dtype=torch.float64)
    for cache, rows in zip(caches, (key, value), strict=True):
        cache.flatten(0, 1)[slots_of(table, (0, end), 4)] = rows
    want = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        attn_mask=torch.ones(end - start, end, dtype=torch.bool).tril(start),
        enable_gqa=True,
    )
    got = reference.paged_attention(query, *caches, batch)
    torch.testing.assert_close(got, want.transpose(0, 1))


def test_a_rotation_keeps_lengths_and_depends_on_distance_alone():
    generator = torch.Generator().manual_seed(0)
    angles = torch.arange(20)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    query, key = torch.randn(2, 1, 1, 6, generator=generator)

    def at(heads, position):
        return reference.rotary(heads, angles.cos(), angles.sin(), torch.tensor([position]))

    torch.testing.assert_close(at(query, 7).norm(), query.norm())
    torch.testing.assert_close(
        (at(query, 7) * at(key, 3)).sum(), (at(query, 15) * at(key, 11)).sum()
    )
