"""A number that was measured, or why it could not be.

What we measure stands beside a yardstick that others have written. One that cannot run here must
not take our number with it, so whoever measures keeps the error in the number's place.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

Function = Callable[..., Any]

MOST_CHARACTERS = 600
MOST_PLACES = 4


class Measured(NamedTuple):
    """value: None if it could not be measured, and `error` says why."""

    value: float | None
    error: str = ""

    def into(self, convert: Callable[[float], float]) -> Measured:
        """The same in other units; an error stays one."""
        return self if self.value is None else Measured(convert(self.value))


def measured(measure: Callable[[], float]) -> Measured:
    """Measure it now; an exception is kept in the number's place."""
    try:
        return Measured(measure())
    except Exception as error:
        return Measured(None, described(error))


def middle(found: Sequence[Measured]) -> Measured:
    """The median; or the first error, if there is one."""
    failed = [each for each in found if each.value is None]
    values = [each.value for each in found if each.value is not None]
    return failed[0] if failed else Measured(median(values))


def made_late(make: Callable[[], Function]) -> Function:
    """A function that is made at its first call: what it lacks, memory say, is its own error."""
    once = cache(make)
    return lambda: once()()


def described(error: BaseException) -> str:
    """The error, what caused it, and the last places it came through, in one line."""
    cause = error.__cause__
    because = f" because of {shortened(repr(cause))}" if cause else ""
    frames = traceback.extract_tb((cause or error).__traceback__)[-MOST_PLACES:]
    places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    return f"{shortened(repr(error))}{because} at {places}"


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Without its middle if it is long: compilers begin with the program and end with the fault."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
