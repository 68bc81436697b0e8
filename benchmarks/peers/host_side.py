"""Host work: what is asked of each side, and what a pass is timed by.

Block size 16, a prompt of 50,000 tokens: 3,125 full blocks, of which at most 3,124 can be found,
because one token is left to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

BLOCK_SIZE = 16
PROMPT_TOKENS = 50_000
# One prompt fits, and of a second one's blocks nearly all must be taken from the first.
POOL_BLOCKS = 3_200
MOST_CACHED_TOKENS = (PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE


class Stages(NamedTuple):
    """Seconds of one prompt's way through a block manager, and what was found on it.

    keys      a hash for each full block
    lookup    the longest cached prefix
    allocate  reference what was found, take blocks for the rest, publish the full ones
    release   let go of all blocks; they stay cached
    """

    keys: float
    lookup: float
    allocate: float
    release: float
    cached_tokens: int

    @classmethod
    def between(cls, times: Sequence[float], cached_tokens: int) -> Stages:
        """From five readings of the clock."""
        keys, lookup, allocate, release = (end - start for start, end in pairwise(times))
        return cls(keys, lookup, allocate, release, cached_tokens)


class HostSide(Protocol):
    """A block manager with a prefix cache, with no model behind it."""

    def forget(self) -> None:
        """Empty the cache."""

    def serve(self, token_ids: list[int]) -> Stages:
        """Take one prompt from its keys to the release of its blocks."""
