"""Which blocks hold which prefix, and who is evicted.

The cache is a set of chains: the content of each cached block begins with the name of the cached
block before it, and a block is never cached without its parents. Three rules keep that true:

- a block is published only behind its parent, by a sequence that holds the parent;
- a sequence that holds a cached block holds all of its parents, so none of them is idle;
- a sequence lets go of its table's tail first, so an idle child is older than its idle parent
  and the least recently used idle block never has a cached child.

Why an equal content is an exact hit (I7), whatever the hash function does. A lookup goes from
block 0 on, and each step compares the whole content. Of block 0 that is its key fields and its
tokens: exact. Suppose that hit i - 1 holds exactly the prefix asked for, and that a block is found
with the content asked for at i: its parent's name and its tokens. A name stands for one hash, its
parent is cached, and one hash has one cached block, because the first one stays. So its parent is
hit i - 1, which its publisher held: it was computed from exactly that prefix, and then from its
own tokens, which are equal. A collision is met where a block is published, and keeps it out.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Any

from minivllm.core.block_keys import BlockKeyChain


class PrefixCache:
    """Hash -> cached block, what each holds, and the idle ones in the order of their last use.

    A cached block is findable by its key, and never written again (I3). It is *idle* when only
    the cache refers to it. The cache counts as one reference; the KV cache, which owns the
    counts, says when a block becomes idle or used.

    num_forgotten   how many blocks it has given up. While that stays, what was found is there.
                    To look whether the last hit holds the same content still is not enough: with
                    equal hashes it may stand behind another parent by now
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_forgotten = 0
        self._blocks: dict[Any, int] = {}
        self._hashes: list[Any] = [None] * num_blocks
        self._contents: list[bytes | None] = [None] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_idle(self) -> int:
        """Cached blocks that no sequence holds."""
        return len(self._idle)

    def at(self, block: int) -> bytes | None:
        """The content that is published in `block`, or None; see BlockKeyChain.contents."""
        return self._contents[block]

    def hash_at(self, block: int) -> Any:
        """The hash under which `block` is found, or None."""
        return self._hashes[block]

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these only the cache refers to."""
        return sum(map(self._idle.__contains__, blocks))

    def lru_order(self) -> list[int]:
        """Idle block ids, the next one to be evicted first."""
        return list(self._idle)

    def find(self, keys: BlockKeyChain, first: int, end: int) -> list[int]:
        """Return the blocks that are cached for [first, end) of a chain, up to the first miss.

        What stands before `first` must be cached: then an equal content is an exact hit.
        """
        found: list[int] = []
        for i in range(first, end):
            block = self._blocks.get(keys.hashes[i])
            if block is None or self._contents[block] != keys.contents[i]:
                break
            found.append(block)
        return found

    def publish(self, blocks: list[int], keys: BlockKeyChain, first: int) -> int:
        """Make written blocks findable as [first, ...) of a chain; return how many.

        It ends at a hash under which something else is cached: the first one stays.
        """
        for i, block in enumerate(blocks, first):
            block_hash = keys.hashes[i]
            if block_hash in self._blocks:
                return i - first
            self._blocks[block_hash] = block
            self._hashes[block] = block_hash
            self._contents[block] = keys.contents[i]
        return len(blocks)

    def mark_idle(self, blocks: Iterable[int]) -> None:
        """No sequence holds these any more: the cached ones are idle, the last one the youngest."""
        for block in blocks:
            if self._contents[block] is not None:
                self._idle[block] = None

    def mark_used(self, blocks: Iterable[int]) -> None:
        """A sequence refers to these again."""
        for block in blocks:
            self._idle.pop(block, None)

    def oldest(self, num_blocks: int) -> list[int]:
        """The least recently used idle blocks, the oldest first."""
        return list(islice(self._idle, num_blocks))

    def forget(self, blocks: list[int]) -> None:
        """Drop idle blocks from the cache."""
        self.num_forgotten += len(blocks)
        for block in blocks:
            del self._idle[block], self._blocks[self._hashes[block]]
            self._hashes[block] = self._contents[block] = None
