"""A runner without a model, whose "KV" is the exact context that a slot was computed from.

The KV of position p depends on all tokens 0..p, on the key fields and on the weights: that is
its *context*. Each context has a number, the same one exactly when two contexts are the same:

    no token yet, ("salt", None)   0
    7                              1      the context of a slot is the number of its last token
    7 3                            2
    7 3 9                          3
    7 4                            4      another second token: another number
    7, but ("salt", "a")           6      its parent is 5, the start under this salt

Writing a slot stores a number. Before any attention would read, every position [0, end) of
every scheduled sequence is compared: a list of numbers against a list of numbers, exact and
quick. The next token is a function of the context, so outputs are known beforehand.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from minivllm.core.batch import SampledToken, ScheduledBatch, ScheduledSequence

CORRUPT = -1  # what a write that broke off leaves behind: no context at all


class Broken(AssertionError):
    """A promise of the design does not hold; the message begins with its id."""


def promise_of(error: BaseException) -> str:
    """The id of the invariant that an error names ("I4"), or "section 6", or its type.

    >>> promise_of(Broken("I4: r1 reads ...")), promise_of(KeyError(3))
    ('I4', 'KeyError')
    """
    found = re.search(r"\bI\d+\b|\bsection 6\b", str(error))
    return found.group() if found else type(error).__name__


class Contexts:
    """The tree of all contexts met so far; a context is the number of its node."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._roots: dict[tuple[str, str], int] = {}
        self._parents: list[int | None] = []
        self._labels: list[Any] = []
        self._states: list[int] = []

    def root(self, key_fields: str, weights: str) -> int:
        """The context before the first token. `key_fields` is their repr: 1 is not True."""
        node = self._roots.get((key_fields, weights))
        if node is None:
            node = self._new(None, (key_fields, weights), _start(weights))
            self._roots[key_fields, weights] = node
        return node

    def walk(self, node: int, token_ids: Iterable[int]) -> list[int]:
        """The contexts of the tokens that follow `node`, one each."""
        found = []
        for token in token_ids:
            child = self._children.get((node, token))
            if child is None:
                child = self._new(node, token, _advance(self._states[node], token))
                self._children[node, token] = child
            found.append(child)
            node = child
        return found

    def next_token(self, node: int, vocab_size: int) -> int:
        """What the "model" says after this context."""
        return self._states[node] % vocab_size

    def tokens(self, node: int) -> list[int]:
        """The tokens that lead to a context, for a person."""
        found = []
        while (parent := self._parents[node]) is not None:
            found.append(self._labels[node])
            node = parent
        return found[::-1]

    def describe(self, node: int | None) -> str:
        """A context in words."""
        if node is None:
            return "nothing: it was never written"
        if node == CORRUPT:
            return "half a write"
        tokens = " ".join(map(str, self.tokens(node)))
        while (parent := self._parents[node]) is not None:
            node = parent
        fields, weights = self._labels[node]
        return f"KV of {tokens} under {fields}, weights {weights!r}"

    def _new(self, parent: int | None, label: Any, state: int) -> int:
        self._parents.append(parent)
        self._labels.append(label)
        self._states.append(state)
        return len(self._labels) - 1


def _start(weights: str) -> int:
    return zlib.crc32(weights.encode())


def _advance(state: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), state)


def greedy(
    prompt: Iterable[int], num_tokens: int, vocab_size: int = 50, weights: str = "first"
) -> list[int]:
    """What any right engine must generate for `prompt`, computed without one.

    The model is a checksum of the whole history.
    """
    state = _start(weights)
    for token in prompt:
        state = _advance(state, token)
    generated = []
    for _ in range(num_tokens):
        generated.append(state % vocab_size)
        state = _advance(state, generated[-1])
    return generated


class HistoryRunner:
    """Implements the Runner protocol on contexts; raises Broken where a promise does not hold.

    fail_next      the next execute() raises this; None is no failure
    fail_after     so many slots of the failing step are written first
    spoil_next     the next execute() returns one token too many
    is_published   asked whether a block may not be written; make_engine() connects it
    blocks         blocks[b][offset] is the context that was written there, None before
    batches        (request_id, index, start, end, block_table) of each sequence of each step
    num_computed   positions written so far
    """

    def __init__(
        self, vocab_size: int = 50, max_model_len: int = 200, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.fail_next: BaseException | None = None
        self.fail_after = 1
        self.spoil_next = False
        self.is_published: Callable[[int], bool] = lambda block: False
        self.batches: list[list[tuple[str, int, int, int, tuple[int, ...]]]] = []
        self.num_computed = 0
        self.weights = "first"
        self.contexts = Contexts()
        self._walked: dict[tuple[str, int], tuple[Any, str, list[int], list[int]]] = {}

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 100 * block_size

    def init_kv(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]

    def load_weights(self, path: str) -> None:
        self.weights = path

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        sequences = batch.sequences
        self.batches.append(
            [(s.request_id, s.index, s.start, s.end, tuple(s.block_table)) for s in sequences]
        )
        self._check_tables(sequences)
        contexts = [
            self.contexts_of((s.request_id, s.index), s.token_ids, s.key_fields) for s in sequences
        ]
        # Write all first: what one sequence reads must not depend on its place in the batch.
        self._write(sequences, contexts)
        for sequence, wanted in zip(sequences, contexts, strict=True):
            self._read(sequence, wanted)
        sampled = [self._sample(sequence) for sequence in sequences if sequence.samples]
        if self.spoil_next:
            self.spoil_next = False
            sampled.append(SampledToken(0))
        return sampled

    def contexts_of(
        self, name: tuple[str, int], token_ids: list[int], key_fields: tuple[Any, ...]
    ) -> list[int]:
        """The context of each token of a sequence. Remembers, so that only new tokens cost."""
        fields, weights, known, contexts = self._walked.get(name, (None, "", [], []))
        if fields is not key_fields or weights != self.weights or token_ids[: len(known)] != known:
            known, contexts = [], []
            self._walked[name] = (key_fields, self.weights, known, contexts)
        if len(known) < len(token_ids):
            new = token_ids[len(known) :]
            last = contexts[-1] if contexts else self.contexts.root(repr(key_fields), self.weights)
            contexts += self.contexts.walk(last, new)
            known += new
        return contexts

    def _check_tables(self, sequences: list[ScheduledSequence]) -> None:
        """The batch makes sense, and nobody writes what is published or somebody else reads."""
        size, num_blocks = self.block_size, len(self.blocks)
        readers: Counter[int] = Counter()
        for s in sequences:
            name = f"{s.request_id}#{s.index}"
            if not 0 <= s.start < s.end <= len(s.token_ids):
                known = f"of {len(s.token_ids)} tokens"
                raise Broken(f"I8: {name} is to compute [{s.start}, {s.end}) {known}")
            table = s.block_table[: -(-s.end // size)]
            if len(table) * size < s.end:
                raise Broken(f"I5: the table {table} of {name} does not cover [0, {s.end})")
            if not all(0 <= block < num_blocks for block in table):
                raise Broken(f"I5: the table {table} of {name} leaves the {num_blocks} blocks")
            if len(set(table)) != len(table):
                raise Broken(f"I2: the table {table} of {name} holds a block twice")
            readers.update(table)
        for s in sequences:
            for block in s.block_table[s.start // size : (s.end - 1) // size + 1]:
                span = f"{s.request_id}#{s.index} writes [{s.start}, {s.end}) into block {block}"
                if readers[block] > 1:
                    raise Broken(f"I3: {span}, which another sequence of the batch reads")
                if self.is_published(block):
                    raise Broken(f"I3: {span}, which is published")

    def _write(self, sequences: list[ScheduledSequence], contexts: list[list[int]]) -> None:
        size = self.block_size
        error, self.fail_next = self.fail_next, None
        room = self.fail_after if error else -1
        for s, values in zip(sequences, contexts, strict=True):
            for position in range(s.start, s.end):
                if room == 0:
                    raise error
                block = s.block_table[position // size]
                # What a failing step wrote, nobody may take for KV.
                self.blocks[block][position % size] = CORRUPT if error else values[position]
                room -= 1
            self.num_computed += s.end - s.start
        if error:
            raise error

    def _read(self, sequence: ScheduledSequence, wanted: list[int]) -> None:
        table = sequence.block_table[: -(-sequence.end // self.block_size)]
        found = list(chain.from_iterable([self.blocks[block] for block in table]))
        if found[: sequence.end] == wanted[: sequence.end]:
            return
        position = next(p for p in range(sequence.end) if found[p] != wanted[p])
        block = table[position // self.block_size]
        name = f"{sequence.request_id}#{sequence.index}"
        raise Broken(
            f"I4: {name} reads position {position} in block {block}:"
            f" {self.contexts.describe(found[position])};"
            f" it needs {self.contexts.describe(wanted[position])}"
        )

    def _sample(self, sequence: ScheduledSequence) -> SampledToken:
        name = (sequence.request_id, sequence.index)
        contexts = self.contexts_of(name, sequence.token_ids, sequence.key_fields)
        return SampledToken(self.contexts.next_token(contexts[-1], self.vocab_size))
