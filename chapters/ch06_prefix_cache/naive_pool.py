"""A pool with a prefix cache, done the slow and obvious way, to compare the real one with.

It has no blocks, no hashes and no chains: it remembers whole prefixes, and counts.
"""

from typing import Any

from chapters.ch06_prefix_cache.memory import Prefix


class NaivePool:
    """Which prefixes are cached, who reads them, and how many blocks that leaves.

    cached   prefix -> number of tables that hold its block
    idle     prefixes that no table holds, least recently used first
    tables   request id -> its blocks: a prefix, or None for a block of its own
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_idle: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_idle = max_num_idle
        self.cached: dict[Prefix, int] = {}
        self.idle: list[Prefix] = []
        self.tables: dict[str, list[Prefix | None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that are neither cached nor somebody's own."""
        own = sum(table.count(None) for table in self.tables.values())
        return self.num_blocks - len(self.cached) - own

    def num_hits(self, sequence: Any) -> int:
        """Blocks of its longest cached prefix; one token at least is left to compute."""
        num_hits = 0
        while (num_hits + 1) * self.block_size < sequence.num_tokens:
            if self._prefix(sequence, num_hits) not in self.cached:
                break
            num_hits += 1
        return num_hits

    def num_missing(self, sequence: Any, end: int, num_hits: int) -> int:
        """Blocks to take so that positions up to `end` have a place."""
        held = len(self.tables.get(sequence.request_id, [])) + num_hits
        return -(-end // self.block_size) - held

    def fits(self, sequence: Any, end: int, num_hits: int) -> bool:
        """True if it could be allocated after evicting everything idle that is not a hit."""
        hits = [self._prefix(sequence, i) for i in range(num_hits)]
        usable = self.num_free + sum(prefix not in hits for prefix in self.idle)
        return self.num_missing(sequence, end, num_hits) <= usable

    def allocate(self, sequence: Any, end: int, num_hits: int) -> None:
        """Hits first, then room, then blocks of its own."""
        num_missing = self.num_missing(sequence, end, num_hits)
        table = self.tables.setdefault(sequence.request_id, [])
        for i in range(num_hits):
            table.append(self._read(self._prefix(sequence, i)))
        while self.num_free < num_missing:
            self._evict()
        table += [None] * num_missing

    def commit(self, sequence: Any, end: int) -> None:
        """Every full block is cached from now on, once."""
        table = self.tables[sequence.request_id]
        for i in range(end // self.block_size):
            if table[i] is None:
                prefix = self._prefix(sequence, i)
                self.cached.setdefault(prefix, 0)
                table[i] = self._read(prefix)

    def free(self, sequence: Any) -> None:
        """Its table's end becomes idle first."""
        for prefix in reversed(self.tables.pop(sequence.request_id, [])):
            if prefix is not None:
                self.cached[prefix] -= 1
                if self.cached[prefix] == 0:
                    self.idle.append(prefix)
        while len(self.idle) > self.max_num_idle:
            self._evict()

    def reset(self) -> bool:
        """Only while nobody holds a block."""
        if any(self.tables.values()):
            return False
        self.cached.clear()
        self.idle.clear()
        return True

    def _read(self, prefix: Prefix) -> Prefix:
        if prefix in self.idle:
            self.idle.remove(prefix)
        self.cached[prefix] += 1
        return prefix

    def _evict(self) -> None:
        del self.cached[self.idle.pop(0)]

    def _prefix(self, sequence: Any, i: int) -> Prefix:
        tokens = sequence.token_ids[: (i + 1) * self.block_size]
        return Prefix(tuple(tokens), sequence.key_fields)
