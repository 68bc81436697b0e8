"""Check a reader's tasks: run their tests, remember what came of it, and show the next thing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chapters.catalog import Chapter, Task
from chapters.checking import SECONDS_A_CHECK, CheckError, run_jobs
from chapters.contents import all_chapters
from chapters.failure import Failure
from chapters.limits import SECONDS_A_TEST
from chapters.report import failure_lines
from chapters.results import FAILED, SKIPPED, Job, Result
from chapters.targets import WORK
from chapters.workbook import State, Workbook, shown


@dataclass(frozen=True)
class Outcome:
    """What a check says of one task."""

    chapter: Chapter
    task: Task
    results: tuple[Result, ...]

    @property
    def failed(self) -> list[Result]:
        """The tests that failed, in order."""
        return [result for result in self.results if result.outcome == FAILED]

    @property
    def skipped(self) -> str:
        """Why not a single test ran, or nothing."""
        if self.results and all(result.outcome == SKIPPED for result in self.results):
            return self.results[0].reason.removeprefix("Skipped: ")
        return ""

    @property
    def failure(self) -> Failure | None:
        """What the first failing test says."""
        return self.failed[0].failure if self.failed else None

    @property
    def unwritten(self) -> str:
        """The task that is not written yet, this one or one before it; or nothing."""
        said = self.failure.unwritten if self.failure else None
        return said.split()[1] if said else ""

    @property
    def state(self) -> State:
        """For the workbook."""
        if self.unwritten or self.skipped:
            return State.NOT_STARTED
        return State.FAILING if self.failed else State.DONE


def check(
    chapter: Chapter,
    tasks: Sequence[Task],
    workbook: Workbook,
    *,
    mine: bool = False,
    with_model: bool = False,
) -> list[Outcome]:
    """Run the tests of these tasks on the reader's file, and remember the outcome.

    Raises CheckError if there is nothing to run.
    """
    digest = workbook.digest(chapter)
    only = tasks[0].number if len(tasks) == 1 else None
    results = run_jobs(
        chapter,
        [Job(WORK, only)],
        workbook,
        mine=mine,
        with_model=with_model,
        seconds=SECONDS_A_CHECK * (5 if with_model else 1),
        seconds_a_test=SECONDS_A_TEST * (12 if with_model else 1),
    )
    outcomes = [
        Outcome(chapter, task, tuple(each for each in results if each.task == task.number))
        for task in tasks
    ]
    if not any(outcome.results for outcome in outcomes):
        raise CheckError(f"chapter {chapter.number} has no such tests")
    for outcome in outcomes:
        if with_model or not outcome.results:
            continue  # not what the task asks for; or nothing is known of it
        workbook.record(outcome.task.number, outcome.state, digest)
    return outcomes


def show(console: Console, outcomes: Sequence[Outcome], workbook: Workbook) -> bool:
    """A line for each task, and the first failure in full. True if nothing failed."""
    for line in _lines(outcomes, workbook):
        console.print(line, soft_wrap=True)
    return not any(outcome.failed for outcome in outcomes)


def _lines(outcomes: Sequence[Outcome], workbook: Workbook) -> Iterator[Text]:
    wrong = next((outcome for outcome in outcomes if outcome.failed), None)
    for outcome in outcomes:
        if outcome.results and not outcome.failed:
            workbook.keep_trace(outcome.task.number, ())
        if wrong is None or wrong.failure is None or not wrong.failure.unreadable:
            yield _line(outcome)
    yield Text()
    yield from _after_a_pass(outcomes, workbook) if wrong is None else _wrong(wrong, workbook)


def _line(outcome: Outcome) -> Text:
    task, num_tests = outcome.task, len(outcome.results)
    head = f"  {task.number} {task.title:40} "
    if outcome.skipped or not outcome.results:
        why = f": {outcome.skipped}" if outcome.skipped else ""
        return Text.assemble(head, ("not checked", "yellow"), why)
    if outcome.unwritten == task.number:
        return Text.assemble(head, ("not written yet", "yellow"))
    if outcome.unwritten:
        return Text.assemble(head, (f"needs task {outcome.unwritten} first", "yellow"))
    if outcome.failed:
        count = f"   {len(outcome.failed)} of {num_tests} tests"
        return Text.assemble(head, ("failing", "bold red"), count)
    seconds = sum(result.seconds for result in outcome.results)
    tests = "1 test" if num_tests == 1 else f"{num_tests} tests"
    return Text.assemble(head, ("done", "bold green"), f"   {tests}, {seconds:.1f} s")


def _wrong(outcome: Outcome, workbook: Workbook) -> Iterator[Text]:
    result = outcome.failed[0]
    failure = result.failure
    if failure is None:
        yield Text(f"{result.test}: {result.reason}", style="bold red")
    elif outcome.unwritten:
        yield Text(f"  {failure.unwritten}", style="yellow")
        yield Text(f"  write it in {shown(workbook.file(outcome.chapter))}", style="cyan")
        yield Text(f"  a hint: python -m chapters hint {outcome.unwritten}", style="cyan")
    else:
        trace = workbook.keep_trace(outcome.task.number, failure.trace)
        yield from failure_lines(outcome.chapter, failure, shown(trace) if trace else "")


def _after_a_pass(outcomes: Sequence[Outcome], workbook: Workbook) -> Iterator[Text]:
    chapter = outcomes[0].chapter
    if all(outcome.skipped for outcome in outcomes):
        yield Text("  nothing was checked", style="yellow")
        return
    left = [task for task in chapter.tasks if not _is_done(workbook, chapter, task)]
    if left:
        command = f"python -m chapters check {left[0].number}"
        yield Text(f"  next: task {left[0].number} {left[0].title}: {command}", style="cyan")
        return
    number = chapter.number
    yield Text(f"  chapter {number} is done: {chapter.builds}", style="bold green")
    yield Text(f"  compare: python -m chapters diff {number}", style="cyan")
    yield Text(f"  measure: python -m chapters.{chapter.name}.measure --mine", style="cyan")
    later = [each for each in all_chapters() if each.number > number]
    if later and not workbook.has(later[0]):
        command = f"python -m chapters start {later[0].number}"
        yield Text(f"  go on:   {command}   ({later[0].title})", style="cyan")


def _is_done(workbook: Workbook, chapter: Chapter, task: Task) -> bool:
    is_done = workbook.state(chapter, task.number) is State.DONE
    return is_done and workbook.is_checked(chapter, task.number)


def status_table(workbook: Workbook) -> Table:
    """All chapters and tasks, and how far each is."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "task", "state", "hints"):
        table.add_column(column)
    styles = {State.DONE: "bold green", State.FAILING: "bold red", State.NOT_STARTED: "dim"}
    for chapter in all_chapters():
        minutes = f"about {chapter.minutes} minutes"
        table.add_row(Text(f"{chapter.number}  {chapter.title}", style="bold"), "", minutes, "")
        for task in chapter.tasks:
            state = workbook.state(chapter, task.number)
            told = Text(state.value, style=styles[state])
            if state is not State.NOT_STARTED and not workbook.is_checked(chapter, task.number):
                told.append(", changed since", style="yellow")
            seen = workbook.hints_seen(task.number)
            hints = f"{seen} of {len(task.hints)}" if seen else ""
            table.add_row("", f"{task.number} {task.title}", told, hints)
    return table


def next_step(workbook: Workbook) -> str:
    """The command that a reader would want now."""
    for chapter in all_chapters():
        if not workbook.has(chapter):
            return f"python -m chapters start {chapter.number}"
        for task in chapter.tasks:
            if not _is_done(workbook, chapter, task):
                return f"python -m chapters check {task.number}"
    return "python -m chapters run --mine"
