"""What happened, event by event, as JSON lines: one format for the terminal, the player, explain.

Line 1 says how large the pool is. Then come events in the order in which they happen; a `step`
line closes the scheduler's decisions of one step and shows the state they led to. What the step
then wrote and published follows it. trace_schema.json beside this package describes each line.

    add        a request was accepted and waits
    match      a waiting sequence looked up its prefix; who waits looks up in every step
    pass_over  it waits a step for blocks that another one is computing
    refuse     the pool could not give the blocks to compute `num_new_tokens` more
    allocate   it now holds a new block        reference  it now holds a block it found cached
    write      the KV of [start, end) is written
    publish    the cache holds a block of it, too
    swap       it now holds the cached block in place of an equal one that it computed
    release    it no longer holds a block      evict, reset  the cache no longer holds a block
    preempt    it lost its blocks and waits again
    finish     it ended, and why; an abort is an event of its own name
    step       the scheduler has decided
"""

import json
from collections.abc import Callable
from typing import Any

from minivllm.config import EngineConfig
from minivllm.core.sequence import Sequence

FORMAT = "minivllm-trace-1"


class Trace:
    """The silent trace: core calls it at every event, and it does nothing."""

    def record(self, event: str, sequence: Sequence | None = None, **details: Any) -> None:
        """`event` happened to `sequence`, if it happened to one.

        Block events bring `blocks`, to which it happened in this order, and the `kv` that knows
        of each its count and its hash: one call, however many blocks. The step event brings the
        scheduler. Nothing is worked out here, because no trace may be on.
        """


class TraceRecorder(Trace):
    """Writes every event as JSON lines through `write_line`, which gets them without newline."""

    def __init__(
        self, write_line: Callable[[str], object], config: EngineConfig, num_kv_blocks: int
    ) -> None:
        self._write_line = write_line
        self._holders: dict[int, list[str]] = {}
        self._num_steps = 0
        sizes = {"block_size": config.block_size, "num_kv_blocks": num_kv_blocks}
        budget = {"max_num_batched_tokens": config.max_num_batched_tokens}
        self._emit({"format": FORMAT, **sizes, **budget})

    def record(self, event: str, sequence: Sequence | None = None, **details: Any) -> None:
        """Write what a reader wants to know of the event: one line, or one for each block."""
        line: dict[str, Any] = {"event": event}
        if event == "step":
            self._emit(line | self._state(details["scheduler"]))
            return
        line["sequence"] = sequence.name if sequence else None
        if "kv" in details:
            for block in details["blocks"]:
                self._emit(line | self._block(event, line["sequence"], block, details["kv"]))
            return
        if event == "write" and sequence:
            details["blocks"] = _blocks_written(sequence, **details)
        elif event == "add" and sequence:
            details = _added(sequence)
        elif event in ("finish", "abort") and sequence:
            details["output_token_ids"] = sequence.token_ids[sequence.num_prompt_tokens :]
        self._emit(line | details)

    def _block(self, event: str, name: str | None, block: int, kv: Any) -> dict[str, Any]:
        """The block's count, its key for a person, and who holds it after the event."""
        holders = self._holders.setdefault(block, [])
        if event in ("allocate", "reference", "swap", "publish"):
            holders.append("cache" if event == "publish" else str(name))
        else:
            holders.remove("cache" if event in ("evict", "reset") else str(name))
        count, key = kv.blocks.ref_counts[block], _readable(kv.cache.hash_at(block))
        return {"block": block, "ref_count": count, "key": key, "holders": holders}

    def _state(self, scheduler: Any) -> dict[str, Any]:
        """The queues, the work, and the order of the free list and of eviction."""
        self._num_steps += 1
        return {
            "step": self._num_steps,
            "waiting": [sequence.name for sequence in scheduler.waiting],
            "running": [sequence.name for sequence in scheduler.running],
            "scheduled": [_scheduled(*item) for item in scheduler.scheduled.items()],
            "budget_left": scheduler.budget_left,
            "free": scheduler.kv.blocks.free_order(),
            "lru": scheduler.kv.cache.lru_order(),
        }

    def _emit(self, line: dict[str, Any]) -> None:
        self._write_line(json.dumps(line, separators=(",", ":")))


def _added(sequence: Sequence) -> dict[str, Any]:
    """The tokens of a request, and what it may do with the cache."""
    policy = sequence.policy
    return {
        "request": sequence.request_id,
        "token_ids": list(sequence.token_ids),
        "cache_read": policy.read,
        "cache_write": policy.write,
        "cacheable_tokens": policy.cacheable_tokens,
        "key_fields": [repr(field) for field in policy.key_fields],
    }


def _scheduled(sequence: Sequence, num_tokens: int) -> dict[str, Any]:
    """What a sequence computes in this step: [start, end), of which `cached` were found."""
    return {
        "sequence": sequence.name,
        "start": sequence.num_computed_tokens,
        "end": sequence.num_computed_tokens + num_tokens,
        "cached": sequence.num_published_blocks * sequence.keys.block_size,
        "block_table": list(sequence.block_table),
    }


def _blocks_written(sequence: Sequence, start: int, end: int) -> list[int]:
    """The blocks that the positions [start, end) lie in."""
    size = sequence.keys.block_size
    return sequence.block_table[start // size : (end - 1) // size + 1]


def _readable(block_hash: Any) -> str | None:
    if isinstance(block_hash, bytes):
        return block_hash.hex()
    return None if block_hash is None else str(block_hash)
