"""Which blocks hold which prefix, and who is evicted.

The cache is a set of chains: each cached block names the cached block before it, and a block is
never cached without its parents. Three rules keep that true:

- a block is published only behind its parent, by a sequence that holds the parent;
- a sequence that holds a cached block holds all of its parents, so none of them is idle;
- a sequence lets go of its table's tail first, so an idle child is older than its idle parent
  and the least recently used idle block never has a cached child.
"""

from __future__ import annotations

from collections import OrderedDict

from minivllm.core.block_keys import BlockKey


class CachedBlock:
    """One published block: findable by its key, never written again (I3).

    Compared by identity: two blocks with equal tokens behind different parents are different.
    """

    __slots__ = ("block", "fields", "key", "parent")

    def __init__(
        self, block: int, key: BlockKey, parent: CachedBlock | None, fields: bytes
    ) -> None:
        self.block = block
        self.key = key
        self.parent = parent
        self.fields = fields

    def holds(self, key: BlockKey, parent: CachedBlock | None, fields: bytes) -> bool:
        """True if this is that block and not one whose hash collides with it (I7)."""
        return self.parent is parent and self.key.tokens == key.tokens and self.fields == fields


class PrefixCache:
    """Key -> cached block, and the idle ones among them in the order of their last use.

    A cached block is *idle* when only the cache refers to it. The cache counts as one
    reference; the KV cache, which owns the counts, says when a block becomes idle or used.
    """

    def __init__(self) -> None:
        self._cached: dict[object, CachedBlock] = {}
        self._cached_at: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def num_idle(self) -> int:
        """Cached blocks that no sequence holds."""
        return len(self._idle)

    def at(self, block: int) -> CachedBlock | None:
        """What is published in `block`, or None."""
        return self._cached_at.get(block)

    def is_idle(self, block: int) -> bool:
        """True if only the cache refers to `block`."""
        return block in self._idle

    def lru_order(self) -> list[int]:
        """Idle block ids, the next one to be evicted first."""
        return list(self._idle)

    def find(self, key: BlockKey, parent: CachedBlock | None, fields: bytes) -> CachedBlock | None:
        """Return the block cached for exactly this key behind exactly this parent, or None."""
        cached = self._cached.get(key.hash)
        return cached if cached and cached.holds(key, parent, fields) else None

    def publish(
        self, block: int, key: BlockKey, parent: CachedBlock | None, fields: bytes
    ) -> CachedBlock | None:
        """Make a written block findable; return what is now cached under its key.

        That is `block` itself, or another block that was published with the same content
        before, or None if the hash collides with different content: the first one stays.
        """
        cached = self._cached.get(key.hash)
        if cached is None:
            cached = CachedBlock(block, key, parent, fields)
            self._cached[key.hash] = self._cached_at[block] = cached
            return cached
        return cached if cached.holds(key, parent, fields) else None

    def mark_idle(self, block: int) -> None:
        """The last sequence let go of `block`: it is now the most recently used idle one."""
        self._idle[block] = None

    def mark_used(self, block: int) -> None:
        """A sequence refers to `block` again."""
        self._idle.pop(block, None)

    def forget_oldest(self) -> CachedBlock:
        """Drop the least recently used idle block from the cache, and return it."""
        block, _ = self._idle.popitem(last=False)
        cached = self._cached_at.pop(block)
        del self._cached[cached.key.hash]
        return cached
