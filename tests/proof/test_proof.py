"""Random workloads, each checked in full: the short form of `python -m tests.proof`."""

import pytest

from tests.proof.__main__ import main
from tests.proof.summary import Summary
from tests.proof.workloads import HASHES, make_workload

NUM_WORKLOADS = 2_500


@pytest.fixture(scope="module")
def proof():
    summary = Summary()
    summary.play(make_workload(seed) for seed in range(NUM_WORKLOADS))
    print(summary.table())
    return summary


def test_every_promise_holds_in_every_workload(proof):
    assert len(proof.num_steps) == NUM_WORKLOADS


def test_the_workloads_reach_every_situation_and_are_large_enough(proof):
    assert proof.problems() == []


def test_a_workload_is_the_same_whenever_it_is_made():
    assert make_workload(7).operations == make_workload(7).operations
    assert make_workload(7) != make_workload(8)


@pytest.mark.parametrize("hash_name", [name for name, values in HASHES.items() if values])
def test_every_promise_holds_when_block_keys_collide(hash_name):
    summary = Summary()
    summary.play(make_workload(seed, hash_name) for seed in range(150))
    assert summary.situations["hash collision"] > 100
    # Only slower: fewer hits, and not none.
    assert summary.num_with_hit > 20


def test_a_situation_never_reached_is_a_problem():
    summary = Summary()
    summary.play([make_workload(0)])
    summary.situations["hash collision"] = 0
    assert "never reached: hash collision" in summary.problems()


def test_small_workloads_are_a_problem():
    summary = Summary(num_requests=[5], num_steps=[29], seconds=1.0)
    assert [problem for problem in summary.problems() if "must be" in problem] == [
        "median of requests is 5.00, must be at least 6.00",
        "median of steps is 29.00, must be at least 30.00",
        "share with a hit is 0.00, must be at least 0.50",
        "share with a preemption is 0.00, must be at least 0.20",
    ]


def test_the_command_runs_workloads_in_several_processes_and_prints_the_table(capsys):
    # Too few to reach everything, so the command says that nothing is proved.
    assert main(["--workloads", "120", "--jobs", "2"]) == 1
    printed = capsys.readouterr().out
    assert "120 workloads held. Median: " in printed
    assert "workloads a minute and core" in printed
    assert "not enough to prove anything: never reached: " in printed


def test_the_command_plays_one_workload_again(capsys):
    assert main(["--replay", "3"]) == 0
    assert "workload 3 holds: " in capsys.readouterr().out
