"""Which prefix blocks are being computed right now, so that nobody computes them twice.

Ten requests with one new prefix arrive together. The first becomes the leader; the other nine
find its keys here, wait a step, and then find its blocks in the cache.
"""

from minivllm.core.block_keys import BlockKey
from minivllm.core.sequence import Sequence


class InFlight:
    """Block-key hash -> the running sequence that will publish that block."""

    def __init__(self) -> None:
        self._leaders: dict[object, Sequence] = {}

    def announce(self, sequence: Sequence, num_blocks: int) -> None:
        """`sequence` runs and will publish its blocks [0, num_blocks) as it computes them.

        Called in each step, costs only what is new: blocks that are published already or were
        announced before are passed over.
        """
        first = max(sequence.num_announced_blocks, len(sequence.cached_blocks))
        for key in sequence.keys.keys[first:num_blocks]:
            self._leaders.setdefault(key.hash, sequence)
        sequence.num_announced_blocks = max(first, num_blocks)

    def has(self, key: BlockKey) -> bool:
        """True if a running sequence computes the block of this key and will publish it."""
        return key.hash in self._leaders

    def withdraw(self, sequence: Sequence, first_block: int, end_block: int) -> None:
        """Blocks [first_block, end_block) of `sequence` are published, or will not be."""
        for key in sequence.keys.keys[first_block:end_block]:
            if self._leaders.get(key.hash) is sequence:
                del self._leaders[key.hash]
