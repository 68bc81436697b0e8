"""Attention out of the paged cache on a CPU: plain torch and our kernel, microseconds a call.

    python -m benchmarks.cpu_attention [--rounds N]

The shape is the default model's. Each way goes through the caches of 30 layers in turn, as a step
does, and something large is read before, so that keys and values come from memory; the figure is
the lowest of all rounds. What is done once a step for all layers is not in it.

    torch   kernels/gathered_attention.py
    ours    kernels/native/attention.py

Sixteen sequences decode once with blocks of their own and once with blocks that they share. The
same keys and values lie in both, so the outputs must be equal to the bit, or the command fails.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from benchmarks.machine import machine
from kernels.gathered_attention import GatheredAttention, Pair
from kernels.native.attention import NativeAttention
from kernels.sequence import StepSequence
from minivllm.model.backend import native_library, why_not

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 16, 9, 3, 64, 30
BYTES_BETWEEN = 256_000_000
"""Read before each turn: more than the caches of a processor hold."""


class Case(NamedTuple):
    """Sequences that are alike: each computes its last rows.

    num_shared  tokens, from the first on, whose blocks are the same for all
    """

    name: str
    num_sequences: int
    context_len: int
    num_rows: int
    num_shared: int = 0

    @property
    def blocks_each(self) -> int:
        """Of a sequence that shares none."""
        return -(-self.context_len // BLOCK_SIZE)


OWN = Case("16 decode at 1,064", 16, 1_064, 1)
SHARED = OWN._replace(name="16 decode at 1,064, 1,024 shared", num_shared=1_024)
CASES = (
    Case("1 decodes at 150", 1, 150, 1),
    Case("8 decode at 150", 8, 150, 1),
    Case("32 decode at 150", 32, 150, 1),
    Case("1 prompt of 512", 1, 512, 512),
    OWN,
    SHARED,
    Case("16 suffixes of 32, 1,024 shared", 16, 1_056, 32, 1_024),
)


@dataclass(frozen=True)
class Reader:
    """What attention needs to know of a sequence, see StepSequence."""

    start: int
    end: int
    block_table: list[int]
    token_ids: list[int] = field(default_factory=list)


class Attention(Protocol):
    """One step of either way."""

    def attend(self, query: Tensor, cache: Pair) -> Tensor:
        """See the ways."""


def _ours(sequences: Sequence[StepSequence], cache: Pair) -> NativeAttention:
    return NativeAttention.begin_step(native_library(), sequences, cache)


WAYS: dict[str, Callable[[Sequence[StepSequence], Pair], Attention]] = {
    "torch": GatheredAttention.of,
    "ours": _ours,
}


def sequences_of(case: Case, blocks: Sequence[int]) -> list[Reader]:
    """The case's sequences; each has the next of `blocks`, and in place of the shared the first's.

    Block size 4, contexts of 9, 4 tokens shared, blocks 5 2 0 7 4 1: tables 5 2 0 and 5 4 1.
    """
    size, num_shared = case.blocks_each, case.num_shared // BLOCK_SIZE
    return [
        Reader(
            case.context_len - case.num_rows,
            case.context_len,
            [*blocks[:num_shared], *blocks[number * size + num_shared : (number + 1) * size]],
        )
        for number in range(case.num_sequences)
    ]


def copy_shared(shared: Case, blocks: Sequence[int], cache: Pair) -> None:
    """Give every sequence of OWN what the sequences of `shared` have in common."""
    size, num_shared = shared.blocks_each, shared.num_shared // BLOCK_SIZE
    for number in range(1, shared.num_sequences):
        own = list(blocks[number * size : number * size + num_shared])
        for pool in cache:
            pool[own] = pool[list(blocks[:num_shared])]


def new_caches(blocks: Sequence[int]) -> list[Pair]:
    """Keys and values of each layer; their values are the same, their memory is not."""
    shape = (len(blocks), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    copy_shared(SHARED, blocks, (keys, values))
    return [(keys.clone(), values.clone()) for _ in range(NUM_LAYERS)]


def query_of(case: Case) -> Tensor:
    """Random, and the same each time."""
    generator = torch.Generator().manual_seed(1)
    num_rows = case.num_sequences * case.num_rows
    return torch.randn(num_rows, NUM_HEADS, HEAD_DIM, generator=generator)


def measure(
    caches: list[Pair], blocks: Sequence[int], num_rounds: int
) -> dict[str, dict[str, float]]:
    """Microseconds a call, by case and way."""
    between = torch.ones(BYTES_BETWEEN // 4)
    turns = {
        (case.name, way): partial(
            begin(sequences_of(case, blocks), caches[0]).attend, query_of(case)
        )
        for case in CASES
        for way, begin in WAYS.items()
    }
    fastest: dict[str, dict[str, float]] = {case.name: {} for case in CASES}
    for _ in range(num_rounds):
        for (name, way), attend in turns.items():
            between.sum()
            started = perf_counter()
            for cache in caches:
                attend(cache)
            microseconds = (perf_counter() - started) / len(caches) * 1e6
            fastest[name][way] = min(fastest[name].get(way, microseconds), microseconds)
    return fastest


def same_bits(cache: Pair, blocks: Sequence[int]) -> bool:
    """Whether our output is the same where blocks are shared and where each has its own."""
    own, shared = (
        _ours(sequences_of(case, blocks), cache).attend(query_of(case), cache)
        for case in (OWN, SHARED)
    )
    return torch.equal(own, shared)


@torch.inference_mode()
def main() -> int:
    """Print the table; exit code 1 if sharing changes a bit, 2 where our kernels cannot run."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_attention")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of all (default 10)")
    arguments = parser.parse_args()
    if missing := why_not("native", torch.device("cpu"), torch.float32):
        print(f"benchmarks.cpu_attention: {missing}")
        return 2
    num_blocks = max(case.num_sequences * case.blocks_each for case in CASES)
    # In the order in which a pool that has been used for a while would hand them out.
    blocks = random.Random(0).sample(range(num_blocks), num_blocks)
    caches = new_caches(blocks)
    if not same_bits(caches[0], blocks):
        print("benchmarks.cpu_attention: other bits where blocks are shared")
        return 1
    fastest = measure(caches, blocks, arguments.rounds)
    print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads", sep=", ")
    print(f"\n{'us a call':34}{'torch':>10}{'ours':>10}{'times as fast':>16}")
    for name, found in fastest.items():
        ratio = found["torch"] / found["ours"]
        print(f"{name:34}{found['torch']:10,.0f}{found['ours']:10,.0f}{ratio:16.1f}")
    brought = fastest[OWN.name]["ours"] / fastest[SHARED.name]["ours"]
    print(f"ours is {brought:.1f} times as fast with shared blocks as with own ones, bit for bit")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
