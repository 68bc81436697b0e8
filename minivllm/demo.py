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
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.llm import LLM, load_engine
from minivllm.output import RequestOutput
from minivllm.pool_picture import LEGEND, pool_picture
from minivllm.sampling_params import SamplingParams

# Enough blocks for six prompts that share nothing: with the cache off, too, all six find room.
CACHE_ON = EngineConfig(num_kv_blocks=384)
CACHE_OFF = replace(CACHE_ON, enable_prefix_caching=False)
PARAMS = SamplingParams(max_tokens=36, stop=("\n",))


@dataclass(slots=True)
class Run:
    """All prompts through one engine: everybody's newest output, and how long it took.

    pool   the pool as it was drawn while all of the last wave were decoding
    """

    engine: LLMEngine
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    seconds: float = 0.0
    pool: Text | None = None

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
    script = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    system = {"role": "system", "content": "\n".join(script["system_prompt"])}
    encode = LLM(engine=engine).encode_chat
    prompts = {
        name: encode([system, {"role": "user", "content": question}])
        for name, question in script["questions"].items()
    }
    first, *others = prompts
    console.print(
        "Six people ask the assistant of a repair café. Everybody's prompt is the same long"
        f" system prompt and one short question: {len(prompts[first])} tokens for {first}."
        " The model is a very small one: it speaks well, and is sometimes wrong.\n"
    )

    console.rule(f"1. Cache on: {first} comes first, then five together", align="left")
    console.print(f"All of {first}'s prompt is computed. The five find the system prompt cached.\n")
    with Live(console=console, auto_refresh=False) as live:

        def show(run: Run) -> None:
            live.update(_answers(run, script["questions"]), refresh=True)

        cached = _run(engine, [[first], others], prompts, show)
    console.print("\nThe pool while the five were answered, a character a block:\n")
    console.print(cached.pool or "", "", LEGEND, "", _first_tokens(cached), sep="\n")
    console.print(
        f"Cold, {first} waited {cached.first_token(first):.2f} s for the first token;"
        f" warm, the five waited {cached.first_token(*others):.2f} s, although together."
    )
    console.print(_work(cached))

    console.rule("2. Cache on: all six together, nothing cached yet", align="left")
    console.print("One of them computes the system prompt; the five others wait for it, and share.")
    together = _run(LLMEngine(CACHE_ON, engine.runner, engine.tokenizer), [[*prompts]], prompts)
    console.print(_work(together))

    console.rule("3. Cache off: as in 1", align="left")
    console.print("Everybody computes the system prompt.")
    off = LLMEngine(CACHE_OFF, engine.runner, engine.tokenizer)
    uncached = _run(off, [[first], others], prompts)
    console.print(
        f"The five waited {uncached.first_token(*others):.2f} s for their first token;"
        f" with the cache it was {cached.first_token(*others):.2f} s."
    )
    console.print(_work(uncached))
    code = _verdict(console, cached, together, uncached)
    console.print("", *script["read_next"], sep="\n")
    return code


def _run(
    engine: LLMEngine,
    waves: list[list[str]],
    prompts: dict[str, list[int]],
    show: Callable[[Run], object] = lambda run: None,
) -> Run:
    """Answer wave after wave; the people of one wave are added together."""
    run = Run(engine)
    started = perf_counter()
    for wave in waves:
        for name in wave:
            engine.add_request(name, prompts[name], PARAMS)
        while engine.has_unfinished_requests():
            run.outputs |= {output.request_id: output for output in engine.step()}
            show(run)
            running = engine.scheduler.running
            if 1 < len(running) == len(wave) and all(each.is_decoding for each in running):
                run.pool = pool_picture(engine.kv, running)
    run.seconds = perf_counter() - started
    return run


def _answers(run: Run, questions: dict[str, str]) -> Group:
    """Questions and answers, as far as they have come."""
    lines: list[Text | Padding] = []
    for name, output in run.outputs.items():
        lines.append(Text(f"{name:>7}: {questions[name]}", "bold"))
        dots = " ..." if output.finish_reason == "length" else ""
        lines.append(Padding(Text(output.text.strip() + dots), (0, 0, 0, 9), expand=False))
    return Group(*lines)


def _first_tokens(run: Run) -> Table:
    """Who found how much of the prompt in the cache, and waited how long."""
    table = Table("who", "prompt tokens", "cached", "computed", "first token after")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, output in run.outputs.items():
        num_prompt, num_cached = output.num_prompt_tokens, output.num_cached_tokens
        wait = f"{run.first_token(name):.2f} s"
        table.add_row(name, str(num_prompt), str(num_cached), str(num_prompt - num_cached), wait)
    return table


def _work(run: Run) -> str:
    """How much of the prompts was computed at all."""
    stats = run.engine.stats()
    num_tokens = sum(output.num_prompt_tokens for output in run.outputs.values())
    return (
        f"Computed {stats['prompt_tokens_computed']:,} of {num_tokens:,} prompt tokens"
        f" (hit rate {stats['prefix_hit_rate']:.0%}), and {stats['generated_tokens']} new ones,"
        f" in {run.seconds:.1f} s.\n"
    )


def _verdict(console: Console, *runs: Run) -> int:
    """Compare what everybody got in each run, say so, and give the exit code."""
    first, *others = [run.outputs for run in runs]
    different = [
        name for name in first if any(o[name].token_ids != first[name].token_ids for o in others)
    ]
    if different:
        console.print(
            f"The answers of {', '.join(different)} differ between the runs."
            " The cache must not change an answer: this is a fault.",
            style="bold red",
        )
        return 1
    console.print("All three runs gave everybody the same answer, token for token.", style="bold")
    return 0
