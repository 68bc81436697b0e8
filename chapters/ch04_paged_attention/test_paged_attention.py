"""Chapter 4's tests: kernels launched on small batches with traps around them, see traps.py."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from chapters.ch04_paged_attention.traps import (
    DEVICE,
    GUARD,
    NAN,
    Batch,
    check_decode,
    check_means,
    check_prefill,
    guarded,
    random,
    run_decode,
    run_prefill,
)
from chapters.testing import Broken, stage_only, task

# numpy, which the interpreter computes with, warns of the infinities that a wrong kernel makes.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HALF, SINGLE = torch.float16, torch.float32

# An example costs some 50 ms in the interpreter: a few, and no search for the smallest.
few_launches = settings(max_examples=6, phases=[Phase.explicit, Phase.generate])


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


# Task 4.1: validated tables


def refusal(stage, tables, context_lens, num_blocks=10, block_size=4):
    """What check_tables says; None if it lets them pass."""
    try:
        stage.check_tables(int32(tables), int32(context_lens), num_blocks, block_size)
    except stage.TableError as error:
        return str(error)
    return None


def must_be_refused(stage, tables, context_lens, broken, **named):
    """The error names these numbers, `named` says what they are."""
    message = refusal(stage, tables, context_lens)
    batch = f"tables {tables}, contexts {context_lens}, block size 4, blocks 0 to 9"
    if message is None:
        raise Broken(broken, f"{batch}: expected TableError, but they passed")
    numbers = [int(number) for number in re.findall(r"-?\d+", message)]
    for what, number in named.items():
        if number not in numbers:
            raise Broken(
                broken, f"{batch}: the error must name {what} {number}; it says {message!r}"
            )


@task("4.1", "C4.2")
@pytest.mark.parametrize(("context", "needed"), [(9, 3), (12, 3), (13, 4)])
def test_a_context_longer_than_its_row_is_refused(stage, context, needed):
    must_be_refused(
        stage, [[1, 2], [7, 2]], [8, context], "C4.2", sequence=1, context=context, blocks=needed
    )


@task("4.1", "C4.2")
@pytest.mark.parametrize("context", [1, 4, 5, 8])
def test_a_context_that_its_row_covers_is_accepted(stage, context):
    message = refusal(stage, [[7, 2]], [context])
    assert message is None, f"[7, 2] covers {context} positions, yet TableError: {message}"


@task("4.1", "C4.1")
@pytest.mark.parametrize("block", [-1, -10, 10, 2**31 - 1])
@pytest.mark.parametrize(("logical", "context"), [(0, 1), (1, 5), (1, 8)])
def test_a_block_that_the_cache_does_not_have_is_refused(stage, block, logical, context):
    table = [7, 2]
    table[logical] = block
    must_be_refused(
        stage, [[1, 3], table], [6, context], "C4.1", sequence=1, logical=logical, block=block
    )


@task("4.1", "C4.1")
def test_the_first_and_the_last_block_of_the_cache_are_accepted(stage):
    message = refusal(stage, [[3, 9], [0, 1]], [8, 4])
    assert message is None, f"blocks 0 and 9 of 10 exist, yet TableError: {message}"


@task("4.1", "C4.3")
@pytest.mark.parametrize("context", [0, -1])
def test_a_context_without_a_key_is_refused(stage, context):
    must_be_refused(stage, [[1, 3], [7, 2]], [6, context], "C4.3", sequence=1)


@task("4.1", "C4.4")
@pytest.mark.parametrize("padding", [-1, 10, 2**31 - 1])
def test_what_stands_behind_the_context_is_padding(stage, padding):
    tables, contexts = [[7, padding, padding], [1, 2, padding]], [4, 5]
    message = refusal(stage, tables, contexts)
    assert message is None, (
        f"tables {tables}, contexts {contexts}, block size 4: entries behind the context are"
        f" padding, yet TableError: {message}"
    )


@task("4.1", "C4.1")
@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"])
def test_no_kernel_follows_a_table_that_was_not_checked(stage, kernel):
    query, (_, cache) = random(1, 1, 16, seed=0), guarded(10, 4, 1, 16, fill=0.0)
    lengths = {"context_lens": int32([5])}
    if kernel == "paged_prefill":
        lengths["query_starts"] = int32([0, 1])
    with pytest.raises(stage.TableError):
        getattr(stage, kernel)(query, cache, cache, block_tables=int32([[7, 10]]), **lengths)


# Task 4.2: store KV


def stored(stage, slots, num_heads=1, head_dim=16, dtype=SINGLE):
    """Store a token in each slot of a cache of 10 blocks of 4: a list of keys and of values.

    Each is (name, what was to be stored, the cache flattened to slots, guards included).
    """
    shape = (10, 4, num_heads, head_dim)
    (all_keys, key_cache), (all_values, value_cache) = (
        guarded(*shape, fill=NAN, dtype=dtype) for _ in range(2)
    )
    key, value = (
        random(len(slots), num_heads, head_dim, seed=seed, dtype=dtype) for seed in (1, 2)
    )
    mapping = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    stage.store_kv(key, value, key_cache, value_cache, mapping)
    return [("key", key, all_keys.flatten(0, 1)), ("value", value, all_values.flatten(0, 1))]


FIRST_SLOT = GUARD * 4


def check_rows(results, slots):
    """C4.5: each row lies in its slot; a failure says where it went instead."""
    for name, rows, cache in results:
        for token, slot in enumerate(slots):
            if torch.equal(cache[FIRST_SLOT + slot], rows[token]):
                continue
            found = (cache == rows[token]).flatten(1).all(1).nonzero().flatten() - FIRST_SLOT
            where = f"it is in {found.tolist()}" if len(found) else "it is in no slot"
            raise Broken(
                "C4.5",
                f"slot_mapping {slots}, block size 4: {name} {token} belongs in slot {slot}, that"
                f" is block {slot // 4}, offset {slot % 4}; {where}",
            )


def check_other_slots(results, slots):
    """C4.6: whatever is no slot of the mapping is as it was."""
    for name, _, cache in results:
        touched = (~cache.isnan()).flatten(1).any(1).nonzero().flatten() - FIRST_SLOT
        wrong = sorted(set(touched.tolist()) - set(slots))
        if wrong:
            raise Broken(
                "C4.6", f"slot_mapping {slots}: the {name} cache was written in slots {wrong}, too"
            )


@task("4.2", "C4.5")
@pytest.mark.parametrize("slots", [[30], [28, 29, 30, 31, 8, 9], [39, 0]], ids=str)
def test_each_key_and_value_lies_in_its_slot(stage, slots):
    check_rows(stored(stage, slots), slots)


@task("4.2", "C4.6")
def test_no_other_slot_is_written(stage):
    slots = [30, 8, 39]
    results = stored(stage, slots, num_heads=3, head_dim=20)  # 60 elements: not a power of two
    check_rows(results, slots)
    check_other_slots(results, slots)


@task("4.2", "C4.5")
@few_launches
@given(
    st.lists(st.integers(0, 39), min_size=1, max_size=5, unique=True),
    st.sampled_from([(1, 16), (2, 20), (3, 64)]),
    st.sampled_from([SINGLE, HALF]),
)
def test_any_slots_any_heads(stage, slots, heads, dtype):
    results = stored(stage, slots, *heads, dtype=dtype)
    check_rows(results, slots)
    check_other_slots(results, slots)


@task("4.2", "C4.5")
def test_rows_may_be_slices_of_a_wider_matrix(stage):
    qkv = random(2, 5, 16, seed=0)
    _, keys = guarded(10, 4, 1, 16, fill=NAN)
    _, values = guarded(10, 4, 1, 16, fill=NAN)
    slots = torch.tensor([5, 3], device=DEVICE)
    stage.store_kv(qkv[:, 3:4], qkv[:, 4:5], keys, values, slots)
    for name, cache, head in (("key", keys, 3), ("value", values, 4)):
        got = cache.flatten(0, 1)[slots]
        assert torch.equal(got, qkv[:, head : head + 1]), f"the {name} rows are not those given"


@task("4.2", "C4.6")
@stage_only("the finished engine makes its slots itself, from tables that it has checked")
@pytest.mark.parametrize("slot", [-1, 40])
def test_a_slot_outside_the_cache_is_refused(stage, slot):
    with pytest.raises(ValueError, match=str(slot)):
        stored(stage, [3, slot])


# Task 4.3: decode


@task("4.3", "C4.7")
@pytest.mark.parametrize(
    ("block_size", "table"),
    [(4, (7, 2, 9, 3, 6, 1, 8, 5)), (16, (3, 1)), (5, (7, 2, 4, 1, 6, 3, 5))],
)
def test_a_decode_reads_each_position_of_its_context_through_the_table(kernels, block_size, table):
    batch = Batch((table,), ((31, 32),), block_size)
    got = run_decode(kernels, batch, batch.query(0.0), batch.positions_as_values())
    check_means(got, batch, "C4.7")


@task("4.3", "C4.7")
def test_sequences_that_share_blocks_read_their_own_rest(kernels):
    batch = Batch(((7, 2, 3, 4), (7, 2, 3, 9), (5, 1, 8, 6)), ((15, 16),) * 3)
    got = run_decode(kernels, batch, batch.query(0.0), batch.positions_as_values())
    check_means(got, batch, "C4.7")


@task("4.3", "C4.8")
def test_weights_are_the_softmax_of_the_scaled_scores(kernels):
    check_decode(kernels, Batch(((7, 2, 9, 3),), ((15, 16),)), "C4.8")


TWO_TILES = Batch(((7, 2, 9, 3, 6, 1, 8, 5),), ((31, 32),))


@task("4.3", "C4.9")
def test_a_later_tile_may_raise_the_maximum(kernels):
    given = TWO_TILES.rising_scores(0, 0.25)
    check_decode(kernels, TWO_TILES, "C4.9", *given)


@task("4.3", "C4.10")
@pytest.mark.parametrize("first", [120, -120])  # exp of either is inf or 0 in float32
def test_scores_of_any_size_have_a_softmax(kernels, first):
    given = TWO_TILES.rising_scores(first, 0.25)
    check_decode(kernels, TWO_TILES, "C4.10", *given)


# Contexts at the edges of a block of 4 and of a tile of 16.
EDGES = Batch(
    ((7,), (2,), (9, 3), (6, 1, 8, 5), (10, 11, 12, 13, 14)),
    ((0, 1), (2, 3), (4, 5), (14, 15), (16, 17)),
)


@task("4.3", "C4.11")
def test_lanes_behind_the_context_weigh_nothing(kernels):
    check_decode(kernels, replace(EDGES, stale=1.0), "C4.11")


@task("4.3", "C4.12")
def test_slots_behind_the_context_are_not_loaded(kernels):
    check_decode(kernels, EDGES, "C4.12")


@task("4.3", "C4.13")
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (3, 1)])
def test_neighbouring_heads_share_a_kv_head(kernels, heads, kv_heads):
    batch = Batch(((7, 2),), ((6, 7),), num_heads=heads, num_kv_heads=kv_heads)
    check_decode(kernels, batch, "C4.13")


def large_halves(batch):
    """(query, caches): q k is 64 * 40 * 40 = 102,400, and float16 ends at 65,504."""
    caches = batch.caches()
    caches.keys[~caches.keys.isnan()] = 40
    return torch.full_like(batch.query(), 40), caches


@task("4.3", "C4.14")
def test_half_precision_is_multiplied_and_summed_in_float32(kernels):
    batch = Batch(((7, 2),), ((6, 7),), head_dim=64, dtype=HALF)
    check_decode(kernels, batch, "C4.14", *large_halves(batch))


@task("4.3", "C4.15")
def test_every_element_of_the_output_is_written_and_none_beside_it(kernels):
    batch = Batch(((7,), (2, 3)), ((3, 4), (6, 7)), num_heads=2, num_kv_heads=2, head_dim=20)
    check_decode(kernels, batch, "C4.15")


@st.composite
def batches(draw, *, decode):
    """Up to two sequences at the edges of blocks and tiles; blocks in any order, some shared."""
    block_size = draw(st.sampled_from([4, 16, 5]))
    edges = [1, block_size, block_size + 1, 15, 16, 17, 33]
    prefix = [("prefix", logical) for logical in range(draw(st.integers(0, 2)))]
    owners, ranges = [], []
    for sequence in range(draw(st.integers(1, 2))):
        start = len(prefix) * block_size + draw(st.sampled_from([0, *edges]))
        end = start + (1 if decode else draw(st.sampled_from(edges)))
        own = [(sequence, i) for i in range(len(prefix), -(-end // block_size))]
        owners.append([*prefix, *own])
        ranges.append((start, end))
    distinct = list(dict.fromkeys(owner for each in owners for owner in each))
    # From 1 on: block 0 is nobody's.
    place = dict(zip(distinct, draw(st.permutations(range(1, len(distinct) + 1))), strict=True))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (3, 1), (2, 2)]))
    return Batch(
        tables=tuple(tuple(place[owner] for owner in each) for each in owners),
        ranges=tuple(ranges),
        block_size=block_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 20, 64])),
        dtype=draw(st.sampled_from([SINGLE, HALF])),
        seed=draw(st.integers(0, 99)),
    )


@task("4.3", "C4.8")
@few_launches
@given(batches(decode=True))
def test_any_decode_equals_the_reference(kernels, batch):
    check_decode(kernels, batch, "C4.8")


# Task 4.4: prefill


@task("4.4", "C4.16")
@pytest.mark.parametrize("span", [(0, 16), (0, 20)], ids=["one tile of rows", "two"])
def test_a_row_of_a_prompt_sees_the_positions_up_to_its_own(kernels, span):
    batch = Batch(((7, 2, 9, 3, 6),), (span,))
    got = run_prefill(kernels, batch, batch.query(0.0), batch.positions_as_values())
    check_means(got, batch, "C4.16")


@task("4.4", "C4.16")
@pytest.mark.parametrize("span", [(16, 20), (3, 20), (19, 20)])
def test_rows_that_start_behind_a_written_prefix_see_it(kernels, span):
    batch = Batch(((7, 2, 9, 3, 6),), (span,))
    got = run_prefill(kernels, batch, batch.query(0.0), batch.positions_as_values())
    check_means(got, batch, "C4.16")


@task("4.4", "C4.17")
def test_each_sequence_computes_its_own_rows_and_no_others(kernels):
    tables = ((7, 2), (9, 3, 6), (1, 8, 5, 4, 10), (11,))
    batch = Batch(tables, ((5, 8), (8, 9), (0, 17), (0, 2)), head_dim=20)
    check_prefill(kernels, batch, "C4.17")


PREFILL = Batch(((7, 2, 9, 3, 6, 1, 8, 5),), ((20, 32),))


@task("4.4", "C4.18")
@pytest.mark.parametrize("first", [0, 120, -120])
def test_a_prefill_rescales_and_takes_scores_of_any_size(kernels, first):
    given = PREFILL.rising_scores(first, 0.25)
    check_prefill(kernels, PREFILL, "C4.18", *given)


@task("4.4", "C4.18")
@pytest.mark.parametrize("stale", [1.0, NAN])
def test_a_prefill_takes_nothing_from_behind_its_context(kernels, stale):
    batch = Batch(((7,), (2,), (9, 3, 6, 1, 8)), ((0, 1), (0, 3), (14, 17)), stale=stale)
    check_prefill(kernels, batch, "C4.18")


@task("4.4", "C4.18")
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_neighbouring_heads_share_a_kv_head_in_a_prefill_too(kernels, heads, kv_heads):
    batch = Batch(((7, 2),), ((2, 7),), num_heads=heads, num_kv_heads=kv_heads)
    check_prefill(kernels, batch, "C4.18")


@task("4.4", "C4.18")
def test_a_prefill_multiplies_half_precision_in_float32(kernels):
    batch = Batch(((7, 2),), ((2, 7),), head_dim=64, dtype=HALF)
    check_prefill(kernels, batch, "C4.18", *large_halves(batch))


@task("4.4", "C4.18")
@few_launches
@given(batches(decode=False))
def test_any_prefill_equals_the_reference(kernels, batch):
    check_prefill(kernels, batch, "C4.18")
