"""Given: whole workloads for chapter 7's scheduler, and what its attention should give."""

import itertools
from typing import Any

import torch

from chapters.ch08_proof.slots import Slots


def next_token(token_ids: list[int]) -> int:
    """A model: its choice depends on every token."""
    return sum(token * (i % 5 + 1) for i, token in enumerate(token_ids)) % 3 + 1


class EngineUse:
    """Serves (step of arrival, prompt) pairs, three tokens each. A subclass says what must hold.

    ch01, ch06, ch07   the stages' modules
    budget, seats      most tokens a step, most sequences that run at a time
    """

    ch01: Any
    ch06: Any
    ch07: Any

    def __init__(self, num_blocks: int, budget: int, seats: int) -> None:
        self.budget = budget
        self.seats = seats
        self.pool = self.ch06.CachingBlockManager(num_blocks, block_size=4)
        self.scheduler = self.ch07.Scheduler(self.pool, budget, seats, max_model_len=24)
        self.slots = Slots(self.pool)
        self.num_computed = 0

    def check_scheduled(self, scheduled: list[Any]) -> None:
        """A step is decided, and nothing of it computed: what must hold of its ranges."""

    def serve(self, arriving: list[Any]) -> int:
        """Run to the end; the number of positions that were computed."""
        scheduler = self.scheduler
        sequences = [
            self.ch01.Sequence(f"r{i}", prompt, self.ch01.SamplingParams(max_tokens=3))
            for i, (_, prompt) in enumerate(arriving)
        ]
        last = max(arrival for arrival, _ in arriving)
        for step in itertools.count():
            for sequence, (arrival, _) in zip(sequences, arriving, strict=True):
                if arrival == step:
                    scheduler.add(sequence)
            if scheduler.waiting or scheduler.running:
                self._step()
            elif step > last:
                break
        check_outputs(scheduler, sequences)
        return self.num_computed

    @classmethod
    def play_rare_cases(cls) -> None:
        """What chance seldom brings, once."""
        turns = [list(range(n)) for n in (4, 8, 12, 16)]
        # Two turns of one conversation at once: they share more than the block that is cached.
        cls(6, 24, 3).serve([(0, turns[0]), (2, turns[1]), (2, turns[2])])
        # Equal prompts of one block: neither may use it, for one token must be computed.
        cls(6, 24, 2).serve([(1, turns[0]), (1, turns[0])])
        # A prompt of 16 tokens, 12 of them cached, beside one of 12: 16 are left to compute.
        cls(16, 24, 3).serve([(0, turns[2] + [1]), (5, [7] * 12), (5, turns[3])])
        # Who waits for a prefix is passed over, and comes first again in the next step.
        cls(6, 24, 3).serve([(0, turns[0]), (0, turns[1]), (0, [0])])
        one = (0, [0])
        cls(6, 24, 2).serve([one, one, one, one, (0, turns[0]), (0, turns[1]), one, one])
        # The pool has room for the new blocks only if the hits are not counted among them.
        cls(6, 24, 5).serve([one, one, one, one, (0, [0, *[1] * 7])])

    def _step(self) -> None:
        scheduler = self.scheduler
        decoding = [sequence for sequence in scheduler.running if sequence.is_decoding]
        waiting, preemptions = list(scheduler.waiting), scheduler.preemptions
        scheduled = scheduler.schedule()
        assert scheduled, "I11: a step without work"
        budget_left = self.budget - sum(end - start for _, start, end in scheduled)
        check_queues(scheduler, decoding, scheduled, budget_left, self.seats)
        # In a step that preempted somebody nobody is admitted: there is nothing to compare.
        if scheduler.preemptions == preemptions:
            check_admission(scheduler, waiting, budget_left, self.seats)
        self.check_scheduled(scheduled)
        for sequence, start, end in scheduled:
            self.slots.write(sequence, start, end)
        for sequence, start, end in scheduled:
            self.slots.check_read(sequence, end)
            self.num_computed += end - start
        scheduler.commit(scheduled, [next_token(s.token_ids) for s, _, _ in scheduled])


def check_queues(
    scheduler: Any, decoding: list[Any], scheduled: list[Any], budget_left: int, seats: int
) -> None:
    """Within budget and seats, in order of arrival, and who decodes gains a token (I12)."""
    assert budget_left >= 0, "over the budget"
    assert len(scheduler.running) <= seats, "more run than there are seats"
    for queue in (scheduler.waiting, scheduler.running):
        arrivals = [sequence.arrival for sequence in queue]
        assert arrivals == sorted(arrivals), f"out of the order of arrival: {arrivals}"
    now = [sequence for sequence, _, _ in scheduled]
    lost = [s.request_id for s in decoding if s in scheduler.running and s not in now]
    assert not lost, f"I12: {lost} decode, but gain no token"


def check_outputs(scheduler: Any, sequences: list[Any]) -> None:
    """Everybody ended once (I10), with the tokens it would have given alone."""
    finished = sorted(sequence.request_id for sequence in scheduler.finished)
    assert finished == sorted(s.request_id for s in sequences), "I10: lost, or ended twice"
    for sequence in sequences:
        alone = sequence.token_ids[: sequence.num_prompt_tokens]
        for _ in range(3):
            alone.append(next_token(alone))
        assert sequence.token_ids == alone, f"not as alone: {sequence.token_ids}"


def check_admission(scheduler: Any, waiting: list[Any], budget_left: int, seats: int) -> None:
    """Of those who waited before the step, exactly the right ones run now.

    Only who would find its next block after this step is passed over; else nobody is overtaken,
    and the first one left behind did not fit.
    """
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


class AttentionCase:
    """Eleven positions in a shuffled table over a cache full of NaN; six heads on two KV heads.

    query      [11, 6, 8]
    cache      two of [5, 4, 2, 8]: keys and values, written in the table's slots only
    table      [3] int64
    expected   [11, 6, 8]: each row attends to the keys 0 up to its own position
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.query = torch.randn(11, 6, 8, generator=generator)
        written = torch.randn(2, 11, 2, 8, generator=generator)
        self.table = torch.tensor([3, 0, 4])
        self.cache = torch.full((2, 5, 4, 2, 8), float("nan"))
        slots = [int(self.table[p // 4]) * 4 + p % 4 for p in range(11)]
        self.cache.flatten(1, 2)[:, slots] = written
        keys, values = written.repeat_interleave(3, dim=2)
        rows = []
        for position in range(11):
            seen = slice(position + 1)
            scores = torch.einsum("hd,khd->hk", self.query[position], keys[seen]) * 8**-0.5
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values[seen]))
        self.expected = torch.stack(rows)
