"""No number of the list of known faults is lost when tests are moved or renamed."""

import re

from tests.known_faults import (
    test_counts_and_blocks,
    test_keys_and_weights,
    test_limits,
    test_scheduling,
)

FILES = (test_counts_and_blocks, test_keys_and_weights, test_limits, test_scheduling)


def test_each_of_the_24_known_faults_has_a_test_that_names_it():
    tests = [
        value for file in FILES for name, value in vars(file).items() if name.startswith("test_")
    ]
    numbers = [re.match(r"Known fault (\d+)", test.__doc__ or "") for test in tests]
    without = [test.__name__ for test, number in zip(tests, numbers, strict=True) if not number]
    assert without == [], "each of these docstrings must begin with 'Known fault N'"
    assert {int(number[1]) for number in numbers} == set(range(1, 25))
