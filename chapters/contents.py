"""All chapters that there are, in order, and how a person names one of their tasks."""

import re
from functools import cache
from importlib import import_module

from chapters.catalog import Chapter, Mutant, Task
from chapters.stages import CHAPTERS


class UnknownTaskError(LookupError):
    """There is no chapter or task of this number; the message says which there are."""


@cache
def all_chapters() -> tuple[Chapter, ...]:
    """Every chapter, first to last."""
    names = sorted(path.parent.name for path in CHAPTERS.glob("ch*/chapter.py"))
    return tuple(import_module(f"chapters.{name}.chapter").CHAPTER for name in names)


def chapter_named(name: str) -> Chapter:
    """The chapter in folder `name`. Raises UnknownTaskError."""
    for chapter in all_chapters():
        if chapter.name == name:
            return chapter
    raise UnknownTaskError(f"there is no chapter {name!r}; there are {_known()}")


def find_chapter(number: str) -> Chapter:
    """The chapter that a person calls "3", "03" or "ch03". Raises UnknownTaskError."""
    match = re.fullmatch(r"(?:ch)?0*(\d+)", number)
    for chapter in all_chapters():
        if match and chapter.number == int(match[1]):
            return chapter
    raise UnknownTaskError(f"there is no chapter {number!r}; there are {_known()}")


def find_task(number: str) -> tuple[Chapter, Task]:
    """The task "3.2" and its chapter. Raises UnknownTaskError."""
    before, dot, _ = number.partition(".")
    chapter = find_chapter(before)
    if not dot:
        raise UnknownTaskError(f"{number!r} is a chapter; its tasks are {_tasks(chapter)}")
    for task in chapter.tasks:
        if task.number == number:
            return chapter, task
    raise UnknownTaskError(f"there is no task {number!r}; there are {_tasks(chapter)}")


def mutants_of(chapter: Chapter) -> tuple[Mutant, ...]:
    """The named wrong answers of a chapter."""
    mutants: tuple[Mutant, ...] = import_module(f"chapters.{chapter.name}.mutants").MUTANTS
    return mutants


def mutant_named(chapter: Chapter, name: str) -> Mutant:
    """The wrong answer `name` of a chapter. Raises UnknownTaskError."""
    for mutant in mutants_of(chapter):
        if mutant.name == name:
            return mutant
    known = ", ".join(mutant.name for mutant in mutants_of(chapter))
    raise UnknownTaskError(f"{chapter.name} has no mutant {name!r}; there are {known}")


def _known() -> str:
    return ", ".join(str(chapter.number) for chapter in all_chapters())


def _tasks(chapter: Chapter) -> str:
    return ", ".join(task.number for task in chapter.tasks)
