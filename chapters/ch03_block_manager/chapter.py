"""What chapter 3 asks for."""

from chapters.catalog import Chapter, Task

CHAPTER = Chapter(
    number=3,
    name="ch03_block_manager",
    title="Block manager",
    minutes=120,
    builds="A pool of blocks that grows each sequence by a block when it needs one, and that"
    " notices a block released twice.",
    needs=(),
    observed=("BlockManager",),
    tasks=(
        Task(
            number="3.1",
            title="Take and release a block",
            contract={
                "C3.1": "take() returns the first block of free_order(), counts it 1, and takes it"
                " off the free list.",
                "C3.2": "take() raises BlockError, and changes nothing, when no block is free.",
                "C3.3": "release() counts one holder less and returns what is left; the block is"
                " free when that is 0, and not before.",
                "C3.4": "release() of a free block raises BlockError and changes nothing.",
                "C3.5": "take() and release() touch as many entries in a pool of 2,000 blocks as"
                " in one of 20.",
            },
            hints=(
                "Two sequences in turn release block 3. After the first release somebody else has"
                " taken block 3. Whose block does the second release take away, and when would you"
                " notice?",
                "The free list is a stack, and its end is the cheap side. In release(), look at"
                " the count before you lower it: 0 means that somebody is wrong, and only they can"
                " say who.",
                "take: `if not self._free: raise BlockError(...)`, then `pop()`, then set the"
                " count to 1. release: `if self.ref_counts[block] == 0: raise BlockError(...)`,"
                " lower it, `append` to the free list if it is 0 now, return it.",
            ),
        ),
        Task(
            number="3.2",
            title="Grow and free a table",
            contract={
                "C3.6": "can_allocate() is True exactly when allocate() would succeed, and changes"
                " nothing.",
                "C3.7": "allocate() keeps the blocks of the table and appends as many as make it"
                " ceil((num_computed_tokens + num_new_tokens) / block_size) long.",
                "C3.8": "allocate() raises BlockError, and changes nothing, when it needs more"
                " blocks than are free.",
                "C3.9": "free() releases the blocks of the table, the last one first, and leaves"
                " the table empty.",
            },
            hints=(
                "Block size 4, 6 positions computed, 2 blocks. How many blocks does the next"
                " token need? And the two after it? Chapter 1 has a method that knows.",
                "Refusing must cost nothing (I9), so count before you take: a loop that takes"
                " until it fails has already changed the table. free() empties the list that the"
                " sequence holds.",
                "num_missing = sequence.num_new_blocks(num_new_tokens, self.block_size); compare"
                " it with self.num_free; raise, or append that many take(). free: while the table"
                " is not empty, release(table.pop()).",
            ),
        ),
        Task(
            number="3.3",
            title="Slots",
            contract={
                "C3.10": "Position p lies in slot block_table[p // block_size] * block_size"
                " + p % block_size.",
                "C3.11": "slot_mapping() gives one slot for each position of [start, end), in"
                " order; end itself is not one of them.",
                "C3.12": "slot_mapping() raises BlockError when the table does not cover the"
                " positions.",
            },
            hints=(
                "Block size 4, table [7, 2]. Position 5 is in the second block of this sequence:"
                " which block of the pool is that?",
                "p // block_size is an index into the table, not a block of the pool. Only"
                " block_table[...] says where in memory it lies.",
                "For each position in range(start, end): block = sequence.block_table[position //"
                " self.block_size]; the slot is block * self.block_size + position %"
                " self.block_size. Before that: is end > len(block_table) * block_size?",
            ),
        ),
    ),
)
