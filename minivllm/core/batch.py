"""Where the two wings meet: what to compute in this step, and who computes it.

`core` decides a ScheduledBatch; a Runner turns it into tokens. Neither knows more of the other
than what stands in this file, so a test can put a runner without a model in its place.
"""

from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from minivllm.sampling_params import SamplingParams

TokenLogprobs = dict[int, float]
"""token id -> natural-log probability, best first; holds the chosen token too."""


# Not frozen: each step makes one a sequence, and a frozen one is filled by a call a field.
@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a step: compute the positions [start, end).

    request_id        of the request it belongs to; with `index` it names the sequence
    token_ids         all tokens known so far, prompt and output; the runner only reads them
    start, end        KV of [0, start) is written and may be read; [start, end) is computed now
    block_table       physical block of each logical block; covers [0, end)
    params            how to choose the next token; `params.seed` is set if temperature > 0
    key_fields        tagged values that are part of this sequence's block keys (an adapter, say)
    index             which of the request's n outputs; its random numbers use seed + index
    num_prompt_tokens token_ids[:num_prompt_tokens] is the prompt
    prompt_logprobs   None, or where the runner puts the log-probabilities of the prompt token
                      at position p (1 <= p < num_prompt_tokens) for each p in [start+1, end];
                      one entry a prompt token, the first is nobody's
    """

    request_id: str
    token_ids: list[int]
    start: int
    end: int
    block_table: list[int]
    params: SamplingParams
    key_fields: tuple[Any, ...] = ()
    index: int = 0
    num_prompt_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def samples(self) -> bool:
        """True if this step computes the newest token, so that a next one is chosen."""
        return self.end == len(self.token_ids)


class ScheduledBatch(NamedTuple):
    """Everything to compute in one step: decodes first, then prefills."""

    sequences: list[ScheduledSequence]

    @property
    def num_tokens(self) -> int:
        """Positions to compute, all sequences together."""
        return sum(sequence.end - sequence.start for sequence in self.sequences)


class SampledToken(NamedTuple):
    """The token chosen for one sequence; `logprobs` if its params ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Runner(Protocol):
    """Whoever computes. Everything the engine relies on stands here.

    vocab_size      token ids are in [0, vocab_size)
    max_model_len   most tokens of one sequence, prompt and output together
    eos_token_ids   ids that end an output, unless the request ignores them
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: ReadOnlySequence[int]

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of keys and values, all layers together, for `block_size` tokens."""

    def init_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the paged KV cache: `num_blocks` blocks, ids 0 to num_blocks - 1."""

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        """Write the KV of every [start, end) and choose the next tokens.

        Returns one SampledToken for each sequence with end == num_tokens, in batch order.
        Whatever it raises, the step is undone and raised again as RunnerError.
        """
