"""The KV cache by itself, with readable verbs: prefill, grow, finish, look up.

Every verb ends with a check of the invariants that a pool at rest must keep (I1, I2, I5).
"""

from __future__ import annotations

from typing import Any

from minivllm.config import EngineConfig
from minivllm.core.invariants import check_pool, check_table
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.sequence import CachePolicy, Sequence
from minivllm.core.trace import Trace
from minivllm.sampling_params import SamplingParams

OFF = {"read": False, "write": False}
"""The policy every request gets from an engine whose prefix cache is switched off."""


class Pool:
    """A KVCache and the sequences that hold blocks in it."""

    def __init__(self, num_blocks: int, block_size: int = 16, **config: Any) -> None:
        self.metrics = Metrics()
        settings = {"block_size": block_size, "prefix_cache_max_share": 1.0} | config
        self.kv = KVCache(num_blocks, EngineConfig(**settings), self.metrics, Trace())
        self.holders: list[Sequence] = []
        self._num_arrivals = 0

    @property
    def usable(self) -> int:
        """Blocks that can be handed out: free, or cached and idle."""
        return self.kv.num_usable

    def sequence(self, token_ids: list[int], **policy: Any) -> Sequence:
        """A sequence that holds nothing yet."""
        self._num_arrivals += 1
        return Sequence(
            request_id=f"r{self._num_arrivals}",
            index=0,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            params=SamplingParams(),
            policy=CachePolicy(**policy),
            keys=self.kv.new_keys(CachePolicy(**policy)),
            arrival=self._num_arrivals,
        )

    def lookup(self, token_ids: list[int], **policy: Any) -> int:
        """How many leading tokens a new sequence would find cached."""
        return self.cached_tokens(self.sequence(token_ids, **policy))

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many leading tokens of `sequence` are cached for it."""
        return len(self.kv.match(sequence).hits) * self.kv.block_size

    def allocate(self, sequence: Sequence) -> bool:
        """Look `sequence` up, and take blocks for all of it; False if the pool is too full.

        Planner and allocator must give the same answer: can_allocate() is the planner.
        """
        hits = self.kv.match(sequence).hits
        num_new_tokens = sequence.num_tokens - len(hits) * self.kv.block_size
        is_planned = self.kv.can_allocate(sequence, num_new_tokens, hits)
        is_done = self.kv.allocate(sequence, num_new_tokens, hits)
        assert is_done == is_planned, f"planned {is_planned}, allocated {is_done}"
        if is_done:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.holders.append(sequence)
        check_pool(self.kv, self.holders)
        return is_done

    def commit(self, sequence: Sequence) -> None:
        """The forward pass has written all that `sequence` knows."""
        self.kv.commit(sequence, sequence.num_tokens)
        self.check()

    def prefill(self, token_ids: list[int], **policy: Any) -> Sequence:
        """Look up, allocate and compute a whole prompt; the sequence holds its blocks."""
        sequence = self.sequence(token_ids, **policy)
        assert self.allocate(sequence), f"{len(token_ids)} tokens do not fit: {self.state()}"
        self.commit(sequence)
        return sequence

    def grow(self, sequence: Sequence, token_ids: list[int]) -> bool:
        """Compute more tokens behind those it has; False, and nothing done, if refused."""
        if not self.kv.allocate(sequence, len(token_ids), []):
            return False
        sequence.token_ids += token_ids
        self.commit(sequence)
        return True

    def finish(self, *sequences: Sequence) -> None:
        """Let them go of all their blocks."""
        for sequence in sequences:
            self.holders.remove(sequence)
            self.kv.free(sequence)
            self.check()

    def num_published(self, sequence: Sequence) -> int:
        """How many blocks of its table can be found by others."""
        return sum(self.kv.cache.at(block) is not None for block in sequence.block_table)

    def state(self) -> dict[str, list[Any]]:
        """Everything that a refused call must leave alone (I9)."""
        return {
            "ref counts": list(self.kv.blocks.ref_counts),
            "free order": self.kv.blocks.free_order(),
            "LRU order": self.kv.cache.lru_order(),
            "published": [self.kv.cache.at(block) for block in range(self.kv.num_blocks)],
            "tables": [list(sequence.block_table) for sequence in self.holders],
            "computed": [sequence.num_computed_tokens for sequence in self.holders],
        }

    def check(self) -> None:
        """I1, I2, I5."""
        check_pool(self.kv, self.holders)
        for sequence in self.holders:
            check_table(self.kv, sequence)
