"""A pytest plugin: run the collected tests once for each job, and write what came of it as data.

One process does many jobs, so that a hundred mutants do not cost a hundred starts of pytest.

    python -m pytest -p chapters.jobs chapters/ch03_block_manager --jobs FILE --results FILE
"""

import json
import time
from pathlib import Path

import pytest

from chapters.failure import Failure
from chapters.results import BEGUN, FAILED, PASSED, SKIPPED, Job, Result, result_line

# Whose code is being tested. The conftest's fixtures look here; each job writes it anew.
TARGET = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two files."""
    parser.addoption("--jobs", type=Path, required=True, help="a JSON list of jobs")
    parser.addoption("--results", type=Path, required=True, help="where to write JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    """Take over how tests are run."""
    config.pluginmanager.register(_Runner(config), "chapters-jobs")


class _Runner:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._jobs = [Job(**job) for job in json.loads(config.getoption("--jobs").read_text())]
        self._out = config.getoption("--results").open("w")
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """All jobs, in order."""
        if session.testsfailed:
            return None  # a file of tests could not be imported: pytest says so
        for number, job in enumerate(self._jobs):
            self._config.stash[TARGET] = job.target
            self._run(number, job, session.items)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test was set up, run, or torn down."""
        self._reports.append(report)

    def pytest_unconfigure(self) -> None:
        """The end."""
        self._out.close()

    def _run(self, number: int, job: Job, items: list[pytest.Item]) -> None:
        endless: set[str] = set()
        for item in items:
            marker = item.get_closest_marker("task")
            task = str(marker.args[0]) if marker else ""
            if job.task not in (None, task) or task in endless:
                continue
            self._write(Result(number, item.name, task, BEGUN))
            result = self._test(number, item, task, items)
            self._write(result)
            failure = result.failure
            if job.stop and result.outcome == FAILED:
                return
            if failure and failure.unreadable:
                return  # the other tests would say the same
            if failure and failure.endless:
                endless.add(task)  # its other tests would take as long

    def _test(self, number: int, item: pytest.Item, task: str, items: list[pytest.Item]) -> Result:
        begin = time.process_time()
        self._reports.clear()
        # What pytest prepares for a whole file stays as long as another test of it is to come.
        other = next((each for each in items if each is not item and each.path == item.path), None)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=other)
        seconds = round(time.process_time() - begin, 3)
        for report in self._reports:
            if report.skipped:
                reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
                return Result(number, item.name, task, SKIPPED, seconds, reason)
            if report.failed:
                failure = dict(report.user_properties).get("failure")
                found = failure if isinstance(failure, Failure) else None
                reason = "" if found else report.longreprtext
                return Result(number, item.name, task, FAILED, seconds, reason, found)
        return Result(number, item.name, task, PASSED, seconds)

    def _write(self, result: Result) -> None:
        self._out.write(result_line(result) + "\n")
        self._out.flush()
