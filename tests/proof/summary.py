"""What many workloads came to, and whether that is enough to prove anything."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from tests.proof.play import play
from tests.proof.situations import SITUATIONS
from tests.proof.workloads import Workload

MIN_MEDIAN_REQUESTS = 6
MIN_MEDIAN_STEPS = 30
MIN_SHARE_WITH_HIT = 1 / 2
MIN_SHARE_WITH_PREEMPTION = 1 / 5


@dataclass(slots=True)
class Summary:
    """Workloads that were played, all of which held.

    seconds   processor time that playing them took
    """

    num_requests: list[int] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    num_with_hit: int = 0
    num_with_preemption: int = 0
    situations: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def play(self, workloads: Iterable[Workload]) -> None:
        """Play each one, and count it in. Raises what the first failing one raises."""
        started = time.process_time()
        for workload in workloads:
            record = play(workload)
            self.num_requests.append(record.num_requests)
            self.num_steps.append(record.num_steps)
            self.num_with_hit += record.situations["hit"] > 0
            self.num_with_preemption += record.situations["preemption"] > 0
            self.situations += record.situations
        self.seconds += time.process_time() - started

    def add(self, other: Summary) -> None:
        """Count in what another process has played."""
        self.num_requests += other.num_requests
        self.num_steps += other.num_steps
        self.num_with_hit += other.num_with_hit
        self.num_with_preemption += other.num_with_preemption
        self.situations += other.situations
        self.seconds += other.seconds

    def problems(self) -> list[str]:
        """Why these workloads are not enough; empty if they are."""
        num = len(self.num_steps)
        found = [f"never reached: {name}" for name in SITUATIONS if not self.situations[name]]
        # A misspelt name would be counted, and never missed.
        found += [f"no such situation: {name}" for name in self.situations.keys() - {*SITUATIONS}]
        conditions = [
            ("median of requests", median(self.num_requests), MIN_MEDIAN_REQUESTS),
            ("median of steps", median(self.num_steps), MIN_MEDIAN_STEPS),
            ("share with a hit", self.num_with_hit / num, MIN_SHARE_WITH_HIT),
            ("share with a preemption", self.num_with_preemption / num, MIN_SHARE_WITH_PREEMPTION),
        ]
        return found + [
            f"{what} is {value:.2f}, must be at least {least:.2f}"
            for what, value, least in conditions
            if value < least
        ]

    def table(self) -> str:
        """Each situation with its count, and the size of the workloads."""
        num = len(self.num_steps)
        lines = [f"{self.situations[name]:>10,}  {name}" for name in SITUATIONS]
        sizes = f"{median(self.num_requests):g} requests, {median(self.num_steps):g} steps"
        hit, preempted = self.num_with_hit / num, self.num_with_preemption / num
        lines += [
            "",
            f"{num:,} workloads held. Median: {sizes}. With a hit {hit:.0%}, with a preemption"
            f" {preempted:.0%}.",
            f"{num / self.seconds * 60:,.0f} workloads a minute and core",
        ]
        return "\n".join(lines)
