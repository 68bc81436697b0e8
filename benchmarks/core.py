"""Microseconds per block of what `core` does, at pools of 1k, 10k and 100k blocks.

    python -m benchmarks.core

Each operation should cost much the same per block however large the pool is. Every pool is full of
cached, idle prefixes of 64 blocks. A round looks up old prefixes drawn from all over the pool
and runs new sequences through it, which evicts the oldest ones: the same number of blocks at
every size. The sizes take turns, and the figure is the median of all rounds, so that a slow
moment of the machine hits them all.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections import deque
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TypeVar

from benchmarks.machine import machine
from minivllm.config import EngineConfig
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.sequence import CachePolicy, Sequence
from minivllm.core.trace import Trace
from minivllm.sampling_params import SamplingParams

BLOCK_SIZE = 16
SEQUENCE_BLOCKS = 64
SEQUENCE_TOKENS = SEQUENCE_BLOCKS * BLOCK_SIZE
SEQUENCES_A_ROUND = 8
POOL_SIZES = (1_024, 10_240, 102_400)
OPERATIONS = ("keys", "lookup", "allocate", "publish", "release", "evict")
# An operation that searched the pool would grow a hundredfold. What is left of its own work is so
# little that memory outside the processor's cache nearly doubles it.
MOST_GROWTH = 2.0

T = TypeVar("T")


class CoreBench:
    """One full pool, and the seconds that each operation took in each round."""

    def __init__(self, num_blocks: int) -> None:
        self.kv = KVCache(num_blocks, EngineConfig(block_size=BLOCK_SIZE), Metrics(), Trace())
        self.seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}
        self._random = random.Random(0)
        self._cached: deque[list[int]] = deque()
        for _ in range(num_blocks // SEQUENCE_BLOCKS):
            sequence = self._new()
            self.kv.allocate(sequence, SEQUENCE_TOKENS, [])
            self.kv.commit(sequence, SEQUENCE_TOKENS)
            self.kv.free(sequence)

    def run_round(self) -> None:
        """Time each operation once, on SEQUENCES_A_ROUND sequences."""
        old = [
            self._sequence(text) for text in self._random.sample(self._cached, SEQUENCES_A_ROUND)
        ]
        new = [self._new() for _ in range(SEQUENCES_A_ROUND)]
        for _ in new:
            self._cached.popleft()
        kv, num_blocks = self.kv, SEQUENCES_A_ROUND * SEQUENCE_BLOCKS
        self._time("keys", lambda s: s.keys.extend(s.token_ids), new)
        for sequence in old:
            sequence.keys.extend(sequence.token_ids)
        self._time("lookup", kv.match, old)
        if any(len(s.matched_blocks) != SEQUENCE_BLOCKS - 1 for s in old):
            raise SystemExit("benchmarks.core: a cached prefix was not found")
        self._time("evict", kv._evict, [num_blocks])
        self._time("allocate", lambda s: kv.allocate(s, SEQUENCE_TOKENS, []), new)
        self._time("publish", lambda s: kv.commit(s, SEQUENCE_TOKENS), new)
        self._time("release", kv.free, new)

    def microseconds_per_block(self, operation: str) -> float:
        """Median over the rounds."""
        return median(self.seconds[operation]) / (SEQUENCES_A_ROUND * SEQUENCE_BLOCKS) * 1e6

    def _new(self) -> Sequence:
        """Make a sequence with tokens that nobody has had; it will be the youngest cached one."""
        text = [self._random.randrange(50_000) for _ in range(SEQUENCE_TOKENS)]
        self._cached.append(text)
        return self._sequence(text)

    def _sequence(self, token_ids: list[int]) -> Sequence:
        policy = CachePolicy()
        keys = self.kv.new_keys(policy)
        return Sequence("r", 0, token_ids, len(token_ids), SamplingParams(), policy, keys, 0)

    def _time(self, operation: str, action: Callable[[T], object], items: list[T]) -> None:
        started = perf_counter()
        for item in items:
            action(item)
        self.seconds[operation].append(perf_counter() - started)


def measure(num_rounds: int) -> dict[str, dict[int, float]]:
    """Microseconds per block by operation and pool size."""
    benches = {size: CoreBench(size) for size in POOL_SIZES}
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_rounds):
            for bench in benches.values():
                bench.run_round()
    finally:
        gc.enable()
    return {
        operation: {size: benches[size].microseconds_per_block(operation) for size in POOL_SIZES}
        for operation in OPERATIONS
    }


def main() -> int:
    """Print the table; exit code 1 if an operation grows more than MOST_GROWTH with the pool."""
    parser = argparse.ArgumentParser(prog="benchmarks.core", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="rounds per pool (default 100)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    arguments = parser.parse_args()
    figures = measure(arguments.rounds)
    growth = {name: row[POOL_SIZES[-1]] / row[POOL_SIZES[0]] for name, row in figures.items()}
    if arguments.json:
        print(json.dumps({"microseconds_per_block": figures, "growth": growth}))
    else:
        print(machine())
        print(
            "microseconds per block" + "".join(f"{size:>10,}" for size in POOL_SIZES) + "  growth"
        )
        for name, row in figures.items():
            cells = "".join(f"{row[size]:>10.3f}" for size in POOL_SIZES)
            print(f"{name:<22}{cells}{growth[name]:>8.2f}")
    return int(max(growth.values()) > MOST_GROWTH)


if __name__ == "__main__":
    raise SystemExit(main())
