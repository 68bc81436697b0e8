"""What to run and what came of it, as data between the command line and a pytest process."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from chapters.failure import Failure

BEGUN, PASSED, FAILED, SKIPPED = "begun", "passed", "failed", "skipped"


@dataclass(frozen=True)
class Job:
    """Whose code, which task (None: all of the chapter), and whether to stop at the first failure.

    target   see targets.py
    """

    target: str
    task: str | None = None
    stop: bool = False


@dataclass(frozen=True)
class Result:
    """What came of one test of one job.

    job      the job's number, from 0
    outcome  "passed", "failed" or "skipped"; "begun" if nothing more was heard of it
    seconds  of computing: what others do on the machine does not count
    reason   why it was skipped, or what went wrong outside of the test itself
    """

    job: int
    test: str
    task: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    failure: Failure | None = None


def result_line(result: Result) -> str:
    """A result as a line of JSON."""
    return json.dumps(asdict(result))


def read_results(path: Path) -> list[Result]:
    """The results in a file of such lines: the last word on each test of each job."""
    results: dict[tuple[int, str], Result] = {}
    for line in path.read_text().splitlines():
        data = json.loads(line)
        if data["failure"]:
            fields = data["failure"].items()
            lists = {name: tuple(value) for name, value in fields if isinstance(value, list)}
            data["failure"] = Failure(**data["failure"] | lists)
        result = Result(**data)
        results[result.job, result.test] = result
    return list(results.values())
