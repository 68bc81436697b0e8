"""Chapter 1. One request as the engine sees it: its tokens, its state, how far it is computed.

Block size 4, prompt `A B C D E F`, max_tokens = 3. "computed" counts the positions whose KV is
written:

    step      computes   blocks needed   then: computed, tokens
    prefill   [0, 6)     ceil(6/4) = 2   6, 7  (G is chosen)
    decode    [6, 7)     ceil(7/4) = 2   7, 8  (H)
    decode    [7, 8)     ceil(8/4) = 2   8, 9  (I: length)

The newest token has been chosen, but its KV is not written before the next step.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class SequenceState(Enum):
    """A sequence is in exactly one of these (I10)."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for.

    temperature, top_k, top_p, seed                      how to choose a token: chapter 5
    max_tokens, min_tokens, stop_token_ids, ignore_eos   when to stop: task 1.4
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 64
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens, the last one perhaps in part.

    Block size 4:

        num_tokens   0  1  4  5  8  9
        blocks       0  1  1  2  2  3
    """
    # task 1.2
    return -(-num_tokens // block_size)
    # end of task


@dataclass(eq=False)
class Sequence:
    """One request: its tokens, its blocks, and how far it is computed.

    token_ids            the prompt, and behind it what was generated; grows at the end only
    num_prompt_tokens    how many of them are the prompt
    num_computed_tokens  KV of positions [0, num_computed_tokens) is written
    block_table          logical block -> physical block (chapter 3)
    finish_reason        "stop", "length", "abort" or "error"; None while it is not finished
    arrival              its place in the order of arrival; the scheduler sets it (chapter 2)
    key_fields           what must be equal, besides the tokens, to share a block (chapter 6)
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    key_fields: tuple[Any, ...] = ()
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    arrival: int = 0
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"request {self.request_id!r} has an empty prompt: nothing to compute")
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known, computed or not."""
        # task 1.1
        return len(self.token_ids)
        # end of task

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        # task 1.1
        return self.num_tokens - self.num_prompt_tokens
        # end of task

    @property
    def is_decoding(self) -> bool:
        """True if only the newest token is left to compute, and it was generated.

        The last token of a prompt is not: it may be the only one left, but it ends a prefill.
        """
        # task 1.1
        return self.num_output_tokens > 0 and self.num_computed_tokens == self.num_tokens - 1
        # end of task

    def advance(self, end: int) -> None:
        """The KV of positions [num_computed_tokens, end) is now written.

        Raises ValueError, and changes nothing, unless num_computed_tokens < end <= num_tokens.
        """
        # task 1.1
        if not self.num_computed_tokens < end <= self.num_tokens:
            raise ValueError(
                f"cannot compute up to {end}: {self.num_computed_tokens} positions are computed,"
                f" {self.num_tokens} tokens are known"
            )
        self.num_computed_tokens = end
        # end of task

    def append_token(self, token_id: int) -> None:
        """Add the token that was chosen after the newest one. Its KV is not written yet.

        Raises ValueError, and adds nothing, while a known token is not computed: a next token
        is chosen from what computing the newest one gives.
        """
        # task 1.1
        if self.num_computed_tokens != self.num_tokens:
            raise ValueError(
                f"cannot choose token {self.num_tokens}: only {self.num_computed_tokens} of"
                f" {self.num_tokens} known tokens are computed"
            )
        self.token_ids.append(token_id)
        # end of task

    def num_new_blocks(self, num_new_tokens: int, block_size: int) -> int:
        """Blocks to add to the table before `num_new_tokens` more positions are computed.

        0 if the table covers them already. Block size 4, 6 positions computed, 2 blocks in it:

            num_new_tokens   end   blocks needed   new blocks
                         1     7   ceil(7/4) = 2            0
                         2     8   ceil(8/4) = 2            0
                         3     9   ceil(9/4) = 3            1
        """
        # task 1.2
        end = self.num_computed_tokens + num_new_tokens
        return max(0, blocks_for(end, block_size) - len(self.block_table))
        # end of task

    def run(self) -> None:
        """WAITING -> RUNNING. Raises ValueError, and changes nothing, from any other state."""
        # task 1.3
        self._leave(SequenceState.WAITING)
        self.state = SequenceState.RUNNING
        # end of task

    def preempt(self) -> None:
        """RUNNING -> WAITING: no position is computed any more, but every token stays.

        Whoever preempts it takes its blocks first. Raises ValueError, and changes nothing, from
        any other state.
        """
        # task 1.3
        self._leave(SequenceState.RUNNING)
        self.state = SequenceState.WAITING
        self.num_computed_tokens = 0
        # end of task

    def finish(self, reason: str) -> None:
        """WAITING or RUNNING -> FINISHED, for this reason.

        Raises ValueError, and keeps the first reason, if it is finished already.
        """
        # task 1.3
        self._leave(SequenceState.WAITING, SequenceState.RUNNING)
        self.state = SequenceState.FINISHED
        self.finish_reason = reason
        # end of task

    def _leave(self, *allowed: SequenceState) -> None:
        """Raise ValueError if it is in none of these states."""
        if self.state not in allowed:
            raise ValueError(f"request {self.request_id!r} is {self.state.value}")

    def stop_reason(self, eos_token_ids: Collection[int], max_model_len: int) -> str | None:
        """Why the newest token ends the output: "stop", "length", or None if it does not.

        Called after each append_token; changes nothing.

            "stop"    it is one of params.stop_token_ids, or of eos_token_ids and ignore_eos is
                      not set; and min_tokens are generated, itself included
            "length"  max_tokens are generated, or prompt and output fill max_model_len

        A stop token is output like any other: it counts, and it stays. When both reasons hold,
        the answer is "stop".
        """
        # task 1.4
        params, token_id = self.params, self.token_ids[-1]
        is_eos = token_id in eos_token_ids and not params.ignore_eos
        is_stop = is_eos or token_id in params.stop_token_ids
        if is_stop and self.num_output_tokens >= params.min_tokens:
            return "stop"
        if self.num_output_tokens >= params.max_tokens or self.num_tokens >= max_model_len:
            return "length"
        return None
        # end of task
