"""Production traces in the Mooncake format, and their replay through `minivllm.core` alone.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, one id
for each 512 tokens of the prompt; two requests with the same leading ids share that prefix. The
traces are published with the Mooncake paper (Qin et al., FAST 2025) in the repository
kvcache-ai/Mooncake on GitHub, folder FAST25-release/traces.

The text is not in the trace, and is not needed: each id becomes one block of one made-up token.
Sharing is as in the original, at the original's granularity, and a replay costs microseconds a
block. Requests are served one after another, in the order of their arrival.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from minivllm.config import EngineConfig
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.sequence import CachePolicy, Sequence
from minivllm.core.trace import Trace
from minivllm.sampling_params import SamplingParams

TOKENS_PER_BLOCK = 512
ANSWER_TOKEN = -1  # no hash id is negative


class TraceError(ValueError):
    """The file is not a trace of this format."""


def read_trace(path: Path) -> list[list[int]]:
    """The hash ids of each request, in the file's order. Raises TraceError, naming the line."""
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            ids = json.loads(line)["hash_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path.name}, line {number}: no hash_ids ({error})") from error
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise TraceError(f"{path.name}, line {number}: hash_ids must be whole numbers, 0 up")
        requests.append(ids)
    if not requests:
        raise TraceError(f"{path.name} holds no request")
    return requests


class CoreReplay:
    """One pool of `minivllm.core`, through which requests go one by one.

    Each holds one block more than its prompt for the answer, which is not cached.
    """

    def __init__(self, num_blocks: int) -> None:
        self.kv = KVCache(num_blocks, EngineConfig(block_size=1), Metrics(), Trace())

    def serve(self, ids: list[int]) -> int:
        """Look up, allocate, publish, release; the number of blocks that were found.

        Raises TraceError for a request that is larger than the pool.
        """
        kv, policy = self.kv, CachePolicy(cacheable_tokens=len(ids))
        tokens = [*ids, ANSWER_TOKEN]
        sequence = Sequence(
            "r", 0, tokens, len(tokens), SamplingParams(), policy, kv.new_keys(policy), 0
        )
        hits = kv.match(sequence).hits
        if not kv.allocate(sequence, len(tokens) - len(hits), hits):
            raise TraceError(f"a request needs {len(tokens)} blocks, the pool has {kv.num_blocks}")
        kv.commit(sequence, len(tokens))
        kv.free(sequence)
        return len(hits)


def replay(requests: Iterable[list[int]], num_blocks: int) -> Iterator[int]:
    """Hits of each request in turn, in a pool of `num_blocks`."""
    pool = CoreReplay(num_blocks)
    for ids in requests:
        yield pool.serve(ids)
