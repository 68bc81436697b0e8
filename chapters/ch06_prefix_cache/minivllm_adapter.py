"""Chapter 6's names over the finished engine's KVCache and block keys."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from chapters.ch03_block_manager.minivllm_adapter import BlockManager
from minivllm.core.block_keys import BlockKey, BlockKeyChain, default_hash, encode_key_fields
from minivllm.core.prefix_cache import CachedBlock
from minivllm.errors import BlockError


def block_keys(
    token_ids: Sequence[int],
    block_size: int,
    key_fields: tuple[Any, ...] = (),
    hash_function: Callable[[bytes], Any] = default_hash,
) -> list[Any]:
    """The hash of each full block's key."""
    chain = BlockKeyChain(block_size, encode_key_fields(key_fields), hash_function)
    return [key.hash for key in chain.extend(token_ids)]


def tokens_as_bytes(token_ids: Sequence[int]) -> bytes:
    """The tokens of a block, as its key keeps them."""
    return BlockKeyChain(len(token_ids), b"", default_hash).extend(token_ids)[0].tokens


def cached_block(
    block: int, key: Any, tokens: bytes, parent: CachedBlock | None, key_fields: tuple[Any, ...]
) -> CachedBlock:
    """The engine's CachedBlock."""
    return CachedBlock(block, BlockKey(key, tokens), parent, encode_key_fields(key_fields))


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

    @property
    def cached(self) -> dict[Any, CachedBlock]:
        """Hash -> cached block."""
        return self.kv.cache._cached

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
        return self.kv.cache.at(block)

    def keys(self, sequence: Any) -> list[Any]:
        """The hashes of the keys of all its full blocks."""
        keys = self._let_in(sequence).keys.extend(sequence.token_ids)
        return [key.hash for key in keys]

    def match(self, sequence: Any) -> list[int]:
        """The blocks of its longest cached prefix."""
        return [hit.block for hit in self.kv.match(self._let_in(sequence)).hits]

    def can_allocate(self, sequence: Any, num_new_tokens: int, hits: Sequence[int] = ()) -> bool:
        """True if allocate would succeed."""
        return self.kv.can_allocate(self._let_in(sequence), num_new_tokens, self._cached(hits))

    def allocate(self, sequence: Any, num_new_tokens: int, hits: Sequence[int] = ()) -> None:
        """The engine says False where the chapters raise."""
        if not self.kv.allocate(self._let_in(sequence), num_new_tokens, self._cached(hits)):
            raise BlockError("refused")

    def reset(self) -> bool:
        """Forget everything cached."""
        return self.kv.reset()

    def _cached(self, hits: Sequence[int]) -> list[Any]:
        return [self.kv.cache.at(block) for block in hits]

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
        CachedBlock=cached_block,
        CachingBlockManager=CachingBlockManager,
        block_keys=block_keys,
        tokens_as_bytes=tokens_as_bytes,
    )
