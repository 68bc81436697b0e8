"""The pool at one moment as text, and the operations that led there."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby

from chapters.observe import Story
from chapters.snapshot import CACHE, PoolView, SequenceView, Snapshot
from chapters.trace import Event, events_between

MOST_BLOCKS = 12
MOST_OPERATIONS = 14


def pool_picture(state: Snapshot, broken: Mapping[int, str] | None = None) -> Iterator[str]:
    """A line for each block that is not simply free, the free list, the queues, and the tables.

    `broken` names the blocks that the failure is about, and the id that is broken there; what
    cannot be right whoever asks, is marked without being named.
    """
    if state.pool is not None:
        marks = dict(_impossible(state, state.pool)) | dict(broken or {})
        yield from _pool(state, state.pool, marks)
    if state.scheduler is not None:
        yield f"waiting    {_names(state.scheduler.waiting)}"
        yield f"running    {_names(state.scheduler.running)}"
    for sequence in state.sequences:
        yield f"{sequence.name:10} {_sequence(sequence)}"


def _pool(state: Snapshot, pool: PoolView, marks: Mapping[int, str]) -> Iterator[str]:
    shown = [
        block
        for block in range(pool.num_blocks)
        if block in marks or state.holders(block) or _count(pool, block)
    ]
    for block in shown[:MOST_BLOCKS]:
        cells = f"[{' '.join(_cells(state, pool, block))}]"
        holders = ", ".join(state.holders(block)) or "-"
        line = f"block {block:<3}  {cells:18} ref {_count(pool, block)}  {holders}"
        cached = pool.cached.get(block)
        if cached:
            line += f"  key {cached.key[:8]}"
        yield line + (f"   <-- {marks[block]}" if block in marks else "")
    if len(shown) > MOST_BLOCKS:
        yield f"...        and {len(shown) - MOST_BLOCKS} more blocks in use"
    yield f"free       {_names(map(str, pool.free[:MOST_BLOCKS]))}"
    if pool.cached or pool.idle:
        yield f"idle       {_names(map(str, pool.idle))}   (evicted in this order)"


def _cells(state: Snapshot, pool: PoolView, block: int) -> list[str]:
    """The tokens whose KV lies in a block; `_` for a slot that is not written."""
    tokens: list[int] = list(pool.cached[block].token_ids) if block in pool.cached else []
    for sequence in state.sequences:
        if block in sequence.block_table and not tokens:
            start = sequence.block_table.index(block) * pool.block_size
            end = min(start + pool.block_size, sequence.num_computed_tokens)
            tokens = list(sequence.token_ids[start:end])
    return [*map(str, tokens), *["_"] * (pool.block_size - len(tokens))]


def _count(pool: PoolView, block: int) -> int:
    return pool.ref_counts[block] if block < len(pool.ref_counts) else 0


def _impossible(state: Snapshot, pool: PoolView) -> Iterator[tuple[int, str]]:
    """Blocks that break I1 or I2 whatever the test was about."""
    for block in range(pool.num_blocks):
        count, num_free = _count(pool, block), pool.free.count(block)
        if len(state.holders(block)) > count or count < 0 or (count and num_free):
            yield block, "I2"
        elif num_free > 1 or (not count and not num_free):
            yield block, "I1"


def named_blocks(message: str, broken: str) -> dict[int, str]:
    """The blocks that a failure's message speaks of."""
    return {int(number): broken for number in re.findall(r"\bblock (\d+)\b", message)}


def _sequence(sequence: SequenceView) -> str:
    num_tokens = len(sequence.token_ids)
    reason = f" ({sequence.finish_reason})" if sequence.finish_reason else ""
    table = " ".join(map(str, sequence.block_table))
    return (
        f"{sequence.state}{reason}, {sequence.num_computed_tokens} of {num_tokens} tokens"
        f" computed, table [{table}]"
    )


def _names(names: Iterable[str]) -> str:
    return " ".join(names) or "-"


def operations(story: Story) -> Iterator[str]:
    """A line for each operation: the call, what it gave, and what changed by it."""
    before = story.before
    known = {sequence.name for sequence in before.sequences}
    yield f"     {story.text}"
    lines: list[str] = []
    for number, operation in enumerate(story.operations, start=1):
        for sequence in operation.after.sequences:
            if sequence.name not in known:
                known.add(sequence.name)
                prompt = sequence.token_ids[: sequence.num_prompt_tokens]
                lines.append(f"     {sequence.name} = {' '.join(map(str, prompt[:24]))}")
        changes = "; ".join(_changes(events_between(before, operation.after)))
        parts = [operation.text, operation.outcome, changes]
        lines.append(f"{number:4} " + "   ".join(part for part in parts if part))
        before = operation.after
    if len(lines) > MOST_OPERATIONS:
        yield f"     ... {len(lines) - MOST_OPERATIONS} lines before these"
    yield from lines[-MOST_OPERATIONS:]


def _changes(events: list[Event]) -> Iterator[str]:
    """Events in a few words; neighbours of one kind and one sequence together."""
    by_kind: Callable[[Event], tuple[str, object]] = lambda e: (e["event"], e["sequence"])  # noqa: E731
    for (kind, name), group in groupby(events, key=by_kind):
        together = list(group)
        blocks = " ".join(str(event.get("block")) for event in together)
        last = together[-1]
        words = {
            "allocate": f"{name} takes {blocks}",
            "reference": f"{name} shares {blocks}",
            "publish": f"{CACHE} takes {blocks}",
            "swap": f"{name} swaps for {blocks}",
            "release": f"{name} gives back {blocks}",
            "evict": f"{CACHE} gives up {blocks}",
            "preempt": f"{name} preempted",
        }
        if kind == "write":
            yield f"{name} computed [{last['start']}, {last['end']})"
        elif kind in ("finish", "abort"):
            yield f"{name} finished ({last['reason']})"
        elif kind in words:
            yield words[kind]
