"""One output of one request, and where it stands.

Block size 4, prompt `A B C D E F`, max_tokens = 3. "computed" counts positions whose KV is
written:

    step      computes   blocks needed   then: computed, tokens    published
    prefill   [0, 6)     ceil(6/4) = 2   6, 7  (G sampled)         block 0
    decode    [6, 7)     ceil(7/4) = 2   7, 8  (H)                 block 0
    decode    [7, 8)     ceil(8/4) = 2   8, 9  (I: length)         blocks 0 and 1

The newest token has been chosen but not computed: while a sequence decodes,
`num_tokens = num_computed_tokens + 1`. tests/test_timeline.py runs this table.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minivllm.core.batch import TokenLogprobs
from minivllm.core.block_keys import BlockKeyChain
from minivllm.sampling_params import SamplingParams


class SequenceState(Enum):
    """A sequence is in exactly one of these until it is returned (I10)."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """What one request may do with the prefix cache.

    read              look up its prefix
    write             publish the blocks it computes
    cacheable_tokens  only blocks within the first so many tokens are looked up or published;
                      None is all. Meant for the static part of a prompt
    key_fields        tagged values that are part of every block key
    """

    read: bool = True
    write: bool = True
    cacheable_tokens: int | None = None
    key_fields: tuple[Any, ...] = ()


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of one request: its tokens, its blocks, and how far it is computed.

    token_ids             prompt and output; grows at the end only
    num_computed_tokens   KV of [0, num_computed_tokens) is written and may be read
    num_cached_tokens     prompt tokens found in the cache when first admitted; None before
    block_table           logical block -> physical block; covers what is computed, and during
                          a step what is being computed
    num_published_blocks  so many leading blocks of the table are cached, with this sequence's
                          keys: hits, or published by itself
    matched_blocks        what the last lookup found; the next one goes on from there
    num_forgotten         what the cache had forgotten by then: if it is more now, from block 0
    may_publish           its policy lets it, and no hash collision has broken its chain
    """

    request_id: str
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    policy: CachePolicy
    keys: BlockKeyChain
    arrival: int
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    block_table: list[int] = field(default_factory=list)
    num_published_blocks: int = 0
    matched_blocks: list[int] = field(default_factory=list)
    num_forgotten: int = 0
    may_publish: bool = field(init=False)
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __post_init__(self) -> None:
        self.may_publish = self.policy.write

    @property
    def name(self) -> str:
        """The request's id, with the index behind it for the second output and on."""
        return f"{self.request_id}#{self.index}" if self.index else self.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known, computed or not."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """True if all but the newest token, which it generated itself, is computed."""
        num_tokens = len(self.token_ids)
        return num_tokens > self.num_prompt_tokens and self.num_computed_tokens == num_tokens - 1

    def stop_reason(self, eos_token_ids: Container[int], max_model_len: int) -> str | None:
        """Why the newest token ends the output: "stop", "length", or None if it does not.

        A stop token ends nothing before min_tokens tokens are generated; the sampler does not
        choose one before that either.
        """
        params = self.params
        token_id = self.token_ids[-1]
        eos = () if params.ignore_eos else eos_token_ids
        is_stop = token_id in params.stop_token_ids or token_id in eos
        if is_stop and self.num_output_tokens >= params.min_tokens:
            return "stop"
        if self.num_output_tokens >= params.max_tokens or self.num_tokens >= max_model_len:
            return "length"
        return None
