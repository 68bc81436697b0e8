"""Why a request found no more of its prefix in the cache: told from a trace, without the engine.

The trace is replayed up to the lookup with which the request was admitted. The first block that
missed has a position and tokens; whoever else had the same tokens up to its end, and what became
of their block, is the reason. If nobody had: the closest one, and where the two part.
"""

import json
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from minivllm.core.trace import FORMAT
from minivllm.errors import TraceError

Event = dict[str, Any]


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
        size, block = self.block_size, self.missed_block
        lines = [
            f"request {self.name}: {self.num_prompt_tokens:,} prompt tokens",
            f"  found   {self.num_hit_tokens:,} tokens in {self.num_hit_tokens // size:,} blocks"
            f" of {size}, looked up for step {self.step}",
        ]
        if self.num_waits:
            lines.append(f"  waited  {self.num_waits} steps while another computed its prefix")
        if block is not None:
            positions = f"[{block * size:,}, {(block + 1) * size:,})"
            lines.append(f"  missed  block {block}, positions {positions}")
        return "\n".join([*lines, f"  why     {': '.join(self.why)}"])


def explain(path: Path, request_id: str) -> Explanation:
    """Explain the lookup with which a request was first admitted.

    Of a request with several outputs the first is explained; "ID#1" names the second. If the id
    was used again, the last use counts. Raises TraceError; it names a line that cannot be read.
    """
    explanation: Explanation | None = None
    number = 1
    try:
        with path.open("rb") as file:
            replay = _Replay(json.loads(file.readline()))
            for line in file:
                number += 1
                event = json.loads(line)
                replay.feed(event)
                # Who waits looks up in every step: the last lookup before the admission counts.
                if event["event"] == "match" and event["sequence"] == request_id:
                    explanation = replay.explain(request_id, len(event["blocks"])) or explanation
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        where = f"{path}: line {number} does not fit the format {FORMAT}"
        raise TraceError(f"{where}: {type(error).__name__}: {error}") from error
    if explanation is not None:
        return explanation
    if request_id in replay.named:
        raise TraceError(f"{path}: request {request_id!r} was never looked up: it had no turn yet")
    known = ", ".join(replay.named) or "none at all"
    raise TraceError(f"{path} has no request {request_id!r}; it has {known:.200}")


@dataclass(slots=True)
class _Sequence:
    """One sequence, as the trace tells of it; first the fields of its `add` event.

    sequence      its name; `request` is the id that its n outputs have in common
    token_ids     its prompt, and once it has ended its output
    num_waits     steps in which it was passed over
    num_held      how many blocks of its prefix it holds in the cache
    num_computed  the most positions it ever had computed
    published     its published blocks, counted from the start of its prompt -> None while in the
                  cache; else on the way to which step it left, and "evicted" or "reset"
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
    published: dict[int, tuple[int, str] | None] = field(default_factory=dict)

    def feed(self, kind: str, event: Event) -> None:
        """Take over one event that happened to it."""
        if kind == "publish":
            self.published[self.num_held] = None
        self.num_held += kind in ("publish", "swap", "reference")
        self.num_waits += kind == "pass_over"
        if kind in ("reference", "allocate"):
            self.was_admitted = self.is_running = True
        elif kind == "write":
            self.num_computed = max(self.num_computed, event["end"])
        elif kind in ("preempt", "finish", "abort"):
            self.is_running, self.num_held = False, 0
            self.token_ids += event.get("output_token_ids", [])


class _Replay:
    """What had been computed and cached, event by event; `named` are the sequences by name."""

    def __init__(self, head: Event) -> None:
        if head["format"] != FORMAT:
            raise ValueError(f"format is {head['format']!r}")
        self.named: dict[str, _Sequence] = {}
        self._block_size = head["block_size"]
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
            owner.published[index] = (self._step, "evicted" if kind == "evict" else "reset")
        else:
            sequence = self.named[event["sequence"]]
            if kind == "publish":
                self._published_at[event["block"]] = (sequence, sequence.num_held)
            sequence.feed(kind, event)

    def explain(self, name: str, num_hits: int) -> Explanation | None:
        """Say why not more than `num_hits` blocks were found; None if it was admitted before."""
        sequence, size = self.named[name], self._block_size
        if sequence.was_admitted:
            return None
        last = len(sequence.token_ids) - 1
        limit = last if sequence.cacheable_tokens is None else sequence.cacheable_tokens
        missed: int | None = num_hits
        if not sequence.cache_read:
            why = ("cache read off", "by the request, by prompt_logprobs, or in the engine")
        elif num_hits < min(limit, last) // size:
            why = self._why_missed(sequence, num_hits)
        else:
            missed = None
            looked_up = f"{last:,} tokens are looked up: one is computed (I8)"
            allowed = f"{limit:,} tokens may be cached"
            why = ("nothing missed", f"only {allowed if limit < last else looked_up}")
        return Explanation(
            name, last + 1, num_hits * size, size, self._step, sequence.num_waits, missed, why
        )

    def _why_missed(self, sequence: _Sequence, block: int) -> tuple[str, str]:
        """Ask all who had the same tokens up to the end of `block` what became of theirs."""
        end = (block + 1) * self._block_size
        others = [o for o in self._sequences if o.was_admitted]
        equal = [o for o in others if o.token_ids[:end] == sequence.token_ids[:end]]
        akin = [o for o in equal if o.key_fields == sequence.key_fields]
        if lost := [(*gone, o.sequence) for o in akin if (gone := o.published.get(block))]:
            step, how, name = max(lost)
            return how, f"request {name} had published it; {how} on the way to step {step}"
        if akin:
            return _why_unpublished(max(akin, key=lambda o: o.num_computed), end)
        if other := next((o for o in equal if block in o.published), None):
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
    computed = f"{min(other.num_computed, end):,} of the same {end:,} positions"
    return reason, f"request {other.sequence} has computed {computed}, {but}"


def _where_they_part(sequence: _Sequence, others: list[_Sequence]) -> str:
    """The closest of the sequences computed before, and the position where the two part."""

    def parting(other: _Sequence) -> tuple[int, Any, Any]:
        pairs = zip_longest(sequence.token_ids, other.token_ids, fillvalue="none")
        return next((i, here, there) for i, (here, there) in enumerate(pairs) if here != there)

    if not others:
        return "nothing was computed under its key fields before"
    closest = max(others, key=lambda other: parting(other)[0])
    position, here, there = parting(closest)
    who = f"request {closest.sequence} comes closest; at position {position:,}"
    return f"{who} this one has token {here}, that one {there}"
