"""I1 to I12, checked around every call and after every step of an engine.

invariants.py checks what one moment shows of the pool, the tables and the queues. What needs the
content of blocks, or two moments, is checked here, against a naive model that shares no code with
`core`: which contexts are cached, how many blocks are there to be had, what each output must be.

    I1 I2 I5 I10   invariants.py, and the arithmetic of each allocation
    I3 I4 I8       oracle.py, in each step         I6 I7   contents of all cached blocks; each match
    I9             around each allocation          I11 I12 around each step
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from minivllm.core.batch import ScheduledBatch, ScheduledSequence
from minivllm.core.block_keys import TOKEN_BYTES, BlockKeyChain
from minivllm.core.invariants import check_between_steps
from minivllm.core.kv_cache import Match
from minivllm.core.sequence import Sequence
from minivllm.engine import LLMEngine
from minivllm.output import RequestOutput
from tests.proof.oracle import Broken, HistoryRunner
from tests.proof.situations import Situations

Name = tuple[str, int]


@dataclass(slots=True)
class Expected:
    """One output as it must become: known when its request is added."""

    prompt: list[int]
    tokens: list[int]
    reason: str
    num_tokens: int = 0  # generated so far
    is_aborted: bool = False

    @property
    def text(self) -> list[int]:
        """Prompt and output as far as it has come."""
        return self.prompt + self.tokens[: self.num_tokens]


@dataclass(frozen=True, eq=False, slots=True)
class Published:
    """One publication of a block: what its slots must hold. The same block again is another one."""

    block: int
    contexts: list[int]


@dataclass(slots=True)
class Moment:
    """What is remembered of the moment before a step."""

    running: list[tuple[Sequence, int, bool]]  # and its tokens, and whether it decodes
    num_computed: int
    num_steps: int
    cached: set[Published]


def blocks_needed(num_tokens: int, block_size: int) -> int:
    return (num_tokens + block_size - 1) // block_size


def name_of(sequence: Sequence) -> Name:
    return sequence.request_id, sequence.index


class CacheChecks:
    """Checks around each match and each allocation, and of what all cached blocks hold."""

    def __init__(self, engine: LLMEngine, runner: HistoryRunner, situations: Situations) -> None:
        kv = self.kv = engine.kv
        self._running = engine.scheduler.running
        self._max_idle = int(engine.config.prefix_cache_max_share * kv.num_blocks)
        # Where keys collide, others may be waited for, too: only slower.
        self._is_exact = engine.config.hash_function is None
        self.runner = runner
        self._note = situations.note
        self._situations = situations
        self._published: dict[int, Published] = {}
        self._is_allocating = False
        self._match, kv.match = kv.match, self.match
        self._allocate, kv.allocate = kv.allocate, self.allocate
        self._can_allocate, kv.can_allocate = kv.can_allocate, self.can_allocate
        self._publish, kv.cache.publish = kv.cache.publish, self.publish

    def cached(self) -> list[Published]:
        """All that is cached, by block id."""
        at = self.kv.cache.at
        return [self._published[b] for b in range(self.kv.num_blocks) if at(b) is not None]

    def check_contents(self) -> None:
        """I6, I7: each cached block holds all of the KV that its key and its parents promise.

        Section 6: no more of them are idle than the cap allows.
        """
        num_idle = self.kv.cache.num_idle
        if num_idle > self._max_idle:
            raise Broken(
                f"section 6: {num_idle} cached blocks are idle, the cap is {self._max_idle}"
            )
        for cached in self.cached():
            self._check_content(cached)

    def check_own_chain(self, sequence: Sequence) -> None:
        """I7: the cached head of a table is exactly the sequence's own tokens and key fields."""
        own, size = self._own_contexts(sequence), self.kv.block_size
        for i, block in enumerate(sequence.block_table[: sequence.num_published_blocks], 1):
            self._check_hit(sequence, block, own[i * size - 1])

    def match(self, sequence: Sequence) -> Match:
        """I7, I8: what is found is exactly the longest cached prefix that may be found."""
        found = self._match(sequence)
        size, own = self.kv.block_size, self._own_contexts(sequence)
        if len(found.hits) * size > sequence.num_tokens - 1:
            matched = f"{len(found.hits) * size} of {sequence.num_tokens} tokens"
            raise Broken(f"I8: {sequence.name} matches {matched}: nothing is left to compute")
        cached = {each.contexts[-1]: each.block for each in self.cached()}
        for i, block in enumerate(found.hits, 1):
            self._check_hit(sequence, block, own[i * size - 1])
            if cached.get(own[i * size - 1]) != block:
                raise Broken(f"I6: {sequence.name} finds block {block}, which was evicted")
        num_cached = 0
        while num_cached < len(own) // size and own[(num_cached + 1) * size - 1] in cached:
            num_cached += 1
        policy = sequence.policy
        limit = min(sequence.num_tokens - 1, _or(policy.cacheable_tokens, len(own))) // size
        expected = min(limit, num_cached) if policy.read else 0
        if len(found.hits) != expected:
            cached_length = f"{expected} blocks of its prefix are cached"
            raise Broken(f"section 6: {sequence.name} finds {len(found.hits)}; {cached_length}")
        leaders = self._leaders_of(sequence, own, expected) if expected < limit else []
        if self._is_exact and policy.read and found.in_flight != bool(leaders):
            computed = f"block {expected} of its prefix is being computed by {leaders}"
            raise Broken(f"section 6: {sequence.name} waits: {found.in_flight}, but {computed}")
        self._note_match(sequence, expected, num_cached)
        return found

    def _leaders_of(self, sequence: Sequence, own: list[int], index: int) -> list[str]:
        """Who runs, and will publish the block that this sequence has as its index-th."""
        end = (index + 1) * self.kv.block_size
        return [
            other.name
            for other in self._running
            if other.policy.write
            and end <= min(other.num_tokens, _or(other.policy.cacheable_tokens, end))
            and self._own_contexts(other)[end - 1] == own[end - 1]
        ]

    def can_allocate(self, sequence: Sequence, num_new_tokens: int, hits: list[int]) -> bool:
        """I1: yes exactly if the blocks are there. I9: asking changes nothing."""
        if self._is_allocating:
            return self._can_allocate(sequence, num_new_tokens, hits)
        kv, before = self.kv, self._state(sequence)
        idle = set(kv.cache.lru_order()) - set(hits)
        end = sequence.num_computed_tokens + len(hits) * kv.block_size + num_new_tokens
        held = len(sequence.block_table) + len(hits)
        missing = blocks_needed(end, kv.block_size) - held
        usable = len(kv.blocks.free_order()) + len(idle)
        answer = self._can_allocate(sequence, num_new_tokens, hits)
        if self._state(sequence) != before:
            raise Broken(f"I9: asking for {missing} blocks for {sequence.name} changed the pool")
        if answer != (missing <= usable):
            there = f"{sequence.name} needs {missing} blocks, {usable} are usable"
            raise Broken(f"I1: {there}; the answer is {answer}")
        return answer

    def allocate(self, sequence: Sequence, num_new_tokens: int, hits: list[int]) -> bool:
        """I9: a refusal changes nothing. I5: a grant gives the table its length."""
        if num_new_tokens < 1:
            raise Broken(f"I8: {sequence.name} is charged {num_new_tokens} tokens")
        expected = self.can_allocate(sequence, num_new_tokens, hits)
        before = self._state(sequence)
        self._is_allocating = self._situations.is_making_room = True
        done = self._allocate(sequence, num_new_tokens, hits)
        self._is_allocating = self._situations.is_making_room = False
        if done != expected:
            raise Broken(f"I9: planner says {expected}, allocator {done} for {sequence.name}")
        if not done and self._state(sequence) != before:
            raise Broken(f"I9: the refusal of {sequence.name} changed the pool")
        end = sequence.num_computed_tokens + num_new_tokens
        if done and len(sequence.block_table) != blocks_needed(end, self.kv.block_size):
            table = f"has the table {sequence.block_table} for [0, {end})"
            raise Broken(f"I5: {sequence.name} {table}")
        return done

    def publish(self, blocks: list[int], keys: BlockKeyChain, first: int) -> int:
        """I6: what becomes findable is written at this very moment."""
        num_new, size = self._publish(blocks, keys, first), self.kv.block_size
        if num_new < len(blocks):
            self._note("hash collision")
        contexts = self._contexts_of_chain(keys)
        for i, block in enumerate(blocks[:num_new], first):
            self._published[block] = Published(block, contexts[i * size : (i + 1) * size])
            self._check_content(self._published[block])
        return num_new

    def _contexts_of_chain(self, keys: BlockKeyChain) -> list[int]:
        """What the chain stands for: its key fields, and the tokens of all of its blocks."""
        width = self.kv.block_size * TOKEN_BYTES
        # The bytes are the repr of the fields; the oracle knows them by it.
        root = self.runner.contexts.root(keys.contents[0][:-width].decode(), self.runner.weights)
        tokens = b"".join(content[-width:] for content in keys.contents)
        return self.runner.contexts.walk(root, memoryview(tokens).cast("i"))

    def _check_content(self, cached: Published) -> None:
        wanted, found = cached.contexts, self.runner.blocks[cached.block]
        if found != wanted:
            i = next(i for i, context in enumerate(wanted) if context != found[i])
            describe = self.runner.contexts.describe
            raise Broken(
                f"I6: block {cached.block} is findable as {describe(wanted[-1])},"
                f" but its slot {i} holds {describe(found[i])}"
            )

    def _state(self, sequence: Sequence) -> tuple[Any, ...]:
        """Everything that a refused allocation must leave alone."""
        kv = self.kv
        return (
            kv.blocks.ref_counts[:],
            kv.blocks.free_order(),
            kv.cache.lru_order(),
            len(kv.cache),
            dict(kv.in_flight._leaders),
            sequence.block_table[:],
            sequence.num_published_blocks,
            sequence.num_computed_tokens,
        )

    def _own_contexts(self, sequence: Sequence) -> list[int]:
        fields = sequence.policy.key_fields
        return self.runner.contexts_of(name_of(sequence), sequence.token_ids, fields)

    def _check_hit(self, sequence: Sequence, block: int, own: int) -> None:
        cached = self._published.get(block)
        if cached is None:
            raise Broken(f"I7: {sequence.name} takes block {block}, which was never published")
        if cached.contexts[-1] != own:
            describe = self.runner.contexts.describe
            takes = f"{sequence.name} takes block {block}, cached as"
            key = describe(cached.contexts[-1])
            raise Broken(f"I7: {takes} {key}; it needs {describe(own)}")

    def _note_match(self, sequence: Sequence, num_hits: int, num_cached: int) -> None:
        size, num_tokens = self.kv.block_size, sequence.num_tokens
        if not sequence.policy.read:
            if num_cached:
                self._note("prefix cached, but the request does not read")
        elif num_cached * size == num_tokens and num_hits == num_cached - 1:
            self._note("whole prompt cached, its last block computed again")
        elif num_cached > num_hits:
            self._note("prefix cached beyond the cacheable tokens")
        elif num_cached == 0 and self._is_cached_for_others(sequence):
            self._note("prefix cached, but under another salt or key field")

    def _is_cached_for_others(self, sequence: Sequence) -> bool:
        kv, width = self.kv, self.kv.block_size * TOKEN_BYTES
        contents = [kv.cache.at(block) for block in range(kv.num_blocks)]
        heads = [content for content in contents if content and content.startswith(b"(")]
        own = sequence.keys.contents[:1]
        return any(head[-width:] == first[-width:] for head in heads for first in own)


class StepChecks:
    """Checks around each step: what was scheduled, who advanced, and that nobody is lost.

    expected   by name, each output that has not been returned as finished
    counted    what the engine's counters must say, counted from outside
    texts      prompts and outputs of those that have ended
    """

    def __init__(self, engine: LLMEngine, cache: CacheChecks, situations: Situations) -> None:
        self.engine = engine
        self.expected: dict[Name, Expected] = {}
        self.counted: Counter[str] = Counter()
        self.texts: list[list[int]] = []
        self._cache = cache
        self._situations = situations
        self._num_prompt: dict[str, int] = {}
        self._admitted: set[Sequence] = set()
        budget, chunk = engine.config.max_num_batched_tokens, engine.config.max_prefill_chunk
        self._budget = budget
        self._seats = min(engine.config.max_num_seqs, budget)
        self._chunk = min(chunk or budget, budget)
        self._schedule = engine.scheduler.schedule
        engine.scheduler.schedule = self.schedule

    def expect(self, name: Name, expected: Expected) -> None:
        """A request was added: from now on this output must not be lost."""
        self.expected[name] = expected
        self._num_prompt[name[0]] = len(expected.prompt)

    # Between steps

    def check(self) -> None:
        """What holds whenever nobody is in the middle of a call."""
        scheduler = self.engine.scheduler
        self._cache.check_contents()
        for sequence in scheduler.running:
            self._cache.check_own_chain(sequence)
        check_between_steps(scheduler)
        unfinished = [*scheduler.waiting, *scheduler.running]
        names = [name_of(sequence) for sequence in [*unfinished, *scheduler.finished]]
        if len(names) != len(self.expected) or set(names) != self.expected.keys():
            queued = f"the queues hold {sorted(names)}"
            raise Broken(f"I10: {queued}; not returned are {sorted(self.expected)}")
        for sequence in unfinished:
            expected = self.expected[name_of(sequence)].text
            if sequence.token_ids != expected:
                raise Broken(f"I10: {sequence.name} is {sequence.token_ids}, not {expected}")
        gone = [s.name for s in self._leaders() if s not in scheduler.running]
        if gone:
            raise Broken(f"I11: others wait for blocks of {gone}, which do not run")

    def check_end(self) -> None:
        """Everything was returned; every block is free or only cached; the counters add up."""
        engine = self.engine
        if self.expected:
            raise Broken(f"I10: never returned: {sorted(self.expected)}")
        if engine.kv.num_in_use:
            raise Broken(f"I1: {engine.kv.num_in_use} blocks are in use after the last request")
        if self._leaders():
            raise Broken("I11: blocks are announced as under way after the last request")
        stats, counts = engine.stats(), self._situations.counts
        self.counted["preemptions"] = counts["preemption"]
        evicted = counts["eviction to make room"] + counts["eviction to keep the cap"]
        self.counted["evicted_blocks"] = evicted
        wrong = {
            name: f"{stats[name]}, but there were {count}"
            for name, count in self.counted.items()
            if stats[name] != count
        }
        if wrong:
            raise Broken(f"I10: counted wrongly: {wrong}")
        if not engine.reset_prefix_cache() or engine.kv.blocks.num_free != engine.kv.num_blocks:
            raise Broken("I1: after the last request and a reset, not every block is free")

    def _leaders(self) -> set[Sequence]:
        return set(self.engine.kv.in_flight._leaders)

    # Around a step

    def before_step(self) -> Moment:
        """Remember what after_step() and after_failure() compare with."""
        self._situations.begin_step()
        return Moment(
            running=[(s, s.num_tokens, _decodes(s)) for s in self.engine.scheduler.running],
            num_computed=self._cache.runner.num_computed,
            num_steps=self.engine.metrics.steps,
            cached=set(self._cache.cached()),
        )

    def schedule(self) -> ScheduledBatch:
        """Section 6: the budget, the seats, the order, and no share that is left unused."""
        scheduler = self.engine.scheduler
        before = set(scheduler.running)
        num_preemptions = self._situations.counts["preemption"]
        batch = self._schedule()
        running = scheduler.running
        if batch.num_tokens > self._budget:
            raise Broken(f"section 6: {batch.num_tokens} tokens in a step, budget {self._budget}")
        if len(running) > self._seats:
            raise Broken(f"section 6: {len(running)} run on {self._seats} seats")
        admitted = [sequence for sequence in running if sequence not in before]
        has_preempted = self._situations.counts["preemption"] > num_preemptions
        if admitted and has_preempted:
            raise Broken(f"section 6: {admitted[0].name} is admitted in a step that preempted")
        shares = {(share.request_id, share.index): share for share in batch.sequences}
        left = self._budget - batch.num_tokens
        for sequence in running:
            self._check_share(sequence, shares.get(name_of(sequence)), left)
        for sequence in admitted:
            self._count_admission(sequence, shares[name_of(sequence)].start)
        if not has_preempted and left and len(running) < self._seats:
            self._check_nobody_waits_in_vain()
        return batch

    def _check_share(self, sequence: Sequence, share: ScheduledSequence | None, left: int) -> None:
        num_tokens = share.end - share.start if share else 0
        if num_tokens > self._chunk:
            most = f"max_prefill_chunk is {self._chunk}"
            raise Broken(f"section 6: {sequence.name} computes {num_tokens} tokens, {most}")
        remaining = sequence.num_tokens - sequence.num_computed_tokens - num_tokens
        if remaining and left and num_tokens < self._chunk:
            unused = f"{left} tokens of the budget are left"
            raise Broken(f"section 6: {sequence.name} could compute {remaining} more, {unused}")

    def _check_nobody_waits_in_vain(self) -> None:
        """Seats and budget are left: the first who waits for no prefix was refused by the pool."""
        situations = self._situations
        fronts = [s for s in self.engine.scheduler.waiting if s not in situations.waits]
        if fronts and situations.refused is not fronts[0]:
            raise Broken(f"section 6: {fronts[0].name} waits before a free seat, not refused")

    def _count_admission(self, sequence: Sequence, num_cached: int) -> None:
        is_first = sequence not in self._admitted
        self._admitted.add(sequence)
        if not sequence.policy.read or (is_first and sequence.index > 0):
            return
        kind = "prefix" if is_first else "resumed"
        self.counted[f"{kind}_query_tokens"] += sequence.num_tokens
        self.counted[f"{kind}_hit_tokens"] += num_cached

    def after_step(self, moment: Moment, outputs: list[RequestOutput]) -> None:
        """I10, I11, I12 of a step that succeeded, and each of its outputs."""
        if len({(output.request_id, output.index) for output in outputs}) != len(outputs):
            raise Broken(f"I10: a step returned an output twice: {outputs}")
        runner = self._cache.runner
        has_computed = runner.num_computed > moment.num_computed
        if not has_computed and not any(output.finished for output in outputs):
            raise Broken("I11: a step computed nothing and ended nothing")
        if has_computed:
            for request_id, _, start, end, _ in runner.batches[-1]:
                num_prompt_tokens = min(end, self._num_prompt[request_id]) - start
                self.counted["prompt_tokens_computed"] += max(0, num_prompt_tokens)
        still_running = set(self.engine.scheduler.running)
        for sequence, num_tokens, decodes in moment.running:
            if decodes and sequence in still_running and sequence.num_tokens != num_tokens + 1:
                raise Broken(f"I12: {sequence.name} decodes, and gained no token in this step")
        for output in outputs:
            self._check_output(output)

    def after_failure(self, moment: Moment) -> None:
        """A failed step leaves everything as if it had not been tried."""
        if self.engine.metrics.steps != moment.num_steps:
            raise Broken("section 6: a failed step is counted")
        new = sorted(each.block for each in set(self._cache.cached()) - moment.cached)
        if new:
            raise Broken(f"I6: a failed step published the blocks {new}")

    def _check_output(self, output: RequestOutput) -> None:
        name = output.request_id, output.index
        expected = self.expected.get(name)
        if expected is None:
            raise Broken(f"I10: {name} is returned, but is not live")
        num_gained = len(output.token_ids) - expected.num_tokens
        if output.token_ids != expected.tokens[: len(output.token_ids)] or num_gained not in (0, 1):
            said = f"{output.token_ids} after {expected.num_tokens} tokens"
            raise Broken(f"I4: {name} says {said}; any right engine says {expected.tokens}")
        if output.num_cached_tokens >= len(expected.prompt):
            raise Broken(f"I8: {name} reports {output.num_cached_tokens} cached tokens: all")
        self.counted["generated_tokens"] += num_gained
        expected.num_tokens += num_gained
        if output.finish_reason is not None:
            del self.expected[name]
            self.texts.append(expected.text)
        self._check_reason(output, expected)

    def _check_reason(self, output: RequestOutput, expected: Expected) -> None:
        """I10: an output ends when and why it must, and neither sooner nor later."""
        is_whole = expected.num_tokens == len(expected.tokens)
        reason = output.finish_reason
        if reason == "error":
            room = self.engine.kv.num_blocks * self.engine.kv.block_size
            is_right = len(expected.text) > room and f"{room:,}" in str(output.error)
        elif reason == "abort":
            is_right = expected.is_aborted
        else:
            is_right = is_whole == (reason is not None) and reason in (None, expected.reason)
        if not is_right:
            must = f"{expected.reason} after {expected.tokens}"
            raise Broken(f"I10: {output.request_id} ends by {output}; it must end by {must}")


def _decodes(sequence: Sequence) -> bool:
    """All but the newest token is computed, and that one was generated."""
    num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
    return num_output_tokens > 0 and sequence.num_computed_tokens == len(sequence.token_ids) - 1


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
