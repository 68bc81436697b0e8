"""Whose code a chapter's tests judge.

    work           the reader's, in the workbook
    solution       the reference
    stub           the reference with every task taken out
    until:3.2      the reference with the tasks after 3.2 taken out: a reader on the way
    mutant:NAME    the reference with a named fault in it
    minivllm       the finished engine, through the chapter's adapter

Whatever the target, the stages before it are the reference's, or the reader's own with `mine`.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chapters.catalog import Chapter
from chapters.contents import all_chapters, find_task, mutant_named
from chapters.regions import mutated, stub
from chapters.stages import Stages, solution_path
from chapters.workbook import Workbook

WORK, SOLUTION, STUB, MINIVLLM = "work", "solution", "stub", "minivllm"
UNTIL, MUTANT = "until:", "mutant:"


class UnknownTargetError(ValueError):
    """There is no such target."""


class FinishedEngine(Stages):
    """Each stage as an adapter of the finished engine; those without one as the reference."""

    def load(self, name: str) -> Any:
        """The adapter of stage `name`, made once."""
        if has_adapter(name) and name not in self._modules:
            self._modules[name] = import_module(f"chapters.{name}.minivllm_adapter").adapt()
        return super().load(name)


def has_adapter(name: str) -> bool:
    """True if the finished engine can stand in for stage `name`."""
    return find_spec(f"chapters.{name}.minivllm_adapter") is not None


def check_target(target: str) -> None:
    """Raises UnknownTargetError unless `target` is one of those above."""
    if target not in (WORK, SOLUTION, STUB, MINIVLLM) and not target.startswith((UNTIL, MUTANT)):
        raise UnknownTargetError(
            f"there is no target {target!r}; there are {WORK}, {SOLUTION}, {STUB}, {MINIVLLM},"
            f" {UNTIL}TASK, {MUTANT}NAME"
        )


def make_stages(
    target: str, chapter: Chapter, workbook: Workbook, scratch: Path, mine: bool = False
) -> Stages:
    """The stages to test `chapter` with. Files that are made for it go to the folder `scratch`.

    Raises UnknownTargetError, UnknownTaskError.
    """
    check_target(target)
    if target == MINIVLLM:
        return FinishedEngine()
    files = {}
    if mine:
        files = {
            other.name: workbook.file(other) for other in all_chapters() if workbook.has(other)
        }
        files.pop(chapter.name, None)
    if target != SOLUTION:
        files[chapter.name] = _file(target, chapter, workbook, scratch)
    return Stages(files)


def _file(target: str, chapter: Chapter, workbook: Workbook, scratch: Path) -> Path:
    """The chapter's own file under `target`."""
    if target == WORK:
        return workbook.file(chapter)
    source = solution_path(chapter.name).read_text()
    if target == STUB:
        text = stub(source, chapter)
    elif target.startswith(UNTIL):
        _, last = find_task(target.removeprefix(UNTIL))
        numbers = [task.number for task in chapter.tasks]
        text = stub(source, chapter, solved=numbers[: numbers.index(last.number) + 1])
    else:
        text = mutated(source, mutant_named(chapter, target.removeprefix(MUTANT)))
    # A folder for each, and the reader's file name in it: messages read as they will for them.
    path = scratch / target.replace(":", "_") / chapter.name / chapter.work_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
