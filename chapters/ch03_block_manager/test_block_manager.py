"""What chapter 3's pool of blocks must do: its contract, and I1, I2, I4, I5, I9 under random work.

Block size 4 everywhere, so that block edges are at 4, 8, 12.
"""

import inspect
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chapters.ch03_block_manager.counting_list import CountingList
from chapters.ch03_block_manager.pool_checks import (
    check_counts,
    check_tables,
    check_unchanged,
    holders_of,
    must_raise,
    state_of,
)
from chapters.testing import Broken, run_machine, stage_only, task

BLOCK_SIZE = 4


def make_pool(stage: Any, num_blocks: int) -> Any:
    return stage.BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE)


def make_sequence(stages: Any, name: str, num_tokens: int) -> Any:
    """A request whose prompt is num_tokens long; which tokens does not matter here."""
    return stages.load("ch01_sequence").Sequence(name, list(range(1, num_tokens + 1)))


# Task 3.1


@task("3.1", "C3.1")
def test_take_hands_out_the_first_free_block_and_counts_it_once(stage: Any) -> None:
    pool = make_pool(stage, 3)
    assert pool.free_order() == [0, 1, 2], f"a new pool's free list is {pool.free_order()}"
    block = pool.take()
    assert block == 0, f"expected block 0, the first free one, got {block}"
    assert pool.ref_counts == [1, 0, 0], f"expected the counts [1, 0, 0], got {pool.ref_counts}"


@task("3.1", "I1")
def test_a_block_in_use_is_not_on_the_free_list(stage: Any) -> None:
    pool = make_pool(stage, 3)
    taken = [pool.take(), pool.take()]
    free = pool.free_order()
    assert free == [2], f"blocks {taken} are taken: expected the free list [2], got {free}"


@task("3.1", "C3.2")
def test_taking_from_a_pool_without_a_free_block_is_an_error(stage: Any) -> None:
    pool = make_pool(stage, 2)
    pool.take(), pool.take()
    before = state_of(pool, [])
    must_raise(stage.BlockError, pool.take, "C3.2", "take() with 0 of 2 blocks free")
    check_unchanged(before, state_of(pool, []), "a take() that raised", "C3.2")


@task("3.1", "C3.3")
def test_a_released_block_is_free_and_handed_out_next(stage: Any) -> None:
    pool = make_pool(stage, 4)
    pool.take(), pool.take(), pool.take()
    left = pool.release(1)
    assert left == 0, f"block 1 had one holder: expected release() to return 0, got {left}"
    free = pool.free_order()
    assert free == [1, 3], f"expected the free list [1, 3], last freed first, got {free}"
    again = pool.take()
    assert again == 1, f"expected block 1 again, got {again}"


@task("3.1", "C3.3")
def test_a_block_with_two_holders_stays_until_the_second_lets_go(stage: Any) -> None:
    pool = make_pool(stage, 2)
    block = pool.take()
    pool.ref_counts[block] += 1  # a second table holds it, as from chapter 6 on
    left = pool.release(block)
    assert left == 1, f"one of two holders let go: expected the count 1, got {left}"
    free = pool.free_order()
    assert free == [1], f"block 0 still has a holder: expected the free list [1], got {free}"
    pool.release(block)
    free = pool.free_order()
    assert free == [0, 1], f"nobody holds block 0: expected the free list [0, 1], got {free}"


@task("3.1", "C3.4")
def test_releasing_a_block_twice_is_an_error_that_changes_nothing(stage: Any) -> None:
    pool = make_pool(stage, 3)
    block = pool.take()
    pool.release(block)
    before = state_of(pool, [])
    must_raise(
        stage.BlockError,
        lambda: pool.release(block),
        "C3.4",
        f"block {block} counts 0 and was released again",
    )
    check_unchanged(before, state_of(pool, []), "a release() that raised", "C3.4")


@task("3.1", "C3.4", "I2")
def test_a_block_released_twice_is_not_handed_out_twice(stage: Any) -> None:
    pool = make_pool(stage, 3)
    pool.release(pool.take())
    with suppress(stage.BlockError):
        pool.release(0)
    taken = [pool.take(), pool.take()]
    assert taken[0] != taken[1], f"two holders were given the same block: {taken}"


@task("3.1", "C3.5")
def test_taking_and_releasing_cost_the_same_in_a_large_pool(stage: Any) -> None:
    small, large = (entries_touched(stage, num_blocks) for num_blocks in (20, 2_000))
    assert small == large, (
        f"10 blocks taken and released touch {small} entries of the pool's lists when it has"
        f" 20 blocks, and {large} when it has 2,000"
    )


def entries_touched(stage: Any, num_blocks: int) -> int:
    """Entries of the pool's lists touched by ten takes and ten releases."""
    pool = make_pool(stage, num_blocks)
    owner = getattr(pool, "engine_blocks", pool)
    lists = {name: CountingList(value) for name, value in vars(owner).items() if _is_list(value)}
    vars(owner).update(lists)
    # Not through the harness, which looks at the whole pool after each call.
    take, release = (
        inspect.unwrap(method) for method in (stage.BlockManager.take, stage.BlockManager.release)
    )
    taken = [take(pool) for _ in range(10)]
    for block in taken[::2] + taken[1::2]:
        release(pool, block)
    return sum(counting.touched for counting in lists.values())


def _is_list(value: object) -> bool:
    return type(value) is list


@task("3.1", "I2", "I1")
def test_counts_and_free_list_agree_whatever_is_taken_and_released(stage: Any) -> None:
    class Pool(RuleBasedStateMachine):
        """Blocks with up to three holders each; `counts` is what they should count."""

        @initialize(num_blocks=st.integers(1, 4))
        def begin(self, num_blocks: int) -> None:
            self.pool = make_pool(stage, num_blocks)
            self.counts = [0] * num_blocks

        @rule()
        def take(self) -> None:
            if all(self.counts):
                must_raise(stage.BlockError, self.pool.take, "C3.2", "take() with no block free")
                return
            block = self.pool.take()
            if self.counts[block]:
                raise Broken("I1", f"take() handed out block {block}, which somebody holds")
            self.counts[block] = 1

        @rule(block=st.integers(0, 3))
        def share(self, block: int) -> None:
            if block < len(self.counts) and 0 < self.counts[block] < 3:
                self.pool.ref_counts[block] += 1
                self.counts[block] += 1

        @rule(block=st.integers(0, 3))
        def release(self, block: int) -> None:
            if block >= len(self.counts):
                return
            if self.counts[block] == 0:
                must_raise(
                    stage.BlockError,
                    lambda: self.pool.release(block),
                    "I2",
                    f"block {block} is free and was released",
                )
                return
            self.counts[block] -= 1
            left = self.pool.release(block)
            if left != self.counts[block]:
                raise Broken("C3.3", f"release({block}) said {left}, not {self.counts[block]}")

        @invariant()
        def counts_are_right(self) -> None:
            if hasattr(self, "pool"):
                holders = {b: ["a holder"] * count for b, count in enumerate(self.counts)}
                check_counts(self.pool, holders)

    run_machine(Pool)


# Task 3.2


@task("3.2", "C3.7")
def test_a_prompt_is_given_the_blocks_that_its_tokens_fill(stage: Any, stages: Any) -> None:
    for num_tokens, expected in [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]:
        pool = make_pool(stage, 5)
        sequence = make_sequence(stages, "A", num_tokens)
        pool.allocate(sequence, num_tokens)
        got = len(sequence.block_table)
        assert got == expected, f"{num_tokens} tokens: expected {expected} blocks, got {got}"


@task("3.2", "C3.7")
def test_a_decode_takes_a_block_only_at_a_block_edge(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 4)
    sequence = make_sequence(stages, "A", 6)
    pool.allocate(sequence, 6)
    pool.commit(sequence, 6)
    for num_tokens, expected in [(7, 2), (8, 2), (9, 3), (10, 3)]:
        sequence.append_token(0)
        pool.allocate(sequence, 1)
        got = len(sequence.block_table)
        assert got == expected, (
            f"to compute position {num_tokens - 1}, {num_tokens} positions must fit:"
            f" expected {expected} blocks, got {got}"
        )
        pool.commit(sequence, num_tokens)


@task("3.2", "C3.7")
def test_growth_keeps_the_blocks_a_sequence_has(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 6)
    first, second = make_sequence(stages, "A", 4), make_sequence(stages, "B", 4)
    for sequence in (first, second):
        pool.allocate(sequence, 4)
        pool.commit(sequence, 4)
    first.append_token(0)
    pool.allocate(first, 1)
    tables = [first.block_table, second.block_table]
    assert tables == [[0, 2], [1]], f"expected the tables [[0, 2], [1]], got {tables}"


@task("3.2", "C3.6")
def test_the_last_free_block_can_be_had(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 2)
    answers = [
        pool.can_allocate(make_sequence(stages, "A", num_tokens), num_tokens)
        for num_tokens in (7, 8, 9)
    ]
    assert answers == [True, True, False], (
        f"2 blocks of 4 hold 7 and 8 tokens, not 9: can_allocate said {answers}"
    )


@task("3.2", "C3.6")
def test_asking_whether_blocks_can_be_had_changes_nothing(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 2)
    sequence = make_sequence(stages, "A", 5)
    before = state_of(pool, [sequence])
    pool.can_allocate(sequence, 5)
    check_unchanged(before, state_of(pool, [sequence]), "can_allocate()", "C3.6")


@task("3.2", "I9", "C3.8")
def test_a_refused_allocation_changes_nothing(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 3)
    resident, newcomer = make_sequence(stages, "A", 6), make_sequence(stages, "B", 8)
    pool.allocate(resident, 6)
    before = state_of(pool, [resident, newcomer])
    must_raise(
        stage.BlockError,
        lambda: pool.allocate(newcomer, 8),
        "C3.8",
        "2 blocks are needed and 1 is free",
    )
    check_unchanged(before, state_of(pool, [resident, newcomer]), "a refused allocation")


@task("3.2", "C3.9")
def test_freeing_empties_the_table_and_gives_back_every_block(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 3)
    sequence = make_sequence(stages, "A", 9)
    pool.allocate(sequence, 9)
    pool.free(sequence)
    assert sequence.block_table == [], f"expected an empty table, got {sequence.block_table}"
    assert pool.num_free == 3, f"expected 3 free blocks, got {pool.num_free}"
    assert pool.ref_counts == [0, 0, 0], f"expected the counts [0, 0, 0], got {pool.ref_counts}"


@task("3.2", "C3.9")
def test_the_last_block_of_a_table_is_released_first(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 3)
    sequence = make_sequence(stages, "A", 9)
    pool.allocate(sequence, 9)
    pool.free(sequence)
    free = pool.free_order()
    assert free == [0, 1, 2], (
        f"blocks 2, 1, 0 released in this order, the last one is the first to be handed out:"
        f" expected the free list [0, 1, 2], got {free}"
    )


def machine_of_sequences(stage: Any, stages: Any) -> type[RuleBasedStateMachine]:
    """Sequences that arrive, decode and end in a small pool, checked after each operation."""

    class Sequences(RuleBasedStateMachine):
        """The naive model: a live sequence with n computed positions holds ceil(n / 4) blocks."""

        @initialize(num_blocks=st.integers(1, 7))
        def begin(self, num_blocks: int) -> None:
            self.pool = make_pool(stage, num_blocks)
            self.live: list[Any] = []
            self.num_arrived = 0

        @rule(num_tokens=st.integers(1, 10))
        def arrive(self, num_tokens: int) -> None:
            self.num_arrived += 1
            sequence = make_sequence(stages, f"r{self.num_arrived}", num_tokens)
            if self.compute(sequence, num_tokens):
                self.live.append(sequence)

        @precondition(lambda self: self.live)
        @rule(data=st.data())
        def decode(self, data: st.DataObject) -> None:
            sequence = data.draw(st.sampled_from(self.live))
            if sequence.num_computed_tokens == sequence.num_tokens:
                sequence.append_token(0)
            self.compute(sequence, 1)

        @precondition(lambda self: self.live)
        @rule(data=st.data())
        def end(self, data: st.DataObject) -> None:
            sequence = data.draw(st.sampled_from(self.live))
            self.live.remove(sequence)
            self.pool.free(sequence)
            if sequence.block_table:
                raise Broken("C3.9", f"freed, but its table is still {sequence.block_table}")

        def compute(self, sequence: Any, num_new_tokens: int) -> bool:
            """Allocate and commit, or be refused; and compare with what the model says."""
            end = sequence.num_computed_tokens + num_new_tokens
            num_missing = _blocks(end) - _blocks(sequence.num_computed_tokens)
            in_use = sum(_blocks(each.num_computed_tokens) for each in self.live)
            num_free = self.pool.num_blocks - in_use
            before = state_of(self.pool, [*self.live, sequence])
            fits = self.pool.can_allocate(sequence, num_new_tokens)
            numbers = f"{num_missing} blocks are needed, {num_free} are free"
            if fits != (num_missing <= num_free):
                raise Broken("C3.6", f"can_allocate() said {fits}, but {numbers}")
            if fits:
                self.pool.allocate(sequence, num_new_tokens)
                self.write(sequence, sequence.num_computed_tokens, end)
                self.pool.commit(sequence, end)
                return True
            must_raise(
                stage.BlockError,
                lambda: self.pool.allocate(sequence, num_new_tokens),
                "C3.8",
                numbers,
            )
            after = state_of(self.pool, [*self.live, sequence])
            check_unchanged(before, after, "a refused allocation")
            return False

        def write(self, sequence: Any, start: int, end: int) -> None:
            """Nothing is stored here; task 3.3's machine does."""

        @invariant()
        def pool_is_sound(self) -> None:
            if hasattr(self, "pool"):
                check_counts(self.pool, holders_of(self.live))
                check_tables(self.live, BLOCK_SIZE)

    return Sequences


def _blocks(num_tokens: int) -> int:
    return (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE


@task("3.2", "I5", "I1", "I2", "I9")
def test_no_block_is_lost_or_held_twice_whoever_comes_and_goes(stage: Any, stages: Any) -> None:
    run_machine(machine_of_sequences(stage, stages))


# Task 3.3


@task("3.3", "C3.10")
def test_a_slot_is_found_through_the_table(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 8)
    sequence = make_sequence(stages, "A", 8)
    sequence.block_table += [7, 2]
    slots = pool.slot_mapping(sequence, 0, 8)
    expected = [28, 29, 30, 31, 8, 9, 10, 11]
    assert slots == expected, (
        f"table [7, 2]: positions 0..3 lie in block 7, 4..7 in block 2:"
        f" expected {expected}, got {slots}"
    )


@task("3.3", "C3.11")
def test_a_range_within_a_sequence_has_one_slot_for_each_position(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 8)
    sequence = make_sequence(stages, "A", 12)
    sequence.block_table += [7, 2, 5]
    for start, end, expected in [(5, 9, [9, 10, 11, 20]), (3, 4, [31]), (8, 8, [])]:
        slots = pool.slot_mapping(sequence, start, end)
        assert slots == expected, f"positions [{start}, {end}): expected {expected}, got {slots}"


@task("3.3", "C3.12")
@stage_only("the engine allocates before it asks for slots, and checks the tables of a whole batch")
def test_positions_that_the_table_does_not_cover_are_an_error(stage: Any, stages: Any) -> None:
    pool = make_pool(stage, 8)
    sequence = make_sequence(stages, "A", 12)
    sequence.block_table += [7, 2]
    pool.slot_mapping(sequence, 7, 8)  # the last position it covers
    must_raise(
        stage.BlockError,
        lambda: pool.slot_mapping(sequence, 7, 9),
        "C3.12",
        "2 blocks cover positions 0..7, and position 8 was asked for",
    )


@task("3.3", "I4")
def test_every_sequence_reads_what_it_wrote_itself(stage: Any, stages: Any) -> None:
    class Memory(machine_of_sequences(stage, stages)):  # type: ignore[misc]
        """Each slot remembers who wrote it: a request and a position."""

        def __init__(self) -> None:
            super().__init__()
            self.memory: dict[int, tuple[str, int]] = {}

        def write(self, sequence: Any, start: int, end: int) -> None:
            slots = self.pool.slot_mapping(sequence, start, end)
            for position, slot in zip(range(start, end), slots, strict=True):
                self.memory[slot] = (sequence.request_id, position)

        @invariant()
        def contents_are_right(self) -> None:
            for sequence in getattr(self, "live", []):
                for position in range(sequence.num_computed_tokens):
                    block = sequence.block_table[position // BLOCK_SIZE]
                    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
                    expected, got = (sequence.request_id, position), self.memory.get(slot)
                    if got != expected:
                        raise Broken(
                            "I4",
                            f"{sequence.request_id} reads position {position} from slot {slot}:"
                            f" expected {expected}, but it holds {got}",
                        )

    run_machine(Memory)
