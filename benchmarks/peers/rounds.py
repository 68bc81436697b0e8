"""Taking turns: ours, peer, ours, peer, ... Only the one whose turn it is computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.peers.works import OURS, Ask, Run, Work


class Seat(NamedTuple):
    """How to deal with one contestant.

    ask   gives it a job
    rest  returns when it has fallen asleep after its turn
    """

    ask: Ask
    rest: Callable[[], object]


class Pair(NamedTuple):
    """Two runs of the same prompts, one right after the other."""

    ours: Run
    theirs: Run


def take_turns(
    work: Work,
    seats: Mapping[str, Seat],
    num_rounds: int,
    vocab_size: int,
    tell: Callable[[str], object],
) -> dict[str, list[Pair]]:
    """For each peer of the work, one pair a round. A first round, of warming up, is thrown away.

    seats  the contestants, by name
    tell   gets a line about each pair
    """
    pairs: dict[str, list[Pair]] = {peer: [] for peer in work.peers}
    for number in range(num_rounds + 1):
        for index, peer in enumerate(work.peers):
            seed = number * len(work.peers) + index
            ours, theirs = (_turn(work, seats[name], seed, vocab_size) for name in (OURS, peer))
            if number > 0:
                pairs[peer].append(Pair(ours, theirs))
            round_name = f"round {number} of {num_rounds}" if number else "warming up"
            times = f"{OURS} {ours.seconds:.2f} s, {peer} {theirs.seconds:.2f} s"
            tell(f"{work.name}, {round_name}: {times}")
    return pairs


def _turn(work: Work, seat: Seat, seed: int, vocab_size: int) -> Run:
    run = work.run(seat.ask, seed, vocab_size)
    seat.rest()
    return run
