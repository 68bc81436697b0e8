"""The KV cache as one would write it down first: a dict from exact context to block.

No hash, no chain, no counts that could go wrong: who holds what is looked up anew each time. A
context is (key fields, all tokens from the first to the last of a block).
"""

from __future__ import annotations

from collections.abc import Hashable

Context = tuple[str, tuple[int, ...]]


class NaiveCache:
    """What is cached, and in which order it would be evicted.

    cached    context -> the block that holds it
    lru       contexts that nobody holds, the next to be evicted first
    tables    name -> block table of each sequence that holds blocks
    content   block -> what its slots hold, one context a slot
    """

    def __init__(self, num_blocks: int, block_size: int, max_idle: int) -> None:
        self.num_blocks, self.block_size, self.max_idle = num_blocks, block_size, max_idle
        self.cached: dict[Context, int] = {}
        self.lru: list[Context] = []
        self.tables: dict[str, list[int]] = {}
        self.content: list[list[Context | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._hashes: dict[Context, Hashable] = {}

    def held(self) -> set[int]:
        """Blocks in at least one table."""
        return {block for table in self.tables.values() for block in table}

    def free(self) -> set[int]:
        """Blocks that nobody refers to."""
        return set(range(self.num_blocks)) - self.held() - set(self.cached.values())

    def longest(self, fields: str, tokens: list[int], num_blocks: int) -> list[int]:
        """The blocks of the longest cached prefix, at most so many."""
        found = []
        for i in range(1, num_blocks + 1):
            block = self.cached.get((fields, tuple(tokens[: i * self.block_size])))
            if block is None:
                break
            found.append(block)
        return found

    def reference(self, name: str, blocks: list[int]) -> None:
        """A sequence takes hits into its table."""
        self.tables.setdefault(name, []).extend(blocks)
        self.lru = [context for context in self.lru if self.cached[context] not in blocks]

    def make_room(self, num_blocks: int) -> None:
        """Evict until so many blocks are free."""
        while len(self.free()) < num_blocks:
            self._evict_oldest()

    def publish(self, context: Context, key_hash: Hashable, block: int) -> int | None:
        """Make a block findable. The block that is cached then; None if the hash collides."""
        if context in self.cached:
            kept = self.cached[context]
            self.lru = [each for each in self.lru if each != context]
            return kept
        if key_hash in (self._hashes[each] for each in self.cached):
            return None
        self.cached[context] = block
        self._hashes[context] = key_hash
        return block

    def release(self, name: str, keep: int) -> None:
        """Let go of a table's tail, the last block first."""
        table = self.tables[name]
        while len(table) > keep:
            block = table.pop()
            if block not in self.held():
                self.lru += [context for context, at in self.cached.items() if at == block]
        while len(self.lru) > self.max_idle:
            self._evict_oldest()

    def reset(self) -> None:
        """Forget everything."""
        self.cached.clear()
        self.lru.clear()

    def _evict_oldest(self) -> None:
        del self.cached[self.lru.pop(0)]
