"""A model that knows the alphabet: its next token is the letter after the last one.

With it a recorded run can be followed by eye: prompt `A B C D E F` goes on with `G`, `H`, `I`.
Token 0 is A, token 25 is Z, and after Z comes A.
"""

from collections.abc import Sequence as ReadOnlySequence

from minivllm.core.batch import SampledToken, ScheduledBatch
from minivllm.errors import RunnerError

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def tokens(text: str) -> list[int]:
    """Token ids of capital letters; blanks only make a prompt easier to read.

    >>> tokens("AB Z")
    [0, 1, 25]
    """
    return [ALPHABET.index(letter) for letter in text if letter != " "]


class LetterRunner:
    """Implements the Runner protocol without keys, values or a model.

    fail_next   set it to let the next step fail, as a runner that runs out of memory would
    """

    vocab_size = len(ALPHABET)
    max_model_len = 1000
    eos_token_ids: ReadOnlySequence[int] = ()

    def __init__(self) -> None:
        self.fail_next = False

    def kv_bytes_per_block(self, block_size: int) -> int:
        """One byte a position: nothing is stored, but the pool wants a size."""
        return block_size

    def init_kv(self, num_blocks: int, block_size: int) -> None:
        """Nothing to make."""

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        """Say the next letter for each sequence whose newest token is computed."""
        if self.fail_next:
            self.fail_next = False
            raise RunnerError("the runner was told to fail")
        return [
            SampledToken((sequence.token_ids[-1] + 1) % self.vocab_size)
            for sequence in batch.sequences
            if sequence.samples
        ]
