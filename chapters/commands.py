"""What each command of the book does; the exit code: 0, or 1 if something fails.

Whatever a person can get wrong is raised, as one of the errors that cli.py tells in one line.
"""

import argparse
import time
from collections.abc import Sequence
from datetime import datetime

from rich.table import Table
from rich.text import Text

from chapters import progress
from chapters.catalog import Chapter, Task
from chapters.checking import CheckError
from chapters.contents import all_chapters, find_chapter, find_task
from chapters.diff import against_earlier_stages, against_solution, solution_text
from chapters.doctor import findings
from chapters.prove import COLUMNS, MUTANTS, Verdict
from chapters.prove import prove as prove_all
from chapters.running import RunError, answers
from chapters.terminal import console, say, show, show_code, show_diff
from chapters.watch import watch as watch_files
from chapters.workbook import Workbook, open_workbook, shown

OK, FAILED = 0, 1


class UsageError(Exception):
    """What was asked for cannot be done; one line says why and what can be."""


def status(_: argparse.Namespace) -> int:
    """Show how far the reader is."""
    workbook = open_workbook()
    show(progress.status_table(workbook))
    say(f"\nnext: {progress.next_step(workbook)}", "cyan")
    return OK


def start(options: argparse.Namespace) -> int:
    """Write the stub of a chapter."""
    chapter = find_chapter(options.chapter)
    path = open_workbook().start(chapter)
    say(f"chapter {chapter.number}: {chapter.title}", "bold")
    say(f"  you will have: {chapter.builds}")
    say(f"  time: about {chapter.minutes} minutes")
    for task in chapter.tasks:
        say(f"  task {task.number}: {task.title}")
    say(f"  read:  docs/{chapter.page}", "cyan")
    say(f"  write: {shown(path)}", "cyan")
    say(f"  check: python -m chapters check {chapter.tasks[0].number}", "cyan")
    return OK


def check(options: argparse.Namespace) -> int:
    """Run tests on the reader's files."""
    workbook = open_workbook()
    code = OK
    for chapter, tasks in _selected(options.what, workbook):
        if not _check_chapter(chapter, tasks, workbook, options):
            code = FAILED
    return code


def _check_chapter(
    chapter: Chapter, tasks: Sequence[Task], workbook: Workbook, options: argparse.Namespace
) -> bool:
    """Check and show; True if nothing failed."""
    with_model = getattr(options, "model", False)
    say(f"chapter {chapter.number}: {chapter.title}   {shown(workbook.file(chapter))}", "bold")
    try:
        outcomes = progress.check(
            chapter, tasks, workbook, mine=options.mine, with_model=with_model
        )
    except CheckError as error:
        raise UsageError(f"nothing was checked: {error}") from error
    return progress.show(console(), outcomes, workbook)


def _selected(what: str | None, workbook: Workbook) -> list[tuple[Chapter, Sequence[Task]]]:
    """Which tasks of which chapters, all of them started."""
    if what is None:
        started = [chapter for chapter in all_chapters() if workbook.has(chapter)]
        if not started:
            raise UsageError("you have not started a chapter: python -m chapters start 1")
        return [(chapter, chapter.tasks) for chapter in started]
    if "." in what:
        chapter, task = find_task(what)
        tasks: Sequence[Task] = (task,)
    else:
        chapter = find_chapter(what)
        tasks = chapter.tasks
    _need_started(chapter, workbook)
    return [(chapter, tasks)]


def _need_started(chapter: Chapter, workbook: Workbook) -> None:
    if not workbook.has(chapter):
        raise UsageError(
            f"you have not started chapter {chapter.number}: python -m chapters start"
            f" {chapter.number}"
        )


def watch(options: argparse.Namespace) -> int:
    """Check at every save until nothing fails."""
    workbook = open_workbook()
    ((chapter, tasks),) = _selected(options.what, workbook)
    also = [each for each in all_chapters() if options.mine and workbook.has(each)]
    files = [workbook.file(each) for each in {chapter, *also}]

    def check_again() -> bool:
        console().clear()
        passed = _check_chapter(chapter, tasks, workbook, options)
        if not passed:
            say("watching: save the file to check it again, Ctrl-C to end", "dim")
        return passed

    watch_files(files, check_again, time.sleep)
    return OK


def hint(options: argparse.Namespace) -> int:
    """Show one hint more than last time."""
    _, task = find_task(options.task)
    workbook = open_workbook()
    seen = min(workbook.hints_seen(task.number) + 1, len(task.hints))
    for number, hint in enumerate(task.hints[:seen], start=1):
        style = "bold" if number == seen else "dim"
        say(f"hint {number} of {len(task.hints)}", style)
        for line in hint.splitlines():
            say(f"  {line}", style if style == "dim" else "")
    workbook.saw_hints(task.number, seen)
    if seen == len(task.hints):
        command = f"python -m chapters solution {task.number.partition('.')[0]} --give-up"
        say(f"that was the last one; the reference: {command}", "cyan")
    return OK


def solution(options: argparse.Namespace) -> int:
    """Show the reference."""
    chapter = find_chapter(options.chapter)
    workbook = open_workbook()
    if not options.give_up and not workbook.is_done(chapter):
        raise UsageError(
            f"chapter {chapter.number} is not done as your file is now; check it, or see the"
            f" reference all the same: python -m chapters solution {chapter.number} --give-up"
        )
    show_code(solution_text(chapter))
    return OK


def diff(options: argparse.Namespace) -> int:
    """Compare with the reference, or the chapter with those before it."""
    chapter = find_chapter(options.chapter)
    if options.stage:
        say(f"chapter {chapter.number}: {chapter.builds}", "bold")
        show_diff(against_earlier_stages(chapter))
        return OK
    workbook = open_workbook()
    _need_started(chapter, workbook)
    lines = against_solution(chapter, workbook)
    if not lines:
        say("your file is the reference, word for word")
    show_diff(lines)
    return OK


def reset(options: argparse.Namespace) -> int:
    """Put the stub back, and keep the reader's file."""
    chapter = find_chapter(options.chapter)
    workbook = open_workbook()
    _need_started(chapter, workbook)
    if not options.yes and not _agrees(f"begin chapter {chapter.number} anew?"):
        raise UsageError("nothing was changed")
    backup = workbook.reset(chapter, datetime.now())
    say(f"{shown(workbook.file(chapter))} is as `start` wrote it")
    say(f"your file is kept as {shown(backup)}", "cyan")
    return OK


def _agrees(question: str) -> bool:
    try:
        return input(f"{question} Your file will be kept. [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def run(options: argparse.Namespace) -> int:
    """Answer with the real model."""
    workbook = open_workbook()
    mine = [each for each in all_chapters() if options.mine and workbook.has(each)]
    if options.mine and not mine:
        raise UsageError("you have not started a chapter: python -m chapters start 1")
    files = {each.name: workbook.file(each) for each in mine}
    yours = ", ".join(str(each.number) for each in mine)
    say(f"your chapters: {yours}; the others are the reference" if mine else "the reference", "dim")
    try:
        for told in answers(files, options.prompt, options.through, options.max_tokens):
            say(f"\n{told}")
    except RunError as error:
        raise UsageError(str(error)) from error
    return OK


def doctor(_: argparse.Namespace) -> int:
    """Look at the machine."""
    code = OK
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings(open_workbook()):
        mark, style = ("ok", "green") if not finding.advice else ("look", "yellow")
        if finding.stops:
            mark, style, code = "missing", "bold red", FAILED
        table.add_row(Text(mark, style=style), finding.what, finding.found)
        if finding.advice:
            table.add_row("", "", Text(finding.advice, style="cyan"))
    show(table)
    return code


def prove(options: argparse.Namespace) -> int:
    """Try every claim about every task, and show the table."""
    chosen = [find_chapter(number) for number in options.chapters] or list(all_chapters())
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "task", *COLUMNS):
        table.add_column(column)
    verdicts: list[Verdict] = []
    for chapter, found in prove_all(chosen):
        verdicts += found
        say(f"chapter {chapter.number}: {len(found)} claims tried", "dim")
        table.add_row(Text(f"{chapter.number}  {chapter.title}", style="bold"))
        for task in chapter.tasks:
            of_task = [each for each in found if each.claim.task is task]
            cells = [_cell([each for each in of_task if each.claim.column == c]) for c in COLUMNS]
            table.add_row("", f"{task.number} {task.title}", *cells)
    show(table)
    for verdict in verdicts:
        if not verdict.holds:
            say(f"{verdict.claim.name}: {verdict.fault}", "bold red")
        elif verdict.skipped:
            say(f"{verdict.claim.name}: left out: {verdict.skipped}", "yellow")
    wrong = sum(not verdict.holds for verdict in verdicts)
    num_mutants = sum(verdict.claim.column == MUTANTS for verdict in verdicts)
    say(f"{len(verdicts)} claims, {num_mutants} of them about mutants; {wrong} do not hold", "bold")
    return FAILED if wrong else OK


def _cell(verdicts: Sequence[Verdict]) -> Text:
    """One column of one task."""
    holding = sum(verdict.holds for verdict in verdicts)
    if any(verdict.skipped for verdict in verdicts):
        return Text("left out", style="yellow")
    style = "green" if holding == len(verdicts) else "bold red"
    if verdicts and verdicts[0].claim.column == MUTANTS:
        return Text(f"{holding} of {len(verdicts)} caught", style=style)
    return Text("holds" if holding == len(verdicts) else "does not hold", style=style)
