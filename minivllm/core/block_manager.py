"""Blocks, the free list, and how many refer to each block.

The pool never calls upward: who may be evicted to make room is the prefix cache's question,
and whoever allocates asks it first.
"""

from minivllm.errors import BlockError


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens, the last one perhaps in part.

    >>> [blocks_for(n, 4) for n in (0, 1, 4, 5, 8, 9)]
    [0, 1, 1, 2, 2, 3]
    """
    return -(-num_tokens // block_size)


class BlockManager:
    """A fixed pool of blocks with ids 0 to num_blocks - 1.

    `ref_counts[b]` = block tables that hold b, + 1 if the prefix cache holds b (I2).
    A block is on the free list exactly when its count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # A stack: the block freed last is taken first, while the memory is still warm.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to."""
        return len(self._free)

    def free_order(self) -> list[int]:
        """Free block ids, the next one to be taken first."""
        return self._free[::-1]

    def take(self) -> int:
        """Hand out a free block with a count of 1. Raises BlockError if there is none."""
        if not self._free:
            raise BlockError(f"all {self.num_blocks} blocks are in use or cached: none is free")
        block = self._free.pop()
        self.ref_counts[block] = 1
        return block

    def reference(self, block: int) -> int:
        """Count one more holder of a block that has one, and return the count."""
        if self.ref_counts[block] == 0:
            raise BlockError(f"block {block} is free: only take() may hand it out (I2)")
        self.ref_counts[block] += 1
        return self.ref_counts[block]

    def release(self, block: int) -> int:
        """Count one holder less, and return the count; at 0 the block is free.

        Raises BlockError if nobody holds the block: somebody released it twice (I2).
        """
        count = self.ref_counts[block]
        if count == 0:
            raise BlockError(f"block {block} is free already: released twice (I2)")
        self.ref_counts[block] = count - 1
        if count == 1:
            self._free.append(block)
        return count - 1
