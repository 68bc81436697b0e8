"""What the pairs of one work and one peer come to: medians, spreads, ratios, equal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

from benchmarks.peers.rounds import Pair
from benchmarks.peers.works import Work


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of several measurements, and how far they lie apart."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether two contestants choose the same tokens.

    A position counts while both have the same history: up to, and with, the first difference.
    What follows a difference answers another text.

        ours    5 7 7 1 2 3        theirs  5 7 8 1 2 3        compared 3, equal 2

    equal, compared        positions
    same_outputs, outputs  whole outputs that are equal, of how many
    """

    equal: int
    compared: int
    same_outputs: int
    outputs: int

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Agreement:
        """Of all outputs of all pairs."""
        both = [each for pair in pairs for each in zip(*_outputs(pair), strict=True)]
        equal = [_num_equal(ours, theirs) for ours, theirs in both]
        same_outputs = sum(ours == theirs for ours, theirs in both)
        return cls(sum(equal), sum(equal) + len(both) - same_outputs, same_outputs, len(both))

    @property
    def share(self) -> float:
        """Equal positions among those compared."""
        return self.equal / self.compared


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table.

    ours, theirs   in `unit`
    ratio          how many times as fast ours is: their seconds by our seconds, pair by pair
    cached_tokens  prompt tokens that ours and theirs found in the last pair, of prompt_tokens
    cache_share    host time of our prefix cache by the time of the run
    seconds        of each pair in turn, ours and theirs
    """

    work: str
    title: str
    unit: str
    peer: str
    ours: Spread
    theirs: Spread
    ratio: Spread
    agreement: Agreement
    prompt_tokens: int
    cached_tokens: tuple[int, int]
    cache_share: Spread
    seconds: list[tuple[float, float]]


def compare(work: Work, peer: str, pairs: Sequence[Pair]) -> Comparison:
    """From at least one pair."""
    last = pairs[-1]
    return Comparison(
        work.name,
        work.title,
        work.unit.value,
        peer,
        Spread.of([work.unit.figure(pair.ours) for pair in pairs]),
        Spread.of([work.unit.figure(pair.theirs) for pair in pairs]),
        Spread.of([pair.theirs.seconds / pair.ours.seconds for pair in pairs]),
        Agreement.of(pairs),
        last.ours.prompt_tokens,
        (last.ours.cached_tokens, last.theirs.cached_tokens),
        Spread.of([pair.ours.cache_seconds / pair.ours.seconds for pair in pairs]),
        [(pair.ours.seconds, pair.theirs.seconds) for pair in pairs],
    )


def _outputs(pair: Pair) -> tuple[list[list[int]], list[list[int]]]:
    return pair.ours.outputs, pair.theirs.outputs


def _num_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Length of the longest common start."""
    both = zip(ours, theirs, strict=True)
    return sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], both))
