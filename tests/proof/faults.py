"""Faults that small engines have had, to be planted in `core`: the proof must find every one.

Most of them leave the greedy tokens of a simple run right, which is why a check of outputs
alone does not find them. Each names the promises that it breaks, any of which may show first.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from minivllm.core.block_keys import TOKEN_BYTES, BlockKeyChain
from minivllm.core.block_manager import BlockManager, blocks_for
from minivllm.core.in_flight import InFlight
from minivllm.core.kv_cache import KVCache, Match
from minivllm.core.prefix_cache import PrefixCache
from minivllm.core.scheduler import Scheduler
from minivllm.core.sequence import Sequence, SequenceState


class Fault(NamedTuple):
    """A wrong answer to plant.

    patches    (class, name of its method, what makes the wrong one of the right one)
    promises   the ids of which the proof must name one
    """

    name: str
    promises: tuple[str, ...]
    patches: tuple[tuple[type, str, Callable[[Any], Any]], ...]


FAULTS: list[Fault] = []


def fault(owner: type, method: str, *promises: str) -> Callable[[Callable], Callable]:
    """Register a function that makes the wrong method; its name is the fault's."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS.append(Fault(make.__name__, promises, ((owner, method, make),)))
        return make

    return register


@contextmanager
def planted(wrong: Fault) -> Iterator[None]:
    """`core` with this fault, until the end of the body."""
    with ExitStack() as undo:
        for owner, name, make in wrong.patches:
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, make(original))
        yield


# Counts


@fault(BlockManager, "reference", "I2")
def ref_count_not_raised(original):
    return lambda self, blocks: None


def release_twice(original):
    def free(self, sequence):
        table = list(sequence.block_table)
        original(self, sequence)
        self.blocks.release(table[-1:])

    return free


def clamp_the_count(original):
    return lambda self, blocks: original(self, [b for b in blocks if self.ref_counts[b]])


FAULTS.append(
    Fault(
        "double_free_clamped",
        ("I1", "I2"),
        ((KVCache, "free", release_twice), (BlockManager, "release", clamp_the_count)),
    )
)


@fault(BlockManager, "release", "I1", "I2")
def freed_while_somebody_holds_it(original):
    def release(self, blocks):
        for block in blocks:
            self.ref_counts[block] = 1
        original(self, blocks)

    return release


@fault(KVCache, "can_allocate", "I1")
def count_idle_hits_as_usable(original):
    return lambda self, sequence, num_new_tokens, hits: (
        self._num_missing(sequence, num_new_tokens, hits) <= self.num_usable
    )


@fault(KVCache, "allocate", "I1", "I2")
def make_room_before_referencing_hits(original):
    def allocate(self, sequence, num_new_tokens, hits):
        if self.can_allocate(sequence, num_new_tokens, hits):
            num_missing = self._num_missing(sequence, num_new_tokens, hits)
            self._evict(num_missing - self.blocks.num_free)
        return original(self, sequence, num_new_tokens, hits)

    return allocate


@fault(Scheduler, "_preempt_newest", "I2", "I5", "I10")
def preempt_without_freeing(original):
    def preempt(self):
        sequence = self.running.pop()
        self.budget_left += self.scheduled.pop(sequence, 0)
        sequence.state = SequenceState.WAITING
        self.waiting.insert(0, sequence)
        self.metrics.preemptions += 1
        return sequence

    return preempt


@fault(KVCache, "roll_back", "I5")
def forget_the_tables_of_a_failed_step(original):
    return lambda self, sequence: None


# Keys


@fault(KVCache, "allocate", "I6")
def published_early(original):
    def allocate(self, sequence, num_new_tokens, hits):
        if not original(self, sequence, num_new_tokens, hits):
            return False
        computed = sequence.num_computed_tokens
        self.commit(sequence, computed + num_new_tokens)
        sequence.num_computed_tokens = computed
        return True

    return allocate


@fault(KVCache, "commit", "I6")
def publish_the_half_full_block(original):
    def commit(self, sequence, end):
        original(self, sequence, end)
        num_blocks = min(blocks_for(end, self.block_size), sequence.num_tokens // self.block_size)
        if sequence.may_publish and num_blocks > sequence.num_published_blocks:
            self._publish(sequence, num_blocks)

    return commit


@fault(KVCache, "roll_back", "I6")
def publish_a_failed_step(original):
    def roll_back(self, sequence):
        original(self, sequence)
        computed = sequence.num_computed_tokens
        end = min(len(sequence.block_table) * self.block_size, sequence.num_tokens)
        self.commit(sequence, end)
        sequence.num_computed_tokens = computed

    return roll_back


@fault(BlockKeyChain, "extend", "I7")
def unchained_key(original):
    def extend(self, token_ids):
        size, fields = self.block_size, self._parent  # no block becomes a parent
        for start in range(len(self.hashes) * size, len(token_ids) - size + 1, size):
            self.contents.append(fields + array("i", token_ids[start : start + size]).tobytes())
            self.hashes.append(self._hash(self.contents[-1]))

    return extend


def own_part(keys, i):
    """The key fields and the own tokens of a chain's block `i`, but not its parent."""
    width = keys.block_size * TOKEN_BYTES
    return keys.contents[0][:-width], keys.contents[i][-width:]


def compared_by(part):
    """A lookup that compares only this part of what a block was published with."""

    def note_what_is_published(original):
        def publish(self, blocks, keys, first):
            num_new = original(self, blocks, keys, first)
            self.__dict__.setdefault("_parts", {}).update(
                (block, part(keys, i)) for i, block in enumerate(blocks[:num_new], first)
            )
            return num_new

        return publish

    def compare_the_part(original):
        def find(self, keys, first, end):
            found = []
            for i in range(first, end):
                block = self._blocks.get(keys.hashes[i])
                if block is None or self._parts[block] != part(keys, i):
                    break
                found.append(block)
            return found

        return find

    return (
        (PrefixCache, "publish", note_what_is_published),
        (PrefixCache, "find", compare_the_part),
    )


FAULTS.append(Fault("own_block_compare", ("I7",), compared_by(own_part)))
FAULTS.append(Fault("trust_the_hash", ("I7",), compared_by(lambda keys, i: None)))


def keep_the_keys(original):
    def forget(self, blocks):
        self.__dict__.setdefault("_stale", {}).update(
            (self._hashes[block], (block, self._contents[block])) for block in blocks
        )
        original(self, blocks)

    return forget


def find_the_kept_keys(original):
    def find(self, keys, first, end):
        stale, found = self.__dict__.get("_stale", {}), []
        for i in range(first, end):
            block, content = stale.get(keys.hashes[i], (None, None))
            now = [block] if content == keys.contents[i] else original(self, keys, i, i + 1)
            if not now:
                break
            found += now
        return found

    return find


FAULTS.append(
    Fault(
        "stale_key",
        ("I6", "I7"),
        ((PrefixCache, "forget", keep_the_keys), (PrefixCache, "find", find_the_kept_keys)),
    )
)


@fault(KVCache, "match", "I6")
def remember_a_hit_for_ever(original):
    def match(self, sequence):
        remembered = list(sequence.matched_blocks)
        found = original(self, sequence)
        return found if len(found.hits) >= len(remembered) else Match(remembered, False)

    return match


@fault(KVCache, "new_keys", "I6", "I7")
def key_without_salt(original):
    def new_keys(self, policy):
        fields = tuple(field for field in policy.key_fields if field[0] != "salt")
        return original(self, replace(policy, key_fields=fields))

    return new_keys


@fault(KVCache, "match", "I8")
def whole_prompt_hit(original):
    def match(self, sequence):
        found = original(self, sequence)
        hits, end = found.hits, len(found.hits) + 1
        if sequence.policy.read and end * self.block_size == sequence.num_tokens:
            hits += self.cache.find(sequence.keys, end - 1, end)
        return found

    return match


@fault(KVCache, "_num_cacheable", "section 6")
def ignore_the_cacheable_length(original):
    return lambda self, sequence, num_tokens: num_tokens // self.block_size


# Refusals


@fault(KVCache, "can_allocate", "I9")
def refused_allocation_keeps_references(original):
    def can_allocate(self, sequence, num_new_tokens, hits):
        allowed = original(self, sequence, num_new_tokens, hits)
        if not allowed:
            self.blocks.reference(hits)
        return allowed

    return can_allocate


@fault(KVCache, "can_allocate", "I9")
def refused_allocation_changes_the_lru_order(original):
    def can_allocate(self, sequence, num_new_tokens, hits):
        for hit in hits:
            if self.cache.count_idle([hit]):
                self.cache.mark_used([hit])
                self.cache.mark_idle([hit])
        return original(self, sequence, num_new_tokens, hits)

    return can_allocate


@fault(KVCache, "allocate", "I9")
def refused_allocation_keeps_what_it_took(original):
    def allocate(self, sequence, num_new_tokens, hits):
        if original(self, sequence, num_new_tokens, hits):
            return True
        sequence.block_table += self.blocks.take(self.blocks.num_free)
        return False

    return allocate


# Eviction and sharing


@fault(KVCache, "_release", "I7")
def heads_evicted_first(original):
    def release(self, sequence, keep):
        sequence.block_table[keep:] = reversed(sequence.block_table[keep:])
        original(self, sequence, keep)

    return release


@fault(PrefixCache, "mark_used", "I1", "I2")
def block_in_use_evicted(original):
    return lambda self, blocks: None


@fault(KVCache, "_swap", "I7")
def keep_a_second_copy_of_a_cached_block(original):
    return lambda self, sequence, cached: None


@fault(KVCache, "_release", "section 6")
def cap_ignored(original):
    def release(self, sequence, keep):
        self._max_idle = self.num_blocks
        original(self, sequence, keep)

    return release


@fault(KVCache, "_reference", "I3", "I5", "I8")
def start_the_suffix_at_position_0(original):
    def reference(self, sequence, hits):
        original(self, sequence, hits)
        if hits:
            sequence.num_computed_tokens = 0

    return reference


@fault(InFlight, "withdraw", "I11")
def wait_for_a_leader_that_is_gone(original):
    return lambda self, sequence: None


@fault(InFlight, "announce", "section 6")
def second_leader_forgotten(original):
    """When the first one is aborted, nobody waits for the other that computes the same."""

    def announce(self, sequence, num_blocks):
        forgotten = self.__dict__.setdefault("_forgotten", set())
        first = sequence.num_published_blocks
        is_second = self.has(sequence.keys, first)
        if sequence not in self._leaders and is_second:
            forgotten.add(sequence)
        if sequence not in forgotten:
            original(self, sequence, num_blocks)

    return announce


# The scheduler


@fault(Scheduler, "_admit", "I8")
def lookup_after_charging(original):
    def admit(self, sequence, hits):
        charged = min(sequence.num_tokens, self.budget_left, self._max_chunk)
        num_tokens = charged - len(hits) * self.kv.block_size
        if not self.kv.allocate(sequence, num_tokens, hits):
            return False
        self._count_lookup(sequence, len(hits) * self.kv.block_size)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=attrgetter("arrival"))
        self._charge(sequence, num_tokens)
        return True

    return admit


@fault(Scheduler, "_admit", "section 6")
def cached_tokens_charged_too(original):
    def admit(self, sequence, hits):
        admitted = original(self, sequence, hits)
        if admitted:
            self.budget_left = max(0, self.budget_left - len(hits) * self.kv.block_size)
        return admitted

    return admit


@fault(Scheduler, "_preempt_newest", "I10")
def preempted_sequence_lost(original):
    def preempt(self):
        sequence = original(self)
        self.waiting.remove(sequence)
        return sequence

    return preempt


@fault(Scheduler, "_preempt_newest", "I10")
def preempted_sequence_loses_its_tokens(original):
    def preempt(self):
        sequence = original(self)
        del sequence.token_ids[sequence.num_prompt_tokens :]
        return sequence

    return preempt


@fault(Sequence, "is_decoding", "I12")
def decode_starved(original):
    # Prefills are charged first, and leave nothing.
    return property(lambda self: not original.fget(self))


@fault(Scheduler, "finish", "I10", "I11")
def ended_sequence_not_returned(original):
    def finish(self, sequence, reason, error=None):
        original(self, sequence, reason, error)
        if reason == "abort":
            self.finished.remove(sequence)

    return finish


@fault(Scheduler, "_admit_waiting", "section 6")
def nobody_passes_one_that_waits_for_its_prefix(original):
    def admit_waiting(self):
        if self.waiting and not self.kv.match(self.waiting[0]).in_flight:
            original(self)

    return admit_waiting
