"""The proof of the exercises: what must hold of every task, tried out.

stub        the untouched stub fails, with the task's own message
solution    the solution passes, over the reference of the stages before it
on the way  the solution of this task and those before it passes: later ones are not needed
mutants     each named fault fails a test of the task named for it, and the failure names
            the invariant or contract line that the fault breaks
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from chapters.catalog import Chapter, Mutant, Task
from chapters.checking import CheckError, run_jobs
from chapters.contents import mutants_of
from chapters.regions import stub_message
from chapters.results import FAILED, PASSED, SKIPPED, Job, Result
from chapters.targets import MUTANT, SOLUTION, STUB, UNTIL
from chapters.workbook import Workbook, open_workbook

SECONDS_A_CHAPTER = 480.0
ON_THE_WAY = "on the way"
MUTANTS = "mutants"
COLUMNS = (STUB, SOLUTION, ON_THE_WAY, MUTANTS)


@dataclass(frozen=True)
class Claim:
    """One thing that must hold, and how to find out.

    column   which of those above
    mutant   the fault, if it is about one
    """

    chapter: Chapter
    task: Task
    column: str
    mutant: Mutant | None = None

    @property
    def name(self) -> str:
        """A short name: "3.1 stub", "3.1 mutant take_does_not_count"."""
        return f"{self.task.number} {f'mutant {self.mutant.name}' if self.mutant else self.column}"

    @property
    def job(self) -> Job:
        """The tests that decide it."""
        number = self.task.number
        if self.mutant:
            return Job(MUTANT + self.mutant.name, number, stop=True)
        if self.column == ON_THE_WAY:
            return Job(UNTIL + number, number)
        return Job(STUB, number, stop=True) if self.column == STUB else Job(SOLUTION, number)


@dataclass(frozen=True)
class Verdict:
    """What was found out: `fault` is empty if the claim holds; `skipped` says why nothing was.

    seconds   of computing that its tests took
    """

    claim: Claim
    num_tests: int
    fault: str
    skipped: str = ""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """True unless something is wrong."""
        return not self.fault


def claims(chapter: Chapter) -> list[Claim]:
    """All that must hold of a chapter."""
    found: list[Claim] = []
    for task in chapter.tasks:
        found += [Claim(chapter, task, column) for column in (STUB, SOLUTION, ON_THE_WAY)]
        mine = [mutant for mutant in mutants_of(chapter) if mutant.task == task.number]
        found += [Claim(chapter, task, MUTANTS, mutant) for mutant in mine]
    return found


def prove(
    chapters: Sequence[Chapter], workbook: Workbook | None = None
) -> Iterator[tuple[Chapter, list[Verdict]]]:
    """The verdicts on each chapter, in order, several at work at a time."""
    book = workbook or open_workbook()
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        yield from zip(
            chapters, pool.map(lambda each: prove_chapter(each, book), chapters), strict=True
        )


def prove_chapter(chapter: Chapter, workbook: Workbook | None = None) -> list[Verdict]:
    """The verdict on each claim of a chapter."""
    wanted = claims(chapter)
    try:
        results = run_jobs(
            chapter,
            [claim.job for claim in wanted],
            workbook or open_workbook(),
            seconds=SECONDS_A_CHAPTER,
        )
    except CheckError as error:
        return [Verdict(claim, 0, f"the tests cannot be run: {error}") for claim in wanted]
    return [
        _verdict(claim, [result for result in results if result.job == number])
        for number, claim in enumerate(wanted)
    ]


def _verdict(claim: Claim, results: list[Result]) -> Verdict:
    skipped = [result for result in results if result.outcome == SKIPPED]
    if results and len(skipped) == len(results):
        return Verdict(claim, 0, "", skipped[0].reason)
    seconds = sum(result.seconds for result in results)
    return Verdict(claim, len(results), _fault(claim, results), seconds=seconds)


def _fault(claim: Claim, results: list[Result]) -> str:
    """What is wrong, or nothing."""
    if not results:
        return "the task has no test, or time was up before it"
    failed = next((result for result in results if result.outcome == FAILED), None)
    if claim.column in (SOLUTION, ON_THE_WAY):
        return f"{failed.test} fails: {_said(failed)}" if failed else _not_passed(results)
    if failed is None:
        return "no test fails"
    if claim.column == STUB:
        wanted = stub_message(claim.task.number)
        got = failed.failure.unwritten if failed.failure else None
        return "" if got == wanted else f"{failed.test} should say {wanted!r}: {_said(failed)}"
    assert claim.mutant is not None
    got = failed.failure.broken if failed.failure else "nothing"
    if got == claim.mutant.broken:
        return ""
    return f"{failed.test} names {got}, not {claim.mutant.broken}: {_said(failed)}"


def _not_passed(results: list[Result]) -> str:
    return "" if any(result.outcome == PASSED for result in results) else "no test passes"


def _said(result: Result) -> str:
    if result.failure:
        return " / ".join(result.failure.values[:2])
    return " / ".join(result.reason.splitlines()[-2:])
