"""A failed test as a reader should see it, as data: it crosses from pytest to the command line."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """What a failing test says.

    test        its name as a sentence
    task        the task that it belongs to
    broken      the id of the invariant or contract line, and its text
    values      what was expected and what came, a line each
    place       where in the reader's file it went wrong, if it did there
    test_place  the test's file and line
    example     the arguments that hypothesis found, if it was asked
    operations  what was called, a line each
    picture     the state at that moment, a line each
    trace       the same for the player, a JSON object a line
    unwritten   the task that is not written yet, if that is all
    unreadable  True if the reader's file could not even be imported
    endless     True if the test was stopped because it computed for too long
    """

    test: str
    task: str
    broken: str
    text: str
    values: tuple[str, ...]
    place: tuple[str, ...] = ()
    test_place: str = ""
    example: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    picture: tuple[str, ...] = ()
    trace: tuple[str, ...] = field(default=(), repr=False)
    unwritten: str | None = None
    unreadable: bool = False
    endless: bool = False
