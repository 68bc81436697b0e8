"""Six people ask one assistant: what a shared prefix is worth, on a real model.

Three runs of the same six prompts, each on an engine of its own with an empty pool: one person
first and then five with the prefix cache on; all six together; and the first run with it off.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from time import perf_counter

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.llm import LLM
from minivllm.output import RequestOutput
from minivllm.pool_picture import LEGEND, pool_picture
from minivllm.sampling_params import SamplingParams

# Enough blocks for six prompts that share nothing: with the cache off, too, all six find room.
CACHE_ON = EngineConfig(num_kv_blocks=384)
CACHE_OFF = replace(CACHE_ON, enable_prefix_caching=False)
PARAMS = SamplingParams(max_tokens=36, stop=("\n",))


@dataclass(slots=True)
class Run:
    """All prompts through one engine: everybody's newest output, and what it took.

    pool   the pool as it was drawn while all of the last wave were decoding
    work   how much of the prompts was computed at all, as a sentence
    """

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    pool: Text = field(default_factory=Text)
    work: str = ""

    def first_token(self, *names: str) -> str:
        """Mean time to the first token of these people."""
        return f"{mean(self.outputs[name].time_to_first_token or 0.0 for name in names):.2f} s"


def run_demo(load: Callable[[EngineConfig], LLMEngine] = LLMEngine) -> int:
    """Run the demo; the exit code is 1 if cache on and cache off disagree, else 0.

    `load` makes an engine; those of the three runs take over its runner and tokenizer.
    """
    console = Console(highlight=False)
    with console.status("loading the model"):
        loaded = load(CACHE_ON)
    script = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    questions = script["questions"]
    system = {"role": "system", "content": "\n".join(script["system_prompt"])}
    conversations = {n: [system, {"role": "user", "content": q}] for n, q in questions.items()}
    encode = LLM(engine=loaded).encode_chat
    prompts = {name: encode(conversation) for name, conversation in conversations.items()}
    first, *others = prompts
    console.print(
        "Six people ask the assistant of a repair café. Everybody's prompt is the same long"
        f" system prompt and one short question: {len(prompts[first])} tokens for {first}."
        " The model is a very small one: it speaks well, and is sometimes wrong.\n"
    )
    in_turn, together = [[first], others], [[first, *others]]
    cold_warm = f"Cold, all of {first}'s prompt is computed; warm, the five find most of it cached."
    share = "One of them computes the system prompt; the five others wait for it, and share."
    runs: list[Run] = []
    for title, note, config, waves in [
        (f"1. Cache on: {first} comes first, then five together", cold_warm, CACHE_ON, in_turn),
        ("2. Cache on: all six together, nothing cached yet", share, CACHE_ON, together),
        ("3. Cache off: as in 1", "Everybody computes the system prompt.", CACHE_OFF, in_turn),
    ]:
        console.rule(title, align="left")
        console.print(note)
        engine = LLMEngine(config, loaded.runner, loaded.tokenizer)
        run = _run(engine, waves, prompts, {} if runs else questions)
        if not runs:
            console.print("\nThe pool while the five were answered, a character a block:\n")
            console.print(run.pool, "", LEGEND, "", _first_tokens(run), sep="\n")
        console.print(
            f"{first} waited {run.first_token(first)} for the first token; the five others waited"
            f" {run.first_token(*others)}, on average. {run.work}\n"
        )
        runs.append(run)

    answers = [{name: run.outputs[name].token_ids for name in prompts} for run in runs]
    different = [name for name in prompts if any(a[name] != answers[0][name] for a in answers)]
    if different:
        verdict = f"A fault: answers differ between the runs, those of {', '.join(different)}."
    else:
        verdict = "All three runs gave everybody the same answer, token for token."
    console.print(verdict, style="bold red" if different else "bold")
    console.print("", *script["read_next"], sep="\n")
    return 1 if different else 0


def _run(
    engine: LLMEngine, waves: list[list[str]], prompts: dict[str, list[int]], asked: dict[str, str]
) -> Run:
    """Answer wave after wave; the people of one wave are added together.

    Shows the answers to what is `asked`: token by token if only one person asks, and otherwise, as
    several grow at the same time, each when it is whole.
    """
    run, shown = Run(), dict.fromkeys(prompts, "")
    started = perf_counter()
    for wave in waves:
        for name in wave:
            engine.add_request(name, prompts[name], PARAMS)
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = output.request_id
                run.outputs[name] = output
                if name in asked and (output.finished or len(wave) == 1):
                    text = _answer(asked[name], output)
                    print(text.removeprefix(shown[name]), end="", flush=True)
                    shown[name] = text
            running = engine.scheduler.running
            if 1 < len(running) == len(wave) and all(each.is_decoding for each in running):
                run.pool = pool_picture(engine.kv, running)
    stats = engine.stats()
    run.work = (
        f"Computed {stats['prompt_tokens_computed']:,} of {sum(map(len, prompts.values())):,}"
        f" prompt tokens (hit rate {stats['prefix_hit_rate']:.0%}), and"
        f" {stats['generated_tokens']} new ones, in {perf_counter() - started:.1f} s."
    )
    return run


def _answer(question: str, output: RequestOutput) -> str:
    """The question, and its answer as far as it has come."""
    end = {None: "", "length": " ...\n"}.get(output.finish_reason, "\n")
    return f"\n{output.request_id:>7}: {question}\n         {output.text}{end}"


def _first_tokens(run: Run) -> Table:
    """Who found how much of the prompt in the cache, and waited how long."""
    headings = ("prompt tokens", "cached", "computed", "first token after")
    table = Table("who", *(Column(heading, justify="right") for heading in headings))
    for name, output in run.outputs.items():
        num_prompt, num_cached = output.num_prompt_tokens, output.num_cached_tokens
        numbers = map(str, (num_prompt, num_cached, num_prompt - num_cached))
        table.add_row(name, *numbers, run.first_token(name))
    return table
