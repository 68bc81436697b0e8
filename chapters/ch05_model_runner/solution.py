"""Chapter 5. From what the scheduler decided to one token for each sequence.

Block size 4. A decodes: it has 7 tokens, 6 are computed, its table is [0, 1]. B is a new prompt
of 5 tokens, its table is [3, 2]:

    row             0     1    2    3    4    5
    sequence        A     B    B    B    B    B
    token_ids       a6    b0   b1   b2   b3   b4
    positions       6     0    1    2    3    4
    slot_mapping    6     12   13   14   15   8        position 4 of B: block 2, offset 0

    query_starts    0 1 6        A owns the rows [0, 1), B the rows [1, 6)
    context_lens    7 5          positions 0 .. 6, and 0 .. 4
    block_tables    0 1 / 3 2

Six rows go through the network, two tokens come out: the rows 0 and 5 alone predict a token that
nobody knows yet.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Batch(NamedTuple):
    """One step as tensors. A row is one position to compute.

    The rows of a sequence lie one after another, in order of their positions.

    token_ids     [num_tokens] int64                   the token at the row's position
    positions     [num_tokens] int64                   counted from the start of its sequence
    slot_mapping  [num_tokens] int64                   where its key and value are written
    query_starts  [num_sequences + 1] int32            sequence i owns the rows
                                                       [query_starts[i], query_starts[i + 1])
    context_lens  [num_sequences] int32                keys that its last row sees, its own included
    block_tables  [num_sequences, max_blocks] int32    logical block -> physical block; behind the
                                                       end of a shorter table stand zeros
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor


def make_batch(
    *,
    token_ids: Sequence[int],
    positions: Sequence[int],
    slot_mapping: Sequence[int],
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
) -> Batch:
    """A Batch of lists: tensors of the right dtypes, and block tables as long as the longest."""
    max_blocks = max(len(table) for table in block_tables)
    padded = [[*table, *[0] * (max_blocks - len(table))] for table in block_tables]
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slot_mapping, dtype=torch.int64),
        query_starts=torch.tensor(query_starts, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.tensor(padded, dtype=torch.int32),
    )


def build_batch(step: Any, pool: Any) -> Batch:
    """Chapter 2's Step as tensors: the rows of `step.decodes`, then those of `step.prefills`.

    A decode computes its newest token alone, position num_tokens - 1. A prefill computes all of
    its tokens, positions [0, num_tokens). The pool (chapter 3) knows the slots. Every sequence
    has a block for each position it computes.
    """
    # task 5.1
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    sequences = step.decodes + step.prefills
    starts = [each.num_tokens - 1 for each in step.decodes] + [0 for _ in step.prefills]
    for sequence, start in zip(sequences, starts, strict=True):
        end = sequence.num_tokens
        token_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        slots += pool.slot_mapping(sequence, start, end)
        query_starts.append(len(token_ids))
    return make_batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_starts=query_starts,
        context_lens=[sequence.num_tokens for sequence in sequences],
        block_tables=[sequence.block_table for sequence in sequences],
    )
    # end of task


class Model(Protocol):
    """A network and its paged KV cache."""

    def hidden(self, batch: Batch) -> Tensor:
        """Write the KV of every row; the rows' last hidden states [num_tokens, hidden_size]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token after each given row: [num_rows, vocab_size].

        This is the largest matrix product of all: 50,000 tokens times the hidden size, a row.
        """


def last_rows(batch: Batch) -> Tensor:
    """The row of each sequence's last position: [num_sequences] int64."""
    # task 5.2
    return batch.query_starts[1:].long() - 1
    # end of task


def next_logits(model: Model, batch: Batch) -> Tensor:
    """Compute the batch; scores of each sequence's next token [num_sequences, vocab_size].

    The network sees the batch once; model.logits is asked for the last rows only, once.
    """
    # task 5.2
    hidden = model.hidden(batch)
    return model.logits(hidden[last_rows(batch)])
    # end of task


def probabilities(logits: Tensor, params: Any) -> Tensor:
    """What to draw the next token from, for a temperature above 0.

    logits   [vocab_size], any float dtype; not changed
    returns  [vocab_size], the probability of each token id; they sum to 1

    The steps, in this order:

        temperature   divide the logits by it: below 1 the likely get likelier
        top_k         keep the top_k most likely tokens; 0, or more than there are, keeps all
        top_p         softmax of what is left; keep the most likely tokens until together they
                      have top_p (above 0), the one that reaches it included; 1 keeps all

    What is kept is scaled to sum to 1, the rest has probability 0. Of equally likely tokens the
    lower id counts as the likelier one. Softmax 0.5, 0.3, 0.15, 0.05:

        top_p   0.2   0.4   0.6   0.79   0.9
        kept      1     1     2      2     3
    """
    # task 5.3
    # In float64, and with the best score at 0: no temperature makes it overflow.
    scores = (logits.double() - logits.max()) / params.temperature
    scores, order = scores.sort(descending=True, stable=True)
    if params.top_k > 0:
        scores[params.top_k :] = float("-inf")
    kept = scores.softmax(dim=-1)
    if params.top_p < 1:
        likelier = kept.cumsum(dim=-1) - kept
        kept = kept.masked_fill(likelier >= params.top_p, 0.0)
    return torch.zeros_like(kept).scatter(0, order, kept / kept.sum())
    # end of task


def sample(logits: Tensor, params: Any, generator: torch.Generator) -> int:
    """Choose a token from one row of logits [vocab_size].

    Temperature 0 is greedy: the largest logit, the lowest id on a tie, and nothing is drawn.
    Otherwise one draw from probabilities(), with the given generator.
    """
    # task 5.3
    if params.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits, params), 1, generator=generator))
    # end of task


def generator_for(sequence: Any) -> torch.Generator:
    """The generator that draws its next token, made anew each time.

    It follows from the request's seed and from how many tokens the sequence has, and from nothing
    else: so a request gets the same tokens alone, in any batch, and after a preemption. Another
    seed draws other numbers, and so does the next token.
    """
    # task 5.4
    # The hash of a tuple of ints is the same in every run.
    return torch.Generator().manual_seed(hash((sequence.params.seed, sequence.num_tokens)))
    # end of task


class ModelRunner:
    """Computes a step with a model and chooses the tokens."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @torch.inference_mode()
    def execute(self, batch: Batch, sequences: Sequence[Any]) -> list[int]:
        """Write the batch's KV, and choose the next token of each sequence.

        `sequences` stand in the order of their rows, and so do the tokens. Each draws with a
        generator of its own.
        """
        # task 5.4
        logits = next_logits(self.model, batch)
        return [
            sample(row, sequence.params, generator_for(sequence))
            for row, sequence in zip(logits, sequences, strict=True)
        ]
        # end of task
