"""Memory for KV without blocks: each sequence has one stretch of slots. What paging replaced."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple


class Stretch(NamedTuple):
    """The slots [start, end) of one sequence."""

    start: int
    end: int


class ContiguousPool:
    """A pool for chapter 2's scheduler that gives each sequence one stretch, the first that fits.

    num_slots   tokens that the memory holds
    length_of   slots that a sequence is given when it is admitted; it cannot grow later
    """

    block_size = 1

    def __init__(self, num_slots: int, length_of: Callable[[Any], int]) -> None:
        self.num_blocks = num_slots
        self.stretches: dict[Any, Stretch] = {}
        self._length_of = length_of

    def can_allocate(self, sequence: Any, num_new_tokens: int) -> bool:
        """True if it has its stretch already, or there is a hole that is long enough."""
        return sequence in self.stretches or self._hole(self._length_of(sequence)) is not None

    def allocate(self, sequence: Any, num_new_tokens: int) -> None:
        """Reserve its stretch, once. Raises ValueError if there is no hole."""
        if sequence in self.stretches:
            return
        length = self._length_of(sequence)
        start = self._hole(length)
        if start is None:
            raise ValueError(f"no hole of {length} slots")
        self.stretches[sequence] = Stretch(start, start + length)

    def commit(self, sequence: Any, end: int) -> None:
        """The KV of positions up to `end` is written."""
        sequence.advance(end)

    def free(self, sequence: Any) -> None:
        """Give its stretch back."""
        self.stretches.pop(sequence, None)

    def _hole(self, length: int) -> int | None:
        """Where the first hole of this length begins."""
        edge = Stretch(self.num_blocks, self.num_blocks)
        taken = [Stretch(0, 0), *sorted(self.stretches.values()), edge]
        fitting = (a.end for a, b in pairwise(taken) if b.start - a.end >= length)
        return next(fitting, None)
