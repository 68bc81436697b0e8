"""Five ways to share a prefix, on the real engine with a tiny model. Block size 4.

In each, tokens, logits, keys and values are compared with an engine whose cache is off, and
tokens and logits with transformers. What comes from the cache is equal bit for bit to what the
sequence that wrote it computes without a cache, and never changes under a sequence that reads it.
So a wrong block shows even where the greedy tokens happen to agree.
"""

import pytest

from tests.known_faults.recorded import Recorded, assert_identical

PREFIX = [41, 7, 93, 12, 58, 30, 66, 5]
"""Exactly two blocks."""


@pytest.fixture
def cached(tiny):
    """An engine that has served PREFIX once; its two blocks are cached, and nobody reads them."""
    engine = Recorded(tiny)
    engine.add("first", PREFIX, 1)
    engine.finish()
    assert engine.engine.stats()["blocks_cached_idle"] == 2
    return engine


def test_a_prefix_of_exactly_two_blocks_is_shared_and_never_written_again(cached):
    """The prefix is the whole first prompt: length 8, both blocks full, both published.

    request   prompt       hits   computes
    longer    8 + 3 = 11      8   [8, 11)
    same      8               4   [4, 8), and takes the cached second block for its own
    """
    cached.add("longer", [*PREFIX, 70, 71, 72], 6)
    cached.add("same", PREFIX, 6)
    assert cached.step() == {"longer": (8, 11), "same": (4, 8)}
    assert cached.ref_counts("first", 2) == [3, 3], "longer, same, and the cache"
    assert cached.tables["longer"][:2] == cached.tables["first"]
    own_second_block = cached.tables["same"][1]
    assert own_second_block != cached.tables["first"][1], "a published block is not written (I3)"
    cached.finish()
    assert cached.tables["same"][:2] == cached.tables["first"]
    assert cached.outputs["longer"].num_cached_tokens == 8
    assert cached.outputs["same"].num_cached_tokens == 4
    now = cached.read(cached.tables["first"], 8)
    assert_identical(now, cached.kv["first"], "the published blocks")
    cached.check_against_the_cache_off_and_transformers(writer="first")


def test_of_a_prompt_of_ten_with_eight_cached_only_a_suffix_of_two_is_computed(cached):
    """Positions 8 and 9: not 0 and 1, and attention sees the eight before them.

    The suffix lies in a third block: offsets 0 and 1.
    """
    cached.add("ten", [*PREFIX, 70, 71], 5)
    assert cached.step() == {"ten": (8, 10)}
    assert len(cached.tables["ten"]) == 3
    assert cached.engine.stats()["prompt_tokens_computed"] == 8 + 2
    third = cached.engine.runner._kv[0].keys[cached.tables["ten"][2]]
    assert third.isnan().flatten(1).any(dim=1).tolist() == [False, False, True, True]
    cached.finish()
    assert cached.outputs["ten"].num_cached_tokens == 8
    cached.check_against_the_cache_off_and_transformers(writer="first")


def test_several_sequences_on_one_prefix_diverge_at_the_same_time(cached):
    """Four prompts, equal up to position 8, part there in one step and go on side by side."""
    names = ["a", "b", "c", "d"]
    for i, name in enumerate(names):
        cached.add(name, [*PREFIX, 70 + i, 80 - i], 9)
    assert cached.step() == dict.fromkeys(names, (8, 10))
    assert cached.ref_counts("first", 2) == [5, 5], "four sequences and the cache"
    cached.finish()
    shared = cached.tables["first"]
    private = [block for name in names for block in cached.tables[name][2:]]
    assert [cached.tables[name][:2] for name in names] == [shared] * 4
    assert len(private) == len(set(private)), "no block behind the prefix is shared"
    assert cached.ref_counts("first", 2) == [1, 1], "the cache alone"
    assert [cached.outputs[name].num_cached_tokens for name in names] == [8] * 4
    assert len({tuple(cached.outputs[name].token_ids) for name in names}) == 4
    cached.check_against_the_cache_off_and_transformers(writer="first")


def test_sequences_that_come_together_compute_their_new_prefix_once_and_diverge(tiny):
    """The same, with nothing cached: the first computes the prefix, the others wait one step."""
    engine = Recorded(tiny)
    for i, name in enumerate("abcd"):
        engine.add(name, [*PREFIX, 70 + i, 80 - i], 9)
    assert engine.step() == {"a": (0, 10)}
    assert engine.step() == {"a": (10, 11), "b": (8, 10), "c": (8, 10), "d": (8, 10)}
    assert engine.ref_counts("a", 2) == [5, 5]
    engine.finish()
    assert [engine.tables[name][:2] for name in "bcd"] == [engine.tables["a"][:2]] * 3
    assert [engine.outputs[name].num_cached_tokens for name in "abcd"] == [0, 8, 8, 8]
    engine.check_against_the_cache_off_and_transformers(writer="a")


def test_one_sequence_ends_while_another_still_reads_the_shared_blocks(tiny):
    """The leaver gives back one count of each shared block; only its private ones become free.

    7 blocks. A newcomer needs every free block while the reader goes on:

        leaver, reader   2 shared + 1 + 1   3 free
        leaver ends      2 shared     + 1   4 free
        newcomer of 13                + 4   0 free
    """
    engine = Recorded(tiny, num_kv_blocks=7)
    engine.add("leaver", [*PREFIX, 70, 71], 2)
    engine.step()
    engine.add("reader", [*PREFIX, 80], 3)
    engine.step()
    assert "leaver" in engine.outputs
    assert engine.tables["reader"][:2] == engine.tables["leaver"][:2]
    assert engine.ref_counts("reader", 3) == [2, 2, 1], "the reader and the cache; the reader"
    left_by_leaver = engine.tables["leaver"][2]
    engine.add("newcomer", [(i * 31 + 3) % 97 for i in range(13)], 1)
    assert engine.step() == {"reader": (9, 10), "newcomer": (0, 13)}
    assert engine.engine.stats()["preemptions"] == 0
    assert left_by_leaver in engine.tables["newcomer"], "written over by other text"
    assert not set(engine.tables["newcomer"]) & set(engine.tables["reader"])
    engine.finish()
    assert engine.outputs["reader"].num_cached_tokens == 8
    engine.check_against_the_cache_off_and_transformers(writer="leaver")


def test_an_entry_is_not_evicted_under_its_reader_and_is_when_the_reader_has_ended(tiny):
    """8 blocks: strangers that need them all take every idle cached block, but not one in use.

    After the reader has ended, its entry goes like any other, and the next one misses.
    """
    engine = Recorded(tiny, num_kv_blocks=8)
    engine.add("first", [*PREFIX, 70, 71, 72, 73], 1)
    engine.finish()
    assert engine.engine.stats()["blocks_cached_idle"] == 3
    shared = engine.tables["first"][:2]
    engine.add("reader", [*PREFIX, 80, 81], 6)
    assert engine.step() == {"reader": (8, 10)}
    # 3 blocks in use; 5 to take, one of them cached and idle: the tail of first.
    engine.add("stranger", [(i * 31 + 3) % 97 for i in range(17)], 1)
    engine.step()
    assert engine.engine.stats()["evicted_blocks"] == 1
    assert engine.tables["first"][2] in engine.tables["stranger"]
    assert not engine.engine.reset_prefix_cache(), "the reader lives"
    engine.add("another", [(i * 29 + 5) % 97 for i in range(14)], 1)
    engine.step()
    assert engine.engine.stats()["evicted_blocks"] == 4
    assert engine.tables["reader"][:2] == shared
    assert [engine.engine.kv.cache.at(block) is not None for block in shared] == [True, True]
    engine.add("also reads", [*PREFIX, 90], 1)
    assert engine.step()["also reads"] == (8, 9)
    engine.finish()
    assert engine.outputs["reader"].num_cached_tokens == 8
    # Nobody reads it now: the whole pool can be taken, and is.
    engine.add("whole pool", [(i * 37 + 11) % 97 for i in range(32)], 1)
    engine.finish()
    assert set(shared) <= set(engine.tables["whole pool"])
    engine.add("too late", [*PREFIX, 91], 3)
    assert engine.step() == {"too late": (0, 9)}
    engine.finish()
    assert engine.outputs["too late"].num_cached_tokens == 0
    engine.check_against_the_cache_off_and_transformers(writer="first")


def test_an_entry_is_evicted_after_a_waiting_request_has_found_it(tiny):
    """Found is not held: whoever waits looks again, and computes what has gone in the meantime.

    6 blocks. `grows` holds 4, and evicts one of the two for its 5th. `waits` would need 3.
    """
    engine = Recorded(tiny, num_kv_blocks=6)
    engine.add("first", PREFIX, 1)
    engine.finish()
    engine.add("grows", [(i * 31 + 3) % 97 for i in range(15)], 6)
    engine.step()
    engine.add("waits", [*PREFIX, 70, 71], 4)
    engine.step()
    (waits,) = engine.engine.scheduler.waiting
    assert len(waits.matched_blocks) == 2, "found while it waits"
    assert engine.engine.stats()["evicted_blocks"] == 0
    while engine.engine.scheduler.waiting:
        engine.step()
    assert engine.engine.stats()["evicted_blocks"] > 0
    assert engine.ranges[-1]["waits"] == (4, 10)
    engine.finish()
    assert engine.outputs["waits"].num_cached_tokens == 4
    engine.check_against_the_cache_off_and_transformers(writer="first")
