"""Runs of the real engine, recorded for the block-table player.

Each scenario is one function: it drives an engine whose model only knows the alphabet, and its
name, with dashes, is the trace's name on a page. `shows` are the events that the scenario is
there for: if the engine stops doing them, the book does not build.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from book.letters import LetterRunner, tokens
from book.places import GENERATED, ROOT, BookError, write
from minivllm import EngineConfig, LLMEngine, SamplingParams
from minivllm.errors import RunnerError

MOST_STEPS = 1000


class Scenario(NamedTuple):
    """One recorded run.

    title    one line for a person
    drive    feeds the engine
    shows    events that must occur
    config   what differs from a block size of 4 and a pool of 8 blocks
    """

    title: str
    drive: Callable[[LLMEngine], None]
    shows: tuple[str, ...]
    config: dict[str, Any]


SCENARIOS: dict[str, Scenario] = {}


def scenario(*shows: str, **config: Any) -> Callable[[Callable[[LLMEngine], None]], object]:
    """Register a function as a scenario; the first line of its docstring is the title."""

    def register(drive: Callable[[LLMEngine], None]) -> object:
        title = (drive.__doc__ or "").splitlines()[0].rstrip(".")
        name = drive.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(title, drive, shows, {"num_kv_blocks": 8} | config)
        return drive

    return register


def record(name: str) -> list[str]:
    """Run a scenario with every check on and return its trace, line by line.

    Raises BookError if an event that it should show did not occur.
    """
    wanted = SCENARIOS[name]
    lines: list[str] = []
    config = EngineConfig(block_size=4, debug_checks=True, **wanted.config)
    wanted.drive(LLMEngine(config, LetterRunner(), write_trace_line=lines.append))
    happened = {json.loads(line).get("event") for line in lines}
    if missing := [event for event in wanted.shows if event not in happened]:
        raise BookError(f"scenario {name}: no {', '.join(missing)} occurred")
    return lines


def write_all() -> None:
    """Record every scenario; write what the player loads, and the plain trace beside it.

    The player loads a script because a page that was opened from a file may not fetch anything.
    """
    schema = (ROOT / "minivllm" / "trace_schema.json").read_text(encoding="utf-8")
    player = "(window.BlockTablePlayer ??= {})"
    write(GENERATED / "trace-schema.js", f"{player}.schema = {schema.strip()};\n")
    index = {name: each.title for name, each in SCENARIOS.items()}
    write(GENERATED / "trace-index.js", f"{player}.traceIndex = {json.dumps(index, indent=1)};\n")
    for name, each in SCENARIOS.items():
        text = "\n".join(record(name)) + "\n"
        told = {"title": each.title, "tokens": "letters", "text": text}
        write(GENERATED / "traces" / f"{name}.jsonl", text)
        script = f"BlockTablePlayer.registerTrace({json.dumps(name)}, {json.dumps(told)});\n"
        write(GENERATED / "traces" / f"{name}.js", script)


# What the scenarios are made of


def _add(engine: LLMEngine, name: str, prompt: str, max_tokens: int, **policy: Any) -> None:
    engine.add_request(name, tokens(prompt), SamplingParams(max_tokens=max_tokens), **policy)


def _step(engine: LLMEngine, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        engine.step()


def _finish(engine: LLMEngine) -> None:
    for _ in range(MOST_STEPS):
        if not engine.has_unfinished_requests():
            return
        engine.step()
    raise BookError(f"a scenario has not ended after {MOST_STEPS} steps")


# The scenarios


@scenario("publish", "finish", max_num_batched_tokens=8)
def one_request(engine: LLMEngine) -> None:
    """One request from its prompt to its last token."""
    _add(engine, "ann", "ABCDEF", 3)
    _finish(engine)


@scenario("reference", "publish", max_num_batched_tokens=8)
def shared_prefix(engine: LLMEngine) -> None:
    """A second request finds the first one's prefix in the cache."""
    _add(engine, "ann", "ABCDEF", 3)
    _step(engine)
    _add(engine, "ben", "ABCDXY", 3)
    _finish(engine)


@scenario("pass_over", "reference", max_num_batched_tokens=16, num_kv_blocks=10)
def wait_for_prefix(engine: LLMEngine) -> None:
    """Three requests with one new prefix arrive together, and one computes it."""
    _add(engine, "ann", "KLMN OPQR A", 2)
    _add(engine, "ben", "KLMN OPQR F", 2)
    _add(engine, "cid", "KLMN OPQR T", 2)
    _finish(engine)


@scenario("refuse", "preempt", "reference", max_num_batched_tokens=16, num_kv_blocks=6)
def preempt_and_resume(engine: LLMEngine) -> None:
    """Two outputs outgrow the pool: the newer one gives way, and comes back with hits."""
    _add(engine, "ann", "ABCD EFGH", 6)
    _add(engine, "ben", "QRST UVWX", 10)
    _finish(engine)


@scenario("evict", "reference", max_num_batched_tokens=32, num_kv_blocks=6)
def evict_the_tail(engine: LLMEngine) -> None:
    """A full pool evicts the end of an old prefix first, and its start still hits."""
    _add(engine, "ann", "ABCD EFGH IJKL M", 1)
    _finish(engine)
    _add(engine, "ben", "STUV WXYZ STUV WXYZ", 1)
    _finish(engine)
    _add(engine, "cid", "ABCD EFGH IJKL M", 1)
    _finish(engine)


@scenario("swap", max_num_batched_tokens=16)
def swap_for_the_cached(engine: LLMEngine) -> None:
    """A request that may not read the cache computes equal blocks, and swaps them."""
    _add(engine, "ann", "ABCD EFGH IJ", 4)
    _step(engine)
    _add(engine, "ben", "ABCD EFGH XY", 4, cache_read=False)
    _finish(engine)


@scenario("allocate", "write", max_num_batched_tokens=4, num_kv_blocks=8)
def chunked_prefill(engine: LLMEngine) -> None:
    """A long prompt is computed in chunks while another request decodes."""
    _add(engine, "ann", "ABC", 5)
    _step(engine)
    _add(engine, "ben", "NOPQ RSTU VW", 2)
    _finish(engine)


@scenario("release", "finish", max_num_batched_tokens=16)
def failed_step(engine: LLMEngine) -> None:
    """The runner fails in the middle of a step, and nothing of it is published."""
    _add(engine, "ann", "ABCD EF", 3)
    runner = engine.runner
    assert isinstance(runner, LetterRunner)
    runner.fail_next = True
    try:
        engine.step()
    except RunnerError:
        _finish(engine)
        return
    raise BookError("the step that was told to fail did not")


@scenario("abort", max_num_batched_tokens=4)
def abort_in_mid_prefill(engine: LLMEngine) -> None:
    """A request is aborted between two chunks of its prompt."""
    _add(engine, "ann", "ABCD EFGH IJ", 3)
    _step(engine)
    engine.abort("ann")
    _add(engine, "ben", "ABCD EFGH XY", 2)
    _finish(engine)
