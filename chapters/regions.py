"""Other versions of a solution: the stub a reader starts from, and a mutant.

In a solution the lines between these two are what a reader writes:

    # task 3.1
    ...
    # end of task

Both stand alone on their lines, as far in as the code between them.
"""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from chapters.catalog import Chapter, Mutant
from chapters.contents import find_task

_BEGIN = re.compile(r"( *)# task (\d+\.\d+)")
_END = re.compile(r"( *)# end of task")


class RegionError(ValueError):
    """A solution's regions, or a mutant's changes, do not fit its text."""


class Region(NamedTuple):
    """Lines [start, end) of a solution, the two marks included, and the task they belong to."""

    task: str
    start: int
    end: int
    indent: str


def regions(source: str) -> list[Region]:
    """What a reader writes, in order. Raises RegionError with the line number."""
    found: list[Region] = []
    opened: tuple[str, int, str] | None = None
    for i, line in enumerate(source.splitlines()):
        begin, end = _BEGIN.fullmatch(line), _END.fullmatch(line)
        if begin and opened:
            raise RegionError(f"line {i + 1}: task {opened[0]} is still open")
        if end and not opened:
            raise RegionError(f"line {i + 1}: no task is open")
        if begin:
            opened = (begin[2], i, begin[1])
        elif end and opened:
            if end[1] != opened[2]:
                raise RegionError(f"line {i + 1}: indented otherwise than line {opened[1] + 1}")
            found.append(Region(opened[0], opened[1], i + 1, opened[2]))
            opened = None
    if opened:
        raise RegionError(f"line {opened[1] + 1}: task {opened[0]} has no end")
    return found


def stub(source: str, chapter: Chapter, solved: Collection[str] = ()) -> str:
    """The solution with every task taken out, except those in `solved`.

    Where code was, `raise NotImplementedError` says which task it is and where to read about it.
    Raises RegionError if the regions are not exactly the chapter's tasks.
    """
    lines = source.splitlines()
    wanted = {task.number for task in chapter.tasks}
    marked = {region.task for region in regions(source)}
    if wanted != marked:
        raise RegionError(f"{chapter.name}: tasks {sorted(wanted)}, regions {sorted(marked)}")
    for region in reversed(regions(source)):
        inside = lines[region.start + 1 : region.end - 1]
        lines[region.start : region.end] = (
            inside if region.task in solved else list(_not_written(region))
        )
    text = "\n".join(lines) + "\n"
    compile(text, chapter.work_file, "exec")
    return text


def stub_message(task: str) -> str:
    """What the stub of a task says when it is called."""
    chapter, found = find_task(task)
    return f"Task {task} {found.title}: see docs/{chapter.page}"


def _not_written(region: Region) -> Iterator[str]:
    """The lines in place of a region; the message on a line of its own where it would be long."""
    message = f'"{stub_message(region.task)}"'
    line = f"{region.indent}raise NotImplementedError({message})"
    if len(line) <= 100:
        yield line
        return
    yield f"{region.indent}raise NotImplementedError("
    yield f"{region.indent}    {message}"
    yield f"{region.indent})"


def mutated(source: str, mutant: Mutant) -> str:
    """The solution with a mutant's changes. Raises RegionError unless each fits exactly once."""
    for old, new in mutant.changes:
        count = source.count(old)
        if count != 1:
            raise RegionError(f"mutant {mutant.name}: {old!r} stands {count} times, not once")
        source = source.replace(old, new)
    compile(source, f"{mutant.name}.py", "exec")
    return source
