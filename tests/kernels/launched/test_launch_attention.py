"""paged_attention and split_attention against the reference in float64."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_testing import (
    BLOCK_SIZES,
    DEVICE,
    DTYPES_WITH_DOT,
    HEAD_DIMS,
    Plan,
    check_attention,
    launching,
    plans,
)

from kernels import reference
from kernels.attention import attention
from kernels.batch import PagedBatch
from kernels.launch import Tile
from kernels.paged_attention import paged_attention
from kernels.split_attention import split_attention
from kernels.step_attention import TritonAttention

# Small tiles meet many edges in a short sequence.
TILES = (Tile(16, 16, 4, 2), Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(64, 32, 4, 2))
MIXED = {
    "block_size": 16,
    "num_blocks": 12,
    "block_tables": [[7, 3, 4], [7, 0, 5, 9], [1], [2, 6, 8]],
    "ranges": [(16, 40), (32, 50), (4, 5), (0, 33)],
}


@launching
@given(plans(dtypes=DTYPES_WITH_DOT), st.sampled_from(TILES))
def test_any_mixed_batch_equals_the_reference(plan, tile):
    check_attention(plan, lambda *inputs, out: paged_attention(*inputs, out=out, tile=tile))


@launching
@given(plans(dtypes=DTYPES_WITH_DOT))
def test_any_mixed_batch_equals_the_reference_with_the_default_tile(plan):
    check_attention(plan, attention)


@launching
@given(plans(dtypes=DTYPES_WITH_DOT))
def test_a_steps_decodes_and_the_rest_each_by_a_kernel_of_their_own_equal_the_reference(plan):
    # As a scheduler puts them: who computes one token first.
    pairs = sorted(
        zip(plan.block_tables, plan.ranges, strict=True), key=lambda pair: num_rows(pair[1]) > 1
    )
    plan.block_tables, plan.ranges = map(list, zip(*pairs, strict=True))

    def launch(query, key_cache, value_cache, batch, out):
        step = TritonAttention.of(batch)
        with mock.patch("kernels.step_attention.torch.empty_like", return_value=out):
            attended = step.attend(query, (key_cache, value_cache))
        assert (attended is out) == (len(step.parts) == 2)
        out.copy_(attended)

    check_attention(plan, launch)


def num_rows(span):
    start, end = span
    return end - start


@launching
@given(plans(dtypes=DTYPES_WITH_DOT, decode=True), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_decode_split_in_any_number_of_parts_equals_the_reference(plan, num_splits):
    def launch(*inputs, out):
        split_attention(*inputs, num_splits=num_splits, out=out, tile=TILES[0])

    check_attention(plan, launch)


@launching
@given(plans(dtypes=DTYPES_WITH_DOT), st.sampled_from(TILES), st.sampled_from([1, 2, 4, 8, 16]))
def test_any_mixed_batch_split_in_any_number_of_parts_equals_the_reference(plan, tile, num_splits):
    def launch(*inputs, out):
        split_attention(*inputs, num_splits=num_splits, out=out, tile=tile)

    check_attention(plan, launch)


@pytest.mark.parametrize("dtype", DTYPES_WITH_DOT, ids=str)
@pytest.mark.parametrize("head_dim", [20, *HEAD_DIMS])
def test_every_head_size_works(head_dim, dtype):
    check_attention(Plan(**MIXED, head_dim=head_dim, group_size=2, dtype=dtype), attention)


@pytest.mark.parametrize("heads", [(9, 3), (15, 5), (16, 1), (5, 5), (7, 1), (6, 2)], ids=str)
def test_every_group_size_works(heads):
    num_heads, num_kv_heads = heads
    group_size = num_heads // num_kv_heads
    check_attention(Plan(**MIXED, num_kv_heads=num_kv_heads, group_size=group_size), attention)


@pytest.mark.parametrize("block_size", [4, 12, 24, *BLOCK_SIZES])
def test_every_block_size_works(block_size):
    ranges = [
        (0, block_size + 1),
        (2 * block_size, 2 * block_size + 3),
        (block_size, block_size + 1),
    ]
    tables = [[7, 1], [5, 2, 6], [5, 3]]
    plan = Plan(block_size, 8, tables, ranges, group_size=2, num_kv_heads=2)
    check_attention(plan, attention)


def test_the_longest_context_of_few_sequences_is_split():
    num_blocks = 70
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    ranges = [(1098, 1099), (2, 3)]
    plan = Plan(16, num_blocks, [table[:69], table[69:]], ranges, group_size=4, num_kv_heads=2)
    # One part of each sequence's 4 or more has 256 keys and more, or none at all.
    check_attention(plan, lambda *inputs, out: split_attention(*inputs, num_splits=4, out=out))
    check_attention(plan, attention)


def test_the_rest_of_a_prompt_behind_a_long_one_is_split():
    num_blocks = 70
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    plan = Plan(16, num_blocks, [table[:69]], [(1030, 1099)], group_size=2, num_kv_heads=1)
    check_attention(plan, lambda *inputs, out: split_attention(*inputs, num_splits=8, out=out))
    with (
        mock.patch("kernels.attention.num_multiprocessors", return_value=4),
        mock.patch("kernels.attention.paged_attention", side_effect=AssertionError("not split")),
    ):
        check_attention(plan, attention)


def test_more_than_128_sequences_find_their_own_rows():
    tables = [[block] for block in range(150)]
    ranges = [(0, 1 + index % 3) for index in range(150)]
    plan = Plan(16, 150, tables, ranges, group_size=3)
    check_attention(plan, lambda *inputs, out: paged_attention(*inputs, out=out, tile=TILES[0]))


def test_the_scale_can_be_given():
    plan = Plan(**MIXED)
    batch = plan.batch()
    query = torch.randn(batch.num_tokens, 1, 64).to(DEVICE)
    key_cache, value_cache = torch.randn(2, *plan.cache_shape()).to(DEVICE)
    got = attention(query, key_cache, value_cache, batch, scale=0.5)
    torch.testing.assert_close(
        got, reference.paged_attention(query, key_cache, value_cache, batch, scale=0.5)
    )


def test_a_replayed_batch_reads_the_numbers_copied_into_it():
    first = {"num_blocks": 6, "block_size": 16, "device": DEVICE, "max_blocks": 3}
    static = PagedBatch.from_host([[5], [1]], [(3, 4), (7, 8)], **first)
    static.copy_from(PagedBatch.from_host([[4, 2, 0]], [(40, 41)], num_sequences=2, **first))
    query = torch.randn(2, 4, 64).to(DEVICE)
    key_cache, value_cache = torch.randn(2, 6, 16, 2, 64).to(DEVICE)
    got = attention(query, key_cache, value_cache, static)
    torch.testing.assert_close(
        got, reference.paged_attention(query, key_cache, value_cache, static)
    )
    assert not got[1].any(), "the row of a padding sequence is zero"


def test_offsets_beyond_2_to_the_31_are_followed():
    num_blocks = 2**31 // (16 * 64) + 2
    try:
        # Never touched but in two blocks: the rest of these 4 GB need not exist.
        cache = torch.empty(num_blocks, 16, 1, 64, dtype=torch.float16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no 4 GB address range to be had: {error}")
    table, ranges = [num_blocks - 1, num_blocks - 2], [(16, 20)]
    cache[-2:] = torch.randn(2, 16, 1, 64)
    batch = PagedBatch.from_host(
        [table], ranges, num_blocks=num_blocks, block_size=16, device=DEVICE
    )
    small = PagedBatch.from_host([[1, 0]], ranges, num_blocks=2, block_size=16, device=DEVICE)
    query = torch.randn(4, 1, 64).to(DEVICE, torch.float16)
    got = attention(query, cache, cache, batch)
    want = attention(query, cache[-2:], cache[-2:], small)
    assert (got == want).all()
