"""Chapter 2's tests.

Prompts are written as their lengths: {"A": 6, "B": 8}. Unless a test says otherwise blocks have
4 tokens, and there is room for everything.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.ch02_scheduler.fake_engine import (
    EOS,
    Request,
    add,
    make_scheduler,
    names,
    run_workload,
    take_step,
)
from chapters.ch02_scheduler.step_checks import (
    expect_blocks_add_up,
    expect_each_once,
    expect_limits,
    expect_order,
    expect_output_as_if_alone,
    expect_progress,
    expect_tokens_or_preemption,
)
from chapters.testing import Broken, stage_only, task

TOKEN = 7

CHUNKS = "the finished engine computes a prompt in chunks, as the budget allows"
OWN_POOL = "needs a pool of its own, which the finished engine does not take"
OWN_STEP = "makes a step by hand; the finished engine commits only what it has scheduled"


# Task 2.1: admit whole prompts


@task("2.1", "C2.1")
def test_prompts_are_admitted_in_the_order_they_came(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 3, "C": 5})
    admitted = names(scheduler._admit_waiting())
    assert admitted == "A B C", f"room for all: expected A B C admitted, got {admitted}"


@task("2.1", "C2.5", "I10")
def test_who_is_admitted_runs_and_waits_no_more(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 3})
    scheduler._admit_waiting()
    lists = (names(scheduler.waiting), names(scheduler.running))
    assert lists == ("-", "A B"), f"(waiting, running): expected ('-', 'A B'), got {lists}"
    states = {sequence.state.name for sequence in scheduler.running}
    assert states == {"RUNNING"}, f"admitted sequences must be RUNNING, they are {states}"


@task("2.1", "C2.1")
def test_nobody_waits_so_nobody_is_admitted(stage, stages):
    admitted = waiting(stage, stages, {})._admit_waiting()
    assert list(admitted) == [], f"expected nobody, got {names(admitted)}"


@task("2.1", "C2.2")
def test_each_admitted_prompt_is_charged_all_its_tokens(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 3}, budget=20)
    scheduler._admit_waiting()
    left = scheduler.budget_left
    assert left == 11, f"budget 20, prompts of 6 and 3 tokens: expected 11 left, got {left}"


@task("2.1", "C2.2")
@stage_only(CHUNKS)
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({"A": 6, "B": 8}, "A"),
        ({"A": 6, "B": 7}, "A"),
        ({"A": 6, "B": 6}, "A B"),
        ({"A": 6, "B": 4, "C": 3}, "A B"),
    ],
    ids=str,
)
def test_prompts_are_admitted_while_their_tokens_fit_into_the_budget(
    stage, stages, lengths, expected
):
    scheduler = waiting(stage, stages, lengths, budget=12)
    admitted = names(scheduler._admit_waiting())
    assert admitted == expected, f"budget 12, {lengths}: expected {expected}, got {admitted}"


@task("2.1", "C2.3")
def test_prompts_are_admitted_while_there_is_a_seat(stage, stages):
    lengths = {"A": 2, "B": 2, "C": 2, "D": 2, "E": 2}
    scheduler = waiting(stage, stages, lengths, seats=3)
    admitted = names(scheduler._admit_waiting())
    assert admitted == "A B C", f"3 seats, 5 prompts wait: expected A B C, got {admitted}"


@task("2.1", "C2.3")
def test_who_runs_already_keeps_its_seat(stage, stages):
    scheduler = waiting(stage, stages, {"A": 2, "B": 2}, seats=3)
    scheduler._admit_waiting()
    add(scheduler, stages, {"C": 2, "D": 2})
    admitted = names(scheduler._admit_waiting())
    assert admitted == "C", f"3 seats, A and B run, C and D wait: expected C, got {admitted}"


@task("2.1", "C2.4")
@pytest.mark.parametrize(
    ("num_blocks", "expected"), [(2, "A"), (3, "A"), (4, "A B"), (5, "A B"), (6, "A B C")]
)
def test_prompts_are_admitted_while_the_pool_has_their_blocks(stage, stages, num_blocks, expected):
    lengths = {"A": 5, "B": 8, "C": 6}
    scheduler = waiting(stage, stages, lengths, num_blocks=num_blocks)
    admitted = names(scheduler._admit_waiting())
    assert admitted == expected, (
        f"block size 4, prompts {lengths} need 2 blocks each of {num_blocks}:"
        f" expected {expected}, got {admitted}"
    )


@task("2.1", "C2.4")
def test_an_admitted_prompt_has_the_blocks_of_all_its_tokens(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6})
    (sequence,) = scheduler._admit_waiting()
    held, free = len(sequence.block_table), scheduler.pool.num_free
    assert (held, free) == (2, 98), (
        "6 tokens in blocks of 4, a pool of 100: expected 2 in the table and 98 free,"
        f" got {held} and {free}"
    )


@task("2.1", "C2.1")
@stage_only(CHUNKS)
def test_a_short_prompt_does_not_overtake_one_that_the_budget_holds_up(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 8, "C": 2}, budget=12)
    admitted = names(scheduler._admit_waiting())
    assert admitted == "A", f"budget 12: B's 8 wait, so C's 2 wait behind it; got {admitted}"


@task("2.1", "C2.1")
def test_a_short_prompt_does_not_overtake_one_that_memory_holds_up(stage, stages):
    scheduler = waiting(stage, stages, {"A": 5, "B": 8, "C": 1}, num_blocks=3)
    admitted = names(scheduler._admit_waiting())
    assert admitted == "A", f"1 block left: B needs 2, so C waits behind it; got {admitted}"


@task("2.1", "C2.6")
def test_who_is_not_admitted_waits_unchanged(stage, stages):
    scheduler = waiting(stage, stages, {"A": 5, "B": 8, "C": 1}, num_blocks=3, budget=20)
    scheduler._admit_waiting()
    assert names(scheduler.waiting) == "B C", f"B and C wait; got {names(scheduler.waiting)}"
    for sequence in scheduler.waiting:
        held, state = len(sequence.block_table), sequence.state.name
        assert (held, state) == (0, "WAITING"), (
            f"{sequence.request_id} is not admitted: expected 0 blocks and WAITING,"
            f" got {held} and {state}"
        )
    left = scheduler.budget_left
    assert left == 15, f"budget 20, only A's 5 tokens are computed: 15 left, got {left}"


# Task 2.2: commit, finish, abort


@task("2.2", "C2.10")
def test_a_waiting_request_can_be_aborted(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 3})
    scheduler.abort("A")
    expect_queues(scheduler, waiting="B", running="-", finished="A")
    reason = scheduler.finished[0].finish_reason
    assert reason == "abort", f"expected A's finish_reason 'abort', got {reason!r}"


@task("2.2", "C2.9", "I1")
def test_an_aborted_request_gives_back_its_blocks(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 3})
    scheduler._admit_waiting()
    scheduler.abort("A")
    expect_queues(scheduler, waiting="-", running="B", finished="A")
    expect_free(scheduler, 99, "A is aborted, B has 1 block")


@task("2.2", "C2.11")
@stage_only("the finished engine looks the id up before its scheduler is asked")
@pytest.mark.parametrize("request_id", ["never added", "A"])
def test_only_a_waiting_or_running_request_can_be_aborted(stage, stages, request_id):
    scheduler = waiting(stage, stages, {"A": 6, "B": 3})
    scheduler.abort("A")
    with pytest.raises(KeyError):
        scheduler.abort(request_id)
    expect_queues(scheduler, waiting="B", running="-", finished="A")


@task("2.2", "C2.7")
def test_a_committed_prompt_is_computed_and_has_its_first_token(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6})
    (sequence,) = prefills = scheduler._admit_waiting()
    scheduler.commit(stage.Step([], prefills), [TOKEN])
    now = (sequence.num_computed_tokens, sequence.num_tokens, sequence.token_ids[-1])
    assert now == (6, 7, TOKEN), (
        f"a prompt of 6 tokens, then {TOKEN} is chosen: expected (computed, tokens, newest)"
        f" (6, 7, {TOKEN}), got {now}"
    )
    expect_queues(scheduler, waiting="-", running="A", finished="-")


@task("2.2", "C2.7")
@stage_only(OWN_STEP)
def test_tokens_come_for_the_decodes_first_then_for_the_prefills(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6})
    decodes = scheduler._admit_waiting()
    scheduler.commit(stage.Step([], decodes), [TOKEN])
    add(scheduler, stages, {"B": 3})
    prefills = scheduler._admit_waiting()
    scheduler.commit(stage.Step(decodes, prefills), [31, 32])
    newest = {each.request_id: each.token_ids[-1] for each in decodes + prefills}
    assert newest == {"A": 31, "B": 32}, (
        f"decodes [A], prefills [B], tokens [31, 32]: expected A 31 and B 32, got {newest}"
    )
    computed = [each.num_computed_tokens for each in decodes + prefills]
    assert computed == [7, 3], f"expected 7 positions of A and 3 of B computed, got {computed}"


@task("2.2", "C2.8")
def test_an_output_of_max_tokens_is_finished(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 3}, max_tokens={"A": 1})
    scheduler.commit(stage.Step([], scheduler._admit_waiting()), [TOKEN, TOKEN])
    expect_queues(scheduler, waiting="-", running="B", finished="A")
    reason = scheduler.finished[0].finish_reason
    assert reason == "length", f"max_tokens 1: expected finish_reason 'length', got {reason!r}"


@task("2.2", "C2.8")
def test_an_output_that_fills_the_models_length_is_finished(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 5}, max_model_len=7)
    scheduler.commit(stage.Step([], scheduler._admit_waiting()), [TOKEN, TOKEN])
    expect_queues(scheduler, waiting="-", running="B", finished="A")


@task("2.2", "C2.8")
def test_an_eos_token_finishes_its_sequence_alone(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 3})
    scheduler.commit(stage.Step([], scheduler._admit_waiting()), [TOKEN, EOS])
    expect_queues(scheduler, waiting="-", running="A", finished="B")
    reason = scheduler.finished[0].finish_reason
    assert reason == "stop", f"B's token is EOS: expected finish_reason 'stop', got {reason!r}"
    tokens = scheduler.finished[0].token_ids
    assert tokens[-1] == EOS, f"the stop token is output, too; B's tokens are {tokens}"


@task("2.2", "C2.9", "I1")
def test_a_finished_sequence_gives_back_its_blocks(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 3}, max_tokens={"A": 1})
    scheduler.commit(stage.Step([], scheduler._admit_waiting()), [TOKEN, TOKEN])
    expect_free(scheduler, 99, "A is finished, B has 1 block")


# Task 2.3: decode first, preempt the newest


@task("2.3", "C2.12")
def test_who_is_admitted_decodes_in_the_next_step(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6})
    steps = [run_step(scheduler), run_step(scheduler), run_step(scheduler)]
    assert steps == [("-", "A"), ("A", "-"), ("A", "-")], (
        f"(decodes, prefills) of 3 steps: a prefill, then decodes; got {steps}"
    )


@task("2.3", "C2.12")
def test_decodes_come_oldest_first(stage, stages):
    scheduler = waiting(stage, stages, {"A": 2})
    run_step(scheduler)
    add(scheduler, stages, {"B": 2, "C": 2})
    run_step(scheduler)
    decodes, _ = run_step(scheduler)
    assert decodes == "A B C", f"arrived A, B, C: expected decodes A B C, got {decodes}"


@task("2.3", "I12", "C2.12")
def test_a_decode_gains_a_token_although_prompts_keep_arriving(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6}, max_tokens={"A": 50})
    (sequence,) = scheduler.waiting
    run_step(scheduler)
    for i in range(4):
        add(scheduler, stages, {f"P{i}": 10})
        before = sequence.num_tokens
        decodes, prefills = run_step(scheduler)
        assert sequence.num_tokens == before + 1, (
            f"A decodes and P{i} arrives: A had {before} tokens and has {sequence.num_tokens};"
            f" the step was decodes {decodes}, prefills {prefills}"
        )


@task("2.3", "C2.12")
@stage_only(CHUNKS)
def test_decodes_are_charged_before_prompts(stage, stages):
    scheduler = waiting(stage, stages, {"A": 2, "B": 2}, budget=12)
    run_step(scheduler)
    add(scheduler, stages, {"C": 11})
    first = run_step(scheduler)
    scheduler.abort("B")
    second = run_step(scheduler)
    assert (first, second) == (("A B", "-"), ("A", "C")), (
        "budget 12, C has 11 tokens: it waits while two decode, and goes beside one;"
        f" expected ('A B', '-'), then ('A', 'C'), got {first}, then {second}"
    )


@task("2.3", "C2.12")
def test_each_step_has_the_whole_budget(stage, stages):
    scheduler = waiting(stage, stages, {"A": 10, "B": 2}, budget=16)
    for expected in (4, 14, 14):
        run_step(scheduler)
        left = scheduler.budget_left
        assert left == expected, (
            "budget 16, prompts of 10 and 2, then two decodes a step: expected"
            f" {expected} left, got {left}"
        )


@task("2.3", "C2.12")
@stage_only(CHUNKS)
def test_two_prompts_run_as_the_first_timeline_says(stage, stages):
    scheduler = waiting(stage, stages, {"A": 6, "B": 8}, budget=12)
    steps = []
    for _ in range(3):
        step = run_step(scheduler)
        steps.append((*step, scheduler.max_num_batched_tokens - scheduler.budget_left))
    expected = [("-", "A", 6), ("A", "B", 9), ("A B", "-", 2)]
    assert steps == expected, (
        f"(decodes, prefills, charged) of 3 steps: expected {expected}, got {steps}"
    )


@task("2.3", "C2.13", "I5")
def test_a_decode_has_its_block_before_it_is_computed(stage, stages):
    scheduler = waiting(stage, stages, {"A": 7})
    (sequence,) = scheduler.waiting
    held = []
    for _ in range(3):
        step = scheduler.schedule()
        held.append(len(sequence.block_table))
        scheduler.commit(step, [TOKEN])
    assert held == [2, 2, 3], (
        "block size 4, prompt of 7: [0, 7), then positions 7 and 8 need 2, 2 and 3 blocks;"
        f" the table had {held}"
    )


@task("2.3", "C2.14")
def test_the_newest_gives_way_when_an_older_one_needs_a_block(stage, stages):
    scheduler = short_of_memory(stage, stages)
    step = run_step(scheduler)
    assert step == ("A", "-"), (
        "A and B have 2 blocks of 2 each, of 4, and A needs a third: expected decodes A"
        f" and no prefill, got {step}"
    )


@task("2.3", "I10", "C2.15")
def test_a_preempted_sequence_waits_again(stage, stages):
    scheduler = short_of_memory(stage, stages)
    run_step(scheduler)
    expect_queues(scheduler, waiting="B", running="A", finished="-")


@task("2.3", "C2.15", "I1")
def test_a_preempted_sequence_gives_back_its_blocks(stage, stages):
    scheduler = short_of_memory(stage, stages)
    run_step(scheduler)
    expect_free(scheduler, 1, "A has taken a third block, B has given back 2")


@task("2.3", "C2.15")
def test_a_preempted_sequence_keeps_its_tokens(stage, stages):
    scheduler = short_of_memory(stage, stages)
    newest = scheduler.running[-1]
    before = list(newest.token_ids)
    run_step(scheduler)
    assert newest.token_ids == before, (
        f"B had generated {before[3:]}; after its preemption it has {newest.token_ids[3:]}"
    )


@task("2.3", "C2.15")
def test_a_preempted_sequence_waits_before_those_that_came_later(stage, stages):
    scheduler = short_of_memory(stage, stages)
    add(scheduler, stages, {"C": 1})
    run_step(scheduler)
    queue = names(scheduler.waiting)
    assert queue == "B C", f"B came before C: expected B C to wait, got {queue}"


@task("2.3", "C2.14", "C2.15", "C2.1")
def test_a_short_pool_is_shared_as_the_second_timeline_says(stage, stages):
    scheduler = waiting(stage, stages, {"A": 3, "B": 3}, num_blocks=4, block_size=2)
    steps = []
    for number in (1, 2, 3, 4):
        if number == 3:
            add(scheduler, stages, {"C": 1})
        steps.append((*run_step(scheduler), scheduler.pool.num_free))
    expected = [("-", "A B", 0), ("A B", "-", 0), ("A", "-", 1), ("A", "-", 1)]
    assert steps == expected, (
        "4 blocks of 2, C comes before step 3; (decodes, prefills, free blocks) of 4 steps:"
        f" expected {expected}, got {steps}"
    )


@task("2.3", "C2.14")
def test_the_newest_gives_way_itself_if_it_is_the_one_without_a_block(stage, stages):
    scheduler = waiting(
        stage, stages, {"A": 3, "B": 4}, num_blocks=4, block_size=2, max_tokens={"A": 2}
    )
    run_step(scheduler)
    step = run_step(scheduler)
    assert step == ("A", "-"), (
        "all 4 blocks of 2 are taken, A's position 3 has its place and B's position 4 has not:"
        f" B waits. Expected decodes A, got {step}"
    )
    expect_queues(scheduler, waiting="B", running="-", finished="A")


@task("2.3", "C2.15")
def test_a_preempted_sequence_computes_all_its_tokens_when_it_returns(stage, stages):
    scheduler = short_of_memory(stage, stages, max_tokens={"A": 4})
    newest = scheduler.running[-1]
    steps = []
    while not steps or not steps[-1][1].startswith("B"):
        steps.append(run_step(scheduler))
        if len(steps) > 10:
            raise Broken("I11", f"B was preempted and has not come back in 10 steps: {steps}")
    assert steps == [("A", "-"), ("A", "-"), ("-", "B")], (
        f"A ends after 4 tokens, then B's 5 are a prefill; got {steps}"
    )
    now = (newest.num_computed_tokens, newest.num_tokens)
    assert now == (5, 6), f"B's 5 tokens computed, 6 known: expected (5, 6), got {now}"


@task("2.3", "C2.16")
@stage_only(OWN_POOL)
def test_nobody_is_admitted_in_a_step_that_preempted(stage, stages):
    class Contested(stage.CountingPool):
        """Has nothing for others while `rival` holds blocks, and room for everybody else.

        In this chapter's pool a victim never fits again at once. In chapter 6's it may, because
        its blocks are still cached: it would come straight back, and be preempted again.
        """

        rival = None

        def can_allocate(self, sequence, num_new_tokens):
            if self.rival and self.rival is not sequence and self.rival.block_table:
                return False
            return super().can_allocate(sequence, num_new_tokens)

    scheduler = make_scheduler(stage, Contested(100, 4))
    add(scheduler, stages, {"A": 6, "B": 6})
    run_step(scheduler)
    scheduler.pool.rival = scheduler.running[-1]
    step = run_step(scheduler)
    assert step == ("A", "-"), (
        f"B was preempted in this step, although it would fit again: expected A alone, got {step}"
    )


@task("2.3", "I11", "C2.17")
def test_a_sequence_that_has_outgrown_the_pool_ends_with_an_error(stage, stages):
    scheduler = waiting(stage, stages, {"A": 5}, num_blocks=3, block_size=2)
    steps = [run_step(scheduler) for _ in range(4)]
    assert not scheduler.waiting + scheduler.running, (
        "3 blocks of 2 hold 6 tokens, A has 7: it can never be computed, but it is"
        f" not ended. (decodes, prefills) of 4 steps: {steps}"
    )
    reason = scheduler.finished[0].finish_reason
    assert reason == "error", f"expected finish_reason 'error', got {reason!r}"
    expect_free(scheduler, 3, "A has ended")


@task("2.3", "C2.17")
def test_others_go_on_after_one_has_outgrown_the_pool(stage, stages):
    scheduler = waiting(stage, stages, {"A": 5, "B": 3}, num_blocks=3, block_size=2)
    for _ in range(10):
        run_step(scheduler)
    ends = [(each.request_id, each.finish_reason) for each in scheduler.finished]
    assert ends == [("A", "error"), ("B", "error")], (
        f"3 blocks of 2 hold 6 tokens, neither A nor B stops by then; they ended as {ends}"
    )


requests = st.builds(
    Request,
    num_prompt_tokens=st.integers(1, 8),
    max_tokens=st.integers(1, 12),
    arrives=st.integers(0, 5),
    aborted=st.sampled_from([None, None, None, None, 1, 3, 6]),
)
workloads = st.lists(requests, min_size=1, max_size=6)
# Small pools, so that most workloads are short of memory.
in_any_workload = given(
    workload=workloads,
    num_blocks=st.integers(2, 7),
    block_size=st.integers(1, 3),
    seats=st.integers(1, 5),
    budget=st.integers(9, 20),
)


@task("2.3", "I10", "I11", "I12", "I1", "I5", "C2.18")
@in_any_workload
@settings(max_examples=150)
def test_in_any_workload_nothing_is_lost_nobody_stalls_and_outputs_are_as_if_alone(
    stage, stages, workload, num_blocks, block_size, seats, budget
):
    pool = stage.CountingPool(num_blocks, block_size)
    scheduler = make_scheduler(stage, pool, budget, seats)
    for sequences, taken in run_workload(scheduler, stages, workload):
        expect_each_once(scheduler, sequences)
        expect_progress(scheduler, taken)
        expect_tokens_or_preemption(taken)
        expect_blocks_add_up(scheduler, sequences)
    for sequence in scheduler.finished:
        expect_output_as_if_alone(scheduler, sequence)


@task("2.3", "C2.2", "C2.3", "C2.1", "C2.14", "C2.16", "I11")
@stage_only(CHUNKS)
@in_any_workload
@settings(max_examples=100)
def test_in_any_workload_a_step_keeps_to_budget_seats_and_order(
    stage, stages, workload, num_blocks, block_size, seats, budget
):
    pool = stage.CountingPool(num_blocks, block_size)
    scheduler = make_scheduler(stage, pool, budget, seats)
    for _, taken in run_workload(scheduler, stages, workload):
        expect_progress(scheduler, taken)
        expect_limits(scheduler, taken)
        expect_order(scheduler, taken)


# What the tests are made of


def waiting(stage, stages, lengths, max_tokens=None, num_blocks=100, block_size=4, **limits):
    """A scheduler in which these requests wait."""
    scheduler = make_scheduler(stage, stage.CountingPool(num_blocks, block_size), **limits)
    add(scheduler, stages, lengths, max_tokens)
    return scheduler


def short_of_memory(stage, stages, max_tokens=None):
    """The second timeline after two steps: A and B have 5 tokens, 4 computed, and 2 blocks of 2."""
    scheduler = waiting(
        stage, stages, {"A": 3, "B": 3}, max_tokens=max_tokens, num_blocks=4, block_size=2
    )
    run_step(scheduler)
    run_step(scheduler)
    return scheduler


def run_step(scheduler):
    """One step in which no token is EOS: the names of its decodes and of its prefills."""
    step = take_step(scheduler, token_of=lambda token_ids: TOKEN).step
    return names(step.decodes), names(step.prefills)


def expect_queues(scheduler, **expected):
    """`waiting`, `running` and `finished` hold these names in this order."""
    got = {name: names(getattr(scheduler, name)) for name in expected}
    assert got == expected, f"expected {expected}, got {got}"


def expect_free(scheduler, expected, why):
    """So many blocks of the pool are free."""
    free, total = scheduler.pool.num_free, scheduler.pool.num_blocks
    assert free == expected, f"{why}: expected {expected} of {total} blocks free, got {free}"
