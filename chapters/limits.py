"""A test may compute for so many seconds; then it is stopped where it is: an endless loop.

What is counted is the processor's time, so a busy machine stops nobody. Where there is no such
clock (Windows), only the limit of the whole check stands.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS_A_TEST = 10.0


class EndlessLoopError(BaseException):
    """A test took too long. Not an Exception: neither a reader's code nor hypothesis catches it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise EndlessLoopError in what runs inside once it has computed for so long."""
    if not hasattr(signal, "SIGVTALRM"):
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise EndlessLoopError(f"stopped after {seconds:g} seconds of computing: an endless loop?")

    before = signal.signal(signal.SIGVTALRM, stop)
    # Once more every second, should it go unheard: in a callback, or where the stack is full.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
