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
from itertools import zip_longest
from pathlib import Path
from typing import Any

from minivllm.core.trace import FORMAT
from minivllm.errors import MiniVLLMError

Event = dict[str, Any]


class TraceError(MiniVLLMError, ValueError):
    """A trace cannot be read, or does not tell of the request asked for."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one lookup found, and why not more.

    step          the step that the lookup was made for, counted from 1
    num_waits     steps that it waited before because another request was computing its prefix
    missed_block  the first block of its prompt that missed, counted from 0; None if none did
    reason        "nothing missed" | "never seen" | "evicted" | "reset" | "in flight"
                  | "not published" | "other key field" | "cache read off"
    detail        a sentence: who, when, where, which
    """

    request: str
    num_prompt_tokens: int
    num_hit_tokens: int
    block_size: int
    step: int
    num_waits: int
    missed_block: int | None
    reason: str
    detail: str

    def __str__(self) -> str:
        """Four or five lines for a person."""
        lines = [
            f"request {self.request}: {self.num_prompt_tokens:,} prompt tokens",
            f"  found   {self.num_hit_tokens:,} tokens in"
            f" {self.num_hit_tokens // self.block_size:,} blocks of {self.block_size},"
            f" looked up for step {self.step}",
        ]
        if self.num_waits:
            lines.append(f"  waited  {self.num_waits} steps while another computed its prefix")
        if self.missed_block is not None:
            start = self.missed_block * self.block_size
            end = start + self.block_size
            lines.append(f"  missed  block {self.missed_block}, positions [{start:,}, {end:,})")
        return "\n".join([*lines, f"  why     {self.reason}: {self.detail}"])


def explain(path: Path, request_id: str) -> Explanation:
    """Explain the lookup with which a request was first admitted.

    Of a request with several outputs the first is explained; "ID#1" names the second. If the id
    was used again, the last use counts. Raises TraceError; it names a line that cannot be read.
    """
    block_size, events = _read(path)
    replay = _Replay(block_size, _outputs(path, events))
    explanation: Explanation | None = None
    for number, event in enumerate(events, start=2):
        with _at_line(path, number):
            replay.feed(event)
            if event["event"] == "match" and replay.is_first_lookup(event, request_id):
                explanation = replay.explain(event)
    if explanation is None:
        raise TraceError(_never_looked_up(path, request_id, replay.names()))
    return explanation


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence, as the trace tells of it.

    token_ids   prompt and output, also what it generates only later in the trace
    num_held    how many blocks of its prefix it holds in the cache
    published   blocks it has published, counted from the start of its prompt
    lost        block -> what became of it ("evicted", "reset"), and on the way to which step
    num_computed  most positions it ever had computed
    """

    name: str
    request: str
    num_prompt_tokens: int
    token_ids: list[int]
    key_fields: list[str]
    may_read: bool
    may_write: bool
    cacheable_tokens: int | None
    num_waits: int = 0
    num_held: int = 0
    num_computed: int = 0
    was_admitted: bool = False
    is_running: bool = False
    published: set[int] = field(default_factory=set)
    lost: dict[int, tuple[str, int]] = field(default_factory=dict)


class _Replay:
    """What the cache had seen, event by event.

    outputs   what each sequence generates until its end, in order of arrival
    """

    def __init__(self, block_size: int, outputs: list[list[int]]) -> None:
        self._block_size = block_size
        self._outputs = outputs
        self._sequences: list[_Sequence] = []
        self._named: dict[str, _Sequence] = {}
        self._published_at: dict[int, tuple[_Sequence, int]] = {}
        self._num_steps = 0

    def names(self) -> list[str]:
        """The sequences seen, in order of arrival."""
        return list(self._named)

    def is_first_lookup(self, match: Event, request_id: str) -> bool:
        """True until the sequence is admitted: who waits looks up again in every step."""
        return bool(match["sequence"] == request_id and not self._named[request_id].was_admitted)

    def feed(self, event: Event) -> None:
        """Take over one event."""
        kind = event["event"]
        if kind == "step":
            self._num_steps += 1
        elif kind == "add":
            self._add(event)
        elif kind in ("evict", "reset"):
            owner, index = self._published_at.pop(event["block"])
            reason = "evicted" if kind == "evict" else "reset"
            owner.lost[index] = (reason, self._num_steps + 1)
        else:
            self._change(kind, self._named[event["sequence"]], event)

    def _add(self, event: Event) -> None:
        prompt = event["token_ids"]
        sequence = _Sequence(
            name=event["sequence"],
            request=event["request"],
            num_prompt_tokens=len(prompt),
            token_ids=prompt + self._outputs[len(self._sequences)],
            key_fields=event["key_fields"],
            may_read=event["cache_read"],
            may_write=event["cache_write"],
            cacheable_tokens=event["cacheable_tokens"],
        )
        self._sequences.append(sequence)
        self._named[sequence.name] = sequence

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

    # The reason

    def explain(self, match: Event) -> Explanation:
        """Say what this lookup found, and why the next block missed."""
        sequence = self._named[match["sequence"]]
        num_hits = len(match["blocks"])
        missed, (reason, detail) = self._reason(sequence, num_hits)
        return Explanation(
            request=sequence.name,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_hit_tokens=num_hits * self._block_size,
            block_size=self._block_size,
            step=self._num_steps + 1,
            num_waits=sequence.num_waits,
            missed_block=missed,
            reason=reason,
            detail=detail,
        )

    def _reason(self, sequence: _Sequence, num_hits: int) -> tuple[int | None, tuple[str, str]]:
        """The first missed block, and why it missed."""
        size = self._block_size
        if not sequence.may_read:
            return 0, (
                "cache read off",
                "the request asked not to read the cache, or for prompt_logprobs,"
                " or the engine runs without one",
            )
        lookable = sequence.num_prompt_tokens - 1
        limit = f"at most {lookable:,} tokens are looked up, so that one is left to compute (I8)"
        if sequence.cacheable_tokens is not None and sequence.cacheable_tokens < lookable:
            lookable = sequence.cacheable_tokens
            limit = f"only the first {lookable:,} tokens may be looked up (cacheable_tokens)"
        if num_hits >= lookable // size:
            return None, ("nothing missed", limit)
        return num_hits, self._why_missed(sequence, num_hits)

    def _why_missed(self, sequence: _Sequence, block: int) -> tuple[str, str]:
        """Ask everybody who had the same tokens up to the end of `block` what became of theirs."""
        end = (block + 1) * self._block_size
        others = [
            (other, _num_common(other.token_ids, sequence.token_ids))
            for other in self._sequences
            if other is not sequence and other.num_computed + other.is_running > 0
        ]
        equal = [o for o, _ in others if o.key_fields == sequence.key_fields]
        same = [o for o, common in others if common >= end and o in equal]
        lost = [(o.lost[block][1], o) for o in same if block in o.lost]
        if lost:
            step, owner = max(lost, key=lambda pair: pair[0])
            how = owner.lost[block][0]
            return how, f"request {owner.name} had published it; {how} on the way to step {step}"
        unpublished = [o for o in same if o.is_running or o.num_computed >= end]
        if unpublished:
            return _why_unpublished(unpublished[-1], end)
        foreign = [o for o, common in others if common >= end and block in o.published]
        if foreign:
            here, there = _first_difference(sequence.key_fields, foreign[-1].key_fields)
            return (
                "other key field",
                f"request {foreign[-1].name} has published the same tokens under {there};"
                f" this one has {here}",
            )
        return "never seen", _where_they_part(sequence, [(o, n) for o, n in others if o in equal])


def _why_unpublished(other: _Sequence, end: int) -> tuple[str, str]:
    """`other` has the same tokens, and its block that ends at `end` is not in the cache."""
    if not other.may_write:
        return "not published", f"request {other.name} computes it, but may not write to the cache"
    if other.cacheable_tokens is not None and other.cacheable_tokens < end:
        return (
            "not published",
            f"request {other.name} computes it, but only its first {other.cacheable_tokens:,}"
            " tokens may be cached (cacheable_tokens)",
        )
    if other.num_computed >= end:
        return "not published", f"request {other.name} computed it: its key met another's hash (I7)"
    return (
        "in flight",
        f"request {other.name} was computing it: {other.num_computed:,} of {end:,} positions"
        " were written when this one looked",
    )


def _where_they_part(sequence: _Sequence, others: list[tuple[_Sequence, int]]) -> str:
    """The closest of the sequences computed before, and the position where the two part."""
    if not others:
        return "nothing was computed under its key fields before"
    closest, position = max(others, key=lambda pair: pair[1])
    here = f"token {sequence.token_ids[position]} here"
    if position < len(closest.token_ids):
        there = f"token {closest.token_ids[position]} there"
    else:
        there = "the end there, and only full blocks are cached"
    return (
        f"request {closest.name} comes closest; the two part at position {position:,}:"
        f" {here}, {there}"
    )


def _first_difference(here: list[str], there: list[str]) -> tuple[str, str]:
    """The first key field in which two requests differ, in both."""
    pairs = zip_longest(here, there, fillvalue="no such field")
    return next(pair for pair in pairs if pair[0] != pair[1])


def _num_common(a: list[int], b: list[int]) -> int:
    """How many leading tokens are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _outputs(path: Path, events: list[Event]) -> list[list[int]]:
    """The generated tokens of each sequence, in order of arrival; none if its end is missing."""
    outputs: list[list[int]] = []
    newest: dict[str, list[int]] = {}
    for number, event in enumerate(events, start=2):
        with _at_line(path, number):
            if event["event"] == "add":
                newest[event["sequence"]] = []
                outputs.append(newest[event["sequence"]])
            elif event["event"] in ("finish", "abort"):
                newest[event["sequence"]].extend(event["output_token_ids"])
    return outputs


def _never_looked_up(path: Path, request_id: str, names: list[str]) -> str:
    if request_id in names:
        return f"{path}: request {request_id!r} was never looked up: its turn did not come"
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{path} has no request {request_id!r}; it has {shown or 'none at all'}"


# The file


def _read(path: Path) -> tuple[int, list[Event]]:
    """The block size, and every event; of step lines only that there was one."""
    try:
        with path.open("rb") as file:
            lines = (_parse(path, number, line) for number, line in enumerate(file, start=1))
            header = next(lines, {})
            if header.get("format") != FORMAT or not isinstance(header.get("block_size"), int):
                raise TraceError(f"{path}: line 1 is not the head of a trace, format {FORMAT!r}")
            events = list(lines)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    return header["block_size"], events


@contextmanager
def _at_line(path: Path, number: int) -> Iterator[None]:
    """Say which line it is that does not fit the format."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise TraceError(f"{path}: line {number} is broken: {error!r}") from error


def _parse(path: Path, number: int, line: bytes) -> Event:
    try:
        event = json.loads(line)
    except ValueError:
        raise TraceError(f"{path}: line {number} is not JSON: {line[:60]!r}") from None
    if not isinstance(event, dict) or not (number == 1 or isinstance(event.get("event"), str)):
        raise TraceError(f"{path}: line {number} is not an event: {line[:60]!r}")
    # The orders of a step are long, and not needed here.
    return {"event": "step"} if event.get("event") == "step" else event
