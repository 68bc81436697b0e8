"""Ctrl-C between two statements of the bookkeeping would tear it: here it waits for their end."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Holder:
    """The SIGINT handler within a held part: notes the signal for `handler`, who gets it later."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self._is_noted = False

    def __call__(self, *signal_and_frame: object) -> None:
        self._is_noted = True

    def deliver(self) -> None:
        """Call the handler if a signal was noted; Python's own one raises KeyboardInterrupt."""
        if self._is_noted:
            self._is_noted = False
            self.handler(signal.SIGINT, None)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Run the body whole: a SIGINT that arrives within is answered when the body has ended.

    Python raises KeyboardInterrupt between any two bytecodes of the main thread, also between
    "take a block" and "write it into the table": a block would be lost. Within this context the
    signal is only noted. At the end, also when the body raised, it goes to the handler that was
    there before: KeyboardInterrupt, unless the program has chosen otherwise.

        with interrupts_held():
            block = blocks.take()
            table.append(block)        # Ctrl-C here ...
                                       # ... is raised here: the block stands in the table

    Contexts may be nested: the outermost one answers. In another thread than the main one, and
    where SIGINT is ignored or kills the process, there is nothing to hold back. Keep the body
    short, because nobody can interrupt it, or let interrupts through where it is long.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, _Holder):
        yield
        return
    holder = _Holder(handler)
    signal.signal(signal.SIGINT, holder)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        holder.deliver()


@contextmanager
def interrupts_let_through() -> Iterator[None]:
    """Within a held part, a body in which SIGINT is answered at once, and first one noted before.

        with interrupts_held():
            batch = schedule()
            try:
                with interrupts_let_through():
                    tokens = execute(batch)        # takes seconds; undone if interrupted
            except BaseException:
                roll_back()
                raise
            commit(tokens)

    Outside a held part it does nothing.
    """
    holder = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not isinstance(holder, _Holder):
        yield
        return
    try:
        signal.signal(signal.SIGINT, holder.handler)
        holder.deliver()
        yield
    finally:
        signal.signal(signal.SIGINT, holder)
