"""The table for a person, and the object for the JSON file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.figures import Comparison, Spread
from benchmarks.peers.host import HostFigures, host_table
from benchmarks.peers.works import OURS, TRANSFORMERS, WORKS

LEAST_AGREEMENT = 0.95
MOST_IDLE_SHARE = 0.05


@dataclass(slots=True)
class Report:
    """All that a run found.

    settings   what was the same for all, and each contestant's versions
    idle       by contestant: processor time used while others computed, by the time that took;
               None where the system does not say
    load       the system's load averages of the last minute, at the start and at the end
    failure    what ended the run before its last row
    """

    machine: str
    settings: dict[str, Any]
    num_rounds: int
    comparisons: list[Comparison] = field(default_factory=list)
    host: HostFigures | None = None
    idle: dict[str, float | None] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def problems(self) -> list[str]:
        """One line each; empty if the figures stand."""
        found = [*_wrong_hits(self.comparisons), *_differing(self.comparisons), *_awake(self.idle)]
        return found if self.failure is None else [*found, self.failure]

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self) | {"problems": self.problems}

    def as_text(self) -> str:
        """For the terminal."""
        parts = [self.machine, *self._load()]
        if self.comparisons:
            parts += ["", *comparison_lines(self.comparisons, self.num_rounds)]
            parts += ["", *_idle_lines(self.idle)]
        if self.host is not None:
            parts += ["", host_table(self.host)]
        return "\n".join([*parts, *(f"PROBLEM: {line}" for line in self.problems)])

    def _load(self) -> Iterator[str]:
        if self.load:
            start, end = self.load[0], self.load[-1]
            yield f"load average at the start and at the end: {start:.1f}, {end:.1f}"


def comparison_lines(comparisons: Sequence[Comparison], num_rounds: int) -> Iterator[str]:
    """One line for each work and peer, and below, what the columns mean."""
    yield (
        f"{'work':<38}{'peer':<23}{'times':>6} {'spread':<12}"
        f"{'unit':<17}{OURS:>9} {'spread':<16}{'peer':>8} {'spread':<16}"
        f"{'same tokens':>14}{'cached':>15}{'cache':>8}"
    )
    for each in comparisons:
        cached = "/".join(_count(tokens) for tokens in each.cached_tokens)
        agreed = f"{each.agreement.equal:,}/{each.agreement.compared:,}"
        yield (
            f"{each.title:<38}{each.peer:<23}"
            f"{each.ratio.median:>6.2f} {_range(each.ratio, '.2f'):<12}"
            f"{each.unit:<17}{_number(each.ours.median):>9} {_range(each.ours):<16}"
            f"{_number(each.theirs.median):>8} {_range(each.theirs):<16}"
            f"{agreed:>14}{cached:>15}{each.cache_share.median:>8.2%}"
        )
    yield f"medians of {num_rounds} rounds; spread is lowest-highest"
    yield "output tokens/s: all of a run, reading the prompts included"
    yield "times: how many times as fast minivllm is, pair by pair; over 1 it is the faster one"
    yield "same tokens: positions that agree, of those both reached with the same history"
    yield "cached: prompt tokens found, by minivllm and by the peer"
    yield "cache: host time of minivllm's lookup and publication, by the time of the run"


def _idle_lines(idle: dict[str, float | None]) -> Iterator[str]:
    for name, share in idle.items():
        known = "not known on this system" if share is None else f"{share:.1%} of a core"
        yield f"{name}, while others compute: {known}"


def _wrong_hits(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Cold work that was not cold, warm work that was not warm."""
    expected_by_work = {work.name: work.cached_tokens for work in WORKS}
    for each in comparisons:
        expected = expected_by_work[each.work]
        for name, found in zip((OURS, each.peer), each.cached_tokens, strict=True):
            if expected is not None and name != TRANSFORMERS and found != expected:
                yield f"{each.work}: {name} found {found:,} cached tokens, not {expected:,}"


def _differing(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for each in comparisons:
        if each.agreement.share < LEAST_AGREEMENT:
            share = f"only {each.agreement.share:.1%} of positions"
            yield f"{each.work}: {OURS} and {each.peer} agree on {share}: not the same work"


def _awake(idle: dict[str, float | None]) -> Iterator[str]:
    for name, share in idle.items():
        if share is not None and share > MOST_IDLE_SHARE:
            yield f"{name} used {share:.0%} of a core while others computed: it slowed them down"


def _count(tokens: int) -> str:
    return f"{tokens:,}"


def _number(value: float) -> str:
    """Three digits that count, at least: 0.531, 12.3, 405, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _range(spread: Spread, digits: str = "") -> str:
    low, high = (
        format(value, digits) if digits else _number(value)
        for value in (spread.lowest, spread.highest)
    )
    return f"{low}-{high}"
