"""Any order of adding, stepping, failing, aborting and resetting keeps every invariant.

Hypothesis drives the real engine with a runner that knows what each slot must hold
(tests/model_free.py). After each action the pool, the tables and the queues are checked; each
finished output must be what an engine without a cache would have generated.
"""

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.core.invariants import check_between_steps
from minivllm.core.sequence import SequenceState
from minivllm.errors import InvalidRequestError, RunnerError
from tests.model_free import HistoryRunner, greedy, make_engine, params

# Few tokens and few openings: prompts often share a prefix, often end at a block's edge.
OPENINGS = [[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
tails = st.lists(st.integers(1, 3), max_size=14)
prompts = st.builds(lambda opening, tail: opening + tail, st.sampled_from(OPENINGS), tails)


def pool_state(kv, sequences):
    """Everything that a refused allocation must leave alone (I9)."""
    return (
        list(kv.blocks.ref_counts),
        kv.blocks.free_order(),
        kv.cache.lru_order(),
        [(list(s.block_table), s.num_published_blocks, s.num_computed_tokens) for s in sequences],
    )


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_kv_blocks=st.integers(4, 12),
        budget=st.integers(1, 20),
        max_num_seqs=st.integers(1, 6),
        chunk=st.sampled_from([None, 1, 3, 8]),
        share=st.sampled_from([0.0, 0.3, 1.0]),
        caching=st.sampled_from([True, True, True, False]),
        weak_hash=st.sampled_from([None, None, lambda data: b"", lambda data: data[-4:]]),
    )
    def start(
        self, block_size, num_kv_blocks, budget, max_num_seqs, chunk, share, caching, weak_hash
    ):
        self.runner = HistoryRunner()
        self.engine = make_engine(
            self.runner,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_prefill_chunk=chunk,
            prefix_cache_max_share=share,
            enable_prefix_caching=caching,
            hash_function=weak_hash,
            debug_checks=False,
        )
        self.seats = min(max_num_seqs, budget)
        self.live = {}
        self.num_added = 0
        self.texts = [[1, 2, 3, 4]]
        self._watch_refusals()

    def _watch_refusals(self):
        kv, allocate = self.engine.kv, self.engine.kv.allocate

        def checked(sequence, num_new_tokens, hits):
            sequences = [*self.engine.scheduler.running, sequence]
            before = pool_state(kv, sequences)
            done = allocate(sequence, num_new_tokens, hits)
            assert done or pool_state(kv, sequences) == before, "I9: a refusal changed something"
            return done

        kv.allocate = checked

    @rule(
        prompt=prompts,
        max_tokens=st.sampled_from([1, 2, 5, 12, 30]),
        n=st.sampled_from([1, 1, 1, 3]),
        salt=st.sampled_from([None, None, "a"]),
        read=st.sampled_from([True, True, False]),
        write=st.sampled_from([True, True, False]),
        cacheable=st.sampled_from([None, None, 0, 5]),
    )
    def add(self, prompt, max_tokens, n, salt, read, write, cacheable):
        name = f"r{self.num_added}"
        try:
            self.engine.add_request(
                name,
                prompt,
                params(max_tokens, n=n),
                cache_salt=salt,
                cache_read=read,
                cache_write=write,
                cacheable_tokens=cacheable,
            )
        except InvalidRequestError:
            room = self.engine.kv.num_blocks * self.engine.kv.block_size
            assert not prompt or len(prompt) > room
            return
        self.num_added += 1
        for index in range(n):
            self.live[name, index] = (prompt, max_tokens)

    @rule(choice=st.integers(0, 9), tail=st.lists(st.integers(1, 3), max_size=9))
    def continue_an_earlier_text(self, choice, tail):
        text = self.texts[choice % len(self.texts)]
        self.add(text + tail, 2, n=1, salt=None, read=True, write=True, cacheable=None)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self._step()

    def _step(self):
        if not self.live:
            assert self.engine.step() == []
            return
        before = {s: (s.num_tokens, s.is_decoding) for s in self.engine.scheduler.running}
        preemptions = self.engine.metrics.preemptions
        waiting = set(self.engine.scheduler.waiting)
        num_computed = self.runner.num_computed
        lengths = {s: s.num_tokens for s in self._unfinished()}
        outputs = self.engine.step()
        for sequence, num_tokens in lengths.items():
            assert sequence.num_tokens >= num_tokens, "I10: a sampled token was lost"
        progress = self.runner.num_computed > num_computed or any(o.finished for o in outputs)
        assert progress, "I11: neither computed nor finished anything"
        for sequence, (num_tokens, was_decoding) in before.items():
            if was_decoding and sequence.state is SequenceState.RUNNING:
                assert sequence.num_tokens == num_tokens + 1, "I12: a decode did not advance"
        if self.engine.metrics.preemptions > preemptions:
            event("preempted")
            assert waiting <= set(self.engine.scheduler.waiting), "admitted after a preemption"
        self._check_outputs(outputs)

    @rule(error=st.sampled_from([ValueError("no memory"), KeyboardInterrupt()]))
    def fail(self, error):
        self.runner.fail_next = error
        tokens = {s: list(s.token_ids) for s in self._unfinished()}
        num_cached = len(self.engine.kv.cache)
        evicted = self.engine.metrics.evicted_blocks
        try:
            outputs = self.engine.step()
        except (RunnerError, KeyboardInterrupt):
            event("failed")
            for sequence in self._unfinished():
                assert sequence.token_ids == tokens[sequence], "a failed step gave a token"
            published = len(self.engine.kv.cache) - num_cached
            assert published == evicted - self.engine.metrics.evicted_blocks, (
                "I6: a failed step published"
            )
        else:  # nothing was computed in this step, so nothing failed
            self.runner.fail_next = None
            self._check_outputs(outputs)

    @rule(choice=st.integers(0, 9))
    def abort(self, choice):
        if choice >= len(self.live):
            return
        name, _ = sorted(self.live)[choice]
        self.engine.abort(name)
        assert not [s for s in self._unfinished() if s.request_id == name]

    @rule()
    def reset(self):
        in_use = self.engine.kv.num_in_use
        assert self.engine.reset_prefix_cache() is (in_use == 0)
        if in_use == 0:
            assert self.engine.kv.blocks.num_free == self.engine.kv.num_blocks

    @invariant()
    def pool_tables_and_queues_are_right(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        check_between_steps(scheduler)
        assert len(scheduler.running) <= self.seats
        known = [*scheduler.waiting, *scheduler.running, *scheduler.finished]
        names = sorted((s.request_id, s.index) for s in known)
        assert names == sorted(self.live), "I10: a sequence was lost or doubled"
        leaders = {id(s) for s in self.engine.kv.in_flight._leaders}
        assert leaders <= {id(s) for s in scheduler.running}, "somebody waits for no one"

    def _unfinished(self):
        return [*self.engine.scheduler.waiting, *self.engine.scheduler.running]

    def _check_outputs(self, outputs):
        for output in outputs:
            prompt, max_tokens = self.live[output.request_id, output.index]
            expected = greedy(prompt, len(output.token_ids))
            assert output.token_ids == expected, "a wrong token"
            assert output.num_cached_tokens < len(prompt), "I8: nothing left to compute"
            assert output.num_cached_tokens % self.engine.kv.block_size == 0
            if output.finished:
                del self.live[output.request_id, output.index]
                event(f"finished: {output.finish_reason}")
                self.texts.append(prompt + output.token_ids)
            if output.finish_reason == "length":
                assert len(output.token_ids) == max_tokens
            if output.finish_reason == "error":
                room = self.engine.kv.num_blocks * self.engine.kv.block_size
                assert len(prompt) + len(output.token_ids) > room
                assert f"{room:,}" in output.error

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(2_000):
            if not self.engine.has_unfinished_requests():
                break
            self._check_outputs(self.engine.step())
        assert not self.live, "I11: requests never end"
        assert self.engine.kv.num_in_use == 0
        stats = self.engine.stats()
        assert stats["prefix_hit_tokens"] <= stats["prefix_query_tokens"]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
