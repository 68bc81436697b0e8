"""Several threads share one engine: one at a time, and nobody is kept out for ever."""

from threading import Lock, get_ident

from minivllm.errors import EngineBusyError


class FairLock:
    """A lock for `with`; whoever has left it cannot enter again before one who waits.

    threading.Lock wakes a waiting thread, but the one that has just left is faster: an engine
    stepped in a loop would keep out whoever wants to add a request. Here who waits for the room
    holds the door, and the one that comes back has to queue before it:

        stepping thread   leaves the room          waits for the door              in the room
        another thread    waits, holds the door    takes the room, frees the door  leaves the room

    A thread that is inside already gets EngineBusyError: it would wait for itself for ever.
    Enter it with interrupts held: Ctrl-C between taking the room and the body would lock it.
    """

    def __init__(self) -> None:
        self._door, self._room = Lock(), Lock()
        self._inside: int | None = None

    def __enter__(self) -> None:
        if self._inside == get_ident():
            raise EngineBusyError("the engine was called from within one of its own calls")
        with self._door:
            self._room.acquire()
        self._inside = get_ident()

    def __exit__(self, *error: object) -> None:
        self._inside = None
        self._room.release()
