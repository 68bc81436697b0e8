"""The KV cache by itself: match, allocate, commit, free, without scheduler or runner."""

import pytest

from minivllm.config import EngineConfig
from minivllm.core.invariants import check_pool
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.sequence import CachePolicy, Sequence
from minivllm.core.trace import Trace
from minivllm.sampling_params import SamplingParams


class Pool:
    """A KVCache of block size 4, and the sequences that live in it."""

    def __init__(self, num_blocks=8, **options):
        self.kv = KVCache(num_blocks, EngineConfig(block_size=4, **options), Metrics(), Trace())
        self.holders = []
        self.num_arrivals = 0

    def sequence(self, token_ids, **policy):
        policy = CachePolicy(**policy)
        self.num_arrivals += 1
        return Sequence(
            request_id=f"r{self.num_arrivals}",
            index=0,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=SamplingParams(),
            policy=policy,
            keys=self.kv.new_keys(policy),
            arrival=self.num_arrivals,
        )

    def compute(self, token_ids, num_tokens=None, **policy):
        """Match, allocate, commit; return the sequence, which still holds its blocks."""
        sequence = self.sequence(token_ids, **policy)
        hits = self.kv.match(sequence).hits
        end = num_tokens or len(token_ids)
        assert self.kv.allocate(sequence, end - 4 * len(hits), hits)
        self.holders.append(sequence)
        self.kv.commit(sequence, end)
        return sequence

    def free(self, sequence):
        self.holders.remove(sequence)
        self.kv.free(sequence)

    def cached_tokens(self, token_ids, **policy):
        return 4 * len(self.kv.match(self.sequence(token_ids, **policy)).hits)

    def state(self):
        """Everything a refused call must leave alone."""
        kv = self.kv
        return (
            list(kv.blocks.ref_counts),
            kv.blocks.free_order(),
            kv.cache.lru_order(),
            [list(s.block_table) for s in self.holders],
        )

    def check(self):
        check_pool(self.kv, self.holders)


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.check()


@pytest.mark.parametrize(
    ("num_tokens", "cached"), [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_a_lookup_matches_full_blocks_and_leaves_a_token_to_compute(pool, num_tokens, cached):
    pool.free(pool.compute(range(13)))
    assert pool.cached_tokens(range(num_tokens)) == cached


def test_two_prompts_that_share_a_middle_but_no_start_share_nothing(pool):
    pool.free(pool.compute([9, 9, 9, 9, 5, 6, 7, 8]))
    assert pool.cached_tokens([5, 6, 7, 8, 3]) == 0


def test_a_lookup_changes_nothing(pool):
    pool.free(pool.compute(range(9)))
    before = pool.state()
    assert pool.cached_tokens(range(9)) == 8
    assert pool.state() == before


def test_a_hit_is_shared_and_not_copied(pool):
    first = pool.compute(range(9))
    second = pool.compute([*range(8), 99])
    assert first.block_table[:2] == second.block_table[:2]
    assert [pool.kv.blocks.ref_counts[b] for b in first.block_table] == [3, 3, 1]
    assert second.num_computed_tokens == 9


def test_a_block_is_not_findable_before_all_of_it_is_written(pool):
    leader = pool.sequence(range(12))
    assert pool.kv.allocate(leader, 7, [])
    pool.holders.append(leader)
    assert pool.cached_tokens(range(12)) == 0
    pool.kv.commit(leader, 7)
    assert pool.cached_tokens(range(12)) == 4
    assert pool.kv.allocate(leader, 1, [])
    pool.kv.commit(leader, 8)
    assert pool.cached_tokens(range(12)) == 8


def test_a_shared_block_survives_until_its_last_reader_is_gone_and_then_stays_cached(pool):
    first = pool.compute(range(9))
    second = pool.compute(range(9))
    shared = first.block_table[0]
    pool.free(first)
    assert shared not in pool.kv.cache.lru_order()
    pool.free(second)
    assert pool.kv.cache.lru_order() == [1, shared]
    assert pool.kv.blocks.ref_counts[shared] == 1


def test_a_hit_on_an_idle_block_keeps_its_key():
    pool = Pool(num_blocks=3)
    pool.free(pool.compute(range(9)))  # b0, b1 idle; b2 free
    reader = pool.compute(range(9))
    assert reader.block_table[:2] == [0, 1]
    assert pool.cached_tokens(range(9)) == 8
    pool.check()


def test_making_room_never_takes_a_hit():
    pool = Pool(num_blocks=3)
    pool.free(pool.compute(range(9)))
    # 2 hits idle, 1 free: 4 more tokens behind the hits would need 2 blocks.
    wants_two = pool.sequence([*range(8), *range(50, 55)])
    hits = pool.kv.match(wants_two).hits
    before = pool.state()
    assert len(hits) == 2
    assert not pool.kv.allocate(wants_two, 5, hits)
    assert pool.state() == before
    assert wants_two.block_table == []
    assert wants_two.num_computed_tokens == 0
    assert pool.kv.allocate(wants_two, 4, hits)
    pool.holders.append(wants_two)
    pool.check()


def test_a_refused_allocation_changes_nothing():
    pool = Pool(num_blocks=4)
    holder = pool.compute(range(9))
    pool.free(pool.compute([7, 7, 7]))
    late = pool.sequence(range(40, 49))
    before = pool.state()
    assert not pool.kv.allocate(late, 9, [])
    assert pool.state() == before
    assert late.block_table == []
    late.keys.extend(late.token_ids)
    assert not pool.kv.in_flight.has(late.keys, 0)
    assert holder.num_computed_tokens == 9


def test_the_least_recently_used_prefix_is_evicted_and_its_tail_before_its_head():
    pool = Pool(num_blocks=6)
    old = pool.compute(range(8))
    new = pool.compute(range(20, 28))
    pool.free(old)
    pool.free(new)
    assert pool.kv.cache.lru_order() == [1, 0, 3, 2]
    holder = pool.compute([1, 1, 1, 2, 2, 2, 3, 3, 3])  # 3 blocks: 2 free, 1 evicted
    assert pool.cached_tokens(range(9)) == 4, "the old prefix lost its tail only"
    assert pool.cached_tokens(range(20, 29)) == 8
    pool.free(holder)
    pool.check()


def test_using_a_prefix_makes_it_young_again():
    pool = Pool(num_blocks=6)
    pool.free(pool.compute(range(8)))
    pool.free(pool.compute(range(20, 28)))
    pool.free(pool.compute(range(9)))
    assert pool.kv.cache.lru_order() == [3, 2, 1, 0]


def test_the_cap_limits_what_stays_cached_while_nobody_uses_it():
    pool = Pool(num_blocks=8, prefix_cache_max_share=0.25)
    sequence = pool.compute(range(16))
    assert len(pool.kv.cache) == 4, "in use is not idle"
    pool.free(sequence)
    assert pool.kv.cache.num_idle == 2
    assert pool.cached_tokens(range(17)) == 8, "the heads are kept"
    pool.check()


def test_a_cap_of_zero_still_shares_between_live_sequences():
    pool = Pool(prefix_cache_max_share=0.0)
    first = pool.compute(range(9))
    second = pool.compute(range(9))
    assert first.block_table[:2] == second.block_table[:2]
    pool.free(first)
    pool.free(second)
    assert pool.kv.cache.num_idle == 0
    assert pool.kv.blocks.num_free == 8


def test_who_computes_a_cached_block_again_takes_the_cached_one_and_frees_its_own(pool):
    first = pool.compute(range(9))
    again = pool.compute(range(9), read=False)
    assert again.block_table[:2] == first.block_table[:2]
    assert pool.kv.num_in_use == 4, "2 shared and 2 private ones"


def test_who_may_not_write_publishes_nothing_but_may_read(pool):
    pool.compute(range(9), write=False)
    assert pool.cached_tokens(range(9)) == 0
    pool.compute(range(9))
    assert pool.cached_tokens(range(9), write=False) == 8


def test_who_may_not_read_is_not_looked_up(pool):
    pool.compute(range(9))
    assert pool.cached_tokens(range(9), read=False) == 0


@pytest.mark.parametrize(("cacheable", "blocks"), [(0, 0), (3, 0), (4, 1), (11, 2), (99, 3)])
def test_only_the_first_tokens_are_cacheable(pool, cacheable, blocks):
    pool.compute(range(13), cacheable_tokens=cacheable)
    assert len(pool.kv.cache) == blocks
    assert pool.cached_tokens(range(13)) == 4 * blocks


def test_a_lookup_stops_at_the_cacheable_length_too(pool):
    pool.compute(range(13))
    assert pool.cached_tokens(range(13), cacheable_tokens=8) == 8


def test_other_key_fields_share_nothing(pool):
    pool.compute(range(9), key_fields=(("salt", "a"),))
    assert pool.cached_tokens(range(9), key_fields=(("salt", "b"),)) == 0
    assert pool.cached_tokens(range(9), key_fields=(("salt", "a"),)) == 8


def test_a_hash_that_always_collides_gives_misses_and_no_wrong_hit():
    pool = Pool(num_blocks=12, hash_function=lambda data: b"same")
    pool.compute(range(9))
    assert pool.cached_tokens(range(9)) == 4, "its first block came first"
    assert pool.cached_tokens(range(50, 59)) == 0
    assert pool.cached_tokens([*range(4, 8), 1]) == 0
    other = pool.compute(range(50, 59))
    assert not other.may_publish
    assert pool.cached_tokens(range(50, 59)) == 0
    pool.check()


def test_a_collision_between_chains_is_told_apart_by_the_parent():
    # Hash only the tokens, as an unchained key would: the middle of one prompt collides with
    # the start of another.
    pool = Pool(num_blocks=12, hash_function=lambda data: data[-16:])
    pool.compute([9, 9, 9, 9, 5, 6, 7, 8, 1])
    assert pool.cached_tokens([5, 6, 7, 8, 1]) == 0
    assert pool.cached_tokens([9, 9, 9, 9, 5, 6, 7, 8, 1]) == 8
    pool.check()


def test_a_collision_between_key_fields_is_told_apart():
    pool = Pool(hash_function=lambda data: data[-16:])
    pool.compute(range(9), key_fields=(("adapter", "a"),))
    assert pool.cached_tokens(range(9), key_fields=(("adapter", "b"),)) == 0


LAST_TOKEN = [lambda data: data[-4:], lambda data: data[-4]]  # as bytes, and as an int


@pytest.mark.parametrize("hash_function", LAST_TOKEN)
def test_a_child_of_another_block_with_an_equal_hash_is_no_hit(hash_function):
    pool = Pool(num_blocks=12, hash_function=hash_function)
    pool.free(pool.compute([1, 1, 1, 9, 5, 5, 5, 5, 0]))
    assert pool.cached_tokens([2, 2, 2, 9, 5, 5, 5, 5, 0]) == 0
    assert pool.cached_tokens([1, 1, 1, 9, 5, 5, 5, 5, 0]) == 8
    other = pool.compute([2, 2, 2, 9, 5, 5, 5, 5, 0])
    assert not other.may_publish
    assert pool.cached_tokens([2, 2, 2, 9, 5, 5, 5, 5, 0]) == 0
    pool.free(other)
    pool.check()


@pytest.mark.parametrize("hash_function", LAST_TOKEN)
def test_a_remembered_hit_is_not_taken_for_the_child_of_another_parent(hash_function):
    # The remembered blocks are forgotten, and filled again by a chain whose first block has the
    # same hash and whose second one therefore has the same content, name by name.
    pool = Pool(num_blocks=3, hash_function=hash_function)
    first = pool.compute([1, 1, 1, 9, 5, 5, 5, 5, 0])
    remembered = first.block_table[:2]
    pool.free(first)
    waiting = pool.sequence([1, 1, 1, 9, 5, 5, 5, 5, 0])
    assert pool.kv.match(waiting).hits == remembered
    content = pool.kv.cache.at(remembered[1])
    for _ in range(2):  # the second time, the blocks come in the order of the first
        assert pool.kv.reset()
        other = pool.compute([2, 2, 2, 9, 5, 5, 5, 5, 0])
        table = other.block_table[:2]
        pool.free(other)
    assert table == remembered
    assert pool.kv.cache.at(remembered[1]) == content
    assert pool.kv.match(waiting).hits == []
    pool.check()


def test_a_failed_step_gives_its_new_blocks_back(pool):
    sequence = pool.compute(range(6))
    assert pool.kv.allocate(sequence, 7, [])
    assert len(sequence.block_table) == 4
    pool.kv.roll_back(sequence)
    assert len(sequence.block_table) == 2
    assert pool.kv.num_in_use == 2


def test_a_failed_first_step_keeps_the_hits_and_nothing_else(pool):
    pool.free(pool.compute(range(9)))
    sequence = pool.sequence([*range(8), 77, 78])
    assert pool.kv.allocate(sequence, 2, pool.kv.match(sequence).hits)
    pool.holders.append(sequence)
    pool.kv.roll_back(sequence)
    assert sequence.block_table == [0, 1]
    assert sequence.num_computed_tokens == 8


def test_reset_forgets_everything_and_says_so():
    pool = Pool()
    pool.free(pool.compute(range(9)))
    assert pool.kv.reset() is True
    assert pool.cached_tokens(range(9)) == 0
    assert pool.kv.blocks.num_free == 8


def test_reset_with_a_live_sequence_does_nothing_and_says_so(pool):
    pool.compute(range(9))
    assert pool.kv.reset() is False
    assert pool.cached_tokens(range(9)) == 8


def test_a_remembered_lookup_notices_that_its_blocks_are_gone():
    pool = Pool(num_blocks=4)
    pool.free(pool.compute(range(12)))
    waiting = pool.sequence(range(13))
    assert len(pool.kv.match(waiting).hits) == 3
    pool.free(pool.compute(range(50, 60)))  # takes 1 free block, evicts 2
    hits = pool.kv.match(waiting).hits
    assert hits == [0]
    assert pool.kv.reset()
    assert pool.kv.match(waiting).hits == []
    # Another chain in the same block is not mistaken for the old one.
    pool.free(pool.compute(range(70, 83)))
    assert pool.kv.match(waiting).hits == []
