"""What a proof has met: it holds only for situations that were reached.

Most are told by the trace, to which `core` reports everything it does; the rest by play.py and
checks.py, which see the calls from outside.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from minivllm.core.block_keys import TOKEN_BYTES, name_of
from minivllm.core.kv_cache import KVCache
from minivllm.core.sequence import Sequence
from minivllm.core.trace import Trace

SITUATIONS = (
    # Hits
    "hit",
    "hit on an idle block",
    "hit on a block that another sequence holds",
    "hit on tokens that were generated",
    "whole prompt cached, its last block computed again",
    "prefix cached, but under another salt or key field",
    "prefix cached, but the request does not read",
    "prefix cached beyond the cacheable tokens",
    # Sharing
    "wait for a prefix under way",
    "wait for one of several that compute the same",
    "passed over, one behind it admitted",
    "leader aborted while others wait",
    "leader preempted while others wait",
    "step failed while others wait for its prefix",
    "swap to a cached block",
    "several outputs of one prompt",
    # Blocks
    "refusal of a waiting request",
    "refusal of a running request",
    "eviction to make room",
    "eviction to keep the cap",
    "eviction of part of a chain",
    "eviction of a chain's head",
    "evicted block filled with another text",
    "hash collision",
    "prompt ends in a partial block",
    "prompt of exactly whole blocks",
    # Steps
    "prefill in chunks, cut by the chunk limit",
    "prefill in chunks, cut by the budget",
    "decodes and prefills in one step",
    "all seats taken while others wait",
    # Preemption
    "preemption",
    "preemption of the one that asked",
    "preemption during a prefill",
    "preempted twice",
    "resumed with a hit",
    "resumed without a hit",
    # Ends
    "ended by a stop token",
    "ended by length",
    "ended by the model's length",
    "ended with an error: outgrew the pool",
    "aborted while waiting",
    "aborted while preempted",
    "aborted in mid-prefill",
    "aborted while decoding",
    "abort of an unknown request refused",
    # Faults
    "step failed before any write",
    "step failed in the middle of its writes",
    "step failed after its writes",
    "step interrupted",
    "step answered wrongly by the runner",
    "step failed several times in a row",
    # The whole engine
    "reset done",
    "reset done while requests wait",
    "reset refused",
    "weights loaded",
    "weights refused",
    # Requests that are refused
    "request refused: empty",
    "request refused: longer than the pool",
    "request refused: longer than the model",
    "request refused: id in use",
    "request that fills the pool exactly",
    "conversation continued",
)


class Situations(Trace):
    """Counts what happens in one workload."""

    def __init__(self, kv: KVCache) -> None:
        self.counts: Counter[str] = Counter()
        self.is_making_room = False
        # Of the newest step: who was passed over, and for whom; who was refused last; who
        # looked up, and the hits.
        self.waits: dict[Sequence, set[Sequence]] = {}
        self.refused: Sequence | None = None
        self._looked_up: dict[Sequence, int] = {}
        self._awaited: set[Sequence] = set()
        self._kv = kv
        self._width = kv.block_size * TOKEN_BYTES  # bytes of a block's own tokens
        self._published: dict[int, tuple[bytes, bytes]] = {}  # block -> its content, its name
        self._evicted_text: dict[int, bytes] = {}
        self._preempted: Counter[Sequence] = Counter()
        self._admitted: set[Sequence] = set()
        self._num_prompt_tokens: dict[int, int] = {}  # of who published the block

    def note(self, situation: str) -> None:
        self.counts[situation] += 1

    def record(self, event: str, sequence: Sequence | None = None, **details: Any) -> None:
        """What core reports; see core/trace.py for the events."""
        handle = _HANDLERS.get(event)
        if handle is None:
            return
        if "kv" not in details:
            handle(self, sequence, **details)
            return
        for block in details["blocks"]:
            handle(self, sequence, block, self._kv.blocks.ref_counts[block])

    def awaited(self) -> set[Sequence]:
        """Those for whose blocks somebody waits since the newest step."""
        return set().union(*self.waits.values())

    def begin_step(self) -> None:
        self._awaited = self.awaited()
        self.waits.clear()
        self.refused = None
        self._looked_up.clear()

    def _match(self, sequence: Sequence, num_tokens: int, blocks: list[int]) -> None:
        self._looked_up[sequence] = len(blocks)

    def _step(self, sequence: None, scheduler: Any) -> None:
        scheduled = scheduler.scheduled
        kinds = {sequence.is_decoding for sequence in scheduled}
        if len(kinds) == 2:
            self.note("decodes and prefills in one step")
        for sequence, num_tokens in scheduled.items():
            if sequence.num_computed_tokens + num_tokens < sequence.num_tokens:
                cut = "chunk limit" if scheduler.budget_left else "budget"
                self.note(f"prefill in chunks, cut by the {cut}")
        for sequence, num_hits in self._looked_up.items():
            if sequence in scheduled:
                self._admit(sequence, num_hits)
        order = list(self._looked_up)
        for i, sequence in enumerate(order):
            if sequence in self.waits and any(other in scheduled for other in order[i + 1 :]):
                self.note("passed over, one behind it admitted")
        if scheduler.waiting and len(scheduler.running) >= scheduler._max_running:
            self.note("all seats taken while others wait")

    def _admit(self, sequence: Sequence, num_hits: int) -> None:
        if sequence in self._admitted:
            self.note("resumed with a hit" if num_hits else "resumed without a hit")
        elif num_hits:
            self.note("hit")
        self._admitted.add(sequence)

    def _reference(self, sequence: Sequence, block: int, ref_count: int) -> None:
        is_idle = ref_count == 2  # the cache, and now this sequence
        self.note(
            "hit on an idle block" if is_idle else "hit on a block that another sequence holds"
        )
        end = (sequence.block_table.index(block) + 1) * self._kv.block_size
        if end > self._num_prompt_tokens.get(block, end):
            self.note("hit on tokens that were generated")

    def _pass_over(self, sequence: Sequence) -> None:
        self.note("wait for a prefix under way")
        i = len(sequence.matched_blocks)
        leaders = {
            leader
            for leader, num_blocks in self._kv.in_flight._leaders.items()
            if i < num_blocks and leader.keys.contents[i] == sequence.keys.contents[i]
        }
        if len(leaders) > 1:
            self.note("wait for one of several that compute the same")
        self.waits[sequence] = leaders

    def _refuse(self, sequence: Sequence, num_new_tokens: int) -> None:
        self.refused = sequence
        self.note(f"refusal of a {sequence.state.value} request")

    def _publish(self, sequence: Sequence, block: int, ref_count: int) -> None:
        content, name = self._kv.cache.at(block), name_of(self._kv.cache.hash_at(block))
        self._published[block] = content, name
        self._num_prompt_tokens[block] = sequence.num_prompt_tokens
        text = content[-self._width :]
        if self._evicted_text.pop(block, text) != text:
            self.note("evicted block filled with another text")

    def _swap(self, sequence: Sequence, block: int, ref_count: int) -> None:
        self.note("swap to a cached block")

    def _evict(self, sequence: None, block: int, ref_count: int) -> None:
        self.note("eviction to make room" if self.is_making_room else "eviction to keep the cap")
        content, _ = self._published.pop(block)
        if content.startswith(b"("):  # key fields, and no parent's name
            self.note("eviction of a chain's head")
        elif content[: -self._width] in (name for _, name in self._published.values()):
            self.note("eviction of part of a chain")
        self._evicted_text[block] = content[-self._width :]

    def _reset(self, sequence: None, block: int, ref_count: int) -> None:
        del self._published[block]

    def _preempt(self, sequence: Sequence, num_tokens: int) -> None:
        self.note("preemption")
        if sequence is self.refused:
            self.note("preemption of the one that asked")
        if sequence.num_output_tokens == 0:
            self.note("preemption during a prefill")
        if sequence in self._awaited:
            self.note("leader preempted while others wait")
        self._preempted[sequence] += 1
        if self._preempted[sequence] == 2:
            self.note("preempted twice")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        if reason == "error":
            self.note("ended with an error: outgrew the pool")
        elif reason == "stop":
            self.note("ended by a stop token")
        elif sequence.num_output_tokens < sequence.params.max_tokens:
            self.note("ended by the model's length")
        else:
            self.note("ended by length")


_HANDLERS = {
    "match": Situations._match,
    "step": Situations._step,
    "reference": Situations._reference,
    "pass_over": Situations._pass_over,
    "refuse": Situations._refuse,
    "publish": Situations._publish,
    "swap": Situations._swap,
    "evict": Situations._evict,
    "reset": Situations._reset,
    "preempt": Situations._preempt,
    "finish": Situations._finish,
}
