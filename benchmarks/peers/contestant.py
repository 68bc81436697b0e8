"""What a contestant is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Protocol

from benchmarks.peers.protocol import serve


@dataclass(frozen=True, slots=True)
class Job:
    """Complete all prompts together, greedy, each with exactly `max_tokens` tokens.

    forget   first, and untimed, drop all cached prefixes
    """

    prompts: list[list[int]]
    max_tokens: int
    forget: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """In the order of the prompts.

    seconds        from handing the prompts over to the last token, by the worker's own clock
    outputs        token ids
    cached_tokens  prompt tokens that were not computed, for each prompt
    cache_seconds  host time of the prefix cache within `seconds`; 0 where it is not known
    """

    seconds: float
    outputs: list[list[int]]
    cached_tokens: list[int]
    cache_seconds: float = 0.0


class Contestant(Protocol):
    """A loaded model that completes prompts."""

    def generate(self, job: Job) -> Answer:
        """Do one job."""


def serve_contestant(contestant: Contestant, packages: Sequence[str]) -> None:
    """Answer jobs until the other side hangs up; say first which versions run here."""
    hello = {"versions": {package: version(package) for package in packages}}
    serve(hello, lambda message: asdict(contestant.generate(Job(**message))))
