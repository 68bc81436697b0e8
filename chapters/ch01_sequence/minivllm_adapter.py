"""Chapter 1's names over the finished engine: its own Sequence, and its cache's arithmetic."""

from collections.abc import Sequence as ReadOnlySequence
from copy import copy
from types import SimpleNamespace
from typing import Any

from minivllm.config import EngineConfig
from minivllm.core import sequence as core
from minivllm.core.block_keys import BlockKeyChain, default_hash, encode_key_fields
from minivllm.core.block_manager import blocks_for
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.trace import Trace
from minivllm.sampling_params import SamplingParams


class Sequence(core.Sequence):
    """The finished engine's sequence, made as the chapters make theirs.

    A pool that looks up or publishes gives it a key chain of its block size, `keys`; so long it
    has one for blocks of one token, and its policy keeps it out of the cache.
    """

    def __init__(
        self,
        request_id: str,
        token_ids: ReadOnlySequence[int],
        params: SamplingParams | None = None,
        key_fields: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(
            request_id=request_id,
            index=0,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=params or SamplingParams(),
            policy=core.CachePolicy(read=False, write=False, key_fields=key_fields),
            keys=BlockKeyChain(1, encode_key_fields(key_fields), default_hash),
            arrival=0,
        )

    @property
    def key_fields(self) -> tuple[Any, ...]:
        """What must be equal, besides the tokens, to share a block."""
        return self.policy.key_fields

    def advance(self, end: int) -> None:
        """The step that computed the positions up to `end` is committed."""
        _pool_for(end, block_size=1).commit(self, end)

    def append_token(self, token_id: int) -> None:
        """The scheduler's commit appends the token that was sampled."""
        self.token_ids.append(token_id)

    def num_new_blocks(self, num_new_tokens: int, block_size: int) -> int:
        """How many blocks the cache appends to the table when it allocates."""
        probe = copy(self)
        probe.block_table = list(self.block_table)
        pool = _pool_for(self.num_computed_tokens + num_new_tokens, block_size)
        pool.allocate(probe, num_new_tokens, [])
        return len(probe.block_table) - len(self.block_table)


def _pool_for(num_tokens: int, block_size: int) -> KVCache:
    """A fresh pool that has room for so many tokens."""
    config = EngineConfig(block_size=block_size)
    return KVCache(blocks_for(num_tokens, block_size), config, Metrics(), Trace())


def adapt() -> SimpleNamespace:
    """The names of chapter 1 that its tests, and later chapters' adapters, use."""
    return SimpleNamespace(
        Sequence=Sequence,
        SequenceState=core.SequenceState,
        SamplingParams=SamplingParams,
        blocks_for=blocks_for,
    )
