"""A story in the format of the engine's trace, so that the same player shows it.

The engine's own trace is written event by event. Here only the states between two operations are
known, so what happened is worked out from what differs, in the order in which an engine does it:
what was computed is written and published, blocks are given up, evicted, taken, and computed.
minivllm/trace_schema.json describes the lines.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from chapters.observe import Operation, Story
from chapters.snapshot import CACHE, PoolView, SequenceView, Snapshot

FORMAT = "minivllm-trace-1"
Event = dict[str, Any]

_NO_POOL = PoolView(1, 1, (), (), (), {})


def trace_lines(story: Story) -> Iterator[str]:
    """The whole story, one JSON object a line."""
    pool = story.before.pool or _NO_POOL
    scheduler = story.before.scheduler
    budget = scheduler.budget if scheduler else pool.num_blocks * pool.block_size
    yield _line(
        {
            "format": FORMAT,
            "block_size": pool.block_size,
            "num_kv_blocks": max(1, pool.num_blocks),
            "max_num_batched_tokens": budget,
        }
    )
    before = story.before
    for event in _added((), before.sequences):
        yield _line(event)
    for number, operation in enumerate(story.operations, start=1):
        for event in events_between(before, operation.after):
            yield _line(event)
        yield _line(_step(number, operation, budget))
        before = operation.after


def events_between(before: Snapshot, after: Snapshot) -> list[Event]:
    """What happened from one state to the next."""
    return list(_Difference(before, after).events())


class _Difference:
    """Two states, and the holders of each block while one becomes the other."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self.before, self.after = before, after
        self.old_pool = before.pool or _NO_POOL
        self.new_pool = after.pool or _NO_POOL
        self.old = {each.name: each for each in before.sequences}
        self.holders = {b: before.holders(b) for b in range(self.new_pool.num_blocks)}

    def events(self) -> Iterator[Event]:
        """All of them, in order; a block's last one has the count that the code itself keeps."""
        found = list(self._in_order())
        last = {event["block"]: event for event in found if "block" in event}
        for block, event in last.items():
            if block < len(self.new_pool.ref_counts):
                event["ref_count"] = max(0, self.new_pool.ref_counts[block])
        yield from found

    def _in_order(self) -> Iterator[Event]:
        yield from _added(self.before.sequences, self.after.sequences)
        pairs = [(self.old.get(new.name), new) for new in self.after.sequences]
        # Who has blocks already computes before it gives any of them up, or takes more.
        ready = [(old, new) for old, new in pairs if old and self._is_covered(old, new)]
        for old, new in ready:
            yield from self._computed(old, new, old.block_table)
        for known, new in pairs:
            if known:
                yield from self._given_up(known, new)
        yield from self._evicted()
        for _, new in pairs:
            yield from self._taken(new)
        for known, new in pairs:
            if (known, new) not in ready:
                yield from self._computed(known, new, new.block_table)

    def _is_covered(self, old: SequenceView, new: SequenceView) -> bool:
        if self.after.pool is None:
            return True
        return new.num_computed_tokens <= len(old.block_table) * self.new_pool.block_size

    def _computed(
        self, old: SequenceView | None, new: SequenceView, table: tuple[int, ...]
    ) -> Iterator[Event]:
        """Written, published, and exchanged for an equal block that was cached before."""
        size = self.new_pool.block_size
        found = self._num_found(old, new) * size
        start = (old.num_computed_tokens if old else 0) + found
        end = new.num_computed_tokens
        if end > start:
            blocks = list(self._real(table[start // size : -(-end // size)]))
            yield {
                "event": "write", "sequence": new.name, "start": start, "end": end, "blocks": blocks
            }  # fmt: skip
        for block in self._real(table):
            key = self._key_after(block)
            if key is not None and CACHE not in self.holders[block]:
                yield self._held("publish", new.name, block, key)
        for mine, cached in zip(table, new.block_table, strict=False):
            if old and mine != cached and self._key_after(cached) and table == old.block_table:
                yield self._held("swap", new.name, cached, self._key_after(cached))
                yield self._dropped("release", new.name, mine)

    def _given_up(self, old: SequenceView, new: SequenceView) -> Iterator[Event]:
        for block in self._real(reversed(old.block_table)):
            if block not in new.block_table and new.name in self.holders[block]:
                yield self._dropped("release", new.name, block)
        if (old.state, new.state) == ("running", "waiting"):
            yield {"event": "preempt", "sequence": new.name, "num_tokens": len(new.token_ids)}
        if new.state == "finished" != old.state:
            reason = new.finish_reason
            yield {
                "event": "abort" if reason == "abort" else "finish",
                "sequence": new.name,
                "reason": reason if reason in ("abort", "stop", "length") else "error",
                "output_token_ids": list(new.token_ids[new.num_prompt_tokens :]),
            }

    def _evicted(self) -> Iterator[Event]:
        for block, cached in self.old_pool.cached.items():
            if self._key_after(block) != cached.key:
                yield self._dropped("evict", None, block) | {"key": cached.key}

    def _taken(self, new: SequenceView) -> Iterator[Event]:
        for block in self._real(new.block_table):
            if new.name in self.holders[block]:
                continue
            if CACHE in self.holders[block]:
                yield self._held("reference", new.name, block, self._key_after(block))
            else:
                yield self._held("allocate", new.name, block, None)

    def _num_found(self, old: SequenceView | None, new: SequenceView) -> int:
        """How many blocks at the head of its table it found in the cache: not computed by it."""
        held = old.block_table if old else ()
        return sum(
            block in self.old_pool.cached and block not in held
            for block in new.block_table
            if not held
        )

    def _key_after(self, block: int) -> str | None:
        cached = self.new_pool.cached.get(block)
        return cached.key if cached else None

    def _held(self, event: str, name: str, block: int, key: str | None) -> Event:
        self.holders[block].append(CACHE if event == "publish" else name)
        return self._block(event, name, block, key)

    def _dropped(self, event: str, name: str | None, block: int) -> Event:
        holder = CACHE if name is None else name
        if holder in self.holders[block]:
            self.holders[block].remove(holder)
        # Blocks are given up before they are evicted, and perhaps published anew.
        cached = self.old_pool.cached.get(block) or self.new_pool.cached.get(block)
        key = cached.key if cached and CACHE in self.holders[block] else None
        return self._block(event, name, block, key)

    def _block(self, event: str, name: str | None, block: int, key: str | None) -> Event:
        holders = list(self.holders[block])
        return {
            "event": event, "sequence": name, "block": block,
            "ref_count": len(holders), "holders": holders, "key": key,
        }  # fmt: skip

    def _real(self, table: Iterable[int]) -> Iterator[int]:
        """Blocks that the pool has; a table may hold anything."""
        return (block for block in table if 0 <= block < self.new_pool.num_blocks)


def _added(old: Iterable[SequenceView], new: Iterable[SequenceView]) -> Iterator[Event]:
    names = {each.name for each in old}
    for each in new:
        if each.name not in names:
            yield {
                "event": "add",
                "sequence": each.name,
                "request": each.name,
                "token_ids": list(each.token_ids[: each.num_prompt_tokens]),
                "cache_read": True,
                "cache_write": True,
                "cacheable_tokens": None,
                "key_fields": list(each.key_fields),
            }


def _step(number: int, operation: Operation, budget: int) -> Event:
    """The state that an operation led to. Without a scheduler whoever holds blocks runs.

    Most operations schedule nothing: then nothing is charged, and the whole budget is left.
    """
    state, pool = operation.after, operation.after.pool or _NO_POOL
    views = {each.name: each for each in state.sequences}
    cached = {name: _num_cached(views[name], pool) for name, _, _ in operation.computes}
    scheduler = state.scheduler
    holding = [each.name for each in state.sequences if each.block_table]
    return {
        "event": "step",
        "step": number,
        "waiting": list(scheduler.waiting) if scheduler else [],
        "running": list(scheduler.running) if scheduler else holding,
        "scheduled": [
            {
                "sequence": name,
                "start": start,
                "end": end,
                "cached": cached[name],
                "block_table": [b for b in views[name].block_table if 0 <= b < pool.num_blocks],
            }
            for name, start, end in operation.computes
            if end > 0
        ],
        "budget_left": max(0, scheduler.budget_left)
        if scheduler and operation.computes
        else budget,
        "free": [block for block in pool.free if 0 <= block < pool.num_blocks],
        "lru": [block for block in pool.idle if 0 <= block < pool.num_blocks],
    }


def _num_cached(sequence: SequenceView, pool: PoolView) -> int:
    """Tokens in the published blocks at the head of its table."""
    num_blocks = 0
    while (
        num_blocks < len(sequence.block_table) and sequence.block_table[num_blocks] in pool.cached
    ):
        num_blocks += 1
    return num_blocks * pool.block_size


def _line(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))
