"""Which prefix blocks are being computed right now, so that nobody computes them twice.

Ten requests with one new prefix arrive together. The first becomes the leader; the other nine
find its blocks here, wait a step, and then find them in the cache. A prefix may have several
leaders: who does not read the cache computes what another one computes. While one of them is
left, it is worth waiting.
"""

from minivllm.core.block_keys import BlockKeyChain
from minivllm.core.sequence import Sequence


class InFlight:
    """Running sequence -> how many leading blocks of it are published, or will be."""

    def __init__(self) -> None:
        self._leaders: dict[Sequence, int] = {}

    def announce(self, sequence: Sequence, num_blocks: int) -> None:
        """`sequence` runs and will publish its blocks [0, num_blocks) as it computes them."""
        self._leaders[sequence] = num_blocks

    def has(self, keys: BlockKeyChain, i: int) -> bool:
        """True if a running sequence will publish block `i` of this chain.

        Equal contents stand at the same place in two chains, unless hashes collide. Who does not
        wait then computes it again: slower, not wrong. Asks every leader: O(running sequences).
        """
        return any(
            i < num_blocks and leader.keys.contents[i] == keys.contents[i]
            for leader, num_blocks in self._leaders.items()
        )

    def withdraw(self, sequence: Sequence) -> None:
        """All that `sequence` has announced is published, or will not be."""
        self._leaders.pop(sequence, None)
