"""Chapter 8. Tests that know when the engine is wrong.

Each of the three functions below is one test. It gets `stages`, the code of all chapters, in which
one file may be a wrong answer to chapter 3, 6 or 7. On right code it returns; on wrong code it
raises, an AssertionError that names the invariant if it can. It does not know which it has got.

    pool_is_right     random use of chapter 3's pool           must fail on chapter 3's mutants
    cache_is_right    random use of chapter 6's cache          must fail on chapter 6's
    engine_is_right   whole workloads, cold against warm       must fail on chapter 7's

A test of outputs alone would pass on most of them. So slots remember what was written to them.
"""

import itertools
from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

# The same examples every time; enough of them to find every mutant, few enough to wait for. On
# wrong code the first failure is enough: no time goes into making it shorter.
SEARCH = settings(
    max_examples=120,
    stateful_step_count=25,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

# Few tokens and common openings: prompts often share a prefix, and often end at a block's edge.
# 1 and 257 have the same last byte.
OPENINGS = st.sampled_from([[0], [0, 1, 2, 3], list(range(8)), list(range(12)), [0, 5, 6, 7]])
TAILS = st.one_of(st.just([]), st.lists(st.sampled_from([1, 2, 257]), max_size=8))
PROMPTS = st.builds(lambda opening, tail: opening + tail, OPENINGS, TAILS)


# Fields that look alike when they are written one after another.
FIELDS = st.sampled_from([("",), ("a", "b"), ("ab",)])


class Slots:
    """What stands in each slot of a pool: the context its KV was computed from, or None."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.contents: list[Any] = [None] * (pool.num_blocks * pool.block_size)

    @staticmethod
    def context(sequence: Any, position: int) -> Any:
        """All that the KV at `position` depends on."""
        return sequence.key_fields, tuple(sequence.token_ids[: position + 1])

    def of_block(self, block: int) -> list[Any]:
        """The contents of one block."""
        size = self.pool.block_size
        return self.contents[block * size : (block + 1) * size]

    def write(self, sequence: Any, start: int, end: int) -> None:
        """Compute the positions [start, end) into the blocks of its table."""
        for position in range(start, end):
            block = sequence.block_table[position // self.pool.block_size]
            assert self.pool.ref_counts[block] == 1, f"I3: wrote to block {block}, which is shared"
            slot = block * self.pool.block_size + position % self.pool.block_size
            self.contents[slot] = self.context(sequence, position)

    def check_read(self, sequence: Any, end: int) -> None:
        """I4: positions [0, end) hold what was computed from exactly these tokens."""
        for position in range(end):
            block = sequence.block_table[position // self.pool.block_size]
            found = self.of_block(block)[position % self.pool.block_size]
            assert found == self.context(sequence, position), (
                f"I4: {sequence.request_id} reads {found} at position {position}"
            )


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


def state(pool: Any, sequences: list[Any]) -> Any:
    """Everything that a refused allocation or a lookup must leave alone (I9)."""
    tables = [(list(s.block_table), s.num_computed_tokens) for s in sequences]
    idle = list(getattr(pool, "idle", ()))
    return list(pool.ref_counts), pool.free_order(), idle, tables


def pool_is_right(stages: Any) -> None:
    """Test chapter 3's BlockManager under random use."""
    # task 8.1
    ch01, ch03 = stages.load("ch01_sequence"), stages.load("ch03_block_manager")

    class Pool(RuleBasedStateMachine):
        @initialize(num_blocks=st.integers(1, 6), block_size=st.integers(1, 4))
        def make(self, num_blocks: int, block_size: int) -> None:
            self.pool = ch03.BlockManager(num_blocks, block_size)
            self.sequences: list[Any] = []

        def refused(self, action: Any, *arguments: Any) -> bool:
            before = state(self.pool, self.sequences)
            try:
                action(*arguments)
            except ch03.BlockError:
                assert state(self.pool, self.sequences) == before, "I9: a refusal changed something"
                return True
            return False

        @rule(num_tokens=st.integers(1, 12))
        def add(self, num_tokens: int) -> None:
            sequence = ch01.Sequence(f"r{len(self.sequences)}", [7] * num_tokens)
            self.sequences.append(sequence)
            self.compute(len(self.sequences) - 1, num_tokens)

        @rule(which=st.integers(0, 5), num_tokens=st.integers(1, 6))
        def compute(self, which: int, num_tokens: int) -> None:
            if which >= len(self.sequences):
                return
            sequence, size = self.sequences[which], self.pool.block_size
            end = sequence.num_computed_tokens + num_tokens
            missing = -(-end // size) - len(sequence.block_table)
            fits = missing <= self.pool.num_free
            assert self.pool.can_allocate(sequence, num_tokens) == fits, f"{missing} are missing"
            assert self.refused(self.pool.allocate, sequence, num_tokens) != fits
            if fits:
                sequence.token_ids += [7] * (end - sequence.num_tokens)
                self.pool.commit(sequence, end)

        @rule(which=st.integers(0, 5))
        def free(self, which: int) -> None:
            if which < len(self.sequences):
                self.pool.free(self.sequences[which])
                assert self.sequences.pop(which).block_table == [], "a freed table is not empty"

        @rule()
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

        @invariant()
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
                    positions = range(start, computed)
                    expected = [table[p // size] * size + p % size for p in positions]
                    assert slots == expected, f"table {table}: {slots}, not {expected}"
                too_far = len(table) * size + 1
                assert self.refused(self.pool.slot_mapping, sequence, 0, too_far), "no such slot"

    run_state_machine_as_test(Pool, settings=SEARCH)
    # end of task


def cache_is_right(stages: Any) -> None:
    """Test chapter 6's CachingBlockManager under random use."""
    # task 8.2
    ch01, ch06 = stages.load("ch01_sequence"), stages.load("ch06_prefix_cache")

    class Cache(RuleBasedStateMachine):
        @initialize(
            num_blocks=st.integers(2, 6),
            block_size=st.sampled_from([1, 2, 2, 3]),
            share=st.sampled_from([1.0, 1.0, 0.5, 0.2]),
            weak=st.booleans(),
        )
        def make(self, num_blocks: int, block_size: int, share: float, weak: bool) -> None:
            # A hash with two values collides all the time. It may cost hits, never a value.
            hashing = {"hash_function": lambda data: bytes([sum(data) % 2])} if weak else {}
            self.weak = weak
            self.pool = ch06.CachingBlockManager(num_blocks, block_size, share, **hashing)
            self.slots = Slots(self.pool)
            self.running: list[Any] = []
            self.texts: list[Any] = [([0, 257], ("",))]
            self.contexts: dict[bytes, Any] = {}  # what each key was made from
            self.oldest_first: list[int] = []  # idle blocks as they should stand in the LRU order

        def published(self) -> dict[int, Any]:
            """Block -> the context of its last slot, for every cached block."""
            blocks = range(self.pool.num_blocks)
            return {b: self.slots.of_block(b)[-1] for b in blocks if self.pool.cached_at(b)}

        @rule(prompt=PROMPTS, fields=FIELDS, chunk=st.sampled_from([99, 99, 1, 3]))
        def start(self, prompt: list[int], fields: Any, chunk: int) -> None:
            sequence = ch01.Sequence(f"r{len(self.texts)}", prompt, key_fields=fields)
            self.check_keys(sequence)
            before = state(self.pool, [*self.running, sequence])
            hits = self.pool.match(sequence)
            assert state(self.pool, [*self.running, sequence]) == before, "match changed something"
            self.check_hits(sequence, hits)
            num_new = min(chunk, sequence.num_tokens - len(hits) * self.pool.block_size)
            if self.allocate(sequence, num_new, hits):
                self.running.append(sequence)
                self.compute(sequence, num_new)

        @rule(which=st.integers(0, 9), more=st.lists(st.sampled_from([1, 257]), max_size=4))
        def continue_an_old_text(self, which: int, more: list[int]) -> None:
            text, fields = self.texts[which % len(self.texts)]
            self.start(text + more, fields, 99)

        def check_keys(self, sequence: Any) -> None:
            keys, size = self.pool.keys(sequence), self.pool.block_size
            assert len(keys) == sequence.num_tokens // size, "a key for each full block"
            for i, key in enumerate(keys if not self.weak else []):
                context = Slots.context(sequence, (i + 1) * size - 1)
                known = self.contexts.setdefault(key, context)
                assert known == context, f"I7: one key for {known} and {context}"

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

        def allocate(self, sequence: Any, num_new: int, hits: list[int]) -> bool:
            pool, everybody = self.pool, [*self.running, sequence]
            end = sequence.num_computed_tokens + len(hits) * pool.block_size + num_new
            missing = -(-end // pool.block_size) - len(sequence.block_table) - len(hits)
            fits = missing <= pool.num_free + len(set(pool.idle) - set(hits))
            assert pool.can_allocate(sequence, num_new, hits) == fits, f"{missing} are missing"
            before, table = state(pool, everybody), list(sequence.block_table)
            num_idle = len(set(pool.idle) - set(hits)) - max(0, missing - pool.num_free)
            self.oldest_first = [b for b in self.oldest_first if not (fits and b in hits)]
            try:
                pool.allocate(sequence, num_new, hits)
            except ch06.BlockError:
                assert not fits, "refused, although there is room"
                assert state(pool, everybody) == before, "I9: a refusal changed something"
                return False
            assert fits, "allowed, although there is no room"
            assert sequence.block_table[: len(table) + len(hits)] == table + hits
            assert len(pool.idle) == num_idle, "evicted more or less than was missing"
            self.slots.check_read(sequence, sequence.num_computed_tokens)
            return True

        def compute(self, sequence: Any, num_new: int) -> None:
            size, end = self.pool.block_size, sequence.num_computed_tokens + num_new
            assert len(sequence.block_table) * size >= end, "I5: no block for the newest token"
            self.slots.write(sequence, sequence.num_computed_tokens, end)
            self.pool.commit(sequence, end)
            # An equal block may have been idle, and is the sequence's now.
            held = sequence.block_table
            self.oldest_first = [block for block in self.oldest_first if block not in held]
            self.slots.check_read(sequence, end)
            published = list(self.published().values())
            assert len(set(published)) == len(published), "one content is cached in two blocks"
            full = sequence.block_table[: end // size]
            missed = [block for block in full if self.pool.cached_at(block) is None]
            assert self.weak or not missed, f"{full} are full, {missed} of them are not cached"

        @rule(which=st.integers(0, 5), token=st.integers(1, 2))
        def go_on(self, which: int, token: int) -> None:
            if not self.running:
                return
            sequence = self.running[which % len(self.running)]
            if sequence.num_computed_tokens == sequence.num_tokens:
                sequence.append_token(token)
            num_new = sequence.num_tokens - sequence.num_computed_tokens
            if self.allocate(sequence, num_new, []):
                self.compute(sequence, num_new)

        @rule(which=st.integers(0, 5))
        def free(self, which: int) -> None:
            if not self.running:
                return
            sequence = self.running.pop(which % len(self.running))
            self.texts.append((list(sequence.token_ids), sequence.key_fields))
            tail_first = sequence.block_table[::-1]
            held = {block for other in self.running for block in other.block_table}
            cached = self.published()
            self.oldest_first += [b for b in tail_first if b in cached and b not in held]
            self.pool.free(sequence)
            assert sequence.block_table == []
            stay = self.oldest_first[max(0, len(self.oldest_first) - self.pool.max_num_idle) :]
            assert list(self.pool.idle) == stay, f"idle {list(self.pool.idle)}, not {stay}"

        @rule()
        def reset(self) -> None:
            before = state(self.pool, self.running)
            assert self.pool.reset() == (not self.running)
            assert not self.running or state(self.pool, self.running) == before, "reset in use"
            assert self.running or self.pool.num_free == self.pool.num_blocks, "reset kept blocks"

        @invariant()
        def everything_is_accounted_for(self) -> None:
            if not hasattr(self, "pool"):
                return
            size, published = self.pool.block_size, self.published()
            check_counts(self.pool, self.running, set(published))
            held = {block for sequence in self.running for block in sequence.block_table}
            idle = list(self.pool.idle)
            assert set(idle) == published.keys() - held, "I1: idle is cached, and held by nobody"
            assert len(idle) <= self.pool.max_num_idle, "more is idle than the cap allows"
            # What was evicted since went from the oldest end.
            assert self.oldest_first[len(self.oldest_first) - len(idle) :] == idle, "LRU order"
            self.oldest_first = idle
            for block, content in published.items():
                assert content is not None, f"I6: block {block} is cached, but not written"
                fields, tokens = content
                before = (fields, tokens[:-size])
                assert len(tokens) == size or before in published.values(), (
                    f"block {block} is cached, the block before it is not"
                )

    # What chance seldom brings: the hits are the oldest idle blocks, and room must be made.
    cache = Cache()
    cache.make(num_blocks=4, block_size=2, share=1.0, weak=False)
    for prompt in ([1, 2, 3, 4], [5, 6, 7, 8]):
        cache.start(prompt, ("",), 99)
        cache.free(0)
    cache.start([1, 2, 3, 4, 9, 9, 9], ("",), 99)
    cache.everything_is_accounted_for()
    run_state_machine_as_test(Cache, settings=SEARCH)
    # end of task


def next_token(token_ids: list[int]) -> int:
    """A model: its choice depends on every token."""
    return sum(token * (i % 5 + 1) for i, token in enumerate(token_ids)) % 3 + 1


def engine_is_right(stages: Any) -> None:
    """Test chapter 7's scheduler, batch and attention, over chapter 6's cache."""
    # task 8.3
    ch01, ch06, ch07 = (
        stages.load(name) for name in ("ch01_sequence", "ch06_prefix_cache", "ch07_suffix_prefill")
    )

    def run(arriving: list[Any], num_blocks: int, budget: int, seats: int) -> int:
        """Serve (step of arrival, prompt) pairs; the number of positions that were computed."""
        pool = ch06.CachingBlockManager(num_blocks, block_size=4)
        scheduler = ch07.Scheduler(pool, budget, seats, max_model_len=24)
        slots, num_computed = Slots(pool), 0
        sequences = [
            ch01.Sequence(f"r{i}", prompt, ch01.SamplingParams(max_tokens=3))
            for i, (_, prompt) in enumerate(arriving)
        ]
        for step in itertools.count():
            for sequence, (arrival, _) in zip(sequences, arriving, strict=True):
                if arrival == step:
                    scheduler.add(sequence)
            if not scheduler.waiting and not scheduler.running:
                if step > max(arrival for arrival, _ in arriving):
                    break
                continue
            decoding = [s for s in scheduler.running if s.is_decoding]
            waiting, preemptions = list(scheduler.waiting), scheduler.preemptions
            scheduled = scheduler.schedule()
            assert scheduled, "I11: a step without work"
            budget_left = budget - sum(end - start for _, start, end in scheduled)
            assert budget_left >= 0, "over the budget"
            assert len(scheduler.running) <= seats, "more run than there are seats"
            for queue in (scheduler.waiting, scheduler.running):
                arrivals = [s.arrival for s in queue]
                assert arrivals == sorted(arrivals), f"out of the order of arrival: {arrivals}"
            if scheduler.preemptions == preemptions:
                check_admission(scheduler, waiting, budget_left, seats)
            now = [sequence for sequence, _, _ in scheduled]
            lost = [s.request_id for s in decoding if s in scheduler.running and s not in now]
            assert not lost, f"I12: {lost} decode, but gain no token"
            check_batch(ch07.build_batch(scheduled, pool), scheduled, pool)
            for sequence, start, end in scheduled:
                assert start == sequence.num_computed_tokens, "I4: a gap, or computed twice"
                slots.write(sequence, start, end)
            for sequence, start, end in scheduled:
                slots.check_read(sequence, end)
                num_computed += end - start
            scheduler.commit(scheduled, [next_token(s.token_ids) for s in now])
            check_counts(pool, scheduler.running, {b.block for b in pool.cached.values()})
        assert sorted(s.request_id for s in scheduler.finished) == sorted(
            s.request_id for s in sequences
        ), "I10: a request was lost, or finished twice"
        for sequence, (_, prompt) in zip(sequences, arriving, strict=True):
            alone = list(prompt)
            for _ in range(3):
                alone.append(next_token(alone))
            assert sequence.token_ids == alone, f"{prompt} became {sequence.token_ids}"
        return num_computed

    # The attention and a chunk, whose range ends before the last known token, come first: quick.
    check_attention(ch07.suffix_attention)
    pool, chunk = ch06.CachingBlockManager(3, block_size=4), ch01.Sequence("chunk", [5] * 10)
    pool.allocate(chunk, 10)
    ranges = [ch07.ScheduledSequence(chunk, 4, 7)]
    check_batch(ch07.build_batch(ranges, pool), ranges, pool)
    # Together: the second waits a step and computes 2 of its 10 tokens; 2 more each while decoding.
    shared = [9, 9, 9, 9, 8, 8, 8, 8]
    computed = run([(0, [*shared, 1, 1]), (0, [*shared, 2, 2])], num_blocks=12, budget=24, seats=2)
    assert computed == 10 + 2 + 2 + 2, f"a shared prefix of 8: {computed} computed, not 16"
    # The second prompt does not fit into what the first leaves of the budget; the third would.
    run([(0, [1] * 20), (0, [2] * 10), (0, [3] * 2)], num_blocks=16, budget=24, seats=3)

    @SEARCH
    @given(
        arriving=st.lists(st.tuples(st.integers(0, 4), PROMPTS), min_size=3, max_size=9),
        num_blocks=st.integers(6, 16),
        seats=st.integers(1, 6),
    )
    def any_workload(arriving: list[Any], num_blocks: int, seats: int) -> None:
        run(arriving, num_blocks, budget=24, seats=seats)

    any_workload()
    # end of task


def check_admission(scheduler: Any, waiting: list[Any], budget_left: int, seats: int) -> None:
    """Of those who waited before the step, exactly the right ones run now.

    Only who would find its next block after this step is passed over; else nobody is overtaken,
    and the first one left behind did not fit.
    """
    # task 8.3
    pool, size = scheduler.pool, scheduler.pool.block_size
    under_way: set[Any] = set()
    blocked = None
    for sequence in waiting:
        num_hits = len(pool.match(sequence))
        ends = range(num_hits * size + size - 1, sequence.num_tokens, size)
        blocks = [Slots.context(sequence, end) for end in ends]
        may_use_next = bool(blocks) and ends[0] < sequence.num_tokens - 1
        waits = may_use_next and blocks[0] in under_way
        if sequence in scheduler.running:
            assert not waits, f"{sequence.request_id} computes a block that is under way"
            assert blocked is None, f"{sequence.request_id} overtook {blocked}"
            under_way.update(blocks)
        elif not waits and blocked is None:
            blocked = sequence.request_id
            num_new = sequence.num_tokens - num_hits * size
            hits = pool.match(sequence)
            fits = num_new <= budget_left and pool.can_allocate(sequence, num_new, hits)
            assert not fits or len(scheduler.running) == seats, f"{blocked} waits, but would fit"
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


def check_attention(suffix_attention: Any) -> None:
    """A suffix over a cached prefix gives the last rows of a whole prefill, whatever the start."""
    # task 8.3
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_heads, num_kv_heads, head_dim, size = 11, 6, 2, 8, 4
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator)
    cache = torch.full((2, 5, size, num_kv_heads, head_dim), float("nan"))
    written = torch.randn(2, num_tokens, num_kv_heads, head_dim, generator=generator)
    table = torch.tensor([3, 0, 4])
    slots = [int(table[p // size]) * size + p % size for p in range(num_tokens)]
    cache.flatten(1, 2)[:, slots] = written
    keys, values = written.repeat_interleave(num_heads // num_kv_heads, dim=2)
    for start in range(num_tokens):
        rows = suffix_attention(query[start:], *cache, table, start)
        for i, position in enumerate(range(start, num_tokens)):
            scores = torch.einsum("hd,khd->hk", query[position], keys[: position + 1])
            weights = (scores * head_dim**-0.5).softmax(dim=-1)
            expected = torch.einsum("hk,khd->hd", weights, values[: position + 1])
            assert torch.allclose(rows[i], expected, atol=1e-5), f"start {start}: row {i} is wrong"
    # end of task
