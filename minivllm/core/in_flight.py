"""Which prefix blocks are being computed right now, so that nobody computes them twice.

Ten requests with one new prefix arrive together. The first becomes the leader; the other nine
find its keys here, wait a step, and then find its blocks in the cache. A prefix may have several
leaders: who does not read the cache computes what another one computes. While one of them is
left, it is worth waiting.
"""

from minivllm.core.block_keys import BlockKey
from minivllm.core.sequence import Sequence


class InFlight:
    """Block-key hash -> the running sequences that will publish that block."""

    def __init__(self) -> None:
        self._leaders: dict[object, set[Sequence]] = {}

    def announce(self, sequence: Sequence, num_blocks: int) -> None:
        """`sequence` runs and will publish its blocks [0, num_blocks) as it computes them.

        Called in each step, costs only what is new: blocks that are published already or were
        announced before are passed over.
        """
        first = max(sequence.num_announced_blocks, len(sequence.cached_blocks))
        for key in sequence.keys.keys[first:num_blocks]:
            self._leaders.setdefault(key.hash, set()).add(sequence)
        sequence.num_announced_blocks = max(first, num_blocks)

    def has(self, key: BlockKey) -> bool:
        """True if a running sequence computes the block of this key and will publish it."""
        return key.hash in self._leaders

    def withdraw(self, sequence: Sequence, first_block: int, end_block: int) -> None:
        """Blocks [first_block, end_block) of `sequence` are published, or will not be."""
        for key in sequence.keys.keys[first_block:end_block]:
            leaders = self._leaders.get(key.hash, set())
            leaders.discard(sequence)
            if not leaders:
                self._leaders.pop(key.hash, None)
