"""What it brings on a CPU that sequences attend to a shared prefix together: seconds, in turns.

    python -m benchmarks.cpu_sharing [--model M] [--rounds N]

Sixteen requests of 1,024 shared tokens, which are cached, and 32 of their own; 16 new tokens each.
Once they attend to the prefix together, once each by itself; both engines have the same weights
and give the same tokens, or the command fails.
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from time import perf_counter

from benchmarks.machine import machine
from kernels import attention_plan
from minivllm import EngineConfig, LLMEngine, SamplingParams

REQUESTS, SHARED, OWN, NEW = 16, 1_024, 32, 16
NEVER = 1 << 62


def serve(engine: LLMEngine, draw: random.Random) -> tuple[float, list[list[int]]]:
    """Compute a new prefix (untimed), then time the requests: (seconds, outputs)."""
    vocab_size = engine.runner.vocab_size
    prefix = [draw.randrange(vocab_size) for _ in range(SHARED)]
    _run(engine, [[*prefix, 0]], 1)
    prompts = [prefix + [draw.randrange(vocab_size) for _ in range(OWN)] for _ in range(REQUESTS)]
    started = perf_counter()
    outputs = _run(engine, prompts, NEW)
    return perf_counter() - started, outputs


def _run(engine: LLMEngine, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)] = output.token_ids
    return outputs


def main() -> int:
    """Print both medians and their ratio; exit code 1 if the tokens differ."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_sharing")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both (default 3)")
    asked = parser.parse_args()
    engine = LLMEngine(EngineConfig(model=asked.model, device="cpu"))
    ways = {"together": attention_plan._LEAST_SPARED_KEYS, "each by itself": NEVER}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(asked.rounds + 1):
        outputs = []
        for name, least in ways.items():
            attention_plan._LEAST_SPARED_KEYS = least
            engine.reset_prefix_cache()
            took, tokens = serve(engine, random.Random(number))
            outputs.append(tokens)
            if number > 0:  # the first round warms up
                seconds[name].append(took)
        if outputs[0] != outputs[1]:
            print(f"benchmarks.cpu_sharing: other tokens in round {number}")
            return 1
    print(machine())
    for name, found in seconds.items():
        print(f"{name:16}{median(found):7.2f} s   ({min(found):.2f} to {max(found):.2f})")
    pairs = zip(*seconds.values(), strict=True)
    print(f"together is {median(apart / both for both, apart in pairs):.2f} times as fast")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
