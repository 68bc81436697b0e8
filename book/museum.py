"""The back rooms of docs/faults-museum.md: every named wrong answer of the chapters.

    python -m book          writes build/book/museum-*.md, which the page includes
    python -m book.museum   finds out anew which test kills each, and writes museum.json

Name, story and broken promise come from chapters/*/mutants.py. Which test fails first is found by
running it, which takes minutes: so it is recorded, and tests/site/test_museum.py checks the record.
"""

import json
import sys
from collections.abc import Mapping, Sequence

from book.places import ROOT, SNIPPETS, BookError, write
from chapters.catalog import INVARIANTS, Chapter, Mutant, Task
from chapters.checking import run_jobs
from chapters.contents import all_chapters, mutants_of
from chapters.results import FAILED, Job
from chapters.targets import MUTANT
from chapters.workbook import open_workbook

RECORD = ROOT / "book" / "museum.json"
SECONDS_A_CHAPTER = 600.0

Killers = Mapping[str, Mapping[str, str]]
"""Name of a chapter -> name of a wrong answer -> name of the test that fails first on it."""


def write_all() -> None:
    """Write build/book/museum-chNN.md for each chapter, and the table of all."""
    killers: Killers = json.loads(RECORD.read_text(encoding="utf-8"))
    for chapter in all_chapters():
        text = room(chapter, mutants_of(chapter), killers.get(chapter.name, {}))
        write(SNIPPETS / f"museum-{chapter.name[:4]}.md", text)
    write(SNIPPETS / "museum-plan.md", plan(all_chapters()))


def plan(chapters: Sequence[Chapter]) -> str:
    """A table: how many wrong answers each room holds."""
    counts = {chapter: len(mutants_of(chapter)) for chapter in chapters}
    rows = [
        f"| [{chapter.number}](#room-{chapter.number}) | {chapter.title} | {count} |"
        for chapter, count in counts.items()
    ]
    last = f"| | **all** | **{sum(counts.values())}** |"
    return "\n".join(["| room | chapter | wrong answers |", "|---|---|---:|", *rows, last]) + "\n"


def room(chapter: Chapter, mutants: Sequence[Mutant], killers: Mapping[str, str]) -> str:
    """A folded entry for each task, in it the broken promises, under each its wrong answers."""
    return "\n".join(
        line
        for task in chapter.tasks
        if (mine := [mutant for mutant in mutants if mutant.task == task.number])
        for line in _entry(chapter, task, mine, killers)
    )


def _entry(
    chapter: Chapter, task: Task, mutants: Sequence[Mutant], killers: Mapping[str, str]
) -> list[str]:
    number = f"{len(mutants)} wrong answer{'s' if len(mutants) > 1 else ''}"
    lines = [
        f'??? abstract "Task {task.number}, {task.title[0].lower()}{task.title[1:]}: {number}"',
        "",
    ]
    for broken in dict.fromkeys(mutant.broken for mutant in mutants):
        lines += [f"    **{broken}** {promise(chapter, broken)}", ""]
        for mutant in mutants:
            if mutant.broken == broken:
                lines.append(
                    f"    - `{mutant.name}`: {_escaped(mutant.story)}{_death(mutant, killers)}"
                )
        lines.append("")
    return lines


def _death(mutant: Mutant, killers: Mapping[str, str]) -> str:
    test = killers.get(mutant.name)
    return f" *Killed by: {sentence(test)}.*" if test else ""


def sentence(test: str) -> str:
    """The name of a test, to be read.

    >>> sentence("test_take_counts_to_1")
    'take counts to 1'
    """
    return test.removeprefix("test_").replace("_", " ")


def promise(chapter: Chapter, broken: str) -> str:
    """The text of an invariant or a contract line. Raises BookError if there is none."""
    lines = dict(INVARIANTS)
    for task in chapter.tasks:
        lines |= task.contract
    if broken not in lines:
        raise BookError(f"{chapter.name}: a mutant breaks {broken!r}, which is no promise")
    return _escaped(lines[broken])


def _escaped(text: str) -> str:
    """As Markdown that shows exactly these characters."""
    return "".join(f"\\{each}" if each in "\\`*_[]<>" else each for each in text)


def find_killers(chapter: Chapter, mutants: Sequence[Mutant]) -> dict[str, str]:
    """Run each wrong answer until a test of its task fails; the names of those tests.

    Raises BookError for one that no test kills, or not for the promise that it breaks.
    """
    jobs = [Job(MUTANT + mutant.name, mutant.task, stop=True) for mutant in mutants]
    results = run_jobs(chapter, jobs, open_workbook(), seconds=SECONDS_A_CHAPTER)
    found = {
        mutants[result.job].name: result.test.partition("[")[0]
        for result in results
        if result.outcome == FAILED
        and result.failure
        and result.failure.broken == mutants[result.job].broken
    }
    if alive := [mutant.name for mutant in mutants if mutant.name not in found]:
        raise BookError(f"{chapter.name}: no test kills {', '.join(alive)}")
    return found


def main() -> int:
    """Record which test kills each wrong answer; 1 if one lives."""
    try:
        killers = {
            chapter.name: find_killers(chapter, mutants_of(chapter)) for chapter in all_chapters()
        }
    except BookError as error:
        print(f"python -m book.museum: {error}", file=sys.stderr)
        return 1
    write(RECORD, json.dumps(killers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
