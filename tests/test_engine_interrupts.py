"""Ctrl-C in the middle of any call of the engine: the call is whole, and then it is answered."""

import os
import signal

import pytest

from minivllm.core.invariants import check_between_steps
from tests.model_free import HistoryRunner, greedy, make_engine, params, run

PROMPT = list(range(13))


def press_ctrl_c_in(owner, name):
    """Press Ctrl-C when this method is called next, before its body runs."""
    method = getattr(owner, name)

    def interrupted(*values, **options):
        setattr(owner, name, method)
        os.kill(os.getpid(), signal.SIGINT)
        return method(*values, **options)

    setattr(owner, name, interrupted)


def test_in_add_request_it_leaves_the_request_added():
    engine = make_engine()
    press_ctrl_c_in(engine.scheduler, "add")
    with pytest.raises(KeyboardInterrupt):
        engine.add_request("a", PROMPT, params(n=2))
    assert run(engine)["a", 1].token_ids == greedy(PROMPT, 4)


def test_in_abort_it_loses_no_block():
    engine = make_engine()
    engine.add_request("a", PROMPT, params(n=2))
    engine.step()
    press_ctrl_c_in(engine.kv, "free")
    with pytest.raises(KeyboardInterrupt):
        engine.abort("a")
    check_between_steps(engine.scheduler)
    assert {output.finish_reason for output in run(engine).values()} == {"abort"}
    assert engine.kv.num_in_use == 0


def test_in_reset_it_leaves_nothing_cached():
    engine = make_engine()
    engine.add_request("a", PROMPT, params(1))
    run(engine)
    press_ctrl_c_in(engine.kv.blocks, "release")
    with pytest.raises(KeyboardInterrupt):
        engine.reset_prefix_cache()
    check_between_steps(engine.scheduler)
    assert engine.kv.blocks.num_free == engine.kv.num_blocks


def test_in_load_weights_it_leaves_no_block_of_the_old_weights_findable():
    class Runner(HistoryRunner):
        def load_weights(self, path):
            super().load_weights(path)
            os.kill(os.getpid(), signal.SIGINT)

    engine = make_engine(Runner())
    engine.add_request("a", PROMPT, params(1))
    run(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.load_weights("second")
    engine.add_request("b", PROMPT, params(1))
    assert run(engine)["b", 0].num_cached_tokens == 0
