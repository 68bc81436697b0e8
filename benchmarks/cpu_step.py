"""Where the time of a step goes on a CPU: our kernels in C by their own time, and what is left.

    python -m benchmarks.cpu_step [--model M] [--batch N] [--prompt N] [--new N] [--lines N]
                                  [--by-parts]

The first table is of the steps that read the prompts, the second of those that decode. A stand-in
for each C function adds up calls and time, from the call until every thread is done. Those of a
layer tell what each of its parts took; a linear layer outside, which is the head, is told by its
inputs and outputs. `Python and torch` is the rest of the step.

With --by-parts no layer is joined into two calls: each of its parts is called from Python.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from ctypes import CDLL, addressof, c_double
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from benchmarks.machine import machine
from kernels.native.layer import PARTS, NativeLayer
from minivllm import EngineConfig, LLMEngine, SamplingParams
from minivllm.model.backend import ENVIRONMENT_VARIABLE, choose_backend, native_library, why_not

REST = "Python and torch"


@dataclass
class Times:
    """Calls and seconds by name: of a layer's parts, and of the other C functions."""

    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """Count one call."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def forget(self) -> None:
        """Begin again at nothing."""
        self.calls.clear()
        self.seconds.clear()


@dataclass(frozen=True)
class Timed:
    """Stands in for one C function: hands everything on, and adds to `times` what it took.

    A layer's last argument is where C adds up what each part takes.
    """

    function: Callable[..., Any]
    name: str
    times: Times

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        if self.name.startswith("layer_"):
            return self._call_layer(*arguments)
        started = perf_counter()
        result = self.function(*arguments)
        self.times.add(self._shown(arguments), perf_counter() - started)
        return result

    def _call_layer(self, *arguments: Any) -> Any:
        seconds = (c_double * len(PARTS))()
        result = self.function(*arguments[:-1], addressof(seconds))
        for part, taken in zip(PARTS, seconds, strict=True):
            if taken:
                self.times.add(part, taken)
        return result

    def _shown(self, arguments: tuple[Any, ...]) -> str:
        if self.name != "linear":
            return self.name
        inputs, outputs = arguments[-2:]
        return f"linear {inputs:,} x {outputs:,}"


@contextmanager
def timed(library: CDLL) -> Iterator[Times]:
    """Stand in for every function of the library that has been looked up; put them back after.

    An engine must be built inside: its linear layers keep the function that they find.
    """
    found = vars(library)
    functions = {name: each for name, each in found.items() if not name.startswith("_")}
    times = Times()
    found.update({name: Timed(each, name, times) for name, each in functions.items()})
    try:
        yield times
    finally:
        found.update(functions)


def add_requests(engine: LLMEngine, batch: int, prompt_len: int, num_new: int) -> None:
    """Requests of random tokens that end at their length only."""
    draw = random.Random(0)
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    for number in range(batch):
        prompt = [draw.randrange(engine.runner.vocab_size) for _ in range(prompt_len)]
        engine.add_request(str(number), prompt, params)


def steps_while(
    engine: LLMEngine, times: Times, condition: Callable[[], bool], num_lines: int
) -> list[str]:
    """Run steps while `condition` holds; what they took, the costliest functions first."""
    num_steps, total = 0, 0.0
    times.forget()
    while condition():
        started = perf_counter()
        engine.step()
        total += perf_counter() - started
        num_steps += 1
    if num_steps == 0:
        return ["no steps"]
    seconds = {**times.seconds, REST: total - sum(times.seconds.values())}
    calls = {**times.calls, REST: num_steps}
    lines = [
        f"{num_steps} steps, {total * 1e3 / num_steps:.1f} ms each",
        f"{'share':>7}{'calls a step':>14}{'us a call':>12}{'ms a step':>12}",
    ]
    for name in sorted(seconds, key=lambda name: -seconds[name])[:num_lines]:
        each, took = calls[name], seconds[name]
        lines.append(
            f"{took / total:7.1%}{each / num_steps:14.0f}{took * 1e6 / each:12,.1f}"
            f"{took * 1e3 / num_steps:12.2f}   {name}"
        )
    return lines


def main() -> int:
    """Print both tables; exit code 2 where our kernels cannot run."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_step")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--batch", type=int, default=8, help="requests (default 8)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each (default 128)")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate (default 16)")
    parser.add_argument("--lines", type=int, default=12, help="lines of a table (default 12)")
    parser.add_argument("--by-parts", action="store_true", help="call each part from Python")
    asked = parser.parse_args()
    where = torch.device("cpu"), torch.float32
    if missing := why_not("native", *where):
        print(f"benchmarks.cpu_step: {missing}")
        return 2
    if (chosen := choose_backend("native", *where)) != "native":
        print(f"benchmarks.cpu_step: {ENVIRONMENT_VARIABLE} is {chosen}")
        return 2
    apart = mock.patch.object(NativeLayer, "takes", return_value=False)
    with timed(native_library()) as times, apart if asked.by_parts else nullcontext():
        engine = LLMEngine(
            EngineConfig(
                model=asked.model, device="cpu", dtype="float32", attention_backend="native"
            )
        )
        add_requests(engine, asked.batch, asked.prompt, 2)
        while engine.has_unfinished_requests():  # warm up
            engine.step()
        engine.reset_prefix_cache()
        add_requests(engine, asked.batch, asked.prompt, asked.new)
        print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads", sep=", ")
        shape = f"{asked.batch} requests of {asked.prompt} tokens"
        for action, condition in (
            ("reading", lambda: engine.stats()["num_waiting"] > 0),
            ("decoding", engine.has_unfinished_requests),
        ):
            first, *lines = steps_while(engine, times, condition, asked.lines)
            print(f"\n{action} {shape}: {first}", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
