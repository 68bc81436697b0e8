"""What the host does for a decode step on a GPU, measured without one: all but the computing.

    python -m benchmarks.host_step [--context N] [--steps N] [--batches N N N]

The engine, its scheduler, the runner, the block tables of a CUDA graph and the texts are the real
ones. Instead of a recording that a GPU would replay stands one that does nothing, and the model is
so small that its logits cost next to nothing. The default model's tokenizer makes the texts. While
the host does this a GPU waits, so a step cannot take less.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from benchmarks.cpu_step import add_requests
from benchmarks.gpu.workload import QWEN3_06B, save_random_model
from benchmarks.machine import machine
from kernels.decode_graphs import Compute, DecodeGraphs
from minivllm import EngineConfig, LLMEngine
from minivllm.engine import TextDecoder
from minivllm.model.loader import resolve_model
from minivllm.model.runner import ModelRunner
from minivllm.tokenizer import Tokenizer

BLOCK_SIZE = 16
MAX_NUM_SEQS = 512
# Qwen3-0.6B's context length; the rest is as small as it goes.
TINY = {
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "eos_token_id": 0,
}
PARTS = {
    "schedule": "who runs, and in which blocks",
    "hidden": "check tables and ranges, copy them to the device",
    "execute": "the rest of the runner: rows, logits, tokens",
    "commit": "publish full blocks, append tokens",
    "step": "stop or go on, texts, outputs",
}


def make_engine(
    folder: Path, tokenizer: TextDecoder | None, num_blocks: int, most_tokens: int
) -> LLMEngine:
    """An engine on the CPU whose decode steps go through DecodeGraphs, and compute nothing."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=most_tokens,
    )
    runner: Any = ModelRunner(config)
    engine = LLMEngine(config, runner, tokenizer)
    runner._decode = lambda token_ids, _: torch.ones(len(token_ids), TINY["hidden_size"])
    runner._graphs = DecodeGraphs(
        lambda: _record,
        device=torch.device("cpu"),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_context_len=runner.max_model_len,
    )
    return engine


def _record(compute: Compute) -> Compute:
    """In place of a CUDA graph: the result stays at its address, and nothing is computed again."""
    result = compute()
    return lambda: result


class Stopwatch:
    """Seconds of the parts of each step; what a part calls counts for itself, and not for it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    @contextmanager
    def watching(self, engine: LLMEngine) -> Iterator[None]:
        """Time the calls of the methods that PARTS names; put them back after."""
        runner: Any = engine.runner
        owners = engine.scheduler, runner._graphs, runner, engine.scheduler, engine
        with ExitStack() as stack:
            for owner, name in zip(owners, PARTS, strict=True):
                timed = self._timed(name, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "step":
                self.steps.append(dict.fromkeys(PARTS, 0.0))
            parts = self.steps[-1]
            inside = sum(parts.values())
            started = perf_counter()
            result = method(*arguments)
            parts[name] += perf_counter() - started - (sum(parts.values()) - inside)
            return result

        return call


def milliseconds_a_step(
    folder: Path, tokenizer: TextDecoder | None, batch: int, context: int, num_steps: int
) -> dict[str, float]:
    """Medians over the steps, by part; `batch` sequences of `context` tokens decode."""
    blocks_each = -(-(context + num_steps + 2) // BLOCK_SIZE)
    engine = make_engine(folder, tokenizer, batch * blocks_each, batch * context)
    add_requests(engine, batch, context, num_steps + 2)
    # Nobody computes the prompts: for real it would take minutes.
    hidden = torch.ones(batch, TINY["hidden_size"])
    with mock.patch.object(engine.runner, "_compute", return_value=hidden):
        engine.step()
    engine.step()  # makes the recording
    return decode_steps(engine, batch, num_steps)


def decode_steps(engine: LLMEngine, batch: int, num_steps: int) -> dict[str, float]:
    """Milliseconds by part, medians over the steps, in each of which `batch` sequences decode."""
    watch = Stopwatch()
    with watch.watching(engine):
        for _ in range(num_steps):
            if len(engine.step()) != batch:
                raise RuntimeError("not every sequence has gained a token")
    return {name: 1e3 * median(step[name] for step in watch.steps) for name in PARTS}


def main() -> int:
    """Print a table: a row a part, a column a batch size."""
    parser = argparse.ArgumentParser(prog="benchmarks.host_step")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each (default 1024)")
    parser.add_argument("--steps", type=int, default=100, help="steps to measure (default 100)")
    asked = parser.parse_args()
    tokenizer = Tokenizer(resolve_model(EngineConfig().model))
    with tempfile.TemporaryDirectory() as name:
        folder = save_random_model(QWEN3_06B | TINY, Path(name, "tiny"), torch.device("cpu"))
        columns = [
            milliseconds_a_step(folder, tokenizer, batch, asked.context, asked.steps)
            for batch in asked.batches
        ]
    print(machine())
    print(f"milliseconds of the host a decode step, {asked.context:,} tokens in each sequence")
    print(f"{'sequences':<52}" + "".join(f"{batch:>8}" for batch in asked.batches))
    for part, what in PARTS.items():
        print(f"{what:<52}" + "".join(f"{column[part]:>8.2f}" for column in columns))
    print(f"{'all':<52}" + "".join(f"{sum(column.values()):>8.2f}" for column in columns))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
