"""Threads share an engine: every call is whole, nothing is lost, and nobody is kept out."""

import sys
import threading
import time
from random import Random

import pytest

from minivllm.core.invariants import check_between_steps
from minivllm.errors import EngineBusyError, UnknownRequestError
from minivllm.fair_lock import FairLock
from tests.model_free import HistoryRunner, greedy, make_engine, params, run

NUM_THREADS, NUM_REQUESTS = 4, 2_000
OPENINGS = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [7, 7, 7, 7, 7]]


@pytest.fixture
def threads_change_often():
    """Python lets another thread go on after a few bytecodes, and not after 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_thread(body):
    """Start body() in a thread; join() raises what it raised."""

    class Thread(threading.Thread):
        error = None

        def run(self):
            try:
                body()
            except BaseException as error:
                self.error = error

        def join(self, timeout=60):
            super().join(timeout)
            assert not self.is_alive(), "the thread is kept out, or hangs"
            if self.error is not None:
                raise self.error

    thread = Thread(daemon=True)
    thread.start()
    return thread


def prompt_of(i):
    return OPENINGS[i % len(OPENINGS)] + [10 + i % 7] * (i % 5)


def test_2000_requests_from_4_threads_a_quarter_of_them_aborted_lose_nothing(threads_change_often):
    engine = make_engine(
        num_kv_blocks=40, max_num_seqs=16, max_num_batched_tokens=64, debug_checks=True
    )
    aborted, too_late = set(), set()

    def add_and_abort(first):
        rng = Random(first)
        for i in range(first, NUM_REQUESTS, NUM_THREADS):
            engine.add_request(str(i), prompt_of(i), params(1 + i % 4))
            if i % 16 < 4:
                time.sleep(rng.choice([0, 0, 0.002]))
                try:
                    engine.abort(str(i))
                    aborted.add(str(i))
                except UnknownRequestError:
                    too_late.add(str(i))

    threads = [in_thread(lambda first=first: add_and_abort(first)) for first in range(NUM_THREADS)]
    finished = {}
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished, "returned twice"
                finished[output.request_id] = output
    for thread in threads:
        thread.join()
    assert sorted(map(int, finished)) == list(range(NUM_REQUESTS))
    assert len(aborted | too_late) == NUM_REQUESTS // 4
    for request_id, output in finished.items():
        i = int(request_id)
        assert output.token_ids == greedy(prompt_of(i), 1 + i % 4)[: len(output.token_ids)]
        if output.finish_reason == "abort":
            assert request_id in aborted
        else:
            # An abort after its last token, before its return, changes nothing.
            assert (output.finish_reason, len(output.token_ids)) == ("length", 1 + i % 4)
    check_between_steps(engine.scheduler)
    assert engine.kv.num_in_use == 0
    assert engine.reset_prefix_cache()


class SlowRunner(HistoryRunner):
    """Computes until it is let go on."""

    def __init__(self):
        super().__init__()
        self.computes, self.may_go_on = threading.Event(), threading.Event()

    def execute(self, batch):
        self.computes.set()
        assert self.may_go_on.wait(60)
        return super().execute(batch)


def stepping_engine():
    """An engine that computes in another thread, and the thread."""
    engine = make_engine(SlowRunner())
    engine.add_request("a", [1, 2, 3], params(2))
    thread = in_thread(lambda: run(engine))
    assert engine.runner.computes.wait(60)
    return engine, thread


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.add_request("b", [4, 5], params(2)),
        lambda engine: engine.abort("a"),
        lambda engine: engine.reset_prefix_cache(),
        lambda engine: engine.stats(),
    ],
    ids=["add_request", "abort", "reset_prefix_cache", "stats"],
)
def test_a_call_during_a_step_happens_after_it(call):
    engine, stepping = stepping_engine()
    calling = in_thread(lambda: call(engine))
    time.sleep(0.05)
    assert calling.is_alive(), "the call did not wait for the step"
    assert len(engine.scheduler.running) == 1
    assert not engine.scheduler.finished
    engine.runner.may_go_on.set()
    calling.join()
    stepping.join()
    run(engine)
    check_between_steps(engine.scheduler)
    assert engine.kv.num_in_use == 0


def order_of_entering(lock):
    """One thread leaves and comes back at once while another one waits."""
    order = []
    inside, waits = threading.Event(), threading.Event()

    def one():
        with lock:
            inside.set()
            assert waits.wait(60)
            time.sleep(0.02)  # in which the other one comes to the door
        with lock:
            order.append("the one that came back")

    def other():
        assert inside.wait(60)
        waits.set()
        with lock:
            order.append("the one that waited")

    for thread in [in_thread(one), in_thread(other)]:
        thread.join()
    return order


def test_nobody_enters_a_fair_lock_again_before_one_that_waits():
    # With threading.Lock the one that came back was the first in 27 of 40 trials.
    for _ in range(20):
        assert order_of_entering(FairLock()) == ["the one that waited", "the one that came back"]


def test_a_call_from_within_a_step_is_an_error_and_not_a_deadlock():
    class Meddler(HistoryRunner):
        def execute(self, batch):
            with pytest.raises(EngineBusyError, match="from within one of its own calls"):
                engine.abort("a")
            return super().execute(batch)

    engine = make_engine(Meddler())
    engine.add_request("a", [1, 2, 3], params(2))
    assert run(engine)["a", 0].token_ids == greedy([1, 2, 3], 2)
