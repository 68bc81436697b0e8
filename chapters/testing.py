"""What a chapter's tests are written with.

    @task("3.1", "I2", "C3.1")
    def test_a_block_released_twice_is_an_error(stage):
        pool = stage.BlockManager(num_blocks=2, block_size=4)
        ...
        assert pool.num_free == 1, f"expected 1 free block, got {pool.num_free}"

`stage` is the code under test: a reader's, the solution, a mutant. `stages` gives the chapters
before it: `stages.load("ch01_sequence").Sequence`.
"""

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

Test = TypeVar("Test", bound=Callable[..., object])


class Broken(AssertionError):
    """A named invariant or contract line does not hold.

    broken    its id, "I2" or "C3.2"
    message   the values that show it
    """

    def __init__(self, broken: str, message: str) -> None:
        super().__init__(f"{broken}: {message}")
        self.broken = broken
        self.message = message


def task(number: str, *broken: str) -> Callable[[Test], Test]:
    """The test belongs to task `number`; its failure means that the first of `broken` is broken.

    A test that checks several says which one it was by raising Broken.
    """
    return pytest.mark.task(number, *broken)


def stage_only(reason: str) -> Callable[[Test], Test]:
    """The test cannot apply to the finished engine, and why."""
    return pytest.mark.stage_only(reason)


def run_machine(machine: type[RuleBasedStateMachine]) -> None:
    """Run a rule-based state machine with the chapters' settings."""
    run_state_machine_as_test(machine)
