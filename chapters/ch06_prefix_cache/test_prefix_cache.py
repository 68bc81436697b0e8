"""What chapter 6's pool must do: its contract, and I1 to I9 under random work.

Block size 4 everywhere. Requests are called A, B, ... as in the chapter's text.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chapters.ch03_block_manager.pool_checks import check_tables, check_unchanged, must_raise
from chapters.ch06_prefix_cache.cache_checks import check_cache, state_of
from chapters.ch06_prefix_cache.memory import Memory
from chapters.ch06_prefix_cache.naive_pool import NaivePool
from chapters.testing import Broken, run_machine, stage_only, task

BLOCK_SIZE = 4
ONE_TO_NINE = [1, 2, 3, 4, 5, 6, 7, 8, 9]
ADAPTER = (("adapter", "a"),)


def make_pool(stage: Any, num_blocks: int = 8, **options: Any) -> Any:
    return stage.CachingBlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, **options)


def make_sequence(
    stages: Any, token_ids: list[int], name: str = "A", key_fields: tuple[Any, ...] = ()
) -> Any:
    return stages.load("ch01_sequence").Sequence(name, token_ids, key_fields=key_fields)


def always_the_same(data: bytes) -> bytes:
    """A hash function under which all keys collide."""
    return b"same"


def own_tokens_only(data: bytes) -> bytes:
    """A hash function that does not see what stands before a block: its last 4 ids of 4 bytes."""
    return data[-16:]


def one_bit(data: bytes) -> bytes:
    """A hash function with two values, which depend on everything."""
    return bytes([sum(data) % 2])


def hashing(hash_function: Any) -> dict[str, Any]:
    """The pool's option for another hash function; None is its own."""
    return {"hash_function": hash_function} if hash_function else {}


# Task 6.1


@task("6.1", "C6.1")
def test_only_full_blocks_have_a_key(stage: Any) -> None:
    counts = [len(stage.block_keys(ONE_TO_NINE[:n], BLOCK_SIZE)) for n in range(10)]
    expected = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert counts == expected, f"0 to 9 tokens: expected {expected} keys, got {counts}"


@task("6.1", "C6.2")
def test_an_equal_prefix_has_equal_keys_and_a_different_end_does_not(stage: Any) -> None:
    first = stage.block_keys([1, 2, 3, 4, 5, 6, 7, 8], BLOCK_SIZE)
    second = stage.block_keys([1, 2, 3, 4, 5, 6, 7, 9, 9, 9], BLOCK_SIZE)
    equal = [a == b for a, b in zip(first, second, strict=True)]
    assert equal == [True, False], (
        f"1 2 3 4 | 5 6 7 8 and 1 2 3 4 | 5 6 7 9: expected equal keys [True, False], got {equal}"
    )


@task("6.1", "C6.2")
def test_equal_tokens_behind_different_ones_have_different_keys(stage: Any) -> None:
    behind_nines = stage.block_keys([9, 9, 9, 9, 5, 6, 7, 8], BLOCK_SIZE)[1]
    at_the_start = stage.block_keys([5, 6, 7, 8], BLOCK_SIZE)[0]
    assert behind_nines != at_the_start, (
        "5 6 7 8 behind 9 9 9 9 has the key of 5 6 7 8 at the start of a prompt: the tokens are"
        " equal, what they attended to is not"
    )


@task("6.1", "C6.4")
def test_token_ids_of_a_large_vocabulary_count_in_full(stage: Any) -> None:
    first_ids = [7, 7 + 256, 7 + 65_536, 128_000, 151_642]
    try:
        keys = [stage.block_keys([each, 2, 3, 4], BLOCK_SIZE)[0] for each in first_ids]
    except (ValueError, OverflowError) as error:
        raise Broken("C6.4", f"no key for token ids up to 151,642: {error}") from error
    assert len(set(keys)) == 5, (
        f"the blocks [n 2 3 4] with n = {first_ids} have only {len(set(keys))} different keys"
    )


@task("6.1", "C6.2")
@given(
    token_ids=st.lists(st.integers(0, 50_000), min_size=1, max_size=20),
    place=st.integers(0, 19),
    other=st.integers(0, 50_000),
)
def test_another_token_changes_its_own_key_and_all_later_ones(
    stage: Any, token_ids: list[int], place: int, other: int
) -> None:
    place %= len(token_ids)
    changed = [*token_ids[:place], other, *token_ids[place + 1 :]]
    keys, new_keys = (stage.block_keys(ids, BLOCK_SIZE) for ids in (token_ids, changed))
    first_new = place // BLOCK_SIZE if changed != token_ids else len(keys)
    expected = [i < first_new for i in range(len(keys))]
    equal = [a == b for a, b in zip(keys, new_keys, strict=True)]
    assert equal == expected, f"{token_ids} and {changed}: expected {expected}, got {equal}"


@task("6.1", "C6.3")
def test_other_key_fields_give_other_keys(stage: Any) -> None:
    fields = [(), ADAPTER, (("adapter", "b"),), (("salt", "a"),), ("1",), (1,), ("a", "b"), ("ab",)]
    first_keys = [stage.block_keys([1, 2, 3, 4], BLOCK_SIZE, each)[0] for each in fields]
    for i, key in enumerate(first_keys):
        same = [fields[j] for j in range(i) if first_keys[j] == key]
        assert not same, f"1 2 3 4 has the same key under {fields[i]} and {same[0]}"
    second_keys = [stage.block_keys(ONE_TO_NINE, BLOCK_SIZE, each)[1] for each in fields]
    assert len(set(second_keys)) == len(fields), "second blocks do not depend on the key fields"


@task("6.1", "C6.2")
def test_the_hash_function_given_is_the_one_used(stage: Any) -> None:
    keys = stage.block_keys([1, 2, 3, 4, 5, 6, 7, 8], BLOCK_SIZE, (), always_the_same)
    assert keys == [b"same", b"same"], f"a hash that always says 'same' gave the keys {keys}"


@task("6.1", "C6.5")
@stage_only("the engine compares a key and encoded fields in one; task 6.2 tests it by lookups")
def test_a_block_holds_only_what_it_was_made_from(stage: Any) -> None:
    tokens, other = (stage.tokens_as_bytes(ids) for ids in ([5, 6, 7, 8], [5, 6, 7, 9]))
    parent = stage.CachedBlock(0, b"p", stage.tokens_as_bytes([1, 2, 3, 4]), None, ADAPTER)
    twin = stage.CachedBlock(3, b"p", stage.tokens_as_bytes([1, 2, 3, 4]), None, ADAPTER)
    block = stage.CachedBlock(1, b"k", tokens, parent, ADAPTER)
    for what, question, expected in [
        ("the same content", (tokens, parent, ADAPTER), True),
        ("other tokens", (other, parent, ADAPTER), False),
        ("no parent", (tokens, None, ADAPTER), False),
        ("another parent object", (tokens, twin, ADAPTER), False),
        ("other key fields", (tokens, parent, ()), False),
    ]:
        got = block.holds(*question)
        assert got is expected, f"holds() with {what}: expected {expected}, got {got}"


# Task 6.2


def cache_by_hand(
    stage: Any, stages: Any, pool: Any, token_ids: list[int], key_fields: tuple[Any, ...] = ()
) -> list[int]:
    """Cache the full blocks of a prompt without allocate and commit; return them."""
    sequence = make_sequence(stages, token_ids, "by hand", key_fields)
    parent, blocks = None, []
    for i, key in enumerate(pool.keys(sequence)):
        if key not in pool.cached:
            tokens = stage.tokens_as_bytes(token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
            pool.cached[key] = stage.CachedBlock(pool.take(), key, tokens, parent, key_fields)
        parent = pool.cached[key]
        blocks.append(parent.block)
    return blocks


@task("6.2", "C6.6")
def test_an_empty_cache_matches_nothing(stage: Any, stages: Any) -> None:
    hits = make_pool(stage).match(make_sequence(stages, ONE_TO_NINE))
    assert hits == [], f"nothing is cached: expected no hits, got {hits}"


@task("6.2", "C6.6")
def test_a_prefix_of_eight_tokens_is_found_for_a_prompt_of_ten(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    blocks = cache_by_hand(stage, stages, pool, ONE_TO_NINE)
    hits = pool.match(make_sequence(stages, [1, 2, 3, 4, 5, 6, 7, 8, 3, 3], "B"))
    assert hits == blocks, f"8 of 10 tokens are cached in blocks {blocks}: got the hits {hits}"


@task("6.2", "C6.7", "I8")
def test_at_least_one_token_is_left_to_compute(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    token_ids = list(range(1, 14))
    cache_by_hand(stage, stages, pool, token_ids)
    for num_tokens, expected in [(1, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (13, 3)]:
        hits = pool.match(make_sequence(stages, token_ids[:num_tokens], "B"))
        assert len(hits) == expected, (
            f"{num_tokens} tokens, all cached, ({num_tokens} - 1) // 4 = {expected}:"
            f" expected {expected} hits, got {hits}"
        )


@task("6.2", "C6.6")
def test_a_match_ends_where_the_tokens_differ(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    blocks = cache_by_hand(stage, stages, pool, list(range(1, 13)))
    hits = pool.match(make_sequence(stages, [1, 2, 3, 4, 5, 6, 0, 8, 9, 10, 11, 12, 13], "B"))
    assert hits == blocks[:1], f"token 6 differs: expected the hits {blocks[:1]}, got {hits}"


@task("6.2", "C6.6")
def test_a_match_does_not_go_on_behind_a_gap(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    blocks = cache_by_hand(stage, stages, pool, list(range(1, 13)))
    sequence = make_sequence(stages, list(range(1, 14)), "B")
    del pool.cached[pool.keys(sequence)[1]]
    hits = pool.match(sequence)
    assert hits == blocks[:1], (
        f"the second of three blocks is not cached: expected the hits {blocks[:1]}, got {hits}"
    )


@task("6.2", "I7", "C6.8")
def test_two_prompts_that_share_a_middle_but_no_start_share_nothing(
    stage: Any, stages: Any
) -> None:
    for hash_function in (None, own_tokens_only):
        pool = make_pool(stage, **hashing(hash_function))
        cache_by_hand(stage, stages, pool, [9, 9, 9, 9, 5, 6, 7, 8])
        hits = pool.match(make_sequence(stages, [5, 6, 7, 8, 3], "B"))
        assert hits == [], (
            f"expected no hits, got {hits}: block 1 was computed after [9 9 9 9], not at the start"
            " of a prompt"
        )


@task("6.2", "I7", "C6.8")
def test_other_tokens_under_the_same_key_are_a_miss(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, hash_function=always_the_same)
    cache_by_hand(stage, stages, pool, [1, 2, 3, 4])
    hits = pool.match(make_sequence(stages, [5, 6, 7, 8, 9], "B"))
    assert hits == [], f"1 2 3 4 and 5 6 7 8 have the same hash: expected no hits, got {hits}"


@task("6.2", "I7", "C6.8")
def test_other_key_fields_are_a_miss_even_under_the_same_key(stage: Any, stages: Any) -> None:
    for hash_function in (None, own_tokens_only):
        pool = make_pool(stage, **hashing(hash_function))
        blocks = cache_by_hand(stage, stages, pool, ONE_TO_NINE, ADAPTER)
        hits = pool.match(make_sequence(stages, ONE_TO_NINE, "B", ADAPTER))
        assert hits == blocks, f"the same tokens and adapter: expected {blocks}, got {hits}"
        hits = pool.match(make_sequence(stages, ONE_TO_NINE, "C"))
        assert hits == [], f"computed with adapter a, asked without: expected no hits, got {hits}"


@task("6.2", "C6.9")
def test_a_lookup_changes_nothing(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    sequence = make_sequence(stages, ONE_TO_NINE, "B")
    for block in reversed(cache_by_hand(stage, stages, pool, ONE_TO_NINE)):
        pool.idle[block] = pool.cached[pool.keys(sequence)[block]]
    before = state_of(pool, [sequence])
    pool.match(sequence)
    check_unchanged(before, state_of(pool, [sequence]), "match()", "C6.9")


PROMPTS = st.builds(
    lambda start, length, end: [*start[:length], *end],
    st.sampled_from([[0] * 8, [0] * 4 + [1] * 4, [1] * 8]),
    st.sampled_from([8, 4, 6, 0]),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)


FIELDS = st.sampled_from([(), (), ADAPTER])
ANY = st.integers(0, 9)


def one_of(sequences: list[Any], which: int) -> Any:
    return sequences[which % len(sequences)]


@task("6.2", "C6.6", "I7")
@given(cached=st.lists(PROMPTS, max_size=3), prompt=PROMPTS)
def test_a_match_is_as_long_as_the_longest_common_start(
    stage: Any, stages: Any, cached: list[list[int]], prompt: list[int]
) -> None:
    pool = make_pool(stage, num_blocks=20)
    for token_ids in cached:
        cache_by_hand(stage, stages, pool, token_ids)
    common = [num_common_blocks(token_ids, prompt) for token_ids in cached]
    expected = min(max(common, default=0), (len(prompt) - 1) // BLOCK_SIZE)
    hits = pool.match(make_sequence(stages, prompt, "B"))
    assert len(hits) == expected, (
        f"cached {cached}, looked up {prompt}: expected {expected} hits, got {hits}"
    )


def num_common_blocks(first: list[int], second: list[int]) -> int:
    """Full blocks from the start on that two prompts have in common."""
    ends = range(BLOCK_SIZE, min(len(first), len(second)) + 1, BLOCK_SIZE)
    return sum(first[:end] == second[:end] for end in ends)


# Task 6.3


def arrive(pool: Any, sequence: Any) -> list[int]:
    """Look it up and allocate all of it; return the hits."""
    hits: list[int] = pool.match(sequence)
    pool.allocate(sequence, sequence.num_tokens - len(hits) * BLOCK_SIZE, hits)
    return hits


def run(pool: Any, sequence: Any) -> list[int]:
    """Look it up, allocate and compute all of it; return the hits."""
    hits = arrive(pool, sequence)
    pool.commit(sequence, sequence.num_tokens)
    return hits


def make_idle_by_hand(pool: Any, sequence: Any) -> None:
    """What free() does; it is the next task."""
    while sequence.block_table:
        block = sequence.block_table.pop()
        if pool.release(block) == 1:
            pool.idle[block] = pool.cached_at(block)


@task("6.3", "C6.10")
def test_a_request_without_hits_takes_free_blocks(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    sequence = make_sequence(stages, ONE_TO_NINE)
    pool.allocate(sequence, 9)
    assert sequence.block_table == [0, 1, 2], f"9 tokens: got the table {sequence.block_table}"
    assert sequence.num_computed_tokens == 0, "nothing was a hit, so nothing is computed yet"


@task("6.3", "I6", "C6.13")
def test_a_block_cannot_be_found_before_its_step_is_committed(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    arrive(pool, make_sequence(stages, ONE_TO_NINE))
    hits = pool.match(make_sequence(stages, ONE_TO_NINE, "B"))
    assert hits == [], f"A's blocks are allocated, not computed: expected no hits, got {hits}"


@task("6.3", "I6", "C6.13")
def test_a_block_cannot_be_found_while_part_of_it_is_computed(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    prompt = list(range(1, 13))
    first, second = make_sequence(stages, prompt), make_sequence(stages, prompt, "B")
    pool.allocate(first, 7)
    pool.commit(first, 7)
    hits = pool.match(second)
    assert hits == [0], f"7 positions computed, 4 to a block: expected the hits [0], got {hits}"
    pool.allocate(first, 1)
    pool.commit(first, 8)
    hits = pool.match(second)
    assert hits == [0, 1], f"8 positions computed: expected the hits [0, 1], got {hits}"


@task("6.3", "I6", "C6.13")
def test_generated_tokens_are_published_once_they_are_computed(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    sequence = make_sequence(stages, [1, 2, 3, 4, 5, 6])
    next_turn = make_sequence(stages, ONE_TO_NINE, "B")
    run(pool, sequence)
    for token_id, expected in [(7, 1), (8, 2)]:
        sequence.append_token(token_id)
        hits = pool.match(next_turn)
        assert len(hits) == 1, f"token {token_id} is not computed yet: got the hits {hits}"
        pool.allocate(sequence, 1)
        pool.commit(sequence, token_id)
        hits = pool.match(next_turn)
        assert len(hits) == expected, (
            f"{token_id} positions computed: expected {expected} hits, got {hits}"
        )


@task("6.3", "I2", "C6.13")
def test_the_cache_is_one_more_holder_of_a_published_block(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, num_blocks=4)
    run(pool, make_sequence(stages, ONE_TO_NINE))
    assert pool.ref_counts == [2, 2, 1, 0], (
        f"blocks 0 and 1 are A's and published, block 2 is A's: expected [2, 2, 1, 0],"
        f" got {pool.ref_counts}"
    )


@task("6.3", "C6.10")
def test_a_shared_prefix_is_neither_copied_nor_computed_again(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    first = make_sequence(stages, ONE_TO_NINE)
    second = make_sequence(stages, [1, 2, 3, 4, 5, 6, 7, 8, 3, 3], "B")
    run(pool, first)
    arrive(pool, second)
    assert second.block_table == [0, 1, 3], (
        f"B shares blocks 0 and 1 and takes one of its own: expected the table [0, 1, 3],"
        f" got {second.block_table}"
    )
    computed = second.num_computed_tokens
    assert computed == 8, f"the positions of two hits are computed: expected 8, got {computed}"


@task("6.3", "I2", "C6.10")
def test_a_hit_is_counted_for_each_request_that_shares_it(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    prompts = {
        name: [1, 2, 3, 4, 5, 6, 7, 8, end] for name, end in zip("ABCD", range(4), strict=True)
    }
    sequences = [make_sequence(stages, prompt, name) for name, prompt in prompts.items()]
    for sequence in sequences:
        run(pool, sequence)
    counts = pool.ref_counts[:2]
    assert counts == [5, 5], f"4 tables and the cache hold blocks 0 and 1: got the counts {counts}"
    check_cache(pool, sequences)


@task("6.3", "I1", "C6.10")
def test_an_idle_block_that_is_hit_is_in_use_again(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    first, second = make_sequence(stages, ONE_TO_NINE), make_sequence(stages, ONE_TO_NINE, "B")
    run(pool, first)
    make_idle_by_hand(pool, first)
    arrive(pool, second)
    assert list(pool.idle) == [], f"B holds blocks 0 and 1, but idle is {list(pool.idle)}"
    check_cache(pool, [second])


@task("6.3", "C6.14")
def test_a_prefix_computed_twice_at_the_same_time_is_kept_once(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    first, second = make_sequence(stages, ONE_TO_NINE), make_sequence(stages, ONE_TO_NINE, "B")
    arrive(pool, first)
    arrive(pool, second)  # in the same step: it cannot find what A is about to compute
    pool.commit(first, 9)
    pool.commit(second, 9)
    assert second.block_table == [0, 1, 5], (
        f"A published blocks 0 and 1, and B computed the same in 3 and 4: expected B's table"
        f" [0, 1, 5], got {second.block_table}"
    )
    check_cache(pool, [first, second])


def pool_with_two_idle_blocks(stage: Any, stages: Any) -> Any:
    """Three blocks: 0 and 1 hold 1 2 3 4 | 5 6 7 8 and are idle, 2 is free."""
    pool = make_pool(stage, num_blocks=3)
    sequence = make_sequence(stages, ONE_TO_NINE)
    run(pool, sequence)
    make_idle_by_hand(pool, sequence)
    return pool


@task("6.3", "C6.11")
def test_an_idle_hit_cannot_be_taken_for_something_else(stage: Any, stages: Any) -> None:
    pool = pool_with_two_idle_blocks(stage, stages)
    for num_tokens, expected in [(12, True), (13, False)]:
        sequence = make_sequence(stages, [1, 2, 3, 4, 5, 6, 7, 8, *range(50, 55)][:num_tokens], "B")
        hits = pool.match(sequence)
        fits = pool.can_allocate(sequence, num_tokens - 8, hits)
        assert fits is expected, (
            f"{num_tokens} tokens, hits {hits}, both idle; 1 block free besides:"
            f" expected can_allocate() to say {expected}, got {fits}"
        )


@task("6.3", "C6.11")
def test_idle_blocks_that_are_no_hits_can_be_taken(stage: Any, stages: Any) -> None:
    pool = pool_with_two_idle_blocks(stage, stages)
    for num_tokens, expected in [(12, True), (13, False)]:
        sequence = make_sequence(stages, list(range(50, 50 + num_tokens)), "B")
        fits = pool.can_allocate(sequence, num_tokens, [])
        assert fits is expected, (
            f"{num_tokens} new tokens, 2 blocks idle and 1 free:"
            f" expected can_allocate() to say {expected}, got {fits}"
        )


@task("6.3", "I9", "C6.12")
def test_a_refused_allocation_changes_nothing(stage: Any, stages: Any) -> None:
    pool = pool_with_two_idle_blocks(stage, stages)
    sequence = make_sequence(stages, [1, 2, 3, 4, 5, 6, 7, 8, *range(50, 55)], "B")
    hits = pool.match(sequence)
    before = state_of(pool, [sequence])
    must_raise(
        stage.BlockError,
        lambda: pool.allocate(sequence, 5, hits),
        "C6.12",
        "2 blocks are needed besides the hits and 1 is free",
    )
    check_unchanged(before, state_of(pool, [sequence]), "a refused allocation")


@task("6.3", "I7", "C6.15")
def test_a_collision_is_not_published(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, hash_function=always_the_same)
    first = make_sequence(stages, [1, 2, 3, 4, 0])
    second = make_sequence(stages, [5, 6, 7, 8, 0], "B")
    run(pool, first)
    run(pool, second)
    assert second.block_table == [2, 3], (
        f"B computed 5 6 7 8 in block 2, and A's block 0 holds 1 2 3 4 under the same key:"
        f" expected B's table [2, 3], got {second.block_table}"
    )
    check_cache(pool, [first, second])


@task("6.3", "C6.15", "I7")
def test_nothing_is_published_behind_a_collision(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, hash_function=own_tokens_only)
    run(pool, make_sequence(stages, [9, 9, 9, 9, 5, 6, 7, 8, 0]))
    run(pool, make_sequence(stages, [5, 6, 7, 8, 1, 1, 1, 1, 0], "B"))
    hits = pool.match(make_sequence(stages, [1, 1, 1, 1, 0], "C"))
    assert hits == [], (
        f"1 1 1 1 was computed behind 5 6 7 8, whose own block could not be published:"
        f" expected no hits, got {hits}"
    )


@task("6.3", "I4", "I2", "I3", "I6", "I7")
@given(
    steps=st.lists(
        st.lists(st.tuples(PROMPTS, FIELDS), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    hash_function=st.sampled_from([None, one_bit, own_tokens_only]),
)
def test_each_request_reads_what_was_computed_from_its_own_tokens(
    stage: Any, stages: Any, steps: list[list[tuple[list[int], Any]]], hash_function: Any
) -> None:
    pool = make_pool(stage, num_blocks=60, **hashing(hash_function))
    memory = Memory(pool)
    sequences: list[Any] = []
    for step in steps:
        arrived = []
        for prompt, key_fields in step:
            sequence = make_sequence(stages, prompt, f"r{len(sequences)}", key_fields)
            arrive(pool, sequence)
            arrived.append(sequence)
            sequences.append(sequence)
        for sequence in arrived:
            memory.write(sequence, sequence.num_computed_tokens, sequence.num_tokens)
            pool.commit(sequence, sequence.num_tokens)
        check_cache(pool, sequences)
        check_tables(sequences, BLOCK_SIZE)
        memory.check(sequences)


# Task 6.4


@task("6.4", "C6.20")
def test_an_empty_cache_can_be_reset(stage: Any, stages: Any) -> None:
    assert make_pool(stage).reset() is True, "nobody holds a block: expected True"


@task("6.4", "C6.16")
def test_a_finished_request_leaves_its_full_blocks_cached(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, num_blocks=4)
    sequence = make_sequence(stages, ONE_TO_NINE)
    run(pool, sequence)
    pool.free(sequence)
    idle, free = list(pool.idle), pool.free_order()
    assert sorted(idle) == [0, 1], f"blocks 0 and 1 are full: expected them idle, got {idle}"
    assert free == [2, 3], f"block 2 was not full: expected the free list [2, 3], got {free}"
    assert sequence.block_table == [], f"expected an empty table, got {sequence.block_table}"
    check_cache(pool, [])


@task("6.4", "C6.16", "I7")
def test_the_end_of_a_chain_is_less_recently_used_than_its_start(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    sequence = make_sequence(stages, list(range(1, 14)))
    run(pool, sequence)
    pool.free(sequence)
    idle = list(pool.idle)
    assert idle == [2, 1, 0], (
        f"block 2 is the end of the chain and must go first: expected the LRU order [2, 1, 0],"
        f" got {idle}"
    )


@task("6.4", "I1", "C6.16")
def test_a_block_stays_in_use_until_its_last_reader_ends(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    first, second = make_sequence(stages, ONE_TO_NINE), make_sequence(stages, ONE_TO_NINE, "B")
    run(pool, first)
    run(pool, second)
    pool.free(first)
    idle = list(pool.idle)
    assert idle == [], f"B still reads blocks 0 and 1: expected none idle, got {idle}"
    pool.free(second)
    idle = list(pool.idle)
    assert idle == [1, 0], f"nobody reads blocks 0 and 1 now: expected [1, 0] idle, got {idle}"


@task("6.4", "C6.18", "I7")
def test_the_key_of_an_evicted_block_finds_nothing(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, num_blocks=2)
    first = make_sequence(stages, [1, 2, 3, 4, 5])
    run(pool, first)
    pool.free(first)
    second = make_sequence(stages, [7, 7, 7, 7, 7], "B")
    try:
        run(pool, second)
    except (KeyError, stage.BlockError) as error:
        what = "B needs 2 blocks, block 1 is free and block 0 idle: evicting it must make it free"
        raise Broken("C6.18", f"{what}, got {error!r}") from error
    hits = pool.match(make_sequence(stages, [1, 2, 3, 4, 5], "C"))
    assert hits == [], (
        f"block 0 held 1 2 3 4, was evicted, and belongs to B now: expected no hits, got {hits}"
    )
    check_cache(pool, [second])


@task("6.4", "C6.17")
def test_the_least_recently_used_prefix_is_evicted_first(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, num_blocks=3)
    used_again, used_once = [1, 2, 3, 4, 5], [5, 6, 7, 8, 9]
    for name, prompt in [("A", used_again), ("B", used_once), ("C", used_again)]:
        sequence = make_sequence(stages, prompt, name)
        run(pool, sequence)
        pool.free(sequence)
    run(pool, make_sequence(stages, [7, 7, 7, 7, 7], "D"))
    kept = [len(pool.match(make_sequence(stages, each))) for each in (used_again, used_once)]
    assert kept == [1, 0], (
        f"A's block was published first, but used last, by C. D needed one block: expected to"
        f" find [1, 0] blocks of A and B, got {kept}"
    )


@task("6.4", "C6.17")
def test_no_more_is_evicted_than_is_needed(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, num_blocks=4)
    first = make_sequence(stages, list(range(1, 14)))
    run(pool, first)
    pool.free(first)
    run(pool, make_sequence(stages, [7, 7, 7, 7, 7], "B"))
    idle = list(pool.idle)
    assert idle == [1, 0], (
        f"idle were [2, 1, 0], block 3 was free, and B needed 2 blocks: expected [1, 0] idle"
        f" still, got {idle}"
    )
    assert pool.evictions == 1, f"expected 1 eviction, got {pool.evictions}"


@task("6.4", "C6.17")
def test_making_room_never_takes_a_hit(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, num_blocks=4)
    for name, prompt in [("A", ONE_TO_NINE), ("B", [50, 51, 52, 53, 54])]:
        sequence = make_sequence(stages, prompt, name)
        run(pool, sequence)
        pool.free(sequence)
    wants_two = make_sequence(stages, [1, 2, 3, 4, 5, 6, 7, 8, *range(60, 65)], "C")
    try:
        arrive(pool, wants_two)
    except (KeyError, stage.BlockError) as error:
        raise Broken("C6.17", f"hits [0, 1], block 2 idle, 3 free: got {error!r}") from error
    assert wants_two.block_table[:2] == [0, 1], f"the hits were [0, 1]: {wants_two.block_table}"
    assert len(set(wants_two.block_table)) == 4, (
        f"idle were [1, 0, 2], C hits 0 and 1 and needs two more, one is free: block 2 had to be"
        f" evicted, but C's table is {wants_two.block_table}"
    )
    check_cache(pool, [wants_two])


@task("6.4", "C6.17", "I1")
def test_nothing_is_evicted_under_a_reader(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, num_blocks=5)
    first = make_sequence(stages, list(range(1, 14)))
    reader = make_sequence(stages, ONE_TO_NINE, "B")
    run(pool, first)
    run(pool, reader)
    pool.free(first)
    greedy = make_sequence(stages, [7] * 13, "C")
    fits = pool.can_allocate(greedy, 13, [])
    assert fits is False, "B reads 3 of 5 blocks and C needs 4: expected can_allocate() False"
    run(pool, make_sequence(stages, [7] * 8, "D"))
    hits = pool.match(make_sequence(stages, list(range(1, 14)), "E"))
    assert hits == [0, 1], (
        f"D took block 2, the end of A's chain; B still reads blocks 0 and 1: expected the hits"
        f" [0, 1], got {hits}"
    )


@task("6.4", "C6.19")
def test_at_most_the_allowed_share_of_the_pool_stays_idle(stage: Any, stages: Any) -> None:
    for share, expected in [(0.0, []), (0.25, [1, 0]), (0.5, [3, 2, 1, 0]), (1.0, [4, 3, 2, 1, 0])]:
        pool = make_pool(stage, num_blocks=8, max_idle_share=share)
        sequence = make_sequence(stages, list(range(1, 22)))
        run(pool, sequence)
        pool.free(sequence)
        idle = list(pool.idle)
        assert idle == expected, (
            f"5 full blocks freed, and at most {share} of 8 may stay idle:"
            f" expected {expected}, got {idle}"
        )
        check_cache(pool, [])


@task("6.4", "C6.20")
def test_a_reset_while_a_block_is_in_use_changes_nothing(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    finished, reader = make_sequence(stages, ONE_TO_NINE), make_sequence(stages, [5] * 5, "B")
    run(pool, finished)
    pool.free(finished)
    run(pool, reader)
    before = state_of(pool, [reader])
    said = pool.reset()
    check_unchanged(before, state_of(pool, [reader]), "reset() while B runs", "C6.20")
    assert said is False, f"B holds 2 blocks: expected reset() to say False, got {said}"


@task("6.4", "C6.20")
def test_after_a_reset_every_block_is_free_and_nothing_is_found(stage: Any, stages: Any) -> None:
    pool = make_pool(stage)
    sequence = make_sequence(stages, ONE_TO_NINE)
    run(pool, sequence)
    pool.free(sequence)
    assert pool.reset() is True, "nobody holds a block: expected True"
    assert pool.num_free == 8, f"expected 8 free blocks, got {pool.num_free}"
    hits = pool.match(make_sequence(stages, ONE_TO_NINE, "B"))
    assert hits == [], f"the cache was reset: expected no hits, got {hits}"
    check_cache(pool, [])


@task("6.4", "I1", "I2", "I3", "I4", "I5", "I6", "I7", "I9")
def test_whoever_comes_and_goes_the_pool_does_what_a_naive_one_does(
    stage: Any, stages: Any
) -> None:
    class Requests(RuleBasedStateMachine):
        """Requests that arrive, are computed, decode and end, beside a NaivePool."""

        @initialize(num_blocks=st.integers(3, 10), max_idle_share=st.sampled_from([0.0, 0.5, 1.0]))
        def begin(self, num_blocks: int, max_idle_share: float) -> None:
            self.pool = make_pool(stage, num_blocks, max_idle_share=max_idle_share)
            self.naive = NaivePool(num_blocks, BLOCK_SIZE, int(max_idle_share * num_blocks))
            self.memory = Memory(self.pool)
            self.num_arrived = 0
            self.allocated: list[Any] = []  # what they will compute is not written yet
            self.computed: list[Any] = []

        @rule(prompt=PROMPTS, key_fields=FIELDS, at_once=st.booleans())
        def arrive(self, prompt: list[int], key_fields: tuple[Any, ...], at_once: bool) -> None:
            self.num_arrived += 1
            sequence = make_sequence(stages, prompt, f"r{self.num_arrived}", key_fields)
            hits = self.pool.match(sequence)
            expected = self.naive.num_hits(sequence)
            if len(hits) != expected:
                raise Broken("C6.6", f"{prompt}: expected {expected} hits, got {hits}")
            if self.allocate(sequence, hits):
                self.allocated.append(sequence)
                if at_once:
                    self.compute(sequence)

        @precondition(lambda self: self.allocated)
        @rule(which=ANY)
        def compute_one(self, which: int) -> None:
            self.compute(one_of(self.allocated, which))

        def compute(self, sequence: Any) -> None:
            self.allocated.remove(sequence)
            self.memory.write(sequence, sequence.num_computed_tokens, sequence.num_tokens)
            self.pool.commit(sequence, sequence.num_tokens)
            self.naive.commit(sequence, sequence.num_tokens)
            self.computed.append(sequence)

        @precondition(lambda self: self.computed)
        @rule(which=ANY, token_id=st.integers(0, 1))
        def decode(self, which: int, token_id: int) -> None:
            sequence = one_of(self.computed, which)
            self.computed.remove(sequence)
            sequence.append_token(token_id)
            if self.allocate(sequence, []):
                self.allocated.append(sequence)
            else:
                self.free(sequence)

        @precondition(lambda self: self.allocated or self.computed)
        @rule(which=ANY)
        def end(self, which: int) -> None:
            sequence = one_of(self.allocated + self.computed, which)
            queue = self.allocated if sequence in self.allocated else self.computed
            queue.remove(sequence)
            self.free(sequence)

        @precondition(lambda self: self.num_arrived % 5 == 4)
        @rule()
        def reset(self) -> None:
            said, expected = self.pool.reset(), self.naive.reset()
            if said is not expected:
                raise Broken("C6.20", f"reset() said {said}, expected {expected}")

        def allocate(self, sequence: Any, hits: list[int]) -> bool:
            """Allocate all that is not computed, or be refused, as the naive pool says."""
            end, live = sequence.num_tokens, [*self.allocated, *self.computed, sequence]
            num_new = end - sequence.num_computed_tokens - len(hits) * BLOCK_SIZE
            before = state_of(self.pool, live)
            fits = self.pool.can_allocate(sequence, num_new, hits)
            expected = self.naive.fits(sequence, end, len(hits))
            if fits != expected:
                raise Broken("C6.11", f"can_allocate() said {fits}, expected {expected}")
            if not fits:
                must_raise(
                    stage.BlockError,
                    lambda: self.pool.allocate(sequence, num_new, hits),
                    "C6.12",
                    "can_allocate() said False",
                )
                check_unchanged(before, state_of(self.pool, live), "a refused allocation")
                return False
            num_before = len(sequence.block_table) + len(hits)
            self.pool.allocate(sequence, num_new, hits)
            self.naive.allocate(sequence, end, len(hits))
            for block in sequence.block_table[num_before:]:
                self.memory.clear(block)
            return True

        def free(self, sequence: Any) -> None:
            self.pool.free(sequence)
            self.naive.free(sequence)

        @invariant()
        def invariants_hold(self) -> None:
            if not hasattr(self, "pool"):
                return
            live = self.allocated + self.computed
            check_cache(self.pool, live)
            check_tables(self.computed, BLOCK_SIZE)
            self.memory.check(live)

        @invariant()
        def the_naive_pool_agrees(self) -> None:
            if not hasattr(self, "pool"):
                return
            found = {self.memory.prefix_in(each.block) for each in self.pool.cached.values()}
            if found != set(self.naive.cached):
                raise Broken("C6.13", f"expected {set(self.naive.cached)} cached, got {found}")
            idle = [self.memory.prefix_in(block) for block in self.pool.idle]
            if idle != self.naive.idle:
                raise Broken("C6.16", f"LRU order: expected {self.naive.idle}, got {idle}")
            num_free = len(self.pool.free_order())
            if num_free != self.naive.num_free:
                raise Broken("I1", f"expected {self.naive.num_free} free blocks, got {num_free}")

    # Two equal prompts in one step, or an eviction at the right moment, are rare: more examples.
    Requests.TestCase.settings = settings(max_examples=150)
    run_machine(Requests)


@task("6.4", "I7", "I1", "I2", "I4")
@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=8),
    hash_function=st.sampled_from([always_the_same, one_bit, own_tokens_only]),
)
def test_no_wrong_block_is_read_even_if_all_keys_collide(
    stage: Any, stages: Any, prompts: list[list[int]], hash_function: Any
) -> None:
    pool = make_pool(stage, num_blocks=10, hash_function=hash_function)
    memory = Memory(pool)
    live: list[Any] = []
    for i, prompt in enumerate(prompts):
        sequence = make_sequence(stages, prompt, f"r{i}")
        hits = arrive(pool, sequence)
        for block in sequence.block_table[len(hits) :]:
            memory.clear(block)
        memory.write(sequence, sequence.num_computed_tokens, sequence.num_tokens)
        pool.commit(sequence, sequence.num_tokens)
        live.append(sequence)
        memory.check(live)
        check_cache(pool, live)
        if i % 2:  # two at most run at a time, so that the next one always fits
            while live:
                pool.free(live.pop(0))
            check_cache(pool, live)
