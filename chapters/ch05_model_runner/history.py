"""A model without a network, for tests: what it computes is what its rows have read.

A network that reads a wrong block answers with numbers as plausible as any others. This one keeps
in each slot which token was computed there, at which position, and from what; a row reads its
context through the block table, as attention does. So a wrong slot, table, position or length
shows as another token, and `reads` says what a row found where.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Entry(NamedTuple):
    """What a slot holds: a token, its position, and a digest of all that was read for it."""

    token: int
    position: int
    digest: int


class HistoryModel:
    """Implements chapter 5's Model. hidden_size is 1: a row's hidden state is its digest.

    slots   what each slot holds, None until it is written
    reads   for each row of the newest batch, the entries it saw, first position first
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 50) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: list[Entry | None] = [None] * (num_blocks * block_size)
        self.reads: list[list[Entry | None]] = []

    def hidden(self, batch: Any) -> Tensor:
        """Write every row's slot and read its context; digests [num_tokens] int64."""
        tokens, positions, slots = (field.tolist() for field in batch[:3])
        starts, contexts, tables = (field.tolist() for field in batch[3:])
        rows = list(zip(tokens, positions, slots, strict=True))
        self.reads = [[] for _ in rows]
        digests = [0] * len(rows)
        for (start, end), context_len, table in zip(
            pairwise(starts), contexts, tables, strict=True
        ):
            for row in range(start, end):
                token, position, slot = rows[row]
                self.slots[slot] = Entry(token, position, 0)
                # The last row sees the whole context, each row before it one key less.
                num_seen = context_len - (end - 1 - row)
                self.reads[row] = [self._at(table, seen) for seen in range(num_seen)]
                digests[row] = _digest(position, self.reads[row])
                self.slots[slot] = Entry(token, position, digests[row])
        return torch.tensor(digests)

    def logits(self, hidden: Tensor) -> Tensor:
        """One token is far likelier than all others: [num_rows, vocab_size]."""
        chosen = hidden % self.vocab_size
        return torch.nn.functional.one_hot(chosen, self.vocab_size).float() * 100

    def _at(self, table: Sequence[int], position: int) -> Entry | None:
        block = table[position // self.block_size]
        return self.slots[block * self.block_size + position % self.block_size]


def history(token_ids: Sequence[int]) -> list[Entry]:
    """What the slots of a sequence's positions must hold."""
    entries: list[Entry] = []
    for position, token in enumerate(token_ids):
        seen = [*entries, Entry(token, position, 0)]
        entries.append(Entry(token, position, _digest(position, seen)))
    return entries


def next_token(token_ids: Sequence[int], vocab_size: int = 50) -> int:
    """What a right engine chooses after these tokens."""
    return history(token_ids)[-1].digest % vocab_size


def first_difference(
    name: str, token_ids: Sequence[int], read: Sequence[Entry | None]
) -> str | None:
    """Where what a row has read differs from the sequence's own tokens, in words; else None."""
    wanted = history(token_ids)
    for position, (own, found) in enumerate(zip(wanted, read, strict=False)):
        where = f"{name}: in the slot of position {position} a row reads "
        expected = f"; it must be token {own.token}, computed at position {position}"
        if found is None:
            return f"{where}nothing: it was never written{expected}"
        if (found.token, found.position) != (own.token, own.position):
            return f"{where}token {found.token}, computed at position {found.position}{expected}"
        if position < len(wanted) - 1 and found.digest != own.digest:
            return f"{where}KV that was computed after other tokens than {token_ids[:position]}"
    if len(read) != len(wanted):
        row = f"{name}: the row of position {len(wanted) - 1}"
        return f"{row} reads {len(read)} keys; it must read {len(wanted)}, its own included"
    return None


def _digest(position: int, seen: Sequence[Entry | None]) -> int:
    """Of the query's position and of everything it saw; the hash of ints is always the same."""
    return abs(hash((position, *(entry or (-1, -1, -1) for entry in seen))))
