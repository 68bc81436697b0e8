"""A runner that fails in the middle of a step, once and for ever: section 6 of the design.

The error is a RunnerError, tables are cut back to what is computed, nothing of the step is
published, and the next step tries again.
"""

import pytest

from minivllm.core.invariants import check_between_steps
from minivllm.errors import RunnerError
from tests.model_free import HistoryRunner, greedy, make_engine, params, run

PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7, 8, 9], "b": [1, 2, 3, 4, 11], "c": [21, 22]}
NUM_TOKENS = 6


class FailingRunner(HistoryRunner):
    """Fails in the steps that it is told to, after so many of the step's slots are written."""

    def __init__(self, fails, after):
        super().__init__()
        self._fails, self._after = fails, after

    def execute(self, batch):
        if self._fails(len(self.batches)):
            self.fail_next, self.fail_after = ValueError("a device is lost"), self._after
        return super().execute(batch)


def engine_that_fails(fails, after=2):
    engine = make_engine(FailingRunner(fails, after), max_prefill_chunk=4)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, params(NUM_TOKENS))
    return engine


def step_failing(engine):
    """Step, which must fail and leave everything in order."""
    tokens = {s: list(s.token_ids) for s in engine.scheduler.running}
    computed = {s: s.num_computed_tokens for s in engine.scheduler.running}
    num_cached = len(engine.kv.cache)
    with pytest.raises(RunnerError, match="ValueError: a device is lost"):
        engine.step()
    check_between_steps(engine.scheduler)  # I5: tables are cut back
    assert len(engine.kv.cache) == num_cached, "I6"
    for sequence, token_ids in tokens.items():
        assert sequence.token_ids == token_ids
        assert sequence.num_computed_tokens == computed[sequence]


@pytest.mark.parametrize("after", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("step", range(8))
def test_one_failed_step_changes_no_output(step, after):
    engine = engine_that_fails(lambda number: number == step, after)
    outputs = {}
    for number in range(40):
        if number == step:
            step_failing(engine)
        else:
            outputs |= {output.request_id: output for output in engine.step()}
    assert {name: output.token_ids for name, output in outputs.items()} == {
        name: greedy(prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()
    }
    assert engine.kv.num_in_use == 0


@pytest.mark.parametrize("num_good_steps", [0, 1, 4])
def test_a_runner_that_fails_for_ever_loses_no_request_and_no_block(num_good_steps):
    engine = engine_that_fails(lambda number: number >= num_good_steps)
    gained = {name: [] for name in PROMPTS}
    for _ in range(num_good_steps):
        gained |= {output.request_id: output.token_ids for output in engine.step()}
    for _ in range(50):
        step_failing(engine)
    assert engine.stats()["steps"] == num_good_steps
    for name in PROMPTS:
        engine.abort(name)
    aborted = {output.request_id: output for output in engine.step()}
    assert {name: output.finish_reason for name, output in aborted.items()} == dict.fromkeys(
        PROMPTS, "abort"
    )
    assert {name: output.token_ids for name, output in aborted.items()} == gained
    assert not engine.has_unfinished_requests()
    assert engine.kv.num_in_use == 0


def test_after_a_long_failure_everything_goes_on_where_it_stood():
    engine = engine_that_fails(lambda number: 3 <= number < 60)
    for number in range(60):
        if number < 3:
            engine.step()
        else:
            step_failing(engine)
    finished = run(engine)
    assert {name: finished[name, 0].token_ids for name in PROMPTS} == {
        name: greedy(prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()
    }


def test_a_request_may_join_and_leave_while_the_runner_fails():
    engine = engine_that_fails(lambda number: number < 10)
    step_failing(engine)
    engine.add_request("late", [31, 32, 33], params(2))
    engine.abort("a")
    for _ in range(9):
        step_failing(engine)
    finished = run(engine)
    assert finished["a", 0].finish_reason == "abort"
    assert finished["late", 0].token_ids == greedy([31, 32, 33], 2)
