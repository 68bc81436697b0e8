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

    def take(self, num_blocks: int) -> list[int]:
        """Hand out free blocks with a count of 1 each.

        Raises BlockError, and hands out none, if there are not so many.
        """
        if num_blocks > len(self._free):
            raise BlockError(f"{num_blocks} blocks are asked for, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self.ref_counts[block] = 1
        return taken

    def reference(self, blocks: list[int]) -> None:
        """Count one more holder of each of these blocks, which have one."""
        self._check_held(blocks, "is free: only take() may hand it out (I2)")
        for block in blocks:
            self.ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Count one holder less of each of these blocks; at 0 a block is free.

        Raises BlockError, and changes nothing, if nobody holds one of them, or if it is there
        twice: somebody releases it twice (I2).
        """
        self._check_held(blocks, "is free already: released twice (I2)")
        if len(set(blocks)) < len(blocks):
            raise BlockError(f"a block is released twice at once (I2): {blocks}")
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free.append(block)

    def _check_held(self, blocks: list[int], problem: str) -> None:
        counts = [self.ref_counts[block] for block in blocks]
        if 0 in counts:
            raise BlockError(f"block {blocks[counts.index(0)]} {problem}")
