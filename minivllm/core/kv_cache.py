"""Match, allocate, commit, free: the block manager and the prefix cache as one.

A sequence goes through these four calls, step by step; each leaves every block free, cached and
idle, or in use (I1):

    match      which blocks of its prefix are cached?            only looks
    allocate   reference those, take blocks for what is new      before the step
    commit     the KV is written: publish the full blocks        after the step
    free       it ended or is preempted: let go of all blocks
"""

from time import perf_counter
from typing import NamedTuple

from minivllm.config import EngineConfig
from minivllm.core.block_keys import BlockKeyChain, default_hash, encode_key_fields
from minivllm.core.block_manager import BlockManager, blocks_for
from minivllm.core.in_flight import InFlight
from minivllm.core.metrics import Metrics
from minivllm.core.prefix_cache import PrefixCache
from minivllm.core.sequence import CachePolicy, Sequence
from minivllm.core.trace import Trace


class Match(NamedTuple):
    """What a lookup found.

    hits       cached blocks of the longest cached prefix, head first
    in_flight  True if the block after them is being computed by a running sequence that will
               publish it: who waits a step will find it
    """

    hits: list[int]
    in_flight: bool


class KVCache:
    """The paged KV cache as `core` sees it: block ids and counts, no tensors."""

    def __init__(
        self, num_blocks: int, config: EngineConfig, metrics: Metrics, trace: Trace
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = config.block_size
        self.blocks = BlockManager(num_blocks)
        self.cache = PrefixCache(num_blocks)
        self.in_flight = InFlight()
        self._max_idle = int(config.prefix_cache_max_share * num_blocks)
        self._hash = config.hash_function or default_hash
        self._metrics = metrics
        self._trace = trace

    # Questions

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out: free, or cached and idle."""
        return self.blocks.num_free + self.cache.num_idle

    @property
    def num_in_use(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - self.num_usable

    def new_keys(self, policy: CachePolicy) -> BlockKeyChain:
        """Return the empty key chain of a sequence under this policy's key fields."""
        return BlockKeyChain(self.block_size, encode_key_fields(policy.key_fields), self._hash)

    def match(self, sequence: Sequence) -> Match:
        """Find the longest cached prefix of `sequence`. Changes nothing that a lookup sees.

        At least one token is left to compute, because only computing gives logits (I8). Block
        size 4:

            num_tokens   blocks looked up = (num_tokens - 1) // 4   tokens matched at most
                     6                                          1                        4
                     8                                          1                        4
                     9                                          2                        8
        """
        if not sequence.policy.read:
            return Match([], False)
        started = perf_counter()
        keys, cache = sequence.keys, self.cache
        keys.extend(sequence.token_ids)
        limit = self._num_cacheable(sequence, sequence.num_tokens - 1)
        # Who waits looks up in every step. What it found is there still if nothing was forgotten.
        if sequence.num_forgotten < cache.num_forgotten:
            sequence.num_forgotten = cache.num_forgotten
            sequence.matched_blocks = []
        hits = sequence.matched_blocks
        hits += cache.find(keys, len(hits), limit)
        is_next_in_flight = len(hits) < limit and self.in_flight.has(keys, len(hits))
        self._metrics.lookup_seconds += perf_counter() - started
        return Match(list(hits), is_next_in_flight)

    def can_allocate(self, sequence: Sequence, num_new_tokens: int, hits: list[int]) -> bool:
        """Would `allocate` succeed? Changes nothing."""
        num_missing = self._num_missing(sequence, num_new_tokens, hits)
        # A hit that is idle now counts as usable, but will be referenced, not taken.
        return num_missing <= self.num_usable - self.cache.count_idle(hits)

    # Actions

    def allocate(self, sequence: Sequence, num_new_tokens: int, hits: list[int]) -> bool:
        """Give `sequence` its cached prefix and the blocks to compute `num_new_tokens` more.

        `hits` are what match() found, head first; empty for a sequence that already runs.
        Returns False, and changes nothing (I9), when the pool cannot give the rest even
        after evicting every idle cached block that is not itself a hit.

        Block size 4, no hits, 6 positions computed, table [0, 1]:

            num_new_tokens   end   blocks needed   new blocks
                         1     7   ceil(7/4) = 2            0
                         2     8   ceil(8/4) = 2            0
                         3     9   ceil(9/4) = 3            1
        """
        num_missing = self._num_missing(sequence, num_new_tokens, hits)
        if num_missing and not self.can_allocate(sequence, num_new_tokens, hits):
            return False
        # Hits first: once referenced they are no longer idle, so making room cannot take them.
        if hits:
            self._reference(sequence, hits)
        if num_missing:
            self._evict(num_missing - self.blocks.num_free)
            taken = self.blocks.take(num_missing)
            sequence.block_table += taken
            self._trace.record("allocate", sequence, blocks=taken, kv=self)
        self._announce(sequence)
        return True

    def commit(self, sequence: Sequence, end: int) -> None:
        """The KV of [0, end) is written: remember it, and publish the blocks it fills.

        Called only once the step has succeeded, so a key is never findable before all of its
        block's KV is written (I6). Block size 4: end = 7 publishes block 0, end = 8 blocks 0
        and 1, although the sequence may know more tokens than are computed.
        """
        self._trace.record("write", sequence, start=sequence.num_computed_tokens, end=end)
        sequence.num_computed_tokens = end
        num_blocks = self._num_cacheable(sequence, end)
        if sequence.may_publish and num_blocks > sequence.num_published_blocks:
            started = perf_counter()
            self._publish(sequence, num_blocks)
            self._metrics.publish_seconds += perf_counter() - started

    def roll_back(self, sequence: Sequence) -> None:
        """The step failed: cut the table back to what is computed (I5). The tail goes first."""
        self._release(sequence, blocks_for(sequence.num_computed_tokens, self.block_size))

    def free(self, sequence: Sequence) -> None:
        """Let go of all blocks. What is published stays in the cache until it is evicted."""
        self.in_flight.withdraw(sequence)
        self._release(sequence, 0)
        sequence.num_published_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.may_publish = sequence.policy.write

    def reset(self) -> bool:
        """Forget everything cached. False, and nothing changed, while a sequence holds blocks."""
        if self.num_in_use > 0:
            return False
        self._evict(self.cache.num_idle, "reset")
        return True

    # What the actions are made of

    def _num_cacheable(self, sequence: Sequence, num_tokens: int) -> int:
        """How many full blocks of the first `num_tokens` may be looked up or published at all."""
        cacheable = sequence.policy.cacheable_tokens
        if cacheable is not None:
            num_tokens = min(num_tokens, cacheable)
        return num_tokens // self.block_size

    def _num_missing(self, sequence: Sequence, num_new_tokens: int, hits: list[int]) -> int:
        """Blocks that are in neither the table nor the hits, but are needed to compute so far."""
        end = sequence.num_computed_tokens + len(hits) * self.block_size + num_new_tokens
        return blocks_for(end, self.block_size) - len(sequence.block_table) - len(hits)

    def _reference(self, sequence: Sequence, hits: list[int]) -> None:
        self.blocks.reference(hits)
        self.cache.mark_used(hits)
        sequence.block_table += hits
        sequence.num_published_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        self._trace.record("reference", sequence, blocks=hits, kv=self)

    def _announce(self, sequence: Sequence) -> None:
        """Tell others which blocks this running sequence will publish, if any are left."""
        num_blocks = self._num_cacheable(sequence, len(sequence.token_ids))
        if sequence.may_publish and num_blocks > sequence.num_published_blocks:
            sequence.keys.extend(sequence.token_ids)
            self.in_flight.announce(sequence, num_blocks)
        else:
            self.in_flight.withdraw(sequence)

    def _evict(self, num_blocks: int, event: str = "evict") -> None:
        """Give up the least recently used idle blocks; none if `num_blocks` is not positive."""
        if num_blocks > 0:
            oldest = self.cache.oldest(num_blocks)
            self.blocks.release(oldest)
            self._trace.record(event, blocks=oldest, kv=self)
            self.cache.forget(oldest)
            self._metrics.evicted_blocks += num_blocks * (event == "evict")

    def _publish(self, sequence: Sequence, end_block: int) -> None:
        """Make blocks [num_published_blocks, end_block) findable; one key, one block.

        Cached already are only the first of them, if any: behind a block that is not cached, none
        is. Nor can any be published behind a block whose hash collides.
        """
        keys, table = sequence.keys, sequence.block_table
        keys.extend(sequence.token_ids)
        cached = self.cache.find(keys, sequence.num_published_blocks, end_block)
        self._swap(sequence, cached)
        first = sequence.num_published_blocks + len(cached)
        end = first + self.cache.publish(table[first:end_block], keys, first)
        published = table[first:end]
        self.blocks.reference(published)
        self._trace.record("publish", sequence, blocks=published, kv=self)
        sequence.num_published_blocks = end
        sequence.may_publish = end == end_block
        self._announce(sequence)

    def _swap(self, sequence: Sequence, cached: list[int]) -> None:
        """Take the blocks that are cached already, and release the equal ones just computed.

        So whoever holds a cached block holds its parents, and none of them can be evicted
        before it.
        """
        self.blocks.reference(cached)
        self.cache.mark_used(cached)
        for i, block in enumerate(cached, sequence.num_published_blocks):
            own, sequence.block_table[i] = sequence.block_table[i], block
            self._trace.record("swap", sequence, blocks=[block], kv=self)
            self.blocks.release([own])
            self._trace.record("release", sequence, blocks=[own], kv=self)

    def _release(self, sequence: Sequence, keep: int) -> None:
        """Release the table down to its first `keep` blocks, tail first.

        The tail becomes idle before its parents do, so it is evicted before them.
        """
        released = sequence.block_table[keep:][::-1]
        self.blocks.release(released)
        del sequence.block_table[keep:]
        self._trace.record("release", sequence, blocks=released, kv=self)
        counts = self.blocks.ref_counts
        self.cache.mark_idle(block for block in released if counts[block] == 1)
        self._evict(self.cache.num_idle - self._max_idle)
