"""Eviction and admission policies, simulated on prefix chains outside the engine.

The engine evicts the least recently used idle block, tails before heads. Would another rule find
more? Here a rule is a function, and a cache is a dictionary of blocks: no KV, no tables, only
what is found and what is thrown out.

    LRU          evict what was used longest ago
    LFU          evict what was used least often, among equals the one used longest ago
    seen twice   LRU, but a block is taken in only when it is seen for the second time

A block may go only when no cached block follows it, as in the engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class _Block:
    """A cached block: the chain of ids that leads to it stands in `prefix`."""

    prefix: int
    parent: _Block | None
    last_use: int = 0
    num_uses: int = 0
    num_children: int = 0


Rank = Callable[[int, int], tuple[int, ...]]
"""(time of the last use, number of uses) -> sort key: the smallest is evicted first."""


def by_recency(last_use: int, num_uses: int) -> tuple[int, ...]:
    """LRU."""
    return (last_use,)


def by_frequency(last_use: int, num_uses: int) -> tuple[int, ...]:
    """LFU, ties broken by LRU."""
    return (num_uses, last_use)


@dataclass(slots=True)
class PolicyCache:
    """A prefix cache of `capacity` blocks under a rule.

    times_seen   a block enters the cache when it has been asked for so many times

    One more block than the prompt's is held while a request runs, as in mooncake.CoreReplay, so
    that LRU here and the engine's LRU can be compared figure by figure.
    """

    capacity: int
    rank: Rank
    times_seen: int = 1
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _heap: list[tuple[tuple[int, ...], int, _Block]] = field(default_factory=list)
    _seen: dict[int, int] = field(default_factory=dict)
    _prefixes: dict[tuple[int, int], int] = field(default_factory=dict)
    _clock: int = 0

    def serve(self, ids: list[int]) -> int:
        """Serve one request; the number of its leading blocks that were found."""
        prefixes = self._prefixes_of(ids)
        num_hits = 0
        while num_hits < len(prefixes) and prefixes[num_hits] in self._blocks:
            num_hits += 1
        # The request holds all its blocks now: nothing of the chain may be evicted, and what is
        # not taken into the cache later needs room all the same.
        held = set(prefixes[:num_hits])
        self._evict_down_to(self.capacity - (len(prefixes) - num_hits) - 1, held)
        self._insert(prefixes)
        self._touch_from_the_tail(prefixes)
        return num_hits

    def _prefixes_of(self, ids: list[int]) -> list[int]:
        """A number for each chain of ids from the start: equal chains have equal numbers."""
        chain, prefixes = 0, []
        for block_id in ids:
            chain = self._prefixes.setdefault((chain, block_id), len(self._prefixes) + 1)
            prefixes.append(chain)
        return prefixes

    def _insert(self, prefixes: list[int]) -> None:
        for prefix in prefixes:
            self._seen[prefix] = self._seen.get(prefix, 0) + 1
        parent = None
        for prefix in prefixes:
            block = self._blocks.get(prefix)
            if block is None:
                if self._seen[prefix] < self.times_seen:
                    return  # what follows cannot be cached without it
                block = self._blocks[prefix] = _Block(prefix, parent)
                if parent is not None:
                    parent.num_children += 1
            parent = block

    def _touch_from_the_tail(self, prefixes: list[int]) -> None:
        """Count a use of each cached block; the tail is the oldest of them."""
        for prefix in reversed(prefixes):
            block = self._blocks.get(prefix)
            if block is not None:
                self._clock += 1
                block.last_use = self._clock
                block.num_uses += 1
                self._offer(block)

    def _offer(self, block: _Block) -> None:
        """It may be evicted from now on, at this rank; an older offer of it is void."""
        if block.num_children == 0:
            rank = self.rank(block.last_use, block.num_uses)
            heapq.heappush(self._heap, (rank, block.prefix, block))

    def _evict_down_to(self, num_blocks: int, held: set[int]) -> None:
        kept_back = []
        while len(self._blocks) > num_blocks and self._heap:
            rank, prefix, block = heapq.heappop(self._heap)
            is_void = (
                self._blocks.get(prefix) is not block
                or block.num_children > 0
                or rank != self.rank(block.last_use, block.num_uses)
            )
            if is_void:
                continue
            if prefix in held:
                kept_back.append((rank, prefix, block))
                continue
            del self._blocks[prefix]
            if block.parent is not None:
                block.parent.num_children -= 1
                self._offer(block.parent)
        for offer in kept_back:
            heapq.heappush(self._heap, offer)
