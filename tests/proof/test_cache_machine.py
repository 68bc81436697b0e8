"""Block manager and prefix cache alone, any calls in any order, beside a naive model.

Hypothesis allocates, appends, writes and publishes, shares, releases, evicts, resets and looks
up. After each call the KV cache must be in exactly the state that the naive model predicts:
what is cached, where, who is evicted next. A failure prints the calls and the pool.
"""

import re

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from minivllm.config import EngineConfig
from minivllm.core.invariants import check_pool, check_table
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.prefix_cache import PrefixCache
from minivllm.core.sequence import CachePolicy, Sequence
from minivllm.core.trace import Trace
from minivllm.errors import MiniVLLMError
from minivllm.sampling_params import SamplingParams
from tests.proof.faults import FAULTS, Fault, planted
from tests.proof.naive import NaiveCache
from tests.proof.oracle import Broken
from tests.proof.picture import picture
from tests.proof.workloads import HASHES, hash_function

# Of two tokens, so that prefixes meet often.
choices = st.integers(0, 4)
tokens = st.lists(st.integers(1, 2), max_size=6)
OPENINGS = [[], [1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 1, 1, 1]]
prompts = st.builds(lambda opening, tail: [*opening, *tail, 2], st.sampled_from(OPENINGS), tokens)


class CacheMachine(RuleBasedStateMachine):
    """`naive` is the model; `live` are the sequences that hold blocks, by name.

    A sequence is allocated first: its new positions are in no state to be read. Then it is
    written and committed, or rolled back, before anything else is done to it.
    """

    @initialize(
        num_blocks=st.integers(2, 8),
        block_size=st.integers(1, 3),
        share=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
        hash_name=st.sampled_from([*HASHES, "xxhash"]),
    )
    def start(self, num_blocks, block_size, share, hash_name):
        config = EngineConfig(
            block_size=block_size,
            prefix_cache_max_share=share,
            hash_function=hash_function(hash_name),
        )
        self.kv = KVCache(num_blocks, config, Metrics(), Trace())
        self.naive = NaiveCache(num_blocks, block_size, int(share * num_blocks))
        self.live: dict[str, Sequence] = {}
        self.publishing: dict[str, bool] = {}
        self.num_made = 0

    # The calls

    @rule(
        prompt=prompts,
        salt=st.sampled_from("aab"),
        write=st.sampled_from([True, True, False]),
        chunk=st.sampled_from([99, 99, 1, 2, 3]),
    )
    def allocate(self, prompt, salt, write, chunk):
        """In one step, or `chunk` tokens first: then a block may be full of tokens and half KV."""
        policy = CachePolicy(write=write, key_fields=(("salt", salt),))
        self._start_sequence(prompt, policy, chunk)

    @rule(choice=choices, tail=tokens)
    def share(self, choice, tail):
        """Somebody asks what a live sequence asked, and something more."""
        if self.live:
            other = self._chosen(choice)
            self._start_sequence([*other.token_ids, *tail], other.policy)

    @rule(num_tokens=st.integers(1, 12))
    def evict(self, num_tokens):
        """Blocks for a sequence that takes no part in the cache, and lets go of them at once."""
        policy = CachePolicy(read=False, write=False, key_fields=(("salt", "none"),))
        name = self._start_sequence([1] * num_tokens, policy)
        if name is not None:
            self._free(name)

    @rule(choice=choices, token=st.integers(1, 2), succeeds=st.sampled_from([True, True, False]))
    def append(self, choice, token, succeeds):
        """A decode step, or one that fails."""
        if self.live:
            sequence = self._chosen(choice)
            sequence.token_ids.append(token)
            num_new_tokens = sequence.num_tokens - sequence.num_computed_tokens
            if self._allocate(sequence, num_new_tokens, []):
                self._end_step(sequence, num_new_tokens, succeeds)
            else:
                sequence.token_ids.pop()
            self._compare()

    @rule(choice=choices)
    def release(self, choice):
        if self.live:
            self._free(self._chosen(choice).name)

    @rule()
    def reset(self):
        in_use = len(self.naive.held())
        done = self.kv.reset()
        if done != (in_use == 0):
            self._fail(f"section 6: reset says {done}, {in_use} blocks are in use")
        if done:
            self.naive.reset()
        self._compare()

    @rule(prompt=prompts, salt=st.sampled_from("aab"))
    def lookup(self, prompt, salt):
        self._match(self._make(prompt, CachePolicy(key_fields=(("salt", salt),))))
        self._compare()

    # What the calls are made of

    def _chosen(self, choice):
        return list(self.live.values())[choice % len(self.live)]

    def _make(self, prompt, policy):
        self.num_made += 1
        return Sequence(
            request_id=f"s{self.num_made}",
            index=0,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(),
            policy=policy,
            keys=self.kv.new_keys(policy),
            arrival=self.num_made,
        )

    def _start_sequence(self, prompt, policy, chunk=99):
        """Look up, then allocate, write and commit; the name, or None if it was refused."""
        sequence = self._make(prompt, policy)
        hits = self._match(sequence)
        num_new_tokens = sequence.num_tokens - len(hits) * self.kv.block_size
        done = self._allocate(sequence, min(chunk, num_new_tokens), hits)
        if done:
            self.live[sequence.name] = sequence
            self.publishing[sequence.name] = policy.write
            self._end_step(sequence, min(chunk, num_new_tokens), True)
            num_left = sequence.num_tokens - sequence.num_computed_tokens
            if num_left > 0:
                self._compare()
                done = self._allocate(sequence, num_left, [])
                if done:
                    self._end_step(sequence, num_left, True)
                else:
                    self._free(sequence.name)
        self._compare()
        return sequence.name if done else None

    def _match(self, sequence):
        hits = self.kv.match(sequence).hits
        limit = (sequence.num_tokens - 1) // self.kv.block_size if sequence.policy.read else 0
        fields = repr(sequence.policy.key_fields)
        expected = self.naive.longest(fields, sequence.token_ids, limit)
        found = list(hits)
        if len(found) > limit:
            self._fail(f"I8: {sequence.token_ids} matches {found}: nothing is left to compute")
        if found != expected:
            self._fail(f"I7: {sequence.token_ids} finds blocks {found}, cached are {expected}")
        return hits

    def _allocate(self, sequence, num_new_tokens, hits):
        """Allocate in both, which must agree; True if it was granted."""
        naive, size = self.naive, self.kv.block_size
        end = sequence.num_computed_tokens + len(hits) * size + num_new_tokens
        num_missing = -(-end // size) - len(hits) - len(sequence.block_table)
        idle = set(naive.cached.values()) - naive.held() - set(hits)
        expected = num_missing <= len(naive.free()) + len(idle)
        before = list(sequence.block_table), self.kv.blocks.free_order()
        if self.kv.can_allocate(sequence, num_new_tokens, hits) != expected:
            usable = f"{len(naive.free())} free and {len(idle)} idle ones"
            self._fail(f"I1: {num_missing} blocks of {usable} are granted: {not expected}")
        done = self.kv.allocate(sequence, num_new_tokens, hits)
        if done != expected or (
            not done and before != (sequence.block_table, self.kv.blocks.free_order())
        ):
            self._fail(f"I9: {sequence.name} was granted: {done}, and must be: {expected}")
        if not done:
            return False
        naive.reference(sequence.name, hits)
        naive.make_room(num_missing)
        new = sequence.block_table[len(sequence.block_table) - num_missing :]
        if not set(new) <= naive.free() or len(set(new)) != num_missing:
            self._fail(f"I1: {sequence.name} gets blocks {new}, free are {sorted(naive.free())}")
        naive.tables[sequence.name] += new
        return True

    def _end_step(self, sequence, num_new_tokens, succeeds):
        """Write the new positions; then commit, or fail."""
        naive, size, name = self.naive, self.kv.block_size, sequence.name
        end = sequence.num_computed_tokens + num_new_tokens
        contexts = self._contexts(sequence)[:end]
        for position in range(sequence.num_computed_tokens, end):
            block = sequence.block_table[position // size]
            if block in naive.cached.values():
                self._fail(f"I3: {name} writes position {position} into published block {block}")
            naive.content[block][position % size] = contexts[position]
        for position, context in enumerate(contexts):
            block = sequence.block_table[position // size]
            if naive.content[block][position % size] != context:
                found = naive.content[block][position % size]
                self._fail(f"I4: {name} reads {found} in block {block}, not {context}")
        if succeeds:
            self.kv.commit(sequence, end)
            self._publish(sequence, contexts)
        else:
            # The token stays, as in the engine: tokens only grow, and the next step tries again.
            self.kv.roll_back(sequence)
            naive.release(name, -(-sequence.num_computed_tokens // size))

    def _publish(self, sequence, contexts):
        naive, size, table = self.naive, self.kv.block_size, self.naive.tables[sequence.name]
        sequence.keys.extend(sequence.token_ids)
        for i in range(len(contexts) // size):
            if not self.publishing[sequence.name]:
                return
            kept = naive.publish(contexts[(i + 1) * size - 1], sequence.keys.hashes[i], table[i])
            if kept is None:  # and what comes after it would have no parent
                self.publishing[sequence.name] = False
            else:
                table[i] = kept

    def _free(self, name):
        self.kv.free(self.live.pop(name))
        self.naive.release(name, 0)
        del self.naive.tables[name]
        self._compare()

    def _contexts(self, sequence):
        fields, all_tokens = repr(sequence.policy.key_fields), sequence.token_ids
        return [(fields, tuple(all_tokens[: i + 1])) for i in range(len(all_tokens))]

    def _compare(self):
        """The KV cache is in the state that the naive model predicts."""
        kv, naive = self.kv, self.naive
        try:
            check_pool(kv, list(self.live.values()))
            for sequence in self.live.values():
                check_table(kv, sequence)
        except MiniVLLMError as error:
            self._fail(str(error))
        tables = {name: sequence.block_table for name, sequence in self.live.items()}
        if tables != naive.tables:
            self._fail(f"I5: tables are {tables}, must be {naive.tables}")
        at = [block for block in range(kv.num_blocks) if kv.cache.at(block) is not None]
        if at != sorted(naive.cached.values()):
            self._fail(f"I6: cached are blocks {at}, must be {sorted(naive.cached.values())}")
        lru = [naive.cached[context] for context in naive.lru]
        if kv.cache.lru_order() != lru:
            self._fail(f"section 6: evicted next {kv.cache.lru_order()}, must be {lru}")

    def _fail(self, message):
        drawn = picture(self.kv, self.live.values(), self._content, message)
        raise Broken(f"{message}\n{drawn}")

    def _content(self, block):
        slots = self.naive.content[block]
        return f"[{' '.join('.' if slot is None else str(slot[1][-1]) for slot in slots)}]"


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


def evict_the_most_recently_used(original):
    return lambda self, num_blocks: self.lru_order()[::-1][:num_blocks]


def forget_a_use(original):
    """A hit does not make its block young again."""

    def mark_idle(self, blocks):
        for block in blocks:
            original(self, [block])
            if block in self._idle:
                self._idle.move_to_end(block, last=False)

    return mark_idle


ONLY_HERE = [
    Fault(fault.__name__, promises, ((PrefixCache, method, fault),))
    for method, fault, promises in [
        ("oldest", evict_the_most_recently_used, ("I6", "I7", "section 6")),
        ("mark_idle", forget_a_use, ("I6", "I7", "section 6")),
    ]
]
NAMES = {
    "ref_count_not_raised",
    "freed_while_somebody_holds_it",
    "count_idle_hits_as_usable",
    "refused_allocation_keeps_references",
    "forget_the_tables_of_a_failed_step",
    "publish_the_half_full_block",
    "unchained_key",
    "own_block_compare",
    "trust_the_hash",
    "stale_key",
    "key_without_salt",
    "whole_prompt_hit",
    "heads_evicted_first",
    "block_in_use_evicted",
    "keep_a_second_copy_of_a_cached_block",
    "cap_ignored",
}
PLANTED = [fault for fault in FAULTS if fault.name in NAMES] + ONLY_HERE


def failure_of_the_machine(fault, phases):
    hunt = settings(
        max_examples=2_000,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
    )
    with planted(fault), pytest.raises(Exception, match=r"\S") as found:
        run_state_machine_as_test(CacheMachine, settings=hunt)
    return found.value


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_the_machine_finds(fault):
    error = failure_of_the_machine(fault, [Phase.generate])
    # By name, and not by a crash; which promise shows first depends on the calls.
    assert isinstance(error, Broken), repr(error)
    assert re.match(r"I\d: |section 6: ", str(error))


def test_a_failure_is_shrunk_to_a_short_list_of_calls_with_the_picture_of_the_pool():
    (fault,) = (fault for fault in FAULTS if fault.name == "heads_evicted_first")
    error = failure_of_the_machine(fault, [Phase.generate, Phase.shrink])
    calls = [note for note in error.__notes__ if note.startswith("state.")]
    # Start, allocate, perhaps release, and the end; Hypothesis may leave a call that does nothing.
    assert 3 <= len(calls) <= 6, error.__notes__
    assert "\n  pool   b" in str(error)
