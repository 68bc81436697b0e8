"""An endless loop ends, whoever tries to catch it."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.limits import EndlessLoopError, at_most


def spin():
    while True:
        pass


def test_a_loop_is_stopped_after_its_time():
    begin = time.process_time()
    with pytest.raises(EndlessLoopError, match=r"0\.2 seconds"), at_most(0.2):
        spin()
    assert 0.1 < time.process_time() - begin < 1


def test_hypothesis_does_not_try_the_loop_again():
    begin = time.process_time()

    @settings(database=None, deadline=None)
    @given(number=st.integers())
    def test(number):
        if number > 10:
            spin()

    with pytest.raises(EndlessLoopError), at_most(0.3):
        test()
    assert time.process_time() - begin < 2


def test_a_loop_that_catches_every_exception_is_stopped():
    def stubborn():
        while True:
            try:
                raise ValueError
            except Exception:
                pass

    with pytest.raises(EndlessLoopError), at_most(0.2):
        stubborn()


def test_waiting_costs_nothing():
    with at_most(0.05):
        time.sleep(0.2)


def test_afterwards_nothing_is_stopped():
    with at_most(0.05):
        pass
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
