"""Tests that are too weak, or too strict: each lets wrong answers live, or fails on right code."""

from chapters.catalog import Mutant

MUTANTS = (
    Mutant(
        name="counts_are_not_compared",
        task="8.1",
        broken="C8.3",
        story="A count that is one too high keeps a block for ever, and nobody notices.",
        changes=(
            (
                "        assert count == holders[block], "
                'f"I2: block {block} counts {count}, not {holders[block]}"\n',
                "        assert count >= 0\n",
            ),
        ),
    ),
    Mutant(
        name="free_list_is_not_compared",
        task="8.1",
        broken="C8.3",
        story="A block may be free and held at the same time.",
        changes=(("assert sorted(pool.free_order()) == free, ", "assert free is not None, "),),
    ),
    Mutant(
        name="nothing_is_released_twice",
        task="8.1",
        broken="C8.2",
        story="The double free is the one fault that the test never tries.",
        changes=(
            (
                "                assert self.refused(self.pool.release, block), "
                'f"I2: block {block} released twice"\n',
                "",
            ),
        ),
    ),
    Mutant(
        name="slots_are_not_compared",
        task="8.1",
        broken="C8.2",
        story="The counts are right, and two sequences write to the same place.",
        changes=(
            (
                "                    assert slots == expected, ",
                "                    assert slots, ",
            ),
        ),
    ),
    Mutant(
        name="wants_an_order_nobody_promised",
        task="8.1",
        broken="C8.1",
        story="A test that fails on right code is switched off, and then finds nothing at all.",
        changes=(
            (
                "            check_counts(self.pool, self.sequences, set())\n",
                "            check_counts(self.pool, self.sequences, set())\n"
                "            assert self.pool.free_order() == sorted(self.pool.free_order())\n",
            ),
        ),
    ),
    Mutant(
        name="contents_are_not_compared",
        task="8.2",
        broken="C8.5",
        story="Tokens come out right, and nobody looks at what the hits hold.",
        changes=(
            (
                "                    assert found == expected, ",
                "                    assert expected, ",
            ),
            ("            self.slots.check_read(sequence, sequence.num_computed_tokens)\n", ""),
            ("            self.slots.check_read(sequence, end)\n", ""),
            ("                assert known == context, ", "                assert known, "),
            (
                "            for fields, tokens in contents:",
                "            for fields, tokens in ():",
            ),
        ),
    ),
    Mutant(
        name="keys_are_not_compared",
        task="8.2",
        broken="C8.5",
        story="Exact comparison hides a weak key: hits are lost, and nobody knows why.",
        changes=(
            ("                assert known == context, ", "                assert known, "),
            (
                "            assert len(keys) == sequence.num_tokens // size, ",
                "            assert True, ",
            ),
            ("            assert self.weak or not missed, ", "            assert True, "),
        ),
    ),
    Mutant(
        name="order_and_cap_are_not_checked",
        task="8.2",
        broken="C8.5",
        story="Idle blocks pile up or go in any order, and only the hit rate tells.",
        changes=(
            (
                'assert list(self.pool.idle) == self.oldest_first, "LRU: the oldest, and no more"',
                "self.oldest_first = list(self.pool.idle)",
            ),
            (
                "assert list(self.pool.idle) == self.oldest_first, "
                '"LRU: the oldest beyond the cap"',
                "self.oldest_first = list(self.pool.idle)",
            ),
        ),
    ),
    Mutant(
        name="wants_every_block_published",
        task="8.2",
        broken="C8.4",
        story="A miss that the contract allows, after a collision, fails the test on right code.",
        changes=(
            ("            assert self.weak or not missed, ", "            assert not missed, "),
        ),
    ),
    Mutant(
        name="only_outputs_are_compared",
        task="8.3",
        broken="C8.7",
        story="Greedy tokens agree although positions, slots and contexts are wrong.",
        changes=(
            (
                "            check_batch(self.ch07.build_batch(scheduled, self.pool), scheduled,"
                " self.pool)\n",
                "",
            ),
            ("    check_batch(Engine.ch07.build_batch(ranges, pool), ranges, pool)\n", ""),
        ),
    ),
    Mutant(
        name="attention_only_from_the_start",
        task="8.3",
        broken="C8.7",
        story="Whole prefills are right; a suffix is attended to by nobody's test.",
        changes=(("    for start in range(len(case.query)):\n", "    for start in range(1):\n"),),
    ),
    Mutant(
        name="ranges_end_with_the_prompt",
        task="8.3",
        broken="C8.7",
        story="A chunk reads slots behind its end, because no range of the test ends early.",
        changes=(
            (
                "    ranges = [Engine.ch07.ScheduledSequence(chunk, 4, 7)]\n",
                "    ranges = [Engine.ch07.ScheduledSequence(chunk, 4, 10)]\n",
            ),
        ),
    ),
)
