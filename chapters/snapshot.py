"""The state of pool, scheduler and sequences at one moment, whoever wrote them.

Everything is read by name and nothing is trusted: a reader's class may be half written, so what
is missing or raises is left out.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

Value = TypeVar("Value")

CACHE = "cache"


class SequenceView(NamedTuple):
    """One sequence."""

    name: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: tuple[int, ...]
    state: str
    finish_reason: str | None
    key_fields: tuple[str, ...]


@dataclass(frozen=True)
class CachedView:
    """What the cache says a block holds; parent is a block, or None."""

    key: str
    token_ids: tuple[int, ...]
    parent: int | None


@dataclass(frozen=True)
class PoolView:
    """A pool of blocks. `idle` is in order of eviction, `free` in order of use."""

    block_size: int
    num_blocks: int
    ref_counts: tuple[int, ...]
    free: tuple[int, ...]
    idle: tuple[int, ...]
    cached: Mapping[int, CachedView]


@dataclass(frozen=True)
class SchedulerView:
    """The queues, by name, and the budget."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    budget: int
    budget_left: int


@dataclass(frozen=True)
class Snapshot:
    """All of it. `pool` is None if there is none with blocks, `scheduler` likewise."""

    sequences: tuple[SequenceView, ...]
    pool: PoolView | None
    scheduler: SchedulerView | None

    def holders(self, block: int) -> list[str]:
        """Who holds a block, as far as the tables say, and the cache."""
        tables = [each.name for each in self.sequences for b in each.block_table if b == block]
        return [CACHE] * bool(self.pool and block in self.pool.cached) + tables


class Names:
    """A name for each sequence: its request id, with a number if two have the same."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self.sequences: list[Any] = []

    def of(self, sequence: Any) -> str:
        """Its name, the same every time."""
        if id(sequence) not in self._names:
            name = str(sequence.request_id)
            taken = list(self._names.values())
            repeats = sum(other == name or other.startswith(f"{name}#") for other in taken)
            self._names[id(sequence)] = f"{name}#{repeats + 1}" if repeats else name
            self.sequences.append(sequence)  # keeps it alive, so that its id stays its own
        return self._names[id(sequence)]


def is_sequence(value: object) -> bool:
    """True for anything that looks like chapter 1's Sequence."""
    return hasattr(value, "request_id") and hasattr(value, "token_ids")


def sequences_in(value: object) -> Iterator[Any]:
    """The sequences in a value, and in lists and tuples in it."""
    if is_sequence(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from sequences_in(each)


def take_snapshot(root: object, names: Names) -> Snapshot:
    """The state of `root`, a pool, a scheduler or a sequence, and of all it has dealt with."""
    for queue in ("waiting", "running", "finished"):
        for sequence in sequences_in(_read(root, queue, [])):
            names.of(sequence)
    pool = _read(root, "pool", root)
    return Snapshot(
        tuple(_sequence(sequence, names) for sequence in names.sequences),
        _pool(pool) if hasattr(pool, "ref_counts") else None,
        _scheduler(root, names) if hasattr(root, "waiting") else None,
    )


def _read(thing: object, name: str, default: Value) -> Value | Any:
    try:
        return getattr(thing, name)
    except Exception:  # a property that is not written yet
        return default


def _number(thing: object, name: str, default: int) -> int:
    value = _read(thing, name, default)
    return value if isinstance(value, int) else default


def _numbers(thing: object, name: str) -> tuple[int, ...]:
    return _only_numbers(_read(thing, name, ()))


def _only_numbers(values: object) -> tuple[int, ...]:
    """The numbers in it, if it is something with numbers in it."""
    if not isinstance(values, Iterable):
        return ()
    return tuple(value for value in values if isinstance(value, int))


def _sequence(sequence: Any, names: Names) -> SequenceView:
    name = names.of(sequence)
    try:
        return _whole_sequence(sequence, name)
    except Exception:  # one that lacks something: read what there is
        state, fields = _read(sequence, "state", ""), _read(sequence, "key_fields", ())
        return SequenceView(
            name,
            _numbers(sequence, "token_ids"),
            _number(sequence, "num_prompt_tokens", 0),
            _number(sequence, "num_computed_tokens", 0),
            _numbers(sequence, "block_table"),
            str(_read(state, "value", state)),
            _read(sequence, "finish_reason", None),
            tuple(map(repr, fields)) if isinstance(fields, tuple) else (),
        )


def _whole_sequence(sequence: Any, name: str) -> SequenceView:
    """Read without caution: it is asked for every sequence after every operation."""
    return SequenceView(
        name,
        tuple(sequence.token_ids),
        sequence.num_prompt_tokens,
        sequence.num_computed_tokens,
        tuple(sequence.block_table),
        sequence.state.value,
        sequence.finish_reason,
        tuple(map(repr, sequence.key_fields)),
    )


def _pool(pool: Any) -> PoolView:
    num_blocks = _number(pool, "num_blocks", 0)
    try:
        free = _only_numbers(pool.free_order())
    except Exception:
        free = ()
    return PoolView(
        max(1, _number(pool, "block_size", 1)),
        num_blocks,
        _numbers(pool, "ref_counts"),
        free,
        _numbers(pool, "idle"),
        dict(_cached(pool, range(num_blocks))),
    )


def _cached(pool: Any, blocks: Iterable[int]) -> Iterator[tuple[int, CachedView]]:
    """What is published in each block."""
    if not hasattr(pool, "cached_at"):
        return
    for block in blocks:
        try:
            cached = pool.cached_at(block)
        except Exception:
            return
        if cached is not None:
            parent = _read(_read(cached, "parent", None), "block", None)
            yield block, CachedView(readable(cached.key), _tokens(cached.tokens), parent)


def readable(key: object) -> str:
    """A key for a person: hexadecimal digits."""
    return key.hex() if isinstance(key, bytes) else str(key)


def _tokens(tokens: Any) -> tuple[int, ...]:
    """The token ids of a cached block, which keeps them as bytes, 4 a token."""
    if isinstance(tokens, bytes):
        return tuple(array("i", tokens)) if len(tokens) % 4 == 0 else ()
    return _only_numbers(tokens)


def _scheduler(scheduler: Any, names: Names) -> SchedulerView:
    def queue(name: str) -> tuple[str, ...]:
        return tuple(names.of(each) for each in sequences_in(_read(scheduler, name, [])))

    budget = max(1, _number(scheduler, "max_num_batched_tokens", 1))
    return SchedulerView(
        queue("waiting"), queue("running"), budget, _number(scheduler, "budget_left", budget)
    )
