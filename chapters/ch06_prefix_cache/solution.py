"""Chapter 6. Blocks that outlive their sequence, found again by what they were computed from.

Block size 4. A = `1 2 3 4 5 6 7 8 9` has run; its two full blocks are published:

    block 0   key H(root, 1 2 3 4)            parent -
    block 1   key H(key of block 0, 5 6 7 8)  parent block 0

B = `1 2 3 4 5 6 7 8 3 3` finds both, holds them in its table beside A, and computes 2 tokens.
C = `5 6 7 8 1` finds nothing: the same four tokens at the start of a prompt have other KV.

What chapter 3 promised changes here. There: a block belongs to one sequence. From now on: a block
that may be *written* belongs to one sequence; a published one is read-only and may be shared.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from xxhash import xxh3_128_digest

from chapters.stages import stage

ch03 = stage("ch03_block_manager")
BlockError = ch03.BlockError


def tokens_as_bytes(token_ids: Sequence[int]) -> bytes:
    """4 bytes a token. bytes(token_ids) would fail for ids above 255."""
    return array("i", token_ids).tobytes()


def block_keys(
    token_ids: Sequence[int],
    block_size: int,
    key_fields: tuple[Any, ...] = (),
    hash_function: Callable[[bytes], bytes] = xxh3_128_digest,
) -> list[bytes]:
    """The key of each full block, first to last, chained: each covers all tokens before it, too.

    The first one is chained to a root made of repr(key_fields).
    """
    # task 6.1
    parent = hash_function(repr(key_fields).encode())
    keys = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_function(parent + tokens_as_bytes(token_ids[start : start + block_size]))
        keys.append(parent)
    return keys
    # end of task


class CachedBlock:
    """A published block: what it holds, for an exact comparison. Compared by identity.

    block       its id
    key         where it is found
    tokens      its own tokens, as bytes
    parent      the cached block before it; None for the first block of a prompt
    key_fields  the fields that its KV depends on, or that it must not be shared across
    """

    def __init__(
        self,
        block: int,
        key: bytes,
        tokens: bytes,
        parent: "CachedBlock | None",
        key_fields: tuple[Any, ...],
    ) -> None:
        self.block = block
        self.key = key
        self.tokens = tokens
        self.parent = parent
        self.key_fields = key_fields

    def holds(
        self, tokens: bytes, parent: "CachedBlock | None", key_fields: tuple[Any, ...]
    ) -> bool:
        """True if it is this content, and not another one whose key happens to be equal (I7)."""
        # task 6.1
        same_start = self.parent is parent and self.key_fields == key_fields
        return same_start and self.tokens == tokens
        # end of task


class CachingBlockManager(ch03.BlockManager):
    """Chapter 3's pool with a prefix cache in it. The cache counts as one holder of a block (I2).

    max_idle_share   most of the pool that may be cached without a reader, 0 to 1
    cached           key -> CachedBlock
    idle             blocks that only the cache holds, least recently used first
    evictions        blocks that the cache has given up so far
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_idle_share: float = 1.0,
        hash_function: Callable[[bytes], bytes] = xxh3_128_digest,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.max_num_idle = int(max_idle_share * num_blocks)
        self.cached: dict[bytes, CachedBlock] = {}
        self.idle: OrderedDict[int, CachedBlock] = OrderedDict()
        self.evictions = 0
        self._hash_function = hash_function
        self._cached_at: dict[int, CachedBlock] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out: free, or cached and idle."""
        return self.num_free + len(self.idle)

    def cached_at(self, block: int) -> CachedBlock | None:
        """What is published in `block`, or None."""
        return self._cached_at.get(block)

    def keys(self, sequence: Any) -> list[bytes]:
        """The keys of all its full blocks."""
        return block_keys(
            sequence.token_ids, self.block_size, sequence.key_fields, self._hash_function
        )

    # Looking

    def match(self, sequence: Any) -> list[int]:
        """The cached blocks of its longest cached prefix, first block first. Changes nothing.

        Stops at the first block that misses. At most num_tokens - 1 tokens match (I8): the last
        one must be computed, because only computing gives logits. Block size 4:

            num_tokens   blocks looked up = (num_tokens - 1) // 4
                     7                                          1
                     8                                          1
                     9                                          2
        """
        # task 6.2
        hits: list[CachedBlock] = []
        limit = (sequence.num_tokens - 1) // self.block_size
        for i, key in enumerate(self.keys(sequence)[:limit]):
            found = self.cached.get(key)
            parent = hits[-1] if hits else None
            if found is None or not found.holds(
                self._tokens(sequence, i), parent, sequence.key_fields
            ):
                break
            hits.append(found)
        return [hit.block for hit in hits]
        # end of task

    def can_allocate(self, sequence: Any, num_new_tokens: int, hits: Sequence[int] = ()) -> bool:
        """Would allocate succeed? Changes nothing.

        An idle hit counts as usable now, but allocate will reference it, so it cannot be taken
        for anything else.
        """
        # task 6.3
        num_idle_hits = sum(block in self.idle for block in hits)
        num_missing = self._num_missing(sequence, num_new_tokens, hits)
        return num_missing <= self.num_usable - num_idle_hits
        # end of task

    # Changing

    def allocate(self, sequence: Any, num_new_tokens: int, hits: Sequence[int] = ()) -> None:
        """Put the hits at the head of its (empty) table, then blocks for what is new.

        A hit is referenced: one more holder, no longer idle; its positions are computed already.
        Then idle blocks are evicted, as many as are missing, and the missing ones taken. Raises
        BlockError, and changes nothing (I9), if there are not enough.
        """
        # task 6.3
        num_missing = self._num_missing(sequence, num_new_tokens, hits)
        if not self.can_allocate(sequence, num_new_tokens, hits):
            raise BlockError(
                f"{num_missing} blocks are needed besides {len(hits)} hits;"
                f" {self.num_usable} of {self.num_blocks} are usable, idle hits among them"
            )
        # Hits first: once referenced they are not idle, so making room cannot evict them.
        for block in hits:
            self._reference(block)
            sequence.block_table.append(block)
        sequence.num_computed_tokens += len(hits) * self.block_size
        while self.num_free < num_missing:
            self._evict_oldest()
        sequence.block_table += [self.take() for _ in range(num_missing)]
        # end of task

    def commit(self, sequence: Any, end: int) -> None:
        """The KV of its positions up to `end` is written: publish the blocks that are now full.

        A full block is one whose every position is computed (I6). If its key is cached with the
        same content already, the sequence takes that block into its table and releases its own.
        If the key is taken by other content, a collision, it publishes no further block.
        """
        super().commit(sequence, end)
        # task 6.3
        parent = None
        for i, key in enumerate(self.keys(sequence)[: end // self.block_size]):
            block = sequence.block_table[i]
            tokens = self._tokens(sequence, i)
            found = self.cached.get(key)
            if found is None:
                found = CachedBlock(block, key, tokens, parent, sequence.key_fields)
                self.cached[key] = self._cached_at[block] = found
                self.ref_counts[block] += 1
            elif not found.holds(tokens, parent, sequence.key_fields):
                break
            elif found.block != block:
                self._reference(found.block)
                sequence.block_table[i] = found.block
                self.release(block)
            parent = found
        # end of task

    def free(self, sequence: Any) -> None:
        """Release its blocks, the last one first, so that a chain is evicted from its tail.

        A cached block that nobody else holds becomes idle, as the most recently used one. If more
        than max_num_idle are idle then, the oldest are evicted.
        """
        # task 6.4
        while sequence.block_table:
            block = sequence.block_table.pop()
            if self.release(block) == 1 and block in self._cached_at:
                self.idle[block] = self._cached_at[block]
        while len(self.idle) > self.max_num_idle:
            self._evict_oldest()
        # end of task

    def _evict_oldest(self) -> None:
        """Forget the least recently used idle block: it is free then, and no key finds it."""
        # task 6.4
        block, cached = self.idle.popitem(last=False)
        del self.cached[cached.key]
        del self._cached_at[block]
        self.release(block)
        self.evictions += 1
        # end of task

    def reset(self) -> bool:
        """Forget everything cached. False, and nothing changed, while a sequence holds a block."""
        # task 6.4
        if self.num_usable < self.num_blocks:
            return False
        while self.idle:
            self._evict_oldest()
        return True
        # end of task

    # Small pieces

    def _reference(self, block: int) -> None:
        """Count one more holder of a cached block."""
        # task 6.3
        self.ref_counts[block] += 1
        self.idle.pop(block, None)
        # end of task

    def _num_missing(self, sequence: Any, num_new_tokens: int, hits: Sequence[int]) -> int:
        """Blocks to take besides the hits."""
        num_cached = len(hits) * self.block_size
        return sequence.num_new_blocks(num_cached + num_new_tokens, self.block_size) - len(hits)

    def _tokens(self, sequence: Any, i: int) -> bytes:
        """The tokens of its i-th block."""
        start = i * self.block_size
        return tokens_as_bytes(sequence.token_ids[start : start + self.block_size])
