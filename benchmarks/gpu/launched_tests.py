"""The kernel tests on the card: nearly every example compiles a kernel, so several at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.report import Figure, Report

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/kernels/launched"
MOST_SECONDS = 450.0
MOST_PROCESSES = 8
# Characters of what a process printed, the last ones.
MOST_OUTPUT = 4000
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


class Ended(NamedTuple):
    """A pytest process; returncode None: it ran out of time."""

    returncode: int | None
    output: str


class Collected(NamedTuple):
    """The test functions, file::name; problem "" if these are all."""

    tests: list[str]
    problem: str


def collect() -> Collected:
    """The launched test functions, as pytest finds them; what it finds of them, if it fails."""
    return collected_from(_pytest(["--collect-only", FOLDER], MOST_SECONDS))


def collected_from(ended: Ended) -> Collected:
    """Read the list that pytest --collect-only prints."""
    ids = [line for line in ended.output.splitlines() if line.startswith(f"{FOLDER}/")]
    tests = list(dict.fromkeys(test_id.split("[")[0] for test_id in ids))
    if ended.returncode == 0 and tests:
        return Collected(tests, "")
    how = _how(ended.returncode) or "found none"
    return Collected(tests, f"collecting the tests {how}\n{ended.output[-MOST_OUTPUT:]}")


def run_one(test: str, deadline: float) -> Outcome:
    """One function in a process of its own: a wild address takes no other test with it."""
    return outcome_of(test, _pytest([test], max(deadline - time.monotonic(), 1.0)))


def outcome_of(test: str, ended: Ended) -> Outcome:
    """Read the last line of a pytest run: "3 passed, 1 skipped in 2.34s"."""
    found = re.findall(r"(\d+) (passed|skipped)", ended.output)
    counts = {word: int(number) for number, word in found}
    problem, output = _how(ended.returncode), ended.output[-MOST_OUTPUT:]
    return Outcome(test, counts.get("passed", 0), counts.get("skipped", 0), problem, output)


def _how(returncode: int | None) -> str:
    """How it failed; "" if it did not."""
    if returncode is None:
        return "was not finished in time"
    return f"ended with {returncode}" if returncode else ""


def run_launched_tests(report: Report) -> None:
    """All of them, within MOST_SECONDS."""
    deadline = time.monotonic() + MOST_SECONDS
    tests, problem = collect()
    if problem:
        report.add_problem(problem)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(run_one, test, deadline): test for test in tests}
        for future in as_completed(futures):
            with report.attempt(futures[future]):
                outcomes.append(future.result())
                tell(report, outcomes)


def tell(report: Report, outcomes: Sequence[Outcome]) -> None:
    """Add what the newest outcome says to the figures, and to the problems or the notes."""
    outcome = outcomes[-1]
    counts = f"{outcome.num_passed} passed, {outcome.num_skipped} skipped"
    print(f"{outcome.test}: {counts} {outcome.problem}".rstrip(), flush=True)
    if outcome.problem:
        report.add_problem(f"{outcome.test} {outcome.problem}\n{outcome.output}")
    elif outcome.num_skipped:
        report.notes.append(f"{outcome.test}: {outcome.num_skipped} skipped")
    report.figures = passed_by_file(outcomes)
    report.keep()


def passed_by_file(outcomes: Sequence[Outcome]) -> list[Figure]:
    """A figure a file, functions without a failure beside all that have ended.

    A function of which every test is skipped on a GPU is not counted.
    """
    ran = [o for o in outcomes if o.num_passed or o.problem]
    good = Counter(_file(o) for o in ran if not o.problem)
    totals = sorted(Counter(map(_file, ran)).items())
    return [Figure("passed", file, "tests", good[file], "of", total) for file, total in totals]


def _file(outcome: Outcome) -> str:
    return Path(outcome.test.split("::")[0]).stem


def _pytest(arguments: list[str], seconds: float) -> Ended:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    try:
        child = subprocess.run(
            [*PYTEST, *arguments],
            cwd=ROOT,
            # Unbuffered: what is printed until it is killed must have left it.
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        return Ended(None, (error.output or b"").decode(errors="replace"))
    return Ended(child.returncode, child.stdout.decode(errors="replace"))
