"""From an exception in a test to what a reader should see of it."""

import linecache
import re
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from chapters.catalog import INVARIANTS
from chapters.contents import all_chapters
from chapters.failure import Failure
from chapters.limits import EndlessLoopError
from chapters.observe import Recorder
from chapters.picture import named_blocks, operations, pool_picture
from chapters.stages import CHAPTERS, StageImportError
from chapters.testing import Broken
from chapters.trace import trace_lines

MOST_VALUES = 12


def sentence(test_name: str) -> str:
    """A test's name as the sentence that it is."""
    name, bracket, rest = test_name.removeprefix("test_").partition("[")
    return name.replace("_", " ") + (f" ({rest.removesuffix(']')})" if bracket else "")


def explain(
    error: BaseException,
    *,
    test_name: str,
    task: str,
    broken: str,
    files: Collection[Path],
    test_file: Path,
    recorder: Recorder | None,
) -> Failure:
    """The failure that `error` is. `files` are the reader's; `broken` is the test's default id."""
    name, unwritten = sentence(test_name), _unwritten(error)
    if unwritten:
        return Failure(name, task, broken, text_of(broken), (unwritten,), unwritten=unwritten)
    if isinstance(error, StageImportError):
        values: tuple[str, ...] = tuple(unreadable(error, files))
        return Failure(name, task, broken, text_of(broken), values, unreadable=True)
    if isinstance(error, Broken):
        broken, values = error.broken, tuple(error.message.splitlines())
    else:
        values = tuple(_values(error))
    told = _tell(recorder, named_blocks(str(error), broken))
    return Failure(
        name,
        task,
        broken,
        text_of(broken),
        values,
        place=_place(error, files),
        test_place=_test_place(error, test_file),
        # What was called says it better, where it is known.
        example=() if told.operations else tuple(_example(error)),
        operations=told.operations,
        picture=told.picture,
        trace=told.trace,
        endless=isinstance(error, EndlessLoopError),
    )


class _Told(NamedTuple):
    """What happened, how it stands now, and both for the player: a line each."""

    operations: tuple[str, ...] = ()
    picture: tuple[str, ...] = ()
    trace: tuple[str, ...] = ()


def _tell(recorder: Recorder | None, marks: Mapping[int, str]) -> _Told:
    """The latest story of a recorder, which has heard enough."""
    if recorder is None or recorder.story is None:
        return _Told()
    recorder.stop()
    story = recorder.story
    try:
        return _Told(
            tuple(operations(story)) if story.operations else (),
            tuple(pool_picture(story.now(), marks)),
            tuple(trace_lines(story)),
        )
    except Exception as error:  # the code under test may have put anything anywhere
        return _Told(picture=(f"cannot be shown: {type(error).__name__}: {error}",))


def text_of(broken: str) -> str:
    """What an invariant or a contract line says."""
    lines = [task.contract for chapter in all_chapters() for task in chapter.tasks]
    return next((line[broken] for line in [INVARIANTS, *lines] if broken in line), "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unwritten(error: BaseException) -> str | None:
    """The stub's own message, if the code under test said that it is not written yet."""
    for each in _chain(error):
        if isinstance(each, NotImplementedError) and re.match(r"Task \d+\.\d+ ", str(each)):
            return str(each)
    return None


def _values(error: BaseException) -> Iterator[str]:
    """What the error says, without what pytest adds to an assert that has words of its own."""
    lines = str(error).splitlines() or [""]
    if isinstance(error, AssertionError):
        words = [line for line in lines if line.strip()]
        if not words[:1] or words[0].startswith("assert "):
            yield from lines[:MOST_VALUES]
            return
        for line in words:
            if line.startswith("assert "):
                return
            yield line
        return
    name = type(error).__name__
    speaks_for_itself = name == "Failed" or isinstance(error, EndlessLoopError)
    yield lines[0] if speaks_for_itself else f"{name}: {lines[0]}".removesuffix(": ")
    yield from lines[1:MOST_VALUES]


def _frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(trace))


def _place(error: BaseException, files: Collection[Path]) -> tuple[str, ...]:
    """The last line of the reader's code that was running when it raised."""
    names = {str(path) for path in files}
    frames = [frame for frame in _frames(error.__traceback__) if frame.filename in names]
    if not frames:
        return ()
    frame = frames[-1]
    return (f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}", frame.line or "")


def _test_place(error: BaseException, test_file: Path) -> str:
    shown = test_file.relative_to(CHAPTERS.parent)
    for frame in reversed(_frames(error.__traceback__)):
        if frame.filename == str(test_file):
            return f"{shown}, line {frame.lineno}"
    return str(shown)


def _example(error: BaseException) -> Iterator[str]:
    """The arguments with which a test fails, as hypothesis has noted them; without the fixtures.

    A note is "Failing test case: test_x(", then a line for each argument, then ")".
    """
    for note in getattr(error, "__notes__", ()):
        heading, *arguments = note.splitlines()
        if not heading.endswith("("):
            continue
        for line in arguments:
            if not re.match(r"\s*(stages?=|\)|#)|\s*$", line):
                yield line.removeprefix("    ")


def unreadable(error: StageImportError, files: Collection[Path]) -> Iterator[str]:
    """Which line of which file cannot be imported, and why."""
    cause = error.__cause__
    if isinstance(cause, StageImportError):
        yield from unreadable(cause, files)
        return
    if isinstance(cause, SyntaxError) and cause.filename:
        yield f"{type(cause).__name__}: {cause.msg}"
        yield f"{Path(cause.filename).name}, line {cause.lineno}"
        if cause.text:
            yield f"    {cause.text.rstrip()}"
            yield "    " + " " * max(0, (cause.offset or 1) - 1) + "^"
        return
    yield f"{type(cause).__name__}: {cause}"
    for frame in reversed(_frames(cause.__traceback__ if cause else None)):
        if frame.filename in {str(path) for path in files}:
            yield f"{Path(frame.filename).name}, line {frame.lineno}"
            yield f"    {linecache.getline(frame.filename, frame.lineno or 0).strip()}"
            return
