"""A runner without a model, whose "KV" is the exact history a slot was computed from.

It makes wrong sharing visible: each slot of its cache remembers all tokens 0..p and the key
fields it was written under, and every step reads back all slots of each sequence and compares
(I4). Its next token depends on the whole history, so a wrong block would also change outputs.
"""

from __future__ import annotations

import zlib

from minivllm import EngineConfig, LLMEngine, SamplingParams
from minivllm.core.batch import SampledToken


class WrongContent(AssertionError):
    """I4: a slot was read that holds other KV than its sequence needs."""


class HistoryRunner:
    """Implements the Runner protocol; `fail_next` makes the next execute() raise."""

    def __init__(self, vocab_size=50, max_model_len=200, eos_token_ids=()):
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.fail_next: BaseException | None = None
        self.batches = []
        self.num_computed = 0
        self.weights = "first"

    def kv_bytes_per_block(self, block_size):
        return 100 * block_size

    def init_kv(self, num_blocks, block_size):
        self.block_size = block_size
        self.slots = [None] * (num_blocks * block_size)

    def load_weights(self, path):
        self.weights = path

    def execute(self, batch):
        self.batches.append(
            [(s.request_id, s.index, s.start, s.end, tuple(s.block_table)) for s in batch.sequences]
        )
        # Write all first: sequences of one batch must not see each other's half-written blocks
        # by the order of the batch.
        for sequence in batch.sequences:
            for position in range(sequence.start, sequence.end):
                self.slots[self._slot(sequence, position)] = self._content(sequence, position)
                self.num_computed += 1
            if self.fail_next is not None:
                error, self.fail_next = self.fail_next, None
                raise error
        for sequence in batch.sequences:
            for position in range(sequence.end):
                found = self.slots[self._slot(sequence, position)]
                if found != self._content(sequence, position):
                    raise WrongContent(
                        f"I4: {sequence.request_id} reads {found} at position {position}"
                    )
        return [self._sample(sequence) for sequence in batch.sequences if sequence.samples]

    def _slot(self, sequence, position):
        block = sequence.block_table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _content(self, sequence, position):
        return (tuple(sequence.token_ids[: position + 1]), sequence.key_fields, self.weights)

    def _sample(self, sequence):
        return SampledToken(next_token(sequence.token_ids, self.vocab_size, self.weights))


def next_token(token_ids, vocab_size, weights="first"):
    """The model: a hash of the whole history."""
    return zlib.crc32(repr((list(token_ids), weights)).encode()) % vocab_size


def greedy(prompt, num_tokens, vocab_size=50):
    """What any right engine must generate for `prompt`, computed without one."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


def make_engine(runner=None, tokenizer=None, write_trace_line=None, **config):
    """An engine with small sizes and every check on."""
    settings = {"block_size": 4, "num_kv_blocks": 16, "debug_checks": True} | config
    return LLMEngine(
        EngineConfig(**settings),
        runner or HistoryRunner(),
        tokenizer,
        write_trace_line=write_trace_line,
    )


def run(engine):
    """Step until nothing is left; return the finished outputs by (request id, index)."""
    finished = {}
    for _ in range(10_000):
        if not engine.has_unfinished_requests():
            return finished
        for output in engine.step():
            if output.finished:
                assert (output.request_id, output.index) not in finished
                finished[output.request_id, output.index] = output
    raise AssertionError("I11: no end after 10,000 steps")


def params(max_tokens=4, **values):
    """Greedy by default."""
    return SamplingParams(max_tokens=max_tokens, **values)
