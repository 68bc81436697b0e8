"""What a test has done so far: the operations on the observed classes, and the state after each.

Only calls from outside count. `pool.allocate(...)` is an operation; the `take()` that it makes
inside is not. A new root, the first of the observed classes, begins a new story: when hypothesis
has found its shortest failing example it runs it once more, so the last story is the shortest.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import getattr_static
from types import FunctionType
from typing import Any

from chapters.snapshot import Names, Snapshot, is_sequence, sequences_in, take_snapshot

MOST_LETTERS = 80
MOST_STORIES = 4
# How tests look at a pool; nobody works with it that way.
QUERIES = ("free_order", "cached_at", "keys")


@dataclass(frozen=True)
class Operation:
    """One call from outside.

    text      as a person would write it: "allocate(A, 5)"
    outcome   "-> 2", "raises BlockError: ...", or "" for a call that returns nothing
    computes  name, start and end of what a schedule() told to compute
    after     the state that it led to
    """

    text: str
    outcome: str
    computes: tuple[tuple[str, int, int], ...]
    after: Snapshot


class Story:
    """The operations on one root, and the state before the first of them."""

    def __init__(self, root: object, text: str) -> None:
        self.root = root
        self.text = text
        self.names = Names()
        if is_sequence(root):
            self.names.of(root)
        self.before = self.now()
        self.operations: list[Operation] = []

    def now(self) -> Snapshot:
        """The state at this moment, with what happened to it since the last operation."""
        return take_snapshot(self.root, self.names)

    def call(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
        """A call as a person would write it, and the sequences in it made known."""
        for sequence in sequences_in([*arguments, *named.values()]):
            self.names.of(sequence)
        return _call(method, arguments, named, self.names)

    def add(self, text: str, result: object, error: BaseException | None) -> None:
        """A call has returned, or raised."""
        for sequence in sequences_in(result):
            self.names.of(sequence)
        outcome = ""
        if error is not None:
            outcome = f"raises {type(error).__name__}: {error}"
        elif result is not None:
            outcome = f"-> {describe(result, self.names)}"
        computes = tuple(_computes(result, self.names)) if text == "schedule()" else ()
        self.operations.append(Operation(text, outcome, computes, self.now()))


class Recorder:
    """Follows the observed classes of one module, each root of the last few in its own story."""

    def __init__(self) -> None:
        self._stories: deque[Story] = deque(maxlen=MOST_STORIES)
        # True while an operation runs, or its story is told: calls made then are not from outside.
        self._is_inside = False

    @property
    def story(self) -> Story | None:
        """The one told last; None before any root is made."""
        return self._stories[-1] if self._stories else None

    def stop(self) -> None:
        """The test is over: what is called from now on is no part of it."""
        self._is_inside = True

    def observe(self, module: object, class_names: tuple[str, ...]) -> None:
        """From now on follow these classes of `module`; those that it lacks are left out."""
        for i, name in enumerate(class_names):
            cls = getattr(module, name, None)
            if isinstance(cls, type):
                self._follow(cls, is_root=i == 0)

    def _follow(self, cls: type, is_root: bool) -> None:
        for name in dir(cls):
            method = getattr_static(cls, name)
            is_told = not name.startswith("_") and name not in QUERIES
            if is_told and isinstance(method, FunctionType):
                setattr(cls, name, self._told(method))
        if is_root:
            begin = getattr_static(cls, "__init__")
            setattr(cls, "__init__", self._begun(begin, cls.__name__))  # noqa: B010

    def _told(self, method: FunctionType) -> Callable[..., Any]:
        @wraps(method)
        def call(receiver: Any, *arguments: Any, **named: Any) -> Any:
            story = None if self._is_inside else self._turn_to(receiver)
            if story is None:
                return method(receiver, *arguments, **named)
            with self._inside():
                text = story.call(method.__name__, arguments, named)
                try:
                    result = method(receiver, *arguments, **named)
                except BaseException as error:
                    story.add(text, None, error)
                    raise
                story.add(text, result, None)
                return result

        return call

    def _begun(self, method: Callable[..., None], name: str) -> Callable[..., None]:
        @wraps(method)
        def call(receiver: Any, *arguments: Any, **named: Any) -> None:
            if self._is_inside:
                method(receiver, *arguments, **named)
                return
            with self._inside():
                method(receiver, *arguments, **named)
                self._stories.append(Story(receiver, _call(name, arguments, named, Names())))

        return call

    def _turn_to(self, root: object) -> Story | None:
        """The story of `root`, which is now the latest; None if it has none."""
        for story in self._stories:
            if story.root is root:
                self._stories.remove(story)
                self._stories.append(story)
                return story
        return None

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False


def _call(method: str, arguments: tuple[Any, ...], named: dict[str, Any], names: Names) -> str:
    parts = [describe(value, names) for value in arguments]
    parts += [f"{name}={describe(value, names)}" for name, value in named.items()]
    return f"{method}({', '.join(parts)})"


def describe(value: object, names: Names) -> str:
    """A value for a person: sequences by name, digests by their first digits."""
    if is_sequence(value):
        return names.of(value)
    if isinstance(value, bytes):
        return value[:4].hex()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [f"{name}={describe(getattr(value, name), names)}" for name in value._fields]
        return _short(f"{type(value).__name__}({', '.join(parts)})")
    if isinstance(value, (list, tuple)):
        inside = ", ".join(describe(each, names) for each in value)
        if isinstance(value, tuple):
            return _short(f"({inside},)" if len(value) == 1 else f"({inside})")
        return _short(f"[{inside}]")
    if type(value).__repr__ is object.__repr__:
        return type(value).__name__
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 4]} ..."


def _computes(result: object, names: Names) -> Iterator[tuple[str, int, int]]:
    """What chapter 2's Step, or chapter 7's list of ranges, says to compute."""
    if hasattr(result, "decodes") and hasattr(result, "prefills"):
        for sequence in sequences_in([*result.decodes, *result.prefills]):
            yield names.of(sequence), sequence.num_computed_tokens, len(sequence.token_ids)
    elif isinstance(result, list):
        for each in result:
            if is_sequence(getattr(each, "sequence", None)):
                yield names.of(each.sequence), each.start, each.end
