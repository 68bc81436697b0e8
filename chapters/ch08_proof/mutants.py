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
                'assert found == expected, f"I7: block {block} holds {found}, not {expected}"',
                'assert expected, f"I7: block {block} holds {found}, not {expected}"',
            ),
            (
                "            assert found == self.context(sequence, position), (",
                "            assert found, (",
            ),
            ('assert known == context, f"I7', 'assert known, f"I7'),
        ),
    ),
    Mutant(
        name="everybody_has_the_same_fields",
        task="8.2",
        broken="C8.5",
        story="One user's blocks go to another, because the test has one user.",
        changes=(('st.sampled_from([("",), ("a", "b"), ("ab",)])', 'st.sampled_from([("",)])'),),
    ),
    Mutant(
        name="no_two_hashes_are_equal",
        task="8.2",
        broken="C8.5",
        story="With a good hash no test will ever see a collision, and then one comes.",
        changes=(("            weak=st.booleans(),\n", "            weak=st.just(False),\n"),),
    ),
    Mutant(
        name="cap_is_not_checked",
        task="8.2",
        broken="C8.5",
        story="Idle blocks pile up, and no request notices before memory is short.",
        changes=(
            (
                "            assert list(self.pool.idle) == stay, ",
                "            assert stay == stay, ",
            ),
            (
                "            assert len(idle) <= self.pool.max_num_idle, ",
                "            assert True, ",
            ),
        ),
    ),
    Mutant(
        name="prompts_are_computed_whole",
        task="8.2",
        broken="C8.5",
        story="A block that is known and not computed looks like any other, if there is none.",
        changes=(("chunk=st.sampled_from([99, 99, 1, 3])", "chunk=st.just(99)"),),
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
            ("            check_batch(ch07.build_batch(scheduled, pool), scheduled, pool)\n", ""),
            ("    check_batch(ch07.build_batch(ranges, pool), ranges, pool)\n", ""),
            ("    check_attention(ch07.suffix_attention)\n", ""),
        ),
    ),
    Mutant(
        name="attention_only_from_the_start",
        task="8.3",
        broken="C8.7",
        story="Whole prefills are right; a suffix is attended to by nobody's test.",
        changes=(("    for start in range(num_tokens):\n", "    for start in range(1):\n"),),
    ),
    Mutant(
        name="any_order_will_do",
        task="8.3",
        broken="C8.7",
        story="Requests are overtaken, or wait for nothing, and their outputs are right.",
        changes=(
            (
                "                check_admission(scheduler, waiting, budget_left, seats)\n",
                "                pass\n",
            ),
            (
                "                assert arrivals == sorted(arrivals), ",
                "                assert arrivals is not None, ",
            ),
        ),
    ),
)
