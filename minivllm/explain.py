"""Why a request found no more of its prefix in the cache: told from a trace, without the engine.

The trace is replayed up to the lookup with which the request was admitted. The first block that
missed has a position and tokens; whoever else had the same tokens up to its end, and what became
of their block, is the reason. If nobody had: the closest one, and where the two part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

from minivllm.core.trace import FORMAT
from minivllm.errors import MiniVLLMError

Event = dict[str, Any]


class TraceError(MiniVLLMError):
    """A trace cannot be read, or does not tell of the request asked for."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one lookup found, and why not more.

    step          the step that the lookup was made for, counted from 1
    num_waits     steps that it waited before because another request was computing its prefix
    missed_block  the first block of its prompt that missed, counted from 0; None if none did
    why           "nothing missed" | "never seen" | "evicted" | "reset" | "in flight"
                  | "not published" | "other key field" | "cache read off", and who, when, where
    """

    name: str
    num_prompt_tokens: int
    num_hit_tokens: int
    block_size: int
    step: int
    num_waits: int
    missed_block: int | None
    why: tuple[str, str]

    def __str__(self) -> str:
        """A few lines for a person."""
        size = self.block_size
        lines = [
            f"request {self.name}: {self.num_prompt_tokens:,} prompt tokens",
            f"  found   {self.num_hit_tokens:,} tokens in {self.num_hit_tokens // size:,} blocks"
            f" of {size}, looked up for step {self.step}",
        ]
        if self.num_waits:
            lines.append(f"  waited  {self.num_waits} steps while another computed its prefix")
        if self.missed_block is not None:
            start = self.missed_block * size
            end = start + size
            lines.append(f"  missed  block {self.missed_block}, positions [{start:,}, {end:,})")
        return "\n".join([*lines, f"  why     {': '.join(self.why)}"])


def explain(path: Path, request_id: str) -> Explanation:
    """Explain the lookup with which a request was first admitted.

    Of a request with several outputs the first is explained; "ID#1" names the second. If the id
    was used again, the last use counts. Raises TraceError; it names a line that cannot be read.
    """
    events = _read(path)
    with _at_line(path, 1):
        replay = _Replay(next(events, {})["block_size"])
    explanation: Explanation | None = None
    for number, event in enumerate(events, start=2):
        with _at_line(path, number):
            replay.feed(event)
            # Who waits looks up in every step: the last lookup before the admission counts.
            if event["event"] == "match" and event["sequence"] == request_id:
                explanation = replay.explain(request_id, len(event["blocks"])) or explanation
    if explanation is None:
        known = ", ".join(replay.named) or "none at all"
        raise TraceError(
            f"{path}: request {request_id!r} was never looked up: its turn did not come"
            if request_id in replay.named
            else f"{path} has no request {request_id!r}; it has {known:.200}"
        )
    return explanation


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence, as the trace tells of it; first the fields of its `add` event.

    sequence      its name; `request` is the id that its n outputs have in common
    token_ids     its prompt, and once it has ended its output
    num_held      how many blocks of its prefix it holds in the cache
    num_computed  the most positions it ever had computed
    published     blocks it has published, counted from the start of its prompt
    lost          block -> on the way to which step it left the cache; "evicted" or "reset"
    """

    event: str
    sequence: str
    request: str
    token_ids: list[int]
    key_fields: list[str]
    cache_read: bool
    cache_write: bool
    cacheable_tokens: int | None
    num_waits: int = 0
    num_held: int = 0
    num_computed: int = 0
    was_admitted: bool = False
    is_running: bool = False
    published: set[int] = field(default_factory=set)
    lost: dict[int, tuple[int, str]] = field(default_factory=dict)

    def num_common(self, other: _Sequence) -> int:
        """How many leading tokens are equal."""
        pairs = zip(self.token_ids, other.token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class _Replay:
    """What had been computed and cached, event by event; `named` are the sequences by name."""

    def __init__(self, block_size: int) -> None:
        self.named: dict[str, _Sequence] = {}
        self._block_size = block_size
        self._sequences: list[_Sequence] = []
        self._published_at: dict[int, tuple[_Sequence, int]] = {}
        self._step = 1

    def feed(self, event: Event) -> None:
        """Take over one event."""
        kind = event["event"]
        if kind == "step":
            self._step += 1
        elif kind == "add":
            self.named[event["sequence"]] = _Sequence(**event)
            self._sequences.append(self.named[event["sequence"]])
        elif kind in ("evict", "reset"):
            owner, index = self._published_at.pop(event["block"])
            owner.lost[index] = (self._step, "evicted" if kind == "evict" else "reset")
        else:
            self._change(kind, self.named[event["sequence"]], event)

    def _change(self, kind: str, sequence: _Sequence, event: Event) -> None:
        if kind == "publish":
            self._published_at[event["block"]] = (sequence, sequence.num_held)
            sequence.published.add(sequence.num_held)
            sequence.lost.pop(sequence.num_held, None)
        if kind in ("publish", "swap", "reference"):
            sequence.num_held += 1
        if kind in ("reference", "allocate"):
            sequence.was_admitted = sequence.is_running = True
        elif kind == "write":
            sequence.num_computed = max(sequence.num_computed, event["end"])
        elif kind == "pass_over":
            sequence.num_waits += 1
        elif kind in ("preempt", "finish", "abort"):
            sequence.is_running = False
            sequence.num_held = 0
            sequence.token_ids += event.get("output_token_ids", [])

    def explain(self, name: str, num_hits: int) -> Explanation | None:
        """Say why not more than `num_hits` blocks were found; None if it was admitted before."""
        sequence = self.named[name]
        if sequence.was_admitted:
            return None
        last = len(sequence.token_ids) - 1
        limit = last if sequence.cacheable_tokens is None else sequence.cacheable_tokens
        missed: int | None = num_hits
        if not sequence.cache_read:
            why = ("cache read off", "by the request, by prompt_logprobs, or in the engine")
        elif num_hits < min(limit, last) // self._block_size:
            why = self._why_missed(sequence, num_hits)
        elif limit < last:
            missed, why = None, ("nothing missed", f"only {limit:,} tokens may be cached")
        else:
            missed = None
            why = ("nothing missed", f"only {last:,} tokens are looked up: one is computed (I8)")
        found = num_hits * self._block_size
        return Explanation(
            name, last + 1, found, self._block_size, self._step, sequence.num_waits, missed, why
        )

    def _why_missed(self, sequence: _Sequence, block: int) -> tuple[str, str]:
        """Ask all who had the same tokens up to the end of `block` what became of theirs."""
        end = (block + 1) * self._block_size
        others = [o for o in self._sequences if o.was_admitted]
        equal = [o for o in others if o.num_common(sequence) >= end]
        akin = [o for o in equal if o.key_fields == sequence.key_fields]
        if lost := [(*o.lost[block], o.sequence) for o in akin if block in o.lost]:
            step, how, name = max(lost)
            return how, f"request {name} had published it; {how} on the way to step {step}"
        if akin:
            return _why_unpublished(max(akin, key=lambda o: o.num_computed), end)
        for other in equal:
            if other not in akin and block in other.published:
                pairs = zip_longest(sequence.key_fields, other.key_fields, fillvalue="nothing")
                here, there = next(pair for pair in pairs if pair[0] != pair[1])
                who = f"request {other.sequence} has published the same tokens"
                return "other key field", f"{who}, but under {there}; this one asks under {here}"
        family = [o for o in others if o.key_fields == sequence.key_fields]
        return "never seen", _where_they_part(sequence, family)


def _why_unpublished(other: _Sequence, end: int) -> tuple[str, str]:
    """`other` has the same tokens, and its block that ends at `end` was never in the cache."""
    reason, limit = "not published", other.cacheable_tokens
    if not other.cache_write:
        but = "but it may not write to the cache"
    elif limit is not None and limit < end:
        but = f"but only its first {limit:,} tokens may be cached"
    elif other.num_computed >= end:
        but = "but its key met another block with an equal hash (I7)"
    elif other.is_running:
        reason, but = "in flight", "so far"
    else:
        reason, but = "never seen", "and stopped there"
    num_computed = min(other.num_computed, end)
    who = f"request {other.sequence} has computed"
    return reason, f"{who} {num_computed:,} of the same {end:,} positions, {but}"


def _where_they_part(sequence: _Sequence, others: list[_Sequence]) -> str:
    """The closest of the sequences computed before, and the position where the two part."""
    if not others:
        return "nothing was computed under its key fields before"
    closest = max(others, key=sequence.num_common)
    position = sequence.num_common(closest)
    here, there = sequence.token_ids[position], closest.token_ids[position : position + 1]
    return (
        f"request {closest.sequence} comes closest; at position {position:,} this one has token"
        f" {here}, that one {there[0] if there else 'none'}"
    )


def _read(path: Path) -> Iterator[Event]:
    """The head of the trace, then event by event."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                with _at_line(path, number):
                    event = json.loads(line)
                    if number == 1 and event["format"] != FORMAT:
                        raise ValueError(f"format is {event['format']!r}")
                yield event
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _at_line(path: Path, number: int) -> Iterator[None]:
    """Say which line it is that does not fit the format."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise TraceError(
            f"{path}: line {number} does not fit the format {FORMAT}:"
            f" {type(error).__name__}: {error}"
        ) from error
