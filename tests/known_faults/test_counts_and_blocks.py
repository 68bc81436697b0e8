"""Known faults of block accounting: counts, refusals, evictions. On the KV cache alone.

Block size 16 and cap 1.0 unless a test says otherwise. 48 common tokens are three full blocks.
"""

import pytest

from tests.known_faults.on_engine import alone, make_engine
from tests.known_faults.on_kv_cache import OFF, Pool
from tests.known_faults.texts import COMMON, text
from tests.model_free import params, run


def test_a_shared_prefix_is_counted_once_and_given_back_whole():
    """Known fault 1: shared blocks were counted as new ones, so the pool seemed fuller than it was.

    Blocks of A, B and C in a pool of 10; hits are in brackets:

        A   48 common + 7   ceil(55/16) = 4         usable 10 - 4 = 6
        B   48 common + 5   ceil(53/16) = 4 (3)     usable  6 - 1 = 5
        both finish                                 usable 10, 3 of them cached
        C   48 common + 6   ceil(54/16) = 4 (3)     usable 10 - 4 = 6
    """
    pool = Pool(10)
    a = pool.prefill(COMMON + text(1, 7))
    assert (len(a.block_table), pool.num_published(a)) == (4, 3)
    b = pool.prefill(COMMON + text(2, 5))
    assert b.num_cached_tokens == 48
    assert len(set(b.block_table) - set(a.block_table)) == 1
    assert pool.usable == 5
    pool.finish(a, b)
    assert pool.usable == 10
    c = pool.prefill(COMMON + text(3, 6))
    assert c.num_cached_tokens == 48
    assert pool.usable == 6


@pytest.mark.parametrize(
    ("steps", "num_blocks", "num_published"),
    [([4], 4, 3), ([19], 5, 4), ([4, 19], 5, 4), ([1] * 19, 5, 4)],
    ids=["4 more", "19 more", "4, then 19 more", "19 more, one by one"],
)
def test_several_tokens_in_one_step_take_and_publish_the_right_blocks(
    steps, num_blocks, num_published
):
    """Known fault 3: growth was counted as if one step brought one token.

    tokens           55   55 + 4 = 59   55 + 19 = 74   59 + 19 = 78
    blocks            4             4              5              5
    full, published   3             3              4              4
    """
    pool = Pool(10)
    a = pool.prefill(text(0, 55))
    assert (len(a.block_table), pool.num_published(a)) == (4, 3)
    generated = iter(text(1, 30))
    for num_tokens in steps:
        assert pool.grow(a, [next(generated) for _ in range(num_tokens)])
    assert len(a.block_table) == num_blocks
    assert pool.num_published(a) == num_published
    assert pool.usable == 10 - num_blocks


def test_with_the_cache_off_nothing_is_hit_and_freed_blocks_are_used_again():
    """Known fault 4: with the cache off, blocks were still hashed, found, and not given back."""
    pool = Pool(4, block_size=4, enable_prefix_caching=False)
    first = pool.prefill(text(0, 10), **OFF)
    assert len(first.block_table) == 3
    pool.finish(first)
    assert pool.kv.blocks.num_free == 4
    second = pool.prefill(text(0, 16), **OFF)
    assert second.num_cached_tokens == 0
    assert len(second.block_table) == 4
    assert pool.num_published(second) == 0
    before = pool.state()
    assert not pool.grow(second, text(1, 4))
    assert pool.state() == before


def test_an_engine_with_the_cache_off_neither_reads_nor_writes_it():
    """Known fault 4, through the engine: its switch gives each request the policy used above."""
    engine = make_engine(16, enable_prefix_caching=False)
    for name in ("first", "second"):
        engine.add_request(name, list(range(10)), params(1))
        (sequence,) = engine.scheduler.waiting
        assert {"read": sequence.policy.read, "write": sequence.policy.write} == OFF
        output = run(engine)[name, 0]
        assert output.num_cached_tokens == 0
        assert output.token_ids == alone(list(range(10)), 1)
    assert engine.stats()["blocks_free"] == 16


def test_a_refused_allocation_leaves_ref_counts_and_lru_order_as_they_were():
    """Known fault 6: a refused request had referenced its hits already, or made them young.

    10 blocks: A holds 3 (the common 48), B's other 3 are cached and idle, C holds 2, 2 are free.
    D has 9 blocks and hits 6. Its 3 missing ones seem to fit into 2 free + 3 idle, but all
    idle ones are its own hits.
    """
    pool = Pool(10)
    pool.prefill(COMMON)
    pool.finish(pool.prefill(COMMON * 2))
    pool.prefill(text(1, 32))
    assert pool.usable == 5
    d = pool.sequence(COMMON * 3)
    assert pool.cached_tokens(d) == 96
    before = pool.state()
    assert not pool.allocate(d)
    assert pool.state() == before
    assert d.block_table == []
    assert d.num_computed_tokens == 0


def test_a_reset_with_live_sequences_changes_nothing_and_one_without_forgets_all():
    """Known fault 7: a reset threw away blocks that live sequences still read."""
    pool = Pool(10)
    a = pool.prefill(COMMON + text(1, 7))
    b = pool.prefill(COMMON + text(2, 5))
    pool.finish(pool.prefill(text(3, 40)))
    before = pool.state()
    assert pool.kv.reset() is False
    assert pool.state() == before
    pool.finish(a)
    before = pool.state()
    assert pool.kv.reset() is False, "B still lives"
    assert pool.state() == before
    pool.finish(b)
    assert pool.kv.reset() is True
    pool.check()
    assert [pool.lookup([*tokens, 9]) for tokens in (COMMON, text(3, 40))] == [0, 0]
    assert pool.kv.blocks.num_free == 10


def test_a_repeated_prompt_as_large_as_the_pool_evicts_its_own_old_tail():
    """Known fault 15: the planner counted idle hits as free, and the allocator found none.

    3 blocks, all idle, [b0 b1 b2] = the prompt. At most (48 - 1) // 16 = 2 may be hit, which
    leaves one block to take: b2, evicted first because the tail was released first.
    """
    pool = Pool(3)
    first = pool.prefill(COMMON)
    *head, tail = first.block_table
    pool.finish(first)
    assert pool.kv.cache.lru_order()[0] == tail
    one_more = pool.sequence([*COMMON[:32], *text(1, 17)])
    before = pool.state()
    assert not pool.allocate(one_more), "2 hits and 2 more blocks are 4 of 3"
    assert pool.state() == before
    second = pool.sequence(COMMON)
    assert pool.allocate(second)
    assert second.num_cached_tokens == 32
    assert second.block_table == [*head, tail]
    assert pool.metrics.evicted_blocks == 1
    assert pool.kv.cache.at(tail) is None, "what was evicted cannot be found until it is written"
    pool.commit(second)
    assert pool.num_published(second) == 3


def test_a_pool_of_one_prompt_serves_it_twice():
    """Known fault 15, through the engine: max_tokens = 1, so 3 blocks hold all that is computed."""
    engine = make_engine(3)
    for num_cached, num_evicted in ((0, 0), (32, 1)):
        engine.add_request("a", COMMON, params(1))
        output = run(engine)["a", 0]
        assert output.num_cached_tokens == num_cached
        assert output.token_ids == alone(COMMON, 1)
        assert engine.stats()["evicted_blocks"] == num_evicted


def test_hits_at_the_head_of_the_eviction_order_are_not_evicted_for_their_own_request():
    """Known fault 16: making room evicted a hit, and gave its block to the same table again.

    10 blocks: 3 of the common prefix (idle, the oldest), 5 of another prompt (idle), 2 free.
    48 + 112 tokens hit 3 and need 7 more: all the others, each once.
    """
    pool = Pool(10)
    old = pool.prefill(COMMON)
    common = list(old.block_table)
    pool.finish(old)
    pool.finish(pool.prefill(text(1, 80)))
    assert sorted(pool.kv.cache.lru_order()[:3]) == sorted(common)
    assert pool.kv.blocks.num_free == 2
    wide = pool.prefill(COMMON + text(2, 112))
    assert wide.num_cached_tokens == 48
    assert wide.block_table[:3] == common
    assert sorted(wide.block_table) == list(range(10)), "each block exactly once"
    assert pool.metrics.evicted_blocks == 5
    assert pool.usable == 0
