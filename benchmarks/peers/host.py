"""Host work: what the prefix cache costs the processor, beside vLLM's own KVCacheManager.

A prompt of 50,000 tokens goes through keys, lookup, allocation with publication, and release, in
one process of vLLM's environment; and minivllm's scheduler decides steps of 256 sequences. No
model is needed, and none is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import settings
from benchmarks.peers.environment import FOLDER, ROOT
from benchmarks.peers.errors import PeerError
from benchmarks.peers.figures import Spread
from benchmarks.peers.host_side import MOST_CACHED_TOKENS, PROMPT_TOKENS, Stages
from benchmarks.peers.protocol import Message, Worker

ROUNDS_PER_ROUND = 10
PATHS = {
    "cold": "cold, the pool free",
    "warm": f"warm, {MOST_CACHED_TOKENS:,} tokens cached",
    "full": "cold, the pool full of another prompt",
}
RATIOS = (
    ("minivllm xxhash", "vLLM sha256", "each with its default"),
    ("minivllm xxhash", "vLLM xxhash", "both with xxhash"),
    ("minivllm sha256", "vLLM sha256", "both with sha256"),
)
_EXPECTED = {"cold": 0, "warm": MOST_CACHED_TOKENS, "full": 0}


@dataclass(frozen=True, slots=True)
class HostRow:
    """One side's way on one path, in milliseconds; `stages` by name, in order."""

    path: str
    side: str
    stages: dict[str, Spread]
    total: Spread


@dataclass(frozen=True, slots=True)
class HostRatio:
    """How many times as fast ours is over a whole path, round by round."""

    path: str
    ours: str
    theirs: str
    which: str
    ratio: Spread


@dataclass(frozen=True, slots=True)
class HostFigures:
    """All of it; scheduling and committing are milliseconds of a step of 256 sequences."""

    versions: dict[str, str]
    rows: list[HostRow]
    ratios: list[HostRatio]
    scheduling: Spread
    committing: Spread


def measure_host(vllm_python: Path, num_rounds: int, tell: Callable[[str], object]) -> HostFigures:
    """Start the worker, and ask it round by round; a first round, of warming up, is dropped."""
    command = [str(vllm_python), "-m", "benchmarks.peers.host_worker"]
    log = FOLDER / "logs" / "host.log"
    with Worker("host work", command, log, settings.variables(), ROOT) as worker:
        rounds = []
        for number in range(num_rounds * ROUNDS_PER_ROUND + 1):
            rounds.append(worker.ask({"round": number}))
            tell(f"host, round {number} of {num_rounds * ROUNDS_PER_ROUND}")
        return host_figures(worker.hello["versions"], rounds[1:])


def host_figures(versions: dict[str, str], rounds: Sequence[Message]) -> HostFigures:
    """From at least one answer of the worker. Raises PeerError if a side found wrong hits."""
    rows, ratios = [], []
    for path in PATHS:
        passes = [_stages(each["paths"][path]) for each in rounds]
        for side in passes[0]:
            stages = [each[side] for each in passes]
            _check_hits(path, side, stages)
            rows.append(_row(path, side, stages))
        for ours, theirs, which in RATIOS:
            by_round = [_total(each[theirs]) / _total(each[ours]) for each in passes]
            ratios.append(HostRatio(path, ours, theirs, which, Spread.of(by_round)))
    return HostFigures(
        versions,
        rows,
        ratios,
        Spread.of([1e3 * seconds for each in rounds for seconds in each["scheduling"]]),
        Spread.of([1e3 * seconds for each in rounds for seconds in each["committing"]]),
    )


def host_table(figures: HostFigures) -> str:
    """The figures for a person."""
    names = Stages._fields[:-1]
    return "\n".join(_lines(figures, names))


def _lines(figures: HostFigures, names: Sequence[str]) -> Iterator[str]:
    yield f"Host work: {PROMPT_TOKENS:,} tokens in blocks of 16, milliseconds, medians"
    for path, title in PATHS.items():
        yield ""
        yield (
            f"{title:<40}"
            + "".join(f"{name:>10}" for name in names)
            + f"{'all':>10}  lowest-highest"
        )
        for row in figures.rows:
            if row.path == path:
                cells = "".join(f"{row.stages[name].median:>10.2f}" for name in names)
                spread = f"{row.total.lowest:.2f}-{row.total.highest:.2f}"
                yield f"  {row.side:<38}{cells}{row.total.median:>10.2f}  {spread}"
        for ratio in figures.ratios:
            if ratio.path == path:
                spread = f"{ratio.ratio.lowest:.2f}-{ratio.ratio.highest:.2f}"
                yield f"  ours is {ratio.ratio.median:.2f} times as fast, {ratio.which} ({spread})"
    yield ""
    for name, step in (("schedule", figures.scheduling), ("commit", figures.committing)):
        yield (
            f"{name} a step of 256 running sequences (minivllm): {step.median:.2f} ms"
            f" ({step.lowest:.2f}-{step.highest:.2f})"
        )


def _stages(sides: Mapping[str, Mapping[str, float]]) -> dict[str, Stages]:
    return {name: Stages(**values) for name, values in sides.items()}  # type: ignore[arg-type]


def _total(stages: Stages) -> float:
    return stages.keys + stages.lookup + stages.allocate + stages.release


def _row(path: str, side: str, stages: Sequence[Stages]) -> HostRow:
    names = Stages._fields[:-1]
    by_name = {name: Spread.of([1e3 * getattr(each, name) for each in stages]) for name in names}
    return HostRow(path, side, by_name, Spread.of([1e3 * _total(each) for each in stages]))


def _check_hits(path: str, side: str, stages: Sequence[Stages]) -> None:
    for each in stages:
        if each.cached_tokens != _EXPECTED[path]:
            found = f"{side} found {each.cached_tokens:,} cached tokens on the {path} path"
            raise PeerError(f"{found}; {_EXPECTED[path]:,} are cached: this compares nothing")
