"""What the host does to launch a step that no graph has recorded: one with a prompt in it.

    python -m benchmarks.host_launches [--layers N] [--steps N]

The rest of one prompt behind its cached prefix. Runner, decoder and launchers are the real ones, on
a model so narrow that its products cost next to nothing. A launch of our kernels does nothing; what
Triton itself needs for one is not in here. While the host launches, a GPU can at best keep up.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.workload import QWEN3_06B, save_random_model
from benchmarks.host_step import BLOCK_SIZE, TINY
from benchmarks.launches import launches_replaced
from benchmarks.machine import machine
from kernels.available import INTERPRET, NO_TRITON
from minivllm import EngineConfig, SamplingParams
from minivllm.core.batch import ScheduledSequence
from minivllm.model.runner import ModelRunner

CACHED, REST = 4096, 32


@contextmanager
def launching_nothing() -> Iterator[Counter[str]]:
    """Count the launches of our kernels by name, and let them do nothing, on any device."""
    launched: Counter[str] = Counter()

    def run(kernel: Any, *_: object, **__: object) -> None:
        launched[kernel.__name__] += 1

    with (
        launches_replaced(run),
        # The runner asks for whatever else would be missing here.
        mock.patch("minivllm.model.runner.choose_backend", return_value="triton"),
    ):
        yield launched


def compute(runner: ModelRunner, sequence: ScheduledSequence) -> None:
    """All of a step that is launched before a token is chosen."""
    runner._decoder.logits(runner._compute([sequence]))


def seconds_a_step(folder: Path, num_steps: int) -> tuple[list[float], Counter[str]]:
    """Of each step, and how many launches of each kernel one step has."""
    num_tokens = CACHED + REST
    table = list(range(-(-num_tokens // BLOCK_SIZE)))
    sequence = ScheduledSequence("r", [1] * num_tokens, CACHED, num_tokens, table, SamplingParams())
    seconds = []
    with launching_nothing() as launched, torch.inference_mode():
        runner = ModelRunner(EngineConfig(model=str(folder), device="cpu"))
        runner.init_kv(len(table), BLOCK_SIZE)
        compute(runner, sequence)
        launched.clear()
        for _ in range(num_steps):
            started = perf_counter()
            compute(runner, sequence)
            seconds.append(perf_counter() - started)
    return seconds, Counter({name: count // num_steps for name, count in launched.items()})


def main() -> int:
    """Print launches and milliseconds; exit code 2 where it cannot be measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.host_launches")
    parser.add_argument("--layers", type=int, default=28, help="layers (default 28)")
    parser.add_argument("--steps", type=int, default=100, help="steps to measure (default 100)")
    asked = parser.parse_args()
    if find_spec("triton") is None:
        print(f"benchmarks.host_launches: {NO_TRITON}")
        return 2
    if INTERPRET in os.environ:
        print(f"benchmarks.host_launches: {INTERPRET} is set; here nothing must be interpreted")
        return 2
    with tempfile.TemporaryDirectory() as name:
        config = QWEN3_06B | TINY | {"num_hidden_layers": asked.layers}
        folder = save_random_model(config, Path(name, "narrow"), torch.device("cpu"))
        seconds, launched = seconds_a_step(folder, asked.steps)
    print(machine())
    print(f"{asked.layers} layers, {REST} tokens behind {CACHED:,} cached ones")
    for kernel, count in sorted(launched.items()):
        print(f"{count:>8} {kernel}")
    step = 1e3 * median(seconds)
    print(f"{launched.total():>8} launches of our kernels in a step")
    print(f"{step:>8.2f} ms of the host a step, {1e3 * step / asked.layers:.0f} us a layer")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
