"""A held interrupt is late, never lost, and goes to whom it belongs."""

import os
import signal
import threading

import pytest

from minivllm.interrupts import interrupts_held, interrupts_let_through


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_stays():
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def raised_by(body):
    """Run body(done); the exception it ends with, and what it had done."""
    done = []
    with pytest.raises(KeyboardInterrupt) as caught:
        body(done)
    return caught.value, done


def test_without_help_an_interrupt_comes_at_once():
    def body(done):
        press_ctrl_c()
        done.append("after")

    assert raised_by(body)[1] == []


def test_a_held_interrupt_comes_when_the_body_has_ended():
    def body(done):
        with interrupts_held():
            press_ctrl_c()
            done.append("body")

    assert raised_by(body)[1] == ["body"]


def test_without_an_interrupt_nothing_is_raised():
    with interrupts_held(), interrupts_let_through():
        pass


def test_a_held_interrupt_also_comes_when_the_body_raises():
    def body(done):
        with interrupts_held():
            press_ctrl_c()
            raise ValueError("of the body")

    assert str(raised_by(body)[0].__context__) == "of the body"


def test_the_outermost_of_nested_contexts_answers():
    def body(done):
        with interrupts_held():
            with interrupts_held():
                press_ctrl_c()
            done.append("after the inner one")

    assert raised_by(body)[1] == ["after the inner one"]


def test_two_interrupts_are_one():
    def body(done):
        with interrupts_held():
            press_ctrl_c()
            press_ctrl_c()

    raised_by(body)
    with interrupts_held():
        pass


def test_an_interrupt_is_let_through_where_the_body_is_long():
    def body(done):
        with interrupts_held():
            try:
                with interrupts_let_through():
                    press_ctrl_c()
                    done.append("never")
            finally:
                press_ctrl_c()  # held again: the undoing is not interrupted
                done.append("undone")

    assert raised_by(body)[1] == ["undone"]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_noted_before_comes_where_they_are_let_through(depth):
    def body(done, levels=depth):
        with interrupts_held():
            if levels > 1:
                body(done, levels - 1)
            press_ctrl_c()
            with interrupts_let_through():
                done.append("never")

    assert raised_by(body)[1] == []


def test_outside_a_held_part_letting_through_changes_nothing():
    with pytest.raises(KeyboardInterrupt), interrupts_let_through():
        press_ctrl_c()


def test_a_handler_of_the_programs_own_gets_it():
    caught = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        with interrupts_held():
            press_ctrl_c()
            assert caught == []
        assert caught == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            press_ctrl_c()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_the_body_just_runs():
    done = []

    def work():
        with interrupts_held(), interrupts_let_through():
            done.append("body")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["body"]
