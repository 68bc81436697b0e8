"""The kernel tests on the card: nearly every example compiles a kernel, so several at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.report import Figure, Report

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/kernels/launched"
MOST_SECONDS = 450.0
MOST_PROCESSES = 8
# Not the repository's own options: they name plugins that a GPU machine may lack.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider")


class Outcome(NamedTuple):
    """One test function, all its parameters in one process.

    problem  "" if none failed: how the process ended
    output   the end of what it printed
    """

    test: str
    num_passed: int
    num_skipped: int
    problem: str
    output: str


def collect() -> list[str]:
    """The launched test functions, file::name, as pytest finds them."""
    found = _pytest(["--collect-only", FOLDER], MOST_SECONDS)
    ids = [line for line in found.stdout.splitlines() if line.startswith(f"{FOLDER}/")]
    return list(dict.fromkeys(test_id.split("[")[0] for test_id in ids))


def run_one(test: str, deadline: float) -> Outcome:
    """One function in a process of its own: a wild address takes no other test with it."""
    try:
        child = _pytest([test], max(deadline - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
        return Outcome(test, 0, 0, "was not finished in time", "")
    return outcome_of(test, child.returncode, child.stdout)


def outcome_of(test: str, returncode: int, output: str) -> Outcome:
    """Read the last line of a pytest run: "3 passed, 1 skipped in 2.34s"."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", output)}
    problem = f"ended with {returncode}" if returncode else ""
    return Outcome(test, counts.get("passed", 0), counts.get("skipped", 0), problem, output[-2000:])


def run_launched_tests(report: Report) -> None:
    """All of them, within MOST_SECONDS."""
    deadline = time.monotonic() + MOST_SECONDS
    tests = collect()
    if not tests:
        report.problems.append(f"pytest found no test in {FOLDER}")
    with ThreadPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1)) as pool:
        add_outcomes(report, list(pool.map(lambda test: run_one(test, deadline), tests)))


def add_outcomes(report: Report, outcomes: Sequence[Outcome]) -> None:
    """A figure a file, functions without a failure beside all; a problem for each other one.

    A function of which every test is skipped on a GPU is not counted.
    """
    ran = [o for o in outcomes if o.num_passed or o.problem]
    good = Counter(_file(o) for o in ran if not o.problem)
    for file, total in Counter(map(_file, ran)).items():
        report.figures.append(Figure("passed", file, "tests", good[file], "of", total))
    for outcome in outcomes:
        if outcome.problem:
            report.problems.append(f"{outcome.test} {outcome.problem}\n{outcome.output}")
        elif outcome.num_skipped:
            report.notes.append(f"{outcome.test}: {outcome.num_skipped} skipped")


def _file(outcome: Outcome) -> str:
    return Path(outcome.test.split("::")[0]).stem


def _pytest(arguments: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [*PYTEST, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
