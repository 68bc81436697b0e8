"""The property test must be able to fail: each fault here is planted in the engine and found.

The faults are ones that small engines have had. Most of them leave the greedy tokens of a
simple run right, which is why a check of outputs alone does not find them.
"""

from contextlib import contextmanager

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from minivllm.core.block_manager import blocks_for
from minivllm.core.in_flight import InFlight
from minivllm.core.kv_cache import KVCache, Match
from minivllm.core.prefix_cache import CachedBlock, PrefixCache
from minivllm.core.scheduler import Scheduler
from minivllm.core.sequence import SequenceState
from tests.test_engine_properties import EngineMachine


def match_the_whole_prompt(original):
    def match(self, sequence):
        sequence.token_ids.append(0)
        try:
            return original(self, sequence)
        finally:
            sequence.token_ids.pop()

    return match


def trust_the_hash(original):
    return lambda self, key, parent, fields: True


def ignore_the_parent(original):
    return lambda self, key, parent, fields: self.key.tokens == key.tokens and self.fields == fields


def ignore_the_key_fields(original):
    return lambda self, policy: original(self, type(policy)())


def publish_before_the_step(original):
    def allocate(self, sequence, num_new_tokens, hits):
        if not original(self, sequence, num_new_tokens, hits):
            return False
        computed = sequence.num_computed_tokens
        self.commit(sequence, computed + num_new_tokens)
        sequence.num_computed_tokens = computed
        return True

    return allocate


def publish_the_half_full_block(original):
    def num_publishable(self, sequence):
        num_blocks = blocks_for(sequence.num_computed_tokens, self.block_size)
        return min(num_blocks, sequence.num_tokens // self.block_size)

    return num_publishable


def leave_a_referenced_hit_in_the_lru_list(original):
    return lambda self, block: None


def make_room_before_referencing_hits(original):
    def allocate(self, sequence, num_new_tokens, hits):
        if self.can_allocate(sequence, num_new_tokens, hits):
            self._make_room(self._num_missing(sequence, num_new_tokens, hits))
        return original(self, sequence, num_new_tokens, hits)

    return allocate


def count_idle_hits_as_usable(original):
    return lambda self, sequence, num_new_tokens, hits: (
        self._num_missing(sequence, num_new_tokens, hits) <= self.num_usable
    )


def keep_a_second_copy_of_a_cached_block(original):
    def swap(self, sequence, i, cached):
        pass

    return swap


def release_the_head_first(original):
    def release(self, sequence, keep):
        sequence.block_table[keep:] = reversed(sequence.block_table[keep:])
        original(self, sequence, keep)

    return release


def forget_the_tables_of_a_failed_step(original):
    return lambda self, sequence: None


def lose_the_preempted_sequence(original):
    def preempt(self):
        sequence = original(self)
        self.waiting.remove(sequence)
        return sequence

    return preempt


def drop_sampled_tokens_on_preemption(original):
    def preempt(self):
        sequence = original(self)
        del sequence.token_ids[sequence.num_prompt_tokens :]
        return sequence

    return preempt


def preempt_without_freeing(original):
    def preempt(self):
        sequence = self.running.pop()
        self.budget_left += self.scheduled.pop(sequence, 0)
        sequence.state = SequenceState.WAITING
        self.waiting.insert(0, sequence)
        self.metrics.preemptions += 1
        return sequence

    return preempt


def wait_for_a_leader_that_is_gone(original):
    return lambda self, sequence, first_block, end_block: None


def start_the_suffix_at_position_0(original):
    def reference(self, sequence, hits):
        original(self, sequence, hits)
        if hits:
            sequence.num_computed_tokens = 0

    return reference


def remember_a_hit_for_ever(original):
    def match(self, sequence):
        hits = sequence.matched_blocks
        return Match(list(hits), False) if hits else original(self, sequence)

    return match


FAULTS = [
    (KVCache, "match", match_the_whole_prompt),
    (CachedBlock, "holds", trust_the_hash),
    (CachedBlock, "holds", ignore_the_parent),
    (KVCache, "new_keys", ignore_the_key_fields),
    (KVCache, "allocate", publish_before_the_step),
    (KVCache, "_num_publishable", publish_the_half_full_block),
    (PrefixCache, "mark_used", leave_a_referenced_hit_in_the_lru_list),
    (KVCache, "allocate", make_room_before_referencing_hits),
    (KVCache, "can_allocate", count_idle_hits_as_usable),
    (KVCache, "_swap", keep_a_second_copy_of_a_cached_block),
    (KVCache, "_release", release_the_head_first),
    (KVCache, "roll_back", forget_the_tables_of_a_failed_step),
    (Scheduler, "_preempt_newest", lose_the_preempted_sequence),
    (Scheduler, "_preempt_newest", drop_sampled_tokens_on_preemption),
    (Scheduler, "_preempt_newest", preempt_without_freeing),
    (InFlight, "withdraw", wait_for_a_leader_that_is_gone),
    (KVCache, "_reference", start_the_suffix_at_position_0),
    (KVCache, "match", remember_a_hit_for_ever),
]


@contextmanager
def planted(owner, name, fault):
    original = getattr(owner, name)
    setattr(owner, name, fault(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@pytest.mark.parametrize(
    ("owner", "name", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_property_test_finds(owner, name, fault):
    hunt = settings(
        max_examples=2_000,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with planted(owner, name, fault), pytest.raises(Exception, match=r"\S") as found:
        run_state_machine_as_test(EngineMachine, settings=hunt)
    # Not a fault of the test itself: the engine or a check of ours complained.
    assert not isinstance(found.value, (NameError, TypeError, pytest.fail.Exception)), found.value
