"""Run a chapter's tests in a process of their own, within a time limit; read what came of it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from chapters.catalog import Chapter
from chapters.limits import SECONDS_A_TEST
from chapters.results import BEGUN, FAILED, Job, Result, read_results
from chapters.stages import CHAPTERS
from chapters.workbook import VARIABLE, Workbook

SECONDS_A_CHECK = 120.0
MOST_LINES = 30


class CheckError(Exception):
    """The tests could not be run at all; the message is what pytest said."""


def run_jobs(
    chapter: Chapter,
    jobs: Sequence[Job],
    workbook: Workbook,
    *,
    mine: bool = False,
    with_model: bool = False,
    seconds: float = SECONDS_A_CHECK,
    seconds_a_test: float = SECONDS_A_TEST,
) -> list[Result]:
    """The results of all tests of all jobs, in order.

    `mine` takes earlier chapters from the workbook, too; `with_model` runs the tests that need
    the real model, and only those. A test may compute for `seconds_a_test`. After `seconds` the
    process is stopped: the test that was running then has failed, and so has one in which the
    process died. Raises CheckError if there are no tests, or they cannot be imported.
    """
    with tempfile.TemporaryDirectory() as name:
        wanted, written = Path(name, "jobs.json"), Path(name, "results.jsonl")
        wanted.write_text(json.dumps([asdict(job) for job in jobs]))
        arguments = [
            sys.executable, "-m", "pytest", "-q", "--tb=short", "--color=no",
            "-p", "no:cacheprovider", "-p", "chapters.jobs",
            "--basetemp", str(Path(name, "files")),
            "--jobs", str(wanted), "--results", str(written),
            # The first job's: which tests there are depends on whose code it is.
            "--target", jobs[0].target, *["--mine"] * mine,
            "--seconds-a-test", str(seconds_a_test),
            "-m", "model" if with_model else "not model",
            str(CHAPTERS / chapter.name),
        ]  # fmt: skip
        environment = os.environ | {VARIABLE: str(workbook.folder)}
        # The tensors are tiny: threads would only wait for each other.
        environment.setdefault("OMP_NUM_THREADS", "1")
        try:
            done = subprocess.run(
                arguments, cwd=CHAPTERS.parent, env=environment, timeout=seconds,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            output = done.stdout + done.stderr
            end = f"the process ended in this test, with code {done.returncode}"
        except subprocess.TimeoutExpired:
            output = end = f"still running when the check was stopped after {seconds:g} seconds"
        results = read_results(written) if written.is_file() else []
    if not results:
        raise CheckError("\n".join(output.strip().splitlines()[-MOST_LINES:]) or "no output")
    return [
        replace(result, outcome=FAILED, reason=end) if result.outcome == BEGUN else result
        for result in results
    ]
