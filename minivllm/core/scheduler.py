"""Who runs, how many tokens, who is preempted.

One token budget a step, charged in this order, each group by arrival:

    1. decodes            one token each: a running output never stalls (I12)
    2. running prefills   as much of the rest as fits
    3. waiting            while there is budget, a free seat, and room for the whole prompt

Block size 4, budget 8, prompts A = 6 tokens and B = 9 tokens, three free seats:

    step   charged              [start, end)         then
    1      A 6, B 2             A [0,6)  B [0,2)     A has 7 tokens, B is in its prefill
    2      A 1, B 7             A [6,7)  B [2,9)     A 8, B 10
    3      A 1, B 1             A [7,8)  B [9,10)    A 9, B 11

Whoever cannot get a block preempts the newest running sequence, perhaps itself. The victim
keeps its tokens, loses its blocks, and waits at the place its arrival gives it.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from minivllm.config import EngineConfig
from minivllm.core.batch import SampledToken, ScheduledBatch, ScheduledSequence
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.sequence import Sequence, SequenceState
from minivllm.core.trace import Trace

_by_arrival = attrgetter("arrival")
_is_decoding = attrgetter("is_decoding")


class Scheduler:
    """Waiting and running sequences, each list in order of arrival, and the finished ones.

    schedule() decides a step, then exactly one of commit() and roll_back() ends it. Between them
    `scheduled` maps each sequence of the step to the tokens it computes; `budget_left` is what
    the step may still charge.
    """

    def __init__(self, kv: KVCache, config: EngineConfig, metrics: Metrics, trace: Trace) -> None:
        self.kv = kv
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.metrics = metrics
        self._trace = trace
        self._budget = config.max_num_batched_tokens
        # More seats than budget would leave a decoding sequence without its token (I12).
        self._max_running = min(config.max_num_seqs, self._budget)
        self._max_chunk = min(config.max_prefill_chunk or self._budget, self._budget)
        self.scheduled: dict[Sequence, int] = {}
        self.budget_left = self._budget

    # From outside

    def add(self, sequence: Sequence) -> None:
        """Let `sequence` wait for its turn. Its arrival number is the highest so far."""
        self._trace.record("add", sequence)
        insort(self.waiting, sequence, key=_by_arrival)

    def finish(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """End a waiting or running sequence now, and let go of its blocks."""
        was = self.waiting if sequence.state is SequenceState.WAITING else self.running
        del was[bisect_left(was, sequence.arrival, key=_by_arrival)]
        self.kv.free(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        sequence.error = error
        self._trace.record("abort" if reason == "abort" else "finish", sequence, reason=reason)
        self.finished.append(sequence)

    def schedule(self) -> ScheduledBatch:
        """Decide what to compute now. Empty only if nothing is left that could be computed."""
        self.scheduled = {}
        self.budget_left = self._budget
        num_preemptions = self.metrics.preemptions
        # Decodes, then prefills: sorting keeps each group in order of arrival.
        for sequence in sorted(self.running, key=_is_decoding, reverse=True):
            if sequence.state is SequenceState.RUNNING:  # not preempted by one before it
                self._schedule_running(sequence)
        if self.metrics.preemptions == num_preemptions:
            self._admit_waiting()
        self._trace.record("step", scheduler=self)
        return ScheduledBatch([_scheduled(*item) for item in self.scheduled.items()])

    def commit(self, sampled: list[SampledToken]) -> list[Sequence]:
        """Take over the results of the step; return the sequences that gained a token.

        `sampled` has one token for each sequence whose newest token was computed, in order.
        The caller ends those that have come to a stop with finish().
        """
        tokens = iter(sampled)
        advanced = []
        for sequence, num_tokens in self.scheduled.items():
            start = sequence.num_computed_tokens
            end = start + num_tokens
            self.kv.commit(sequence, end)
            num_prompt_tokens = min(end, sequence.num_prompt_tokens) - start
            self.metrics.prompt_tokens_computed += max(0, num_prompt_tokens)
            if end == sequence.num_tokens:
                token = next(tokens)
                sequence.token_ids.append(token.token_id)
                if token.logprobs is not None:
                    sequence.logprobs.append(token.logprobs)
                advanced.append(sequence)
        self.metrics.generated_tokens += len(advanced)
        self.metrics.steps += 1
        self.scheduled = {}
        return advanced

    def roll_back(self) -> None:
        """Undo the step: nothing was computed. Whoever was admitted stays, with its hits."""
        for sequence in reversed(self.scheduled):
            self.kv.roll_back(sequence)
        self.scheduled = {}

    # One step

    def _schedule_running(self, sequence: Sequence) -> None:
        """Charge a running sequence, and preempt from the newest on until it has its blocks."""
        wanted = min(sequence.num_tokens - sequence.num_computed_tokens, self._max_chunk)
        if self.budget_left == 0:
            return
        # A preemption gives budget back, so what can be charged is worked out after each.
        while not self.kv.allocate(sequence, num_tokens := min(wanted, self.budget_left), []):
            self._trace.record("refuse", sequence, num_new_tokens=num_tokens)
            if len(self.running) == 1:
                self.finish(sequence, "error", self._outgrown(sequence))
                return
            if self._preempt_newest() is sequence:
                return
        self._charge(sequence, num_tokens)

    def _charge(self, sequence: Sequence, num_tokens: int) -> None:
        self.scheduled[sequence] = num_tokens
        self.budget_left -= num_tokens

    def _preempt_newest(self) -> Sequence:
        """Take all blocks from a running sequence; it will recompute what the cache lost."""
        sequence = self.running.pop()
        self.budget_left += self.scheduled.pop(sequence, 0)
        self.kv.free(sequence)
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_by_arrival)
        self.metrics.preemptions += 1
        self._trace.record("preempt", sequence, num_tokens=sequence.num_tokens)
        return sequence

    def _admit_waiting(self) -> None:
        """Admit from the front, passing over those whose prefix is being computed right now."""
        passed_over = []
        num_seen = 0
        for sequence in self.waiting:
            if len(self.running) >= self._max_running or self.budget_left == 0:
                break
            match = self.kv.match(sequence)
            self._trace.record("match", sequence, num_tokens=sequence.num_tokens, blocks=match.hits)
            if match.in_flight:
                passed_over.append(sequence)
                self._trace.record("pass_over", sequence)
            elif not self._admit(sequence, match.hits):
                break
            num_seen += 1
        self.waiting[:num_seen] = passed_over

    def _admit(self, sequence: Sequence, hits: list[int]) -> bool:
        """Give a waiting sequence its hits and the blocks of its first chunk.

        Only if the pool has room for all of it, as far as it is known: a long prompt that is
        let in for its first chunk would soon preempt itself.
        """
        num_cached = len(hits) * self.kv.block_size
        wanted = sequence.num_tokens - num_cached
        num_tokens = min(wanted, self.budget_left, self._max_chunk)
        if not self.kv.can_allocate(sequence, wanted, hits):
            self._trace.record("refuse", sequence, num_new_tokens=wanted)
            return False
        self.kv.allocate(sequence, num_tokens, hits)
        self._count_lookup(sequence, num_cached)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_by_arrival)
        self._charge(sequence, num_tokens)
        return True

    def _count_lookup(self, sequence: Sequence, num_cached: int) -> None:
        """Count one admission's lookup: its request's first one, or one after a preemption."""
        is_first = sequence.num_cached_tokens is None
        if is_first:
            sequence.num_cached_tokens = num_cached
        if sequence.policy.read and not is_first:
            self.metrics.resumed_query_tokens += sequence.num_tokens
            self.metrics.resumed_hit_tokens += num_cached
        elif sequence.policy.read and sequence.index == 0:
            self.metrics.prefix_queries += 1
            self.metrics.prefix_query_tokens += sequence.num_tokens
            self.metrics.prefix_hit_tokens += num_cached

    def _outgrown(self, sequence: Sequence) -> str:
        size, pool = self.kv.block_size, self.kv.num_blocks
        grown = f"the sequence has grown to {sequence.num_tokens:,} tokens"
        holds = f"the pool holds {pool:,} blocks x {size} = {pool * size:,}"
        return f"{grown}; {holds}: raise num_kv_blocks or lower max_tokens"


def _scheduled(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    """What the runner gets to see of `sequence`: positions [computed, computed + num_tokens)."""
    start = sequence.num_computed_tokens
    return ScheduledSequence(
        request_id=sequence.request_id,
        token_ids=sequence.token_ids,
        start=start,
        end=start + num_tokens,
        block_table=sequence.block_table,
        params=sequence.params,
        key_fields=sequence.policy.key_fields,
        index=sequence.index,
        num_prompt_tokens=sequence.num_prompt_tokens,
        prompt_logprobs=sequence.prompt_logprobs,
    )
