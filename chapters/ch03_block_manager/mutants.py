"""Wrong answers to chapter 3, each one small, each one seen in real engines or learners' code."""

from chapters.catalog import Mutant

_CHECK = """        if self.ref_counts[block] == 0:
            raise BlockError(f"I2: block {block} is free already, it was released twice")
        self.ref_counts[block] -= 1
"""
_REFUSAL = """        if num_missing > self.num_free:
            raise BlockError(f"{num_missing} blocks are needed, {self.num_free} are free")
        sequence.block_table += [self.take() for _ in range(num_missing)]
"""
_COVERED = """        if end > len(sequence.block_table) * self.block_size:
            covered = len(sequence.block_table) * self.block_size
            raise BlockError(f"positions up to {end} asked for, the table covers {covered}")
"""
_LOOP = """        while sequence.block_table:
            self.release(sequence.block_table.pop())
"""

MUTANTS = (
    Mutant(
        name="taken_block_stays_on_the_free_list",
        task="3.1",
        broken="I1",
        story="The next sequence is given the same block and overwrites the KV in it.",
        changes=(("block = self._free.pop()", "block = self._free[-1]"),),
    ),
    Mutant(
        name="take_does_not_count",
        task="3.1",
        broken="C3.1",
        story="A block in use counts 0, so its first and only release looks like a second one.",
        changes=(("        self.ref_counts[block] = 1\n", ""),),
    ),
    Mutant(
        name="oldest_free_block_first",
        task="3.1",
        broken="C3.1",
        story="Blocks are handed out from the wrong end of the free list, which moves all others.",
        changes=(("block = self._free.pop()", "block = self._free.pop(0)"),),
    ),
    Mutant(
        name="free_list_is_searched",
        task="3.1",
        broken="C3.5",
        story="All results are right, but each step of a large pool spends its time in a list.",
        changes=(
            (
                "block = self._free.pop()",
                "block = self._free[-1]\n        self._free.remove(block)",
            ),
        ),
    ),
    Mutant(
        name="empty_pool_gives_nothing",
        task="3.1",
        broken="C3.2",
        story="take() says None instead of raising, and None is written into a block table.",
        changes=(('raise BlockError(f"all {self.num_blocks} blocks are in use")', "return None"),),
    ),
    Mutant(
        name="count_clamped_at_zero",
        task="3.1",
        broken="C3.4",
        story="A double release goes unnoticed, until it takes away a block that is somebody's.",
        changes=(
            (_CHECK, "        self.ref_counts[block] = max(0, self.ref_counts[block] - 1)\n"),
        ),
    ),
    Mutant(
        name="second_release_ignored",
        task="3.1",
        broken="C3.4",
        story="The fault that released twice is never found: today it was harmless.",
        changes=(
            (
                'raise BlockError(f"I2: block {block} is free already, it was released twice")',
                "return 0",
            ),
        ),
    ),
    Mutant(
        name="count_below_zero",
        task="3.1",
        broken="C3.4",
        story="The count becomes -1, the next take makes it 1 again, and the pool looks sound.",
        changes=((_CHECK, "        self.ref_counts[block] -= 1\n"),),
    ),
    Mutant(
        name="freed_at_any_release",
        task="3.1",
        broken="C3.3",
        story="The first of two readers ends, and the block is overwritten under the second.",
        changes=(
            (
                "        if self.ref_counts[block] == 0:\n            self._free.append(block)\n",
                "        self._free.append(block)\n",
            ),
        ),
    ),
    Mutant(
        name="growth_counts_only_new_tokens",
        task="3.2",
        broken="C3.7",
        story="Every decoded token takes a block of its own, and the pool is full in no time.",
        changes=(
            (
                "        num_missing = sequence.num_new_blocks(num_new_tokens, self.block_size)\n",
                "        num_missing = -(-num_new_tokens // self.block_size)\n",
            ),
        ),
    ),
    Mutant(
        name="growth_rounds_down",
        task="3.2",
        broken="C3.7",
        story="The tokens of a block that is not full have no memory to be written to.",
        changes=(
            (
                "        num_missing = sequence.num_new_blocks(num_new_tokens, self.block_size)\n",
                "        end = sequence.num_computed_tokens + num_new_tokens\n"
                "        num_missing = end // self.block_size - len(sequence.block_table)\n",
            ),
        ),
    ),
    Mutant(
        name="growth_when_a_block_is_full",
        task="3.2",
        broken="C3.7",
        story="A block is taken one token too early: a pool of n blocks seems to hold less.",
        changes=(
            (
                "        num_missing = sequence.num_new_blocks(num_new_tokens, self.block_size)\n",
                "        end = sequence.num_computed_tokens + num_new_tokens\n"
                "        num_missing = end // self.block_size + 1 - len(sequence.block_table)\n",
            ),
        ),
    ),
    Mutant(
        name="last_block_cannot_be_had",
        task="3.2",
        broken="C3.6",
        story="A request that would just fit waits for ever.",
        changes=(
            (
                "return sequence.num_new_blocks(num_new_tokens, self.block_size) <= self.num_free",
                "return sequence.num_new_blocks(num_new_tokens, self.block_size) < self.num_free",
            ),
        ),
    ),
    Mutant(
        name="refused_allocation_keeps_blocks",
        task="3.2",
        broken="I9",
        story="A request that waits holds blocks that nobody will ever compute in.",
        changes=(
            (
                _REFUSAL,
                "        for _ in range(num_missing):\n"
                "            sequence.block_table.append(self.take())\n",
            ),
        ),
    ),
    Mutant(
        name="refused_allocation_drops_blocks",
        task="3.2",
        broken="I9",
        story="Blocks taken before the refusal are in no table and on no list: the pool shrinks.",
        changes=(
            (
                _REFUSAL,
                "        sequence.block_table += [self.take() for _ in range(num_missing)]\n",
            ),
        ),
    ),
    Mutant(
        name="free_leaves_the_table_filled",
        task="3.2",
        broken="C3.9",
        story="A preempted sequence comes back with a table of blocks that are others' by now.",
        changes=(
            (
                _LOOP,
                "        for block in reversed(sequence.block_table):\n"
                "            self.release(block)\n",
            ),
        ),
    ),
    Mutant(
        name="head_released_first",
        task="3.2",
        broken="C3.9",
        story="Harmless now; with a cache, the start of a prefix would be evicted before its end.",
        changes=((_LOOP, _LOOP.replace("pop()", "pop(0)")),),
    ),
    Mutant(
        name="logical_block_as_physical",
        task="3.3",
        broken="C3.10",
        story="Each sequence writes its first tokens into block 0, whoever that belongs to.",
        changes=(
            (
                "block = sequence.block_table[position // self.block_size]",
                "block = position // self.block_size",
            ),
        ),
    ),
    Mutant(
        name="offset_from_the_range",
        task="3.3",
        broken="C3.11",
        story="Prefills are right; each decoded token is written over the first one of its block.",
        changes=(
            (
                "slots.append(block * self.block_size + position % self.block_size)",
                "slots.append(block * self.block_size + (position - start) % self.block_size)",
            ),
        ),
    ),
    Mutant(
        name="end_is_included",
        task="3.3",
        broken="C3.11",
        story="One slot too many: the batch's slots no longer stand beside its tokens.",
        changes=(
            (
                "for position in range(start, end):",
                "for position in range(start, min(end + 1, len(sequence.block_table)"
                " * self.block_size)):",
            ),
        ),
    ),
    Mutant(
        name="written_to_the_last_block",
        task="3.3",
        broken="C3.12",
        story="A missing block goes unnoticed: its tokens overwrite those of the block before.",
        changes=(
            (_COVERED, ""),
            (
                "block = sequence.block_table[position // self.block_size]",
                "block = sequence.block_table[\n"
                "                min(position // self.block_size, len(sequence.block_table) - 1)\n"
                "            ]",
            ),
        ),
    ),
)
