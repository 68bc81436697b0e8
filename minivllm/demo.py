"""Six people ask one assistant: what a shared prefix is worth, on a real model.

Three runs of the same six prompts, each on an engine of its own with an empty pool: one person
first and then five with the prefix cache on; all six together; and the first run with it off.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from time import perf_counter

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.llm import LLM, load_engine
from minivllm.output import RequestOutput
from minivllm.pool_picture import LEGEND, pool_picture, table_picture
from minivllm.sampling_params import SamplingParams

# Enough blocks for six prompts that share nothing: with the cache off, too, all six find room.
CACHE_ON = EngineConfig(num_kv_blocks=384)
CACHE_OFF = replace(CACHE_ON, enable_prefix_caching=False)
PARAMS = SamplingParams(max_tokens=40)

READ_NEXT = """
Read next
  minivllm/core/scheduler.py    who runs, and how many tokens of each
  minivllm/core/kv_cache.py     how a prefix is found, shared and let go
  README.md                     the way into the book
Try next
  python -m minivllm generate --prompt "One, two, three, four" --trace trace.jsonl
  python -m minivllm explain --trace trace.jsonl --request 0"""


@dataclass(slots=True)
class Run:
    """All prompts through one engine: everybody's newest output, and how long it took.

    pool   the pool as it was drawn while all of the last wave were decoding
    """

    engine: LLMEngine
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    seconds: float = 0.0
    pool: Text | None = None

    def token_ids(self) -> dict[str, list[int]]:
        """What everybody got."""
        return {name: output.token_ids for name, output in self.outputs.items()}

    def first_token(self, *names: str) -> float:
        """Mean time to the first token of these people, in seconds."""
        return mean(self.outputs[name].time_to_first_token or 0.0 for name in names)


def run_demo(load: Callable[[EngineConfig], LLMEngine] = load_engine) -> int:
    """Run the demo; the exit code is 1 if cache on and cache off disagree, else 0.

    `load` makes the first engine; the others take over its runner and tokenizer.
    """
    console = Console(highlight=False)
    with console.status("loading the model"):
        engine = load(CACHE_ON)
    system_prompt, questions = _script()
    encode = LLM.from_engine(engine).encode_chat
    prompts = {
        name: encode([system_prompt, {"role": "user", "content": question}])
        for name, question in questions.items()
    }
    first, *others = prompts
    console.print(
        "Six people ask the assistant of a repair café. Everybody's prompt is the same long"
        f" system prompt and one short question: {len(prompts[first])} tokens for {first}."
    )

    _title(console, f"1. Cache on: {first} comes first, then five together")
    console.print(f"All of {first}'s prompt is computed. The five find the system prompt cached.\n")
    with _Answers(console, questions) as answers:
        cached = _run(engine, [[first], others], prompts, answers.show)
    console.print("\nThe pool while the five were answered, a character a block:\n")
    console.print(cached.pool or "", "", LEGEND, sep="\n")
    _print_first_tokens(console, cached)
    _print_work(console, cached)

    _title(console, "2. Cache on: all six together, nothing cached yet")
    console.print("One of them computes the system prompt; the five others wait for it, and share.")
    together = _run(LLMEngine(CACHE_ON, engine.runner, engine.tokenizer), [[*prompts]], prompts)
    _print_work(console, together)

    _title(console, "3. Cache off: as in 1")
    console.print("Everybody computes the system prompt.")
    uncached = _run(
        LLMEngine(CACHE_OFF, engine.runner, engine.tokenizer), [[first], others], prompts
    )
    _print_work(console, uncached)
    console.print(
        f"The five waited {uncached.first_token(*others):.2f} s for their first token,"
        f" with the cache {cached.first_token(*others):.2f} s."
    )

    return _verdict(console, [cached, together, uncached])


def _script() -> tuple[dict[str, str], dict[str, str]]:
    """The system message, and who asks what."""
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    system_prompt = "\n".join(content["system_prompt"])
    return {"role": "system", "content": system_prompt}, content["questions"]


def _run(
    engine: LLMEngine,
    waves: list[list[str]],
    prompts: dict[str, list[int]],
    show: Callable[[RequestOutput], None] = lambda output: None,
) -> Run:
    """Answer wave after wave; the people of one wave are added together."""
    run = Run(engine)
    started = perf_counter()
    for wave in waves:
        for name in wave:
            engine.add_request(name, prompts[name], PARAMS)
        while engine.has_unfinished_requests():
            for output in engine.step():
                run.outputs[output.request_id] = output
                show(output)
            running = engine.scheduler.running
            if 1 < len(running) == len(wave) and all(each.is_decoding for each in running):
                run.pool = _picture(engine)
    run.seconds = perf_counter() - started
    return run


def _picture(engine: LLMEngine) -> Text:
    """The pool, and below it everybody's block table."""
    picture = pool_picture(engine.kv)
    for sequence in engine.scheduler.running:
        picture.append(f"\n{sequence.name:>7}: {table_picture(engine.kv, sequence)}")
    return picture


class _Answers:
    """Questions and answers as they come: redrawn on a terminal, else each one when it is whole."""

    def __init__(self, console: Console, questions: dict[str, str]) -> None:
        self._console = console
        self._questions = questions
        self._texts: dict[str, str] = {}
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> _Answers:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, output: RequestOutput) -> None:
        """Take the newest output of somebody."""
        name = output.request_id
        self._texts[name] = output.text
        if self._live is not None:
            self._live.update(Group(*map(self._line, self._texts)), refresh=True)
        elif output.finished:
            self._console.print(self._line(name))

    def _line(self, name: str) -> Text:
        text = " ".join(self._texts[name].split())
        return Text.assemble((f"{name:>7}: {self._questions[name]}", "bold"), f"\n         {text}")


def _print_first_tokens(console: Console, run: Run) -> None:
    """Who found how much of the prompt in the cache, and waited how long."""
    table = Table("who", "prompt tokens", "cached", "computed", "first token after")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, output in run.outputs.items():
        num_prompt, num_cached = output.num_prompt_tokens, output.num_cached_tokens
        wait = f"{run.first_token(name):.2f} s"
        table.add_row(name, str(num_prompt), str(num_cached), str(num_prompt - num_cached), wait)
    console.print("\n", table, sep="")
    cold, *warm = run.outputs
    console.print(
        f"Cold, {cold} waited {run.first_token(cold):.2f} s for the first token;"
        f" warm, the five waited {run.first_token(*warm):.2f} s on average, although together."
    )


def _print_work(console: Console, run: Run) -> None:
    """How much of the prompts was computed at all."""
    stats = run.engine.stats()
    num_tokens = sum(output.num_prompt_tokens for output in run.outputs.values())
    console.print(
        f"Computed {stats['prompt_tokens_computed']:,} of {num_tokens:,} prompt tokens"
        f" (hit rate {stats['prefix_hit_rate']:.0%}), and {stats['generated_tokens']} new ones,"
        f" in {run.seconds:.1f} s."
    )


def _verdict(console: Console, runs: list[Run]) -> int:
    """Compare what everybody got in each run, say so, and give the exit code."""
    expected, *others = [run.token_ids() for run in runs]
    different = [name for name in expected if any(o[name] != expected[name] for o in others)]
    if different:
        console.print(
            f"\nThe answers of {', '.join(different)} differ between the runs."
            " The cache must not change an answer: this is a fault.",
            style="bold red",
        )
        return 1
    console.print("\nAll three runs gave everybody the same answer, token for token.", style="bold")
    console.print(READ_NEXT)
    return 0


def _title(console: Console, text: str) -> None:
    console.print()
    console.rule(text, align="left")
