"""Chapter 1's tests. Small numbers throughout: a prompt of 6 tokens, blocks of 4."""

from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapters.testing import Broken, stage_only, task

PROMPT = [11, 12, 13, 14, 15, 16]
G, H, J = 17, 18, 19
EOS = 2

SCHEDULER_MOVES = "in the finished engine the scheduler moves a sequence: chapter 2 tests that"
NEVER_ASKED = "the finished engine's scheduler asks only for what is possible: nothing refuses it"


# Task 1.1: known and computed tokens


@task("1.1", "C1.1")
def test_a_new_sequence_knows_its_prompt_and_has_no_output(stage):
    sequence = stage.Sequence("r", PROMPT)
    known = (sequence.num_tokens, sequence.num_output_tokens)
    assert known == (6, 0), (
        f"6 prompt tokens: expected (num_tokens, num_output) (6, 0), got {known}"
    )


@task("1.1", "C1.4")
def test_advance_says_how_far_kv_is_written(stage):
    sequence = stage.Sequence("r", PROMPT)
    for end in (2, 6):
        sequence.advance(end)
        computed = sequence.num_computed_tokens
        assert computed == end, f"after advance({end}): expected {end} computed, got {computed}"


@task("1.1", "C1.4")
@stage_only(NEVER_ASKED)
@pytest.mark.parametrize(
    ("computed", "end"), [(0, 0), (3, 3), (3, 2), (0, 7), (6, 7)], ids=lambda n: str(n)
)
def test_advance_refuses_what_is_computed_already_or_not_known(stage, computed, end):
    sequence = stage.Sequence("r", PROMPT)
    sequence.num_computed_tokens = computed
    words = f"{computed} of 6 tokens computed: advance({end})"
    with raises_value_error(words):
        sequence.advance(end)
    now = sequence.num_computed_tokens
    assert now == computed, f"{words} was refused, but changed num_computed_tokens to {now}"


@task("1.1", "C1.2")
def test_a_chosen_token_is_known_but_not_computed(stage):
    sequence = stage.Sequence("r", PROMPT)
    sequence.advance(6)
    sequence.append_token(G)
    computed = sequence.num_computed_tokens
    assert computed == 6, f"G is chosen, its KV comes in the next step: 6 computed, got {computed}"
    tokens = sequence.token_ids
    assert tokens == [*PROMPT, G], f"expected the prompt and {G} behind it, got {tokens}"


@task("1.1", "C1.1")
def test_the_output_is_counted_without_the_prompt(stage):
    sequence = stage.Sequence("r", PROMPT)
    for i, token_id in enumerate((G, H), start=1):
        sequence.advance(sequence.num_tokens)
        sequence.append_token(token_id)
        known = (sequence.num_tokens, sequence.num_output_tokens)
        assert known == (6 + i, i), f"{i} generated: expected {(6 + i, i)}, got {known}"


@task("1.1", "C1.5")
@stage_only(NEVER_ASKED)
def test_no_token_is_chosen_before_all_known_ones_are_computed(stage):
    sequence = stage.Sequence("r", PROMPT)
    sequence.num_computed_tokens = 5
    with raises_value_error("5 of 6 tokens computed: append_token"):
        sequence.append_token(G)
    assert sequence.token_ids == PROMPT, f"it was refused, but the tokens are {sequence.token_ids}"


@task("1.1", "C1.3")
def test_only_an_output_whose_newest_token_is_left_decodes(stage):
    sequence = stage.Sequence("r", PROMPT)
    seen = [("new", sequence.is_decoding)]
    sequence.advance(5)
    seen.append(("5 of 6 prompt tokens computed", sequence.is_decoding))
    sequence.advance(6)
    seen.append(("prompt computed", sequence.is_decoding))
    sequence.append_token(G)
    seen.append(("G chosen", sequence.is_decoding))
    sequence.advance(7)
    seen.append(("G computed", sequence.is_decoding))
    sequence.append_token(H)
    seen.append(("H chosen", sequence.is_decoding))
    for moment, decoding in seen:
        expected = moment in ("G chosen", "H chosen")
        assert decoding is expected, f"{moment}: expected is_decoding {expected}, got {decoding}"


@task("1.1", "C1.3")
def test_a_sequence_that_must_compute_all_its_tokens_anew_does_not_decode(stage):
    sequence = stage.Sequence("r", PROMPT)
    sequence.advance(6)
    sequence.append_token(G)
    sequence.num_computed_tokens = 0
    assert not sequence.is_decoding, "0 of 7 tokens computed: that is a prefill, not a decode"


# Task 1.2: blocks needed


@task("1.2", "C1.6")
def test_tokens_need_whole_blocks_the_last_one_perhaps_in_part(stage):
    for num_tokens, expected in ((0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        blocks = stage.blocks_for(num_tokens, 4)
        assert blocks == expected, f"blocks_for({num_tokens}, 4): expected {expected}, got {blocks}"


@task("1.2", "C1.6")
@given(num_tokens=st.integers(0, 2000), block_size=st.integers(1, 64))
def test_no_fewer_blocks_would_hold_the_tokens(stage, num_tokens, block_size):
    blocks = stage.blocks_for(num_tokens, block_size)
    words = f"blocks_for({num_tokens}, {block_size}) is {blocks}"
    assert blocks * block_size >= num_tokens, f"{words}: they hold {blocks * block_size}"
    assert blocks == 0 or (blocks - 1) * block_size < num_tokens, f"{words}: one fewer would do"


@task("1.2", "C1.7")
@pytest.mark.parametrize(
    ("num_new_tokens", "expected"), [(1, 1), (4, 1), (5, 2), (6, 2), (8, 2), (9, 3)]
)
def test_a_prefill_gets_the_blocks_of_all_its_tokens(stage, num_new_tokens, expected):
    sequence = stage.Sequence("r", list(range(20)))
    blocks = sequence.num_new_blocks(num_new_tokens, 4)
    assert blocks == expected, (
        f"empty table, block size 4, {num_new_tokens} tokens: expected {expected}, got {blocks}"
    )


@task("1.2", "C1.7")
@pytest.mark.parametrize("computed", range(5, 14))
def test_a_decode_gets_a_block_when_its_token_is_the_first_of_one(stage, computed):
    sequence = in_progress(stage, computed)
    blocks = sequence.num_new_blocks(1, 4)
    expected = 1 if computed in (8, 12) else 0
    assert blocks == expected, (
        f"block size 4, {computed} computed in {len(sequence.block_table)} blocks: position"
        f" {computed} is at offset {computed % 4} of its block: expected {expected} new blocks,"
        f" got {blocks}"
    )


@task("1.2", "C1.7")
@stage_only("a table of the finished engine is never longer than what is being computed needs")
def test_a_table_that_covers_more_than_needed_lacks_nothing(stage):
    sequence = in_progress(stage, 2)
    sequence.block_table = [0, 1, 2]
    blocks = sequence.num_new_blocks(1, 4)
    assert blocks == 0, f"3 blocks for 3 positions: expected 0 new blocks, got {blocks}"


@task("1.2", "I5", "C1.7")
@given(ranges=st.lists(st.integers(1, 9), min_size=1, max_size=8), block_size=st.integers(1, 5))
def test_a_table_grown_by_it_has_just_the_blocks_of_what_is_computed(stage, ranges, block_size):
    sequence = stage.Sequence("r", [0] * sum(ranges))
    for num_new_tokens in ranges:
        new = sequence.num_new_blocks(num_new_tokens, block_size)
        sequence.block_table += [0] * new
        sequence.num_computed_tokens += num_new_tokens
        computed, length = sequence.num_computed_tokens, len(sequence.block_table)
        if length != (computed + block_size - 1) // block_size:
            raise Broken(
                "I5",
                f"block size {block_size}, {computed} positions computed, {num_new_tokens} of them"
                f" just now with {new} new blocks: the table has {length} blocks",
            )


# Task 1.3: states


@task("1.3", "C1.8")
@stage_only(SCHEDULER_MOVES)
def test_a_waiting_sequence_runs(stage):
    sequence = stage.Sequence("r", PROMPT)
    sequence.run()
    expect_state(stage, sequence, "RUNNING", "run()")


@task("1.3", "C1.9")
@stage_only(SCHEDULER_MOVES)
def test_a_preempted_sequence_waits_and_keeps_its_generated_tokens(stage):
    sequence = preempted(stage)
    expect_state(stage, sequence, "WAITING", "preempt()")
    tokens = sequence.token_ids
    assert tokens == [*PROMPT, G, H], f"{[G, H]} were generated before: the tokens are {tokens}"
    assert sequence.num_prompt_tokens == 6, "what was generated does not become prompt"


@task("1.3", "C1.10")
@stage_only(SCHEDULER_MOVES)
def test_a_preempted_sequence_has_no_kv_left(stage):
    computed = preempted(stage).num_computed_tokens
    assert computed == 0, f"its blocks are gone: expected 0 positions computed, got {computed}"


@task("1.3", "C1.8")
@stage_only(SCHEDULER_MOVES)
def test_a_preempted_sequence_can_run_again(stage):
    sequence = preempted(stage)
    sequence.run()
    expect_state(stage, sequence, "RUNNING", "run() after preempt()")


@task("1.3", "C1.11")
@stage_only(SCHEDULER_MOVES)
@pytest.mark.parametrize("from_state", ["WAITING", "RUNNING"])
def test_a_sequence_finishes_from_waiting_and_from_running(stage, from_state):
    sequence = in_state(stage, from_state)
    sequence.finish("abort")
    expect_state(stage, sequence, "FINISHED", f'finish("abort") while {from_state}')
    reason = sequence.finish_reason
    assert reason == "abort", f"expected finish_reason 'abort', got {reason!r}"


@task("1.3", "C1.12", "I10")
@stage_only(SCHEDULER_MOVES)
@pytest.mark.parametrize(
    ("from_state", "move"),
    [
        ("RUNNING", "run"),
        ("FINISHED", "run"),
        ("WAITING", "preempt"),
        ("FINISHED", "preempt"),
        ("FINISHED", "finish"),
    ],
)
def test_every_other_move_is_refused(stage, from_state, move):
    sequence = in_state(stage, from_state)
    sequence.num_computed_tokens = 4
    before = (sequence.state, sequence.finish_reason, 4)
    arguments = ("length",) if move == "finish" else ()
    with raises_value_error(f"{move}() while {from_state}"):
        getattr(sequence, move)(*arguments)
    after = (sequence.state, sequence.finish_reason, sequence.num_computed_tokens)
    assert after == before, (
        f"{move}() while {from_state} was refused, but changed {before}: {after}"
    )


# Task 1.4: stop rules


@task("1.4", "C1.13")
def test_an_eos_token_stops(stage):
    reason = stop_reason(stage, [G, EOS])
    assert reason == "stop", f"EOS is the newest of 2 tokens: expected 'stop', got {reason!r}"


@task("1.4", "C1.13")
def test_any_other_token_does_not_stop(stage):
    reason = stop_reason(stage, [EOS, G])
    assert reason is None, f"EOS is not the newest token, G is: expected None, got {reason!r}"


@task("1.4", "C1.13")
def test_with_ignore_eos_an_eos_token_does_not_stop(stage):
    reason = stop_reason(stage, [G, EOS], ignore_eos=True)
    assert reason is None, f"ignore_eos is set: expected None, got {reason!r}"


@task("1.4", "C1.14")
def test_a_stop_token_of_the_request_stops(stage):
    reason = stop_reason(stage, [G, H], stop_token_ids=(H,))
    assert reason == "stop", f"H is in stop_token_ids: expected 'stop', got {reason!r}"


@task("1.4", "C1.14")
def test_ignore_eos_does_not_ignore_stop_tokens_of_the_request(stage):
    reason = stop_reason(stage, [G, H], stop_token_ids=(H,), ignore_eos=True)
    assert reason == "stop", f"ignore_eos is about EOS alone: expected 'stop', got {reason!r}"


@task("1.4", "C1.15")
@pytest.mark.parametrize("stop", [{}, {"stop_token_ids": (H,)}], ids=["eos", "stop token"])
def test_before_min_tokens_no_token_stops(stage, stop):
    newest = H if stop else EOS
    for before, expected in (([], None), ([G], None), ([G, G], "stop"), ([G, G, G], "stop")):
        reason = stop_reason(stage, [*before, newest], min_tokens=3, **stop)
        count = len(before) + 1
        assert reason == expected, (
            f"min_tokens 3, it is generated token {count}: expected {expected!r}, got {reason!r}"
        )


@task("1.4", "C1.16")
def test_the_output_has_exactly_max_tokens(stage):
    for count, expected in ((1, None), (2, None), (3, "length")):
        reason = stop_reason(stage, [G] * count, max_tokens=3)
        assert reason == expected, (
            f"max_tokens 3, {count} generated: expected {expected!r}, got {reason!r}"
        )


@task("1.4", "C1.17")
def test_prompt_and_output_together_have_at_most_max_model_len_tokens(stage):
    for count, expected in ((1, None), (2, "length")):
        reason = stop_reason(stage, [G] * count, max_model_len=8)
        assert reason == expected, (
            f"max_model_len 8, prompt 6, {count} generated: expected {expected!r}, got {reason!r}"
        )


@task("1.4", "C1.17")
def test_min_tokens_cannot_make_it_longer_than_the_model_allows(stage):
    reason = stop_reason(stage, [G, EOS], min_tokens=5, max_model_len=8)
    assert reason == "length", f"8 of 8 tokens are used: expected 'length', got {reason!r}"


@task("1.4", "C1.18")
def test_a_stop_token_at_the_last_place_is_a_stop(stage):
    reason = stop_reason(stage, [G, G, EOS], max_tokens=3)
    assert reason == "stop", f"EOS as the third of 3 tokens: expected 'stop', got {reason!r}"


@task("1.4", "C1.19")
def test_the_stop_token_stays_in_the_output(stage):
    sequence = with_output(stage, [G, EOS])
    sequence.stop_reason((EOS,), 512)
    output = sequence.token_ids[6:]
    assert output == [G, EOS], f"expected the output {[G, EOS]}, got {output}"


@task("1.4", "C1.16")
def test_one_request_runs_as_the_timeline_says(stage):
    sequence = stage.Sequence("r", PROMPT, stage.SamplingParams(max_tokens=3))
    rows = []
    for token_id in (G, H, J):
        start, end = sequence.num_computed_tokens, sequence.num_tokens
        sequence.block_table += [0] * sequence.num_new_blocks(end - start, 4)
        num_blocks = len(sequence.block_table)
        sequence.advance(end)
        sequence.append_token(token_id)
        reason = sequence.stop_reason((EOS,), 512)
        rows.append(
            (start, end, num_blocks, sequence.num_computed_tokens, sequence.num_tokens, reason)
        )
    expected = [(0, 6, 2, 6, 7, None), (6, 7, 2, 7, 8, None), (7, 8, 2, 8, 9, "length")]
    assert rows == expected, (
        "block size 4, (start, end, blocks, then computed, tokens, reason) of each step:"
        f" expected {expected}, got {rows}"
    )


# What the tests are made of


@contextmanager
def raises_value_error(what):
    """pytest.raises(ValueError), with words on what should have been refused."""
    try:
        yield
    except ValueError:
        return
    raise AssertionError(f"{what}: expected a ValueError, nothing was raised")


def in_progress(stage, computed):
    """A sequence with this many positions computed in blocks of 4, and one more token known."""
    sequence = stage.Sequence("r", list(range(computed + 1)))
    sequence.num_computed_tokens = computed
    sequence.block_table = list(range((computed + 3) // 4))
    return sequence


def in_state(stage, name):
    """A sequence in the state of this name."""
    sequence = stage.Sequence("r", PROMPT)
    sequence.state = stage.SequenceState[name]
    sequence.finish_reason = "stop" if name == "FINISHED" else None
    return sequence


def preempted(stage):
    """A sequence that has generated G and H, computed 7 positions, and then was preempted."""
    sequence = in_state(stage, "RUNNING")
    sequence.token_ids += [G, H]
    sequence.num_computed_tokens = 7
    sequence.preempt()
    return sequence


def expect_state(stage, sequence, name, after):
    expected = stage.SequenceState[name]
    assert sequence.state is expected, f"after {after}: expected {expected}, got {sequence.state}"


def with_output(stage, output, **params):
    """A sequence with the prompt of 6 tokens and this output."""
    sequence = stage.Sequence("r", PROMPT, stage.SamplingParams(**params))
    sequence.token_ids += output
    return sequence


def stop_reason(stage, output, max_model_len=512, **params):
    """What stop_reason says after the last token of `output`; EOS is the model's only EOS id."""
    return with_output(stage, output, **params).stop_reason((EOS,), max_model_len)
