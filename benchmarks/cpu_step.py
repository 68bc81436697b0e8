"""Where the time of a step goes on a CPU: torch's operators by their own time.

    python -m benchmarks.cpu_step [--model M] [--batch N] [--prompt N] [--new N] [--lines N]

The first table is of the steps that read the prompts, the second of those that decode. torch's
profiler is on, which makes small operators look slower than they are.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import machine
from minivllm import EngineConfig, LLMEngine, SamplingParams


def add_requests(engine: LLMEngine, batch: int, prompt_len: int, num_new: int) -> None:
    """Requests of random tokens that end at their length only."""
    draw = random.Random(0)
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    for number in range(batch):
        prompt = [draw.randrange(engine.runner.vocab_size) for _ in range(prompt_len)]
        engine.add_request(str(number), prompt, params)


def steps_while(engine: LLMEngine, condition: Callable[[], bool], num_lines: int) -> list[str]:
    """Run steps while `condition` holds; what they took, the costliest operators first."""
    num_steps = 0
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        while condition():
            engine.step()
            num_steps += 1
    found = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in found)
    lines = [f"{num_steps} steps, {total / 1e3 / max(1, num_steps):.1f} ms each"]
    for row in found[:num_lines]:
        share, each = row.self_cpu_time_total / total, row.self_cpu_time_total / row.count
        lines.append(f"{share:7.1%} {row.count:>7} x {each:9.1f} us   {row.key}")
    return lines


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_step")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--batch", type=int, default=8, help="requests (default 8)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each (default 128)")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate (default 16)")
    parser.add_argument("--lines", type=int, default=12, help="operators to show (default 12)")
    asked = parser.parse_args()
    engine = LLMEngine(EngineConfig(model=asked.model, device="cpu"))
    add_requests(engine, asked.batch, asked.prompt, 2)
    while engine.has_unfinished_requests():  # warm up
        engine.step()
    engine.reset_prefix_cache()
    add_requests(engine, asked.batch, asked.prompt, asked.new)
    print(machine())
    shape = f"{asked.batch} requests of {asked.prompt} tokens"
    reading = steps_while(engine, lambda: engine.stats()["num_waiting"] > 0, asked.lines)
    print(f"\nreading {shape}: {reading[0]}", *reading[1:], sep="\n")
    decoding = steps_while(engine, engine.has_unfinished_requests, asked.lines)
    print(f"\ndecoding {shape}: {decoding[0]}", *decoding[1:], sep="\n")


if __name__ == "__main__":
    main()
