"""Chapter 6's names over the finished engine's KVCache and block keys."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from chapters.ch03_block_manager.minivllm_adapter import BlockManager
from minivllm.core.block_keys import (
    TOKEN_BYTES,
    BlockKeyChain,
    default_hash,
    encode_key_fields,
    name_of,
)
from minivllm.core.kv_cache import KVCache
from minivllm.errors import BlockError


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """What chapter 6 keeps of a published block; the engine keeps a hash and a content.

    parent       the cached block before it; GONE if there is none, and it is no first block
    key_fields   only of a block that a test makes by hand: the engine has them encoded
    """

    block: int
    key: Any
    tokens: bytes
    parent: "CachedBlock | None"
    key_fields: tuple[Any, ...] = ()


GONE = CachedBlock(-1, None, b"", None)


class CachedBlocks(MutableMapping[Any, CachedBlock]):
    """Hash -> cached block, as a view of the engine's prefix cache: one object a publication."""

    def __init__(self, kv: KVCache) -> None:
        self._cache = kv.cache
        self._width = kv.block_size * TOKEN_BYTES
        self._seen: dict[int, tuple[bytes, CachedBlock]] = {}

    def __getitem__(self, key: Any) -> CachedBlock:
        block = self._cache._blocks[key]
        content = self._cache._contents[block]
        seen = self._seen.get(block)
        # The very object that was published, and not an equal one that was published later.
        if seen is None or seen[0] is not content:
            before, tokens = content[: -self._width], content[-self._width :]
            cached = CachedBlock(block, key, tokens, self._parent_named(before))
            seen = self._seen[block] = content, cached
        return seen[1]

    def __setitem__(self, key: Any, cached: CachedBlock) -> None:
        parent, fields = cached.parent, encode_key_fields(cached.key_fields)
        content = (name_of(parent.key) if parent else fields) + cached.tokens
        self._cache._blocks[key] = cached.block
        self._cache._hashes[cached.block] = key
        self._cache._contents[cached.block] = content
        self._seen[cached.block] = content, cached

    def __delitem__(self, key: Any) -> None:
        block = self._cache._blocks.pop(key)
        self._cache._hashes[block] = self._cache._contents[block] = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cache._blocks)

    def __len__(self) -> int:
        return len(self._cache._blocks)

    def _parent_named(self, name: bytes) -> CachedBlock | None:
        if name.startswith(b"("):  # key fields, and no name
            return None
        return next((self[other] for other in self if name_of(other) == name), GONE)


def block_keys(
    token_ids: Sequence[int],
    block_size: int,
    key_fields: tuple[Any, ...] = (),
    hash_function: Callable[[bytes], Any] = default_hash,
) -> list[Any]:
    """The hash of each full block's key."""
    chain = BlockKeyChain(block_size, encode_key_fields(key_fields), hash_function)
    chain.extend(token_ids)
    return chain.hashes


def tokens_as_bytes(token_ids: Sequence[int]) -> bytes:
    """The tokens of a block, as its content ends with them."""
    chain = BlockKeyChain(len(token_ids), b"", default_hash)
    chain.extend(token_ids)
    return chain.contents[0]


class CachingBlockManager(BlockManager):
    """The finished engine's KVCache, with caching."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_idle_share: float = 1.0,
        hash_function: Callable[[bytes], Any] | None = None,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            prefix_cache_max_share=max_idle_share,
            hash_function=hash_function,
        )
        self.cached = CachedBlocks(self.kv)

    @property
    def idle(self) -> OrderedDict[int, Any]:
        """Blocks that only the cache holds, least recently used first."""
        return self.kv.cache._idle

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out."""
        return self.kv.num_usable

    @property
    def evictions(self) -> int:
        """Blocks that the cache has given up; the engine does not count a reset's."""
        return self.metrics.evicted_blocks

    def cached_at(self, block: int) -> CachedBlock | None:
        """What is published in `block`."""
        if self.kv.cache.at(block) is None:
            return None
        return self.cached[self.kv.cache.hash_at(block)]

    def keys(self, sequence: Any) -> list[Any]:
        """The hashes of the keys of all its full blocks."""
        keys = self._let_in(sequence).keys
        keys.extend(sequence.token_ids)
        return keys.hashes

    def match(self, sequence: Any) -> list[int]:
        """The blocks of its longest cached prefix."""
        return self.kv.match(self._let_in(sequence)).hits

    def can_allocate(self, sequence: Any, num_new_tokens: int, hits: Sequence[int] = ()) -> bool:
        """True if allocate would succeed."""
        return self.kv.can_allocate(self._let_in(sequence), num_new_tokens, list(hits))

    def allocate(self, sequence: Any, num_new_tokens: int, hits: Sequence[int] = ()) -> None:
        """The engine says False where the chapters raise."""
        if not self.kv.allocate(self._let_in(sequence), num_new_tokens, list(hits)):
            raise BlockError("refused")

    def reset(self) -> bool:
        """Forget everything cached."""
        return self.kv.reset()

    def _let_in(self, sequence: Any) -> Any:
        """Chapter 1's adapter makes sequences that may not use a cache; here they may."""
        if not sequence.policy.read:
            sequence.policy = replace(sequence.policy, read=True, write=True)
            sequence.keys = self.kv.new_keys(sequence.policy)
            sequence.may_publish = True
        return sequence


def adapt() -> SimpleNamespace:
    """The names of chapter 6 that its tests use."""
    return SimpleNamespace(
        BlockError=BlockError,
        CachedBlock=CachedBlock,
        CachingBlockManager=CachingBlockManager,
        block_keys=block_keys,
        tokens_as_bytes=tokens_as_bytes,
    )
