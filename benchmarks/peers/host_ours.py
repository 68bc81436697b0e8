"""Host work, our side: one prompt through minivllm.core, and a step of many sequences."""

from __future__ import annotations

from hashlib import sha256
from time import perf_counter

from benchmarks.peers.host_side import BLOCK_SIZE, POOL_BLOCKS, Stages
from minivllm.config import EngineConfig
from minivllm.core.batch import SampledToken
from minivllm.core.block_manager import blocks_for
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.scheduler import Scheduler
from minivllm.core.sequence import CachePolicy, Sequence
from minivllm.core.trace import Trace
from minivllm.sampling_params import SamplingParams

HASHES = {"xxhash": None, "sha256": lambda text: sha256(text).digest()}
RUNNING, PROMPT, STEPS = 256, 512, 64


class OurSide:
    """A KVCache; see host_side.HostSide."""

    def __init__(self, hash_name: str) -> None:
        config = EngineConfig(block_size=BLOCK_SIZE, hash_function=HASHES[hash_name])
        self._kv = KVCache(POOL_BLOCKS, config, Metrics(), Trace())

    def forget(self) -> None:
        """Empty the cache."""
        self._kv.reset()

    def serve(self, token_ids: list[int]) -> Stages:
        """Take one prompt from its keys to the release of its blocks."""
        kv, num_tokens = self._kv, len(token_ids)
        sequence = _sequence(kv, token_ids, 0)
        times = [perf_counter()]
        sequence.keys.extend(sequence.token_ids)
        times.append(perf_counter())
        hits = kv.match(sequence).hits
        times.append(perf_counter())
        num_cached = len(hits) * BLOCK_SIZE
        kv.allocate(sequence, num_tokens - num_cached, hits)
        kv.commit(sequence, num_tokens)
        times.append(perf_counter())
        kv.free(sequence)
        times.append(perf_counter())
        return Stages.between(times, num_cached)


def schedule_steps() -> tuple[list[float], list[float]]:
    """Seconds of schedule() and of commit() in STEPS steps of RUNNING decoding sequences.

    Prompt lengths differ by up to a block, so that each step fills a block of some sequences.
    """
    lengths = [PROMPT + i % BLOCK_SIZE for i in range(RUNNING)]
    num_blocks = sum(blocks_for(length + STEPS + 1, BLOCK_SIZE) for length in lengths)
    config = EngineConfig(
        block_size=BLOCK_SIZE, max_num_seqs=RUNNING, max_num_batched_tokens=sum(lengths)
    )
    metrics, trace = Metrics(), Trace()
    kv = KVCache(num_blocks, config, metrics, trace)
    scheduler = Scheduler(kv, config, metrics, trace)
    for number, length in enumerate(lengths):
        scheduler.add(_sequence(kv, list(range(number, number + length)), number))
    scheduling, committing = [], []
    for _ in range(STEPS + 1):
        started = perf_counter()
        batch = scheduler.schedule()
        scheduled = perf_counter()
        sampled = [SampledToken(7) for sequence in batch.sequences if sequence.samples]
        sampled_at = perf_counter()
        scheduler.commit(sampled)
        scheduling.append(scheduled - started)
        committing.append(perf_counter() - sampled_at)
        if len(sampled) != RUNNING:
            raise RuntimeError(f"{len(sampled)} of {RUNNING} sequences were scheduled")
    return scheduling[1:], committing[1:]  # the first step was the prefill


def _sequence(kv: KVCache, token_ids: list[int], arrival: int) -> Sequence:
    policy = CachePolicy()
    return Sequence(
        request_id=str(arrival),
        index=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(max_tokens=STEPS + 2),
        policy=policy,
        keys=kv.new_keys(policy),
        arrival=arrival,
    )
