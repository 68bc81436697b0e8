"""Host work, vLLM's side: one prompt through its own KVCacheManager."""

from __future__ import annotations

from time import perf_counter

import torch
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # type: ignore[import-not-found]
from vllm.v1.request import Request  # type: ignore[import-not-found]

from benchmarks.peers.host_side import BLOCK_SIZE, POOL_BLOCKS, PROMPT_TOKENS, Stages


class VllmSide:
    """A KVCacheManager of one group of full-attention layers; see host_side.HostSide."""

    def __init__(self, hash_name: str) -> None:
        self._hash = get_hash_fn_by_name(hash_name)
        kv_cache_utils.init_none_hash(self._hash)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, self._hash)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.float32
        )
        config = KVCacheConfig(
            num_blocks=POOL_BLOCKS + 1,  # block 0 is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=2 * PROMPT_TOKENS,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )

    def forget(self) -> None:
        """Empty the cache. The seed of the first key is global: it goes with the hash."""
        kv_cache_utils.init_none_hash(self._hash)
        self._manager.reset_prefix_cache()

    def serve(self, token_ids: list[int]) -> Stages:
        """Take one prompt from its keys to the release of its blocks."""
        manager = self._manager
        request = Request("0", token_ids, SamplingParams(max_tokens=16), None)
        times = [perf_counter()]
        request.block_hashes = self._hasher(request)
        times.append(perf_counter())
        blocks, num_cached, _ = manager.get_computed_blocks(request)
        times.append(perf_counter())
        # Publishing is part of it: vLLM makes blocks findable before they are computed.
        manager.allocate_slots(request, len(token_ids) - num_cached, num_cached, blocks)
        times.append(perf_counter())
        manager.free(request)
        times.append(perf_counter())
        return Stages.between(times, num_cached)
