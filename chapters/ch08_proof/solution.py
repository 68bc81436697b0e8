"""Chapter 8. Tests that know when the engine is wrong.

Each of the three functions `..._is_right` is one test. It gets `stages`, the code of all chapters,
in which one file may be a wrong answer to chapter 3, 6 or 7. On right code it returns; on wrong
code it raises, an AssertionError that names the invariant if it can.

    pool_is_right     random use of chapter 3's pool           must fail on chapter 3's mutants
    cache_is_right    random use of chapter 6's cache          must fail on chapter 6's
    engine_is_right   whole workloads, cold against warm       must fail on chapter 7's

A test of outputs alone would pass on most of them. So slots remember what was written to them.
Given are slots.py, search.py, and the random use of a cache and of an engine: cache_use.py and
engine_use.py. The use of a pool is yours to write, and all that must hold.
"""

from collections import Counter
from typing import Any

import torch
from hypothesis import given, stateful
from hypothesis import strategies as st

from chapters.ch08_proof.cache_use import CacheUse
from chapters.ch08_proof.engine_use import AttentionCase, EngineUse
from chapters.ch08_proof.search import PROMPTS, SEARCH
from chapters.ch08_proof.slots import Slots, refused, state


def check_counts(pool: Any, sequences: list[Any], cached: set[int]) -> None:
    """I1 and I2: every block counts its holders, and is free exactly if it has none.

    cached   blocks that the prefix cache holds; empty for a pool without one
    """
    # task 8.1
    holders = Counter(block for sequence in sequences for block in sequence.block_table)
    holders.update(cached)
    for block, count in enumerate(pool.ref_counts):
        assert count == holders[block], f"I2: block {block} counts {count}, not {holders[block]}"
    free = [block for block in range(pool.num_blocks) if holders[block] == 0]
    assert sorted(pool.free_order()) == free, f"I1: free is {pool.free_order()}, unheld {free}"
    # end of task


def pool_is_right(stages: Any) -> None:
    """Test chapter 3's BlockManager under random use."""
    # task 8.1
    ch01, ch03 = stages.load("ch01_sequence"), stages.load("ch03_block_manager")

    class Pool(stateful.RuleBasedStateMachine):
        @stateful.initialize(num_blocks=st.integers(1, 6), block_size=st.integers(1, 4))
        def make(self, num_blocks: int, block_size: int) -> None:
            self.pool = ch03.BlockManager(num_blocks, block_size)
            self.sequences: list[Any] = []

        def refused(self, action: Any, *arguments: Any) -> bool:
            look = lambda: state(self.pool, self.sequences)  # noqa: E731
            return refused(ch03.BlockError, lambda: action(*arguments), look)

        @stateful.rule(num_tokens=st.integers(1, 12))
        def add(self, num_tokens: int) -> None:
            self.sequences.append(ch01.Sequence(f"r{len(self.sequences)}", [7] * num_tokens))
            self.compute(len(self.sequences) - 1, num_tokens)

        @stateful.rule(which=st.integers(0, 5), num_tokens=st.integers(1, 6))
        def compute(self, which: int, num_tokens: int) -> None:
            if which >= len(self.sequences):
                return
            sequence = self.sequences[which]
            end = sequence.num_computed_tokens + num_tokens
            missing = -(-end // self.pool.block_size) - len(sequence.block_table)
            fits = missing <= self.pool.num_free
            assert self.pool.can_allocate(sequence, num_tokens) == fits, f"{missing} are missing"
            assert self.refused(self.pool.allocate, sequence, num_tokens) != fits
            if fits:
                sequence.token_ids += [7] * (end - sequence.num_tokens)
                self.pool.commit(sequence, end)

        @stateful.rule(which=st.integers(0, 5))
        def free(self, which: int) -> None:
            if which < len(self.sequences):
                self.pool.free(self.sequences[which])
                assert self.sequences.pop(which).block_table == [], "a freed table is not empty"

        @stateful.rule()
        def take_until_empty_and_release(self) -> None:
            taken = [self.pool.take() for _ in range(self.pool.num_free)]
            assert len(set(taken)) == len(taken), f"I1: a block was handed out twice: {taken}"
            assert self.refused(self.pool.take), "take() from an empty pool"
            for block in taken:
                assert self.pool.ref_counts[block] == 1, f"I2: block {block} was just taken"
                self.pool.ref_counts[block] += 1  # a second holder, as chapter 6 will have
                assert self.pool.release(block) == 1
                assert block not in self.pool.free_order(), f"I2: block {block} has a holder"
                assert self.pool.release(block) == 0
                assert self.refused(self.pool.release, block), f"I2: block {block} released twice"

        @stateful.invariant()
        def everything_is_accounted_for(self) -> None:
            if not hasattr(self, "pool"):
                return
            check_counts(self.pool, self.sequences, set())
            size = self.pool.block_size
            for sequence in self.sequences:
                computed, table = sequence.num_computed_tokens, sequence.block_table
                assert len(table) == -(-computed // size), f"I5: {computed} computed, {table}"
                for start in range(min(computed, 6)):
                    slots = self.pool.slot_mapping(sequence, start, computed)
                    expected = [table[p // size] * size + p % size for p in range(start, computed)]
                    assert slots == expected, f"table {table}: {slots}, not {expected}"
                too_far = len(table) * size + 1
                assert self.refused(self.pool.slot_mapping, sequence, 0, too_far), "no such slot"

    stateful.run_state_machine_as_test(Pool, settings=SEARCH)
    # end of task


def cache_is_right(stages: Any) -> None:
    """Test chapter 6's CachingBlockManager under random use."""
    # task 8.2

    class Cache(CacheUse):
        ch01, ch06 = stages.load("ch01_sequence"), stages.load("ch06_prefix_cache")

        def __init__(self) -> None:
            super().__init__()
            self.contexts: dict[bytes, Any] = {}  # what each key was made from
            self.oldest_first: list[int] = []  # idle blocks as they should stand in the LRU order

        def check_hits(self, sequence: Any, hits: list[int]) -> None:
            size, published = self.pool.block_size, self.published().values()
            assert len(hits) * size < sequence.num_tokens, "I8: nothing is left to compute"
            for i, block in enumerate(hits):
                for offset, found in enumerate(self.slots.of_block(block)):
                    expected = Slots.context(sequence, i * size + offset)
                    assert found == expected, f"I7: block {block} holds {found}, not {expected}"
            after = (len(hits) + 1) * size - 1
            could = after < sequence.num_tokens - 1 and Slots.context(sequence, after) in published
            assert self.weak or not could, f"{len(hits)} blocks hit, the next is cached, too"
            assert list(self.pool.idle) == self.oldest_first, "I9: match changed the LRU order"
            keys = self.pool.keys(sequence)
            assert len(keys) == sequence.num_tokens // size, "a key for each full block"
            for i, key in enumerate([] if self.weak else keys):
                context = Slots.context(sequence, (i + 1) * size - 1)
                known = self.contexts.setdefault(key, context)
                assert known == context, f"I7: one key for {known} and {context}"

        def check_fit(self, sequence: Any, missing: int, hits: list[int]) -> None:
            room = self.pool.num_free + len(set(self.pool.idle) - set(hits))
            self.fits, self.before = missing <= room, state(self.pool, [*self.running, sequence])
            self.num_free = self.pool.num_free

        def check_allocated(self, sequence: Any, missing: int, hits: list[int], done: bool) -> None:
            assert done == self.fits, (
                f"{missing} blocks are missing: given {done}, fits {self.fits}"
            )
            if not done:
                now = state(self.pool, [*self.running, sequence])
                assert now == self.before, f"I9: a refusal changed {self.before} to {now}"
                return
            self.oldest_first = [b for b in self.oldest_first if b not in hits]
            del self.oldest_first[: max(0, missing - self.num_free)]
            assert list(self.pool.idle) == self.oldest_first, "LRU: the oldest, and no more"
            self.slots.check_read(sequence, sequence.num_computed_tokens)

        def check_committed(self, sequence: Any) -> None:
            end = sequence.num_computed_tokens
            self.slots.check_read(sequence, end)
            full = sequence.block_table[: end // self.pool.block_size]
            missed = [block for block in full if self.pool.cached_at(block) is None]
            assert self.weak or not missed, f"{full} are full, {missed} of them are not cached"
            # An equal block may have been idle, and is the sequence's now.
            self.oldest_first = [b for b in self.oldest_first if b not in sequence.block_table]

        def check_freed(self, only_cached: list[int]) -> None:
            self.oldest_first += only_cached
            del self.oldest_first[: max(0, len(self.oldest_first) - self.pool.max_num_idle)]
            assert list(self.pool.idle) == self.oldest_first, "LRU: the oldest beyond the cap"

        def check_reset(self, done: bool) -> None:
            assert done == (not self.running), "reset while in use, or not although nobody reads"
            self.oldest_first = [] if done else self.oldest_first
            assert list(self.pool.idle) == self.oldest_first, "reset: idle blocks"

        def check_everything(self) -> None:
            published = self.published()
            check_counts(self.pool, self.running, set(published))
            held = {block for sequence in self.running for block in sequence.block_table}
            assert set(self.pool.idle) == published.keys() - held, "I1: idle is cached and unheld"
            contents = list(published.values())
            assert None not in contents, "I6: a block is cached, but not written"
            assert len(set(contents)) == len(contents), "one content is cached in two blocks"
            for fields, tokens in contents:
                before = tokens[: -self.pool.block_size]
                assert not before or (fields, before) in contents, f"{tokens} without {before}"

    Cache.play_rare_cases()
    stateful.run_state_machine_as_test(Cache, settings=SEARCH)
    # end of task


def engine_is_right(stages: Any) -> None:
    """Test chapter 7's scheduler, batch and attention, over chapter 6's cache."""
    # task 8.3

    class Engine(EngineUse):
        ch01, ch06 = stages.load("ch01_sequence"), stages.load("ch06_prefix_cache")
        ch07 = stages.load("ch07_suffix_prefill")

        def check_scheduled(self, scheduled: Any) -> None:
            for sequence, start, _ in scheduled:
                assert start == sequence.num_computed_tokens, "I4: a gap, or computed twice"
            check_batch(self.ch07.build_batch(scheduled, self.pool), scheduled, self.pool)

    # The attention and a chunk, whose range ends before the last known token, come first: quick.
    case, chunk = AttentionCase(), Engine.ch01.Sequence("chunk", [5] * 10)
    for start in range(len(case.query)):
        rows = Engine.ch07.suffix_attention(case.query[start:], *case.cache, case.table, start)
        assert torch.allclose(rows, case.expected[start:], atol=1e-5), f"rows from {start} on"
    pool = Engine.ch06.CachingBlockManager(3, block_size=4)
    pool.allocate(chunk, 10)
    ranges = [Engine.ch07.ScheduledSequence(chunk, 4, 7)]
    check_batch(Engine.ch07.build_batch(ranges, pool), ranges, pool)
    # Together: the second waits a step and computes 2 of its 10 tokens; 2 more each while decoding.
    shared = [9, 9, 9, 9, 8, 8, 8, 8]
    computed = Engine(12, 24, 2).serve([(0, [*shared, 1, 1]), (0, [*shared, 2, 2])])
    assert computed == 10 + 2 + 2 + 2, f"a shared prefix of 8: {computed} computed, not 16"
    # The second prompt does not fit into what the first leaves of the budget; the third would.
    Engine(16, 24, 3).serve([(0, [1] * 20), (0, [2] * 10), (0, [3] * 2)])
    Engine.play_rare_cases()

    @SEARCH
    @given(
        arriving=st.lists(st.tuples(st.integers(0, 4), PROMPTS), min_size=3, max_size=9),
        num_blocks=st.integers(6, 16),
        seats=st.integers(1, 6),
    )
    def any_workload(arriving: list[Any], num_blocks: int, seats: int) -> None:
        Engine(num_blocks, 24, seats).serve(arriving)

    any_workload()
    # end of task


def check_batch(batch: Any, scheduled: list[Any], pool: Any) -> None:
    """Every row stands at its true position, and sees all of its context."""
    # task 8.3
    size, row = pool.block_size, 0
    for i, (sequence, start, end) in enumerate(scheduled):
        table = sequence.block_table
        rows = slice(row, row + end - start)
        assert batch.positions[rows].tolist() == list(range(start, end)), "positions"
        assert batch.token_ids[rows].tolist() == sequence.token_ids[start:end], "token ids"
        slots = [table[p // size] * size + p % size for p in range(start, end)]
        assert batch.slot_mapping[rows].tolist() == slots, "slots"
        assert batch.query_starts[i : i + 2].tolist() == [rows.start, rows.stop], "query starts"
        assert batch.context_lens[i].item() == end, "the last row sees [0, end)"
        assert batch.block_tables[i, : len(table)].tolist() == table, "block table"
        row = rows.stop
    assert len(batch.token_ids) == row, "rows that belong to nobody"
    # end of task
