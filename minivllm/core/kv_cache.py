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
from minivllm.core.block_keys import BlockKey, BlockKeyChain, default_hash, encode_key_fields
from minivllm.core.block_manager import BlockManager, blocks_for
from minivllm.core.in_flight import InFlight
from minivllm.core.metrics import Metrics
from minivllm.core.prefix_cache import CachedBlock, PrefixCache
from minivllm.core.sequence import CachePolicy, Sequence
from minivllm.core.trace import Trace


class Match(NamedTuple):
    """What a lookup found.

    hits       cached blocks of the longest cached prefix, head first
    in_flight  True if the block after them is being computed by a running sequence that will
               publish it: who waits a step will find it
    """

    hits: list[CachedBlock]
    in_flight: bool


class KVCache:
    """The paged KV cache as `core` sees it: block ids and counts, no tensors."""

    def __init__(
        self, num_blocks: int, config: EngineConfig, metrics: Metrics, trace: Trace
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = config.block_size
        self.blocks = BlockManager(num_blocks)
        self.cache = PrefixCache()
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
        keys = sequence.keys.extend(sequence.token_ids)
        limit = min((sequence.num_tokens - 1) // self.block_size, self._num_cacheable(sequence))
        hits = sequence.matched_blocks
        # Who waits looks up in every step. A cached block's parents are cached too, so it is
        # enough to go back to the last hit that is still there, and on from it.
        while hits and self.cache.at(hits[-1].block) is not hits[-1]:
            hits.pop()
        for key in keys[len(hits) : limit]:
            parent = hits[-1] if hits else None
            found = self.cache.find(key, parent, sequence.keys.fields)
            if found is None:
                break
            hits.append(found)
        is_next_in_flight = len(hits) < limit and self.in_flight.has(keys[len(hits)])
        self._metrics.lookup_seconds += perf_counter() - started
        return Match(list(hits), is_next_in_flight)

    def can_allocate(
        self, sequence: Sequence, num_new_tokens: int, hits: list[CachedBlock]
    ) -> bool:
        """Would `allocate` succeed? Changes nothing."""
        # A hit that is idle now counts as usable, but will be referenced, not taken.
        num_idle_hits = sum(self.cache.is_idle(hit.block) for hit in hits)
        num_missing = self._num_missing(sequence, num_new_tokens, hits)
        return num_missing <= self.num_usable - num_idle_hits

    # Actions

    def allocate(self, sequence: Sequence, num_new_tokens: int, hits: list[CachedBlock]) -> bool:
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
        if not self.can_allocate(sequence, num_new_tokens, hits):
            return False
        num_missing = self._num_missing(sequence, num_new_tokens, hits)
        # Hits first: once referenced they are no longer idle, so making room cannot take them.
        self._reference(sequence, hits)
        self._make_room(num_missing)
        for _ in range(num_missing):
            block = self.blocks.take()
            sequence.block_table.append(block)
            self._note("allocate", block, sequence)
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
        num_blocks = self._num_publishable(sequence)
        if num_blocks > len(sequence.cached_blocks):
            started = perf_counter()
            self._publish(sequence, num_blocks)
            self._metrics.publish_seconds += perf_counter() - started

    def roll_back(self, sequence: Sequence) -> None:
        """The step failed: cut the table back to what is computed (I5). The tail goes first."""
        self._release(sequence, blocks_for(sequence.num_computed_tokens, self.block_size))

    def free(self, sequence: Sequence) -> None:
        """Let go of all blocks. What is published stays in the cache until it is evicted."""
        num_published = len(sequence.cached_blocks)
        self.in_flight.withdraw(sequence, num_published, sequence.num_announced_blocks)
        self._release(sequence, 0)
        sequence.cached_blocks.clear()
        sequence.num_announced_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.may_publish = sequence.policy.write

    def reset(self) -> bool:
        """Forget everything cached. False, and nothing changed, while a sequence holds blocks."""
        if self.num_in_use > 0:
            return False
        while self.cache.num_idle:
            self._evict("reset")
        return True

    # What the actions are made of

    def _num_cacheable(self, sequence: Sequence) -> int:
        """How many leading blocks of `sequence` may be looked up or published at all."""
        cacheable = sequence.policy.cacheable_tokens
        num_tokens = sequence.num_tokens if cacheable is None else cacheable
        return num_tokens // self.block_size

    def _num_publishable(self, sequence: Sequence) -> int:
        """How many leading blocks are fully written, and may be cached."""
        if not sequence.may_publish:
            return 0
        num_full = sequence.num_computed_tokens // self.block_size
        return min(num_full, self._num_cacheable(sequence))

    def _num_missing(self, sequence: Sequence, num_new_tokens: int, hits: list[CachedBlock]) -> int:
        """Blocks that are in neither the table nor the hits, but are needed to compute so far."""
        end = sequence.num_computed_tokens + len(hits) * self.block_size + num_new_tokens
        return blocks_for(end, self.block_size) - len(sequence.block_table) - len(hits)

    def _reference(self, sequence: Sequence, hits: list[CachedBlock]) -> None:
        for hit in hits:
            self.blocks.reference(hit.block)
            self.cache.mark_used(hit.block)
            sequence.block_table.append(hit.block)
            sequence.cached_blocks.append(hit)
            self._note("reference", hit.block, sequence, hit.key)
        sequence.num_computed_tokens += len(hits) * self.block_size

    def _announce(self, sequence: Sequence) -> None:
        """Tell others which blocks this running sequence is about to publish."""
        if not sequence.may_publish:
            return
        keys = sequence.keys.extend(sequence.token_ids)
        self.in_flight.announce(sequence, min(len(keys), self._num_cacheable(sequence)))

    def _make_room(self, num_blocks: int) -> None:
        while self.blocks.num_free < num_blocks:
            self._evict("evict")

    def _evict(self, event: str) -> None:
        cached = self.cache.forget_oldest()
        self._metrics.evicted_blocks += event == "evict"
        self.blocks.release(cached.block)
        self._note(event, cached.block, None, cached.key)

    def _note(
        self, event: str, block: int, sequence: Sequence | None, key: BlockKey | None = None
    ) -> None:
        count = self.blocks.ref_counts[block]
        self._trace.record(event, sequence, block=block, ref_count=count, key=key)

    def _publish(self, sequence: Sequence, end_block: int) -> None:
        """Make blocks [len(cached_blocks), end_block) findable; one key, one block."""
        first = len(sequence.cached_blocks)
        keys = sequence.keys.extend(sequence.token_ids)
        for i in range(first, end_block):
            parent = sequence.cached_blocks[-1] if sequence.cached_blocks else None
            block = sequence.block_table[i]
            cached = self.cache.publish(block, keys[i], parent, sequence.keys.fields)
            if cached is None:
                # Its children could only be published behind a parent that is not cached.
                sequence.may_publish = False
                end_block = sequence.num_announced_blocks
                break
            sequence.cached_blocks.append(cached)
            if cached.block == block:
                self.blocks.reference(block)
                self._note("publish", block, sequence, cached.key)
            else:
                self._swap(sequence, i, cached)
        self.in_flight.withdraw(sequence, first, end_block)

    def _swap(self, sequence: Sequence, i: int, cached: CachedBlock) -> None:
        """Take the block that is cached already, and release the equal one just computed.

        So whoever holds a cached block holds its parents, and none of them can be evicted
        before it.
        """
        self.blocks.reference(cached.block)
        self.cache.mark_used(cached.block)
        own, sequence.block_table[i] = sequence.block_table[i], cached.block
        self._note("swap", cached.block, sequence, cached.key)
        self.blocks.release(own)
        self._note("release", own, sequence)

    def _release(self, sequence: Sequence, keep: int) -> None:
        """Release the table down to its first `keep` blocks, tail first.

        The tail becomes idle before its parents do, so it is evicted before them.
        """
        while len(sequence.block_table) > keep:
            block = sequence.block_table.pop()
            count = self.blocks.release(block)
            cached = self.cache.at(block)
            self._note("release", block, sequence, cached.key if cached else None)
            if count == 1 and cached is not None:
                self.cache.mark_idle(block)
        while self.cache.num_idle > self._max_idle:
            self._evict("evict")
