"""The proof can fail: each known fault is planted in `core`, and found within 2,000 workloads."""

import re

import pytest

from minivllm.core.block_manager import BlockManager
from minivllm.core.kv_cache import KVCache
from tests.proof.__main__ import main
from tests.proof.faults import FAULTS, planted
from tests.proof.oracle import promise_of
from tests.proof.report import failure_of, report
from tests.proof.workloads import make_workload

MAX_WORKLOADS = 2_000
BY_NAME = {fault.name: fault for fault in FAULTS}


def first_failure():
    """(seed, error) of the first workload that fails."""
    for seed in range(MAX_WORKLOADS):
        _, error = failure_of(make_workload(seed))
        if error is not None:
            return seed, error
    pytest.fail(f"not found in {MAX_WORKLOADS:,} workloads")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_proof_finds(fault):
    with planted(fault):
        seed, error = first_failure()
    print(f"{fault.name}: found in workload {seed + 1}: {error}")
    assert promise_of(error) in fault.promises, f"found, but not by name: {error!r}"


def test_no_two_faults_have_one_name():
    assert len(BY_NAME) == len(FAULTS) >= 15


def test_a_fault_is_gone_after_its_plant():
    before = KVCache.free, BlockManager.release
    with planted(BY_NAME["double_free_clamped"]):
        assert (KVCache.free, BlockManager.release) != before
    assert (KVCache.free, BlockManager.release) == before


def test_the_report_tells_a_short_way_there_the_pool_and_how_to_repeat_it():
    with planted(BY_NAME["ref_count_not_raised"]):
        seed, _ = first_failure()
        text = report(make_workload(seed))
    assert f"workload {seed} fails\n  I2: block " in text
    num_left, num_all = map(int, re.search(r"(\d+) of (\d+) operations", text).groups())
    # A sequence that publishes a block is enough: add it, and step.
    assert num_left <= 3 < num_all
    assert re.search(r"\n  pool   b\d+ \[.*\]  ref \d  .*<-- I2\n", text)
    assert text.endswith(f"python -m tests.proof --replay {seed} --hash 'xxhash'")


def test_the_command_that_a_report_names_fails_again(capsys):
    with planted(BY_NAME["heads_evicted_first"]):
        seed, error = first_failure()
        assert main(["--replay", str(seed)]) == 1
    assert promise_of(error) in capsys.readouterr().out
