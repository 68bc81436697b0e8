"""Paged attention in plain torch, quick on a CPU: what is alike is computed together.

The keys that a sequence's rows see are cut in two, and what comes of both is joined:

    shared   whole blocks before the rows, which several sequences hold: each row sees all of
             them, so they are gathered once, and the rows of all these sequences attend together
    own      the rest, up to each row's own position

Block size 4. A and B continue one prompt and decode, C is another prompt:

    sequence   start, end   block table     parts
    A          12, 13       7 2 5 4         row 0: shared [7 2], own [5 4], 5 keys of it
    B          13, 14       7 2 6 1         row 1: shared [7 2], own [6 1], 6 keys of it
    C           0,  3       3               rows 2 to 4: own [3]

A's and B's own parts are one call: about as long, they are padded to the longer one's blocks.

The join. With s a row's scores in one part, let o = softmax(s) v and l = log(sum(exp(s))). Over
both parts the row's output is the mean of the two o, weighted by exp(l), and
exp(l1) / (exp(l1) + exp(l2)) = sigmoid(l1 - l2). (Softmax in parts: Milakov & Gimelshein 2018;
a prefix attended to once for all who share it: Hydragen, Juravsky et al. 2024.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention_part import AttentionPart, Pair, Part, SharingPart
from kernels.sequence import StepSequence

# A shared part costs a few calls a layer: it must spare the gathering of so many keys.
_LEAST_SPARED_KEYS = 512
# What decoding sequences gather in one call should stay in the processor's cache.
_MOST_KEYS_A_CALL = 2048
# Padding computes nothing: the shortest of a call fills at least this share of its blocks.
_LEAST_FILL = 0.75
# The rows of a prompt attend in tiles, each tile only to the keys up to its last row.
_TILE_ROWS = 256


def attention_parts(sequences: Sequence[StepSequence], cache: Pair) -> list[AttentionPart]:
    """Cut a step into parts, on the device of the cache; each row is in exactly one of them.

    The rows of the sequences lie one after another; `cache` is that of any layer.
    """
    return _Plan(cache).parts(list(_members(sequences)))


class _Member(NamedTuple):
    """The rows of one sequence at the positions [start, end); the first is the step's first_row."""

    table: list[int]
    start: int
    end: int
    first_row: int

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + self.end - self.start)


def _members(sequences: Sequence[StepSequence]) -> Iterator[_Member]:
    first_row = 0
    for sequence in sequences:
        yield _Member(sequence.block_table, sequence.start, sequence.end, first_row)
        first_row += sequence.end - sequence.start


def _tiles(member: _Member) -> Iterator[_Member]:
    """Positions [4, 11) in tiles of 3: [4, 7), [7, 10) and [10, 11)."""
    for start in range(member.start, member.end, _TILE_ROWS):
        end = min(start + _TILE_ROWS, member.end)
        yield _Member(member.table, start, end, member.first_row + start - member.start)


class _Plan:
    """Which rows attend together: pure Python, up to the tensors that say so."""

    def __init__(self, cache: Pair) -> None:
        keys, _ = cache
        self._block_size = keys.shape[1]
        self._device, self._dtype = keys.device, keys.dtype

    def parts(self, members: list[_Member]) -> list[AttentionPart]:
        """Those that share, group by group; then all who attend to their keys alone."""
        parts: list[AttentionPart] = []
        alone: list[_Member] = []
        for group in self._groups(members):
            if num_blocks := self._num_shared_blocks(group):
                parts.append(self._sharing(group, num_blocks))
            else:
                alone += group
        return parts + [self._own_part(call, 0) for call in self._calls(alone, 0)]

    def _groups(self, members: list[_Member]) -> Iterable[list[_Member]]:
        """Those with the same first block before their rows; and those that have none there."""
        groups: dict[int | None, list[_Member]] = defaultdict(list)
        for member in members:
            has_one = member.start >= self._block_size
            groups[member.table[0] if has_one else None].append(member)
        return groups.values()

    def _num_shared_blocks(self, group: list[_Member]) -> int:
        """Blocks that all of a group hold before their rows; 0 if a shared part does not pay.

        Or if it cannot be joined: only the CPU's attention tells the l that this takes.
        """
        num_blocks = _num_common([m.table[: m.start // self._block_size] for m in group])
        num_spared_keys = num_blocks * self._block_size * (len(group) - 1)
        pays = num_spared_keys >= _LEAST_SPARED_KEYS and self._device.type == "cpu"
        return num_blocks if pays else 0

    def _sharing(self, group: list[_Member], num_blocks: int) -> SharingPart:
        calls = self._calls(group, num_blocks)
        rows = self._rows([member for call in calls for member in call])
        shared = Part(rows, self._slots(group[:1], 0, num_blocks * self._block_size))
        return SharingPart(rows, shared, [self._own_part(call, num_blocks) for call in calls])

    def _calls(self, members: list[_Member], first_block: int) -> list[list[_Member]]:
        """Who attends together to what lies behind `first_block` blocks.

        A prefill alone, tile by tile; decoding sequences with others that are about as long.
        """
        long = [member for member in members if len(member.rows) > 1]
        calls = [[tile] for member in long for tile in _tiles(member)]
        left = [member for member in members if len(member.rows) == 1]
        left.sort(key=self._num_blocks, reverse=True)
        while left:
            longest = self._num_blocks(left[0]) - first_block
            most = max(1, _MOST_KEYS_A_CALL // (longest * self._block_size))
            least = first_block + longest * _LEAST_FILL
            call = [member for member in left[:most] if self._num_blocks(member) >= least]
            calls.append(call)
            left = left[len(call) :]
        return calls

    def _own_part(self, call: list[_Member], first_block: int) -> Part:
        """What `call` attends to from block `first_block` of each table on.

        Block size 4, first_block 1. Two sequences decode, with ends 10 and 5: of 2 blocks, 8 keys,
        they see 10 - 4 = 6 and 5 - 4 = 1. One prefill of [4, 7): 3 keys, and it is causal.
        """
        first_key = first_block * self._block_size
        longest = call[0]
        if len(longest.rows) > 1 and longest.start == first_key:
            slots = self._slots(call, first_key, longest.end)
            return Part(self._rows(call), slots, is_causal=True)
        # A single row is padded to whole blocks, alone too: so padding moves no key to another
        # place in a sum.
        num_padded = self._num_blocks(longest) * self._block_size
        end = longest.end if len(longest.rows) > 1 else num_padded
        positions = self._int64([list(range(member.start, member.end)) for member in call])
        unseen = torch.arange(first_key, end, device=self._device) > positions[..., None]
        mask = torch.zeros(unseen.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(unseen, -math.inf)[:, None]
        return Part(self._rows(call), self._slots(call, first_key, end), mask)

    def _slots(self, members: list[_Member], start: int, end: int) -> Tensor:
        """Slots of the positions [start, end): [len(members), end - start] int64.

        Behind a member's end its last slot stands again. Nobody looks there, but what is gathered
        must be written: a weight of 0 does not hide a NaN.
        """
        size = self._block_size
        first, behind = start // size, -(-end // size)
        tables = [member.table[first:behind] for member in members]
        padded = self._int64(
            [table + table[:1] * (behind - first - len(table)) for table in tables]
        )
        positions = torch.arange(start, end, device=self._device)
        positions = positions.minimum(self._int64([[member.end - 1] for member in members]))
        return padded.gather(1, positions // size - first) * size + positions % size

    def _num_blocks(self, member: _Member) -> int:
        return -(-member.end // self._block_size)

    def _rows(self, members: list[_Member]) -> slice | Tensor:
        """A slice, which copies nothing, where it can be one."""
        rows = [row for member in members for row in member.rows]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[-1] + 1)
        return self._int64(rows)

    def _int64(self, numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _num_common(tables: list[list[int]]) -> int:
    """How many leading blocks are the same in all tables."""
    # In lexicographic order, what the first and the last one share, all share.
    pairs = zip(min(tables), max(tables), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
