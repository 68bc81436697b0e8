"""What happened, event by event, as JSON lines: one format for the terminal, the player, explain.

Line 1 says how large the pool is. Then come events in the order in which they happen; a `step`
line closes the scheduler's decisions of one step and shows the state they led to. What the step
then wrote and published follows it. trace_schema.json beside this package describes each line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ReadOnlySequence
from typing import Any

from minivllm.core.block_keys import BlockKey
from minivllm.core.block_manager import BlockManager
from minivllm.core.prefix_cache import CachedBlock, PrefixCache
from minivllm.core.sequence import Sequence

FORMAT = "minivllm-trace-1"


class Trace:
    """The silent trace: core calls it at every event, and it does nothing."""

    def add(self, sequence: Sequence) -> None:
        """A request was accepted and waits."""

    def match(self, sequence: Sequence, hits: ReadOnlySequence[CachedBlock]) -> None:
        """A waiting sequence looked up its prefix and found `hits`."""

    def pass_over(self, sequence: Sequence) -> None:
        """A waiting sequence waits a step for blocks that another one is computing."""

    def refuse(self, sequence: Sequence, num_new_tokens: int) -> None:
        """The pool could not give the blocks to compute `num_new_tokens` more."""

    def block(
        self,
        event: str,
        block: int,
        ref_count: int,
        sequence: Sequence | None,
        key: BlockKey | None = None,
    ) -> None:
        """`event` happened to `block`, whose count is now `ref_count`.

        allocate, reference, swap: `sequence` now holds it; release: it no longer does;
        publish: the cache holds it too; evict, reset: the cache no longer does (no sequence).
        """

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """The KV of positions [start, end) is written."""

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence lost its blocks and waits again."""

    def finish(self, sequence: Sequence) -> None:
        """A sequence ended; `finish_reason` says why. An abort is an event of its own name."""

    def step(
        self,
        waiting: ReadOnlySequence[Sequence],
        running: ReadOnlySequence[Sequence],
        scheduled: Mapping[Sequence, int],
        budget_left: int,
        blocks: BlockManager,
        cache: PrefixCache,
    ) -> None:
        """The scheduler has decided; `scheduled` maps sequences to tokens to compute."""


class TraceRecorder(Trace):
    """Writes every event as one JSON line through `write_line`, which gets it without newline."""

    def __init__(
        self,
        write_line: Callable[[str], object],
        *,
        block_size: int,
        num_kv_blocks: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._write_line = write_line
        self._holders: dict[int, list[str]] = {}
        self._num_steps = 0
        self._emit(
            format=FORMAT,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            max_num_batched_tokens=max_num_batched_tokens,
        )

    def add(self, sequence: Sequence) -> None:
        """Write the tokens and what the request may do with the cache."""
        policy = sequence.policy
        self._emit(
            event="add",
            sequence=sequence.name,
            request=sequence.request_id,
            token_ids=list(sequence.token_ids),
            cache_read=policy.read,
            cache_write=policy.write,
            cacheable_tokens=policy.cacheable_tokens,
            key_fields=[repr(field) for field in policy.key_fields],
        )

    def match(self, sequence: Sequence, hits: ReadOnlySequence[CachedBlock]) -> None:
        """Write the blocks found, head first."""
        self._emit(
            event="match",
            sequence=sequence.name,
            num_tokens=sequence.num_tokens,
            blocks=[hit.block for hit in hits],
        )

    def pass_over(self, sequence: Sequence) -> None:
        """Write who waits."""
        self._emit(event="pass_over", sequence=sequence.name)

    def refuse(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Write who was refused, and for how much."""
        self._emit(event="refuse", sequence=sequence.name, num_new_tokens=num_new_tokens)

    def block(
        self,
        event: str,
        block: int,
        ref_count: int,
        sequence: Sequence | None,
        key: BlockKey | None = None,
    ) -> None:
        """Write the block's count, its holders, and its key where it has one."""
        holders = self._holders.setdefault(block, [])
        if event in ("allocate", "reference", "swap") and sequence is not None:
            holders.append(sequence.name)
        elif event == "release" and sequence is not None:
            holders.remove(sequence.name)
        elif event == "publish":
            holders.append("cache")
        elif event in ("evict", "reset"):
            holders.remove("cache")
        self._emit(
            event=event,
            sequence=sequence.name if sequence else None,
            block=block,
            ref_count=ref_count,
            holders=list(holders),
            key=_readable(key.hash) if key else None,
        )

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """Write the positions, and the blocks they lie in."""
        size = sequence.keys.block_size
        blocks = sequence.block_table[start // size : (end - 1) // size + 1]
        self._emit(event="write", sequence=sequence.name, start=start, end=end, blocks=blocks)

    def preempt(self, sequence: Sequence) -> None:
        """Write who was preempted, and how many tokens it keeps."""
        self._emit(event="preempt", sequence=sequence.name, num_tokens=sequence.num_tokens)

    def finish(self, sequence: Sequence) -> None:
        """Write why, and what was generated."""
        self._emit(
            event="abort" if sequence.finish_reason == "abort" else "finish",
            sequence=sequence.name,
            reason=sequence.finish_reason,
            output_token_ids=sequence.output_token_ids,
        )

    def step(
        self,
        waiting: ReadOnlySequence[Sequence],
        running: ReadOnlySequence[Sequence],
        scheduled: Mapping[Sequence, int],
        budget_left: int,
        blocks: BlockManager,
        cache: PrefixCache,
    ) -> None:
        """Write the queues, the work, and the order of the free list and of eviction."""
        self._num_steps += 1
        self._emit(
            event="step",
            step=self._num_steps,
            waiting=[sequence.name for sequence in waiting],
            running=[sequence.name for sequence in running],
            scheduled=[
                {
                    "sequence": sequence.name,
                    "start": sequence.num_computed_tokens,
                    "end": sequence.num_computed_tokens + num_tokens,
                    "cached": len(sequence.cached_blocks) * sequence.keys.block_size,
                    "block_table": list(sequence.block_table),
                }
                for sequence, num_tokens in scheduled.items()
            ],
            budget_left=budget_left,
            free=blocks.free_order(),
            lru=cache.lru_order(),
        )

    def _emit(self, **line: Any) -> None:
        self._write_line(json.dumps(line, separators=(",", ":")))


def _readable(key_hash: Any) -> str:
    return key_hash.hex() if isinstance(key_hash, bytes) else str(key_hash)
