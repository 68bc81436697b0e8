"""Chapter 3. A pool of blocks, and for each sequence a table of those that hold its KV.

Block size 4, five blocks, A has 6 tokens and B has 3:

    A's table   [0, 1]     position 5 lies in block 1 at offset 1: slot 1 * 4 + 1 = 5
    B's table   [2]        position 2 lies in block 2 at offset 2: slot 2 * 4 + 2 = 10
    free        3, 4

In this chapter a block belongs to one sequence: its ref count is 1, or 0 when it is free.
Chapter 6 will let several tables, and a cache, hold one block.
"""

from typing import Any


class BlockError(Exception):
    """The pool was asked for something that would corrupt it or that it does not have."""


class BlockManager:
    """A fixed pool of blocks with ids 0 to num_blocks - 1, and the tables made of them.

    ref_counts   how many hold block b; 0 exactly when b is free (I2)
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        # A stack, so that both ends of a block's life cost O(1): block 0 is handed out first,
        # later always the block freed last.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def free_order(self) -> list[int]:
        """Free block ids, the next one to be handed out first."""
        return self._free[::-1]

    # One block

    def take(self) -> int:
        """Hand out the first block of free_order(); its count is now 1.

        Raises BlockError, and changes nothing, if none is free.
        """
        # task 3.1
        if not self._free:
            raise BlockError(f"all {self.num_blocks} blocks are in use")
        block = self._free.pop()
        self.ref_counts[block] = 1
        return block
        # end of task

    def release(self, block: int) -> int:
        """Count one holder less and return the count.

        At 0 the block is free, and the first of free_order(). Raises BlockError, and changes
        nothing, if nobody holds it: somebody has released it twice (I2).
        """
        # task 3.1
        if self.ref_counts[block] == 0:
            raise BlockError(f"I2: block {block} is free already, it was released twice")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free.append(block)
        return self.ref_counts[block]
        # end of task

    # One sequence

    def can_allocate(self, sequence: Any, num_new_tokens: int) -> bool:
        """Would allocate succeed? Changes nothing."""
        # task 3.2
        return sequence.num_new_blocks(num_new_tokens, self.block_size) <= self.num_free
        # end of task

    def allocate(self, sequence: Any, num_new_tokens: int) -> None:
        """Append to its table the blocks to compute `num_new_tokens` more positions.

        Raises BlockError, and changes nothing (I9), if there are not enough.
        """
        # task 3.2
        num_missing = sequence.num_new_blocks(num_new_tokens, self.block_size)
        if num_missing > self.num_free:
            raise BlockError(f"{num_missing} blocks are needed, {self.num_free} are free")
        sequence.block_table += [self.take() for _ in range(num_missing)]
        # end of task

    def commit(self, sequence: Any, end: int) -> None:
        """The KV of its positions up to `end` is written. Chapter 6 will publish blocks here."""
        sequence.advance(end)

    def free(self, sequence: Any) -> None:
        """Take all blocks out of its table and release them, the last one first."""
        # task 3.2
        while sequence.block_table:
            self.release(sequence.block_table.pop())
        # end of task

    def slot_mapping(self, sequence: Any, start: int, end: int) -> list[int]:
        """The slot of each position in [start, end): block * block_size + offset.

        Raises BlockError if the table does not cover them. Block size 4, table [7, 2]:

            position   3       4       5
            slot       7*4+3   2*4+0   2*4+1   =  31  8  9
        """
        # task 3.3
        if end > len(sequence.block_table) * self.block_size:
            covered = len(sequence.block_table) * self.block_size
            raise BlockError(f"positions up to {end} asked for, the table covers {covered}")
        slots = []
        for position in range(start, end):
            block = sequence.block_table[position // self.block_size]
            slots.append(block * self.block_size + position % self.block_size)
        return slots
        # end of task
