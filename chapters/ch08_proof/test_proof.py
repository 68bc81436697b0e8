"""A test is judged by two things: right code passes it, and wrong code does not."""

from types import SimpleNamespace

import pytest

from chapters.ch08_proof.judge import survivors, told
from chapters.stages import Stages
from chapters.testing import Broken, task


def _judge(test, wrong_answers_to, broken, scratch):
    alive = survivors(test, wrong_answers_to, scratch)
    if alive:
        raise Broken(broken, told(alive))


def _passes(test, broken):
    try:
        test(Stages())
    except NotImplementedError:
        raise
    except Exception as error:
        raise Broken(broken, f"the reference is right, but your test says: {error!r}") from error


def _pool(ref_counts, free):
    return SimpleNamespace(
        num_blocks=len(ref_counts), ref_counts=ref_counts, free_order=lambda: list(free)
    )


@task("8.1", "C8.3")
def test_a_right_pool_passes_check_counts(stage):
    a = SimpleNamespace(request_id="a", block_table=[2, 0])
    b = SimpleNamespace(request_id="b", block_table=[2])
    stage.check_counts(_pool([1, 0, 3, 1, 0], [4, 1]), [a, b], cached={2, 3})


@task("8.1", "C8.3")
@pytest.mark.parametrize(
    ("what", "ref_counts", "free"),
    [
        ("a count too low", [1, 0, 2, 1, 0], [4, 1]),
        ("a count too high", [1, 0, 3, 2, 0], [4, 1]),
        ("a block that is free and held", [1, 0, 3, 1, 0], [4, 1, 0]),
        ("a block that is nowhere", [1, 0, 3, 1, 0], [4]),
        ("a block that is free twice", [1, 0, 3, 1, 0], [4, 1, 4]),
    ],
)
def test_check_counts_finds_a_wrong_pool(stage, what, ref_counts, free):
    a = SimpleNamespace(request_id="a", block_table=[2, 0])
    b = SimpleNamespace(request_id="b", block_table=[2])
    with pytest.raises(AssertionError):
        stage.check_counts(_pool(ref_counts, free), [a, b], cached={2, 3})
        pytest.fail(f"{what} passes check_counts: counts {ref_counts}, free {free}", pytrace=False)


@task("8.1", "C8.1")
def test_the_right_pool_passes_your_test(stage):
    _passes(stage.pool_is_right, "C8.1")


@task("8.1", "C8.2")
@pytest.mark.parametrize("wrong_answers_to", ["3.1", "3.2", "3.3"])
def test_no_wrong_pool_passes_your_test(stage, wrong_answers_to, tmp_path):
    _judge(stage.pool_is_right, wrong_answers_to, "C8.2", tmp_path)


@task("8.2", "C8.4")
def test_the_right_cache_passes_your_test(stage):
    _passes(stage.cache_is_right, "C8.4")


@task("8.2", "C8.5")
@pytest.mark.parametrize("wrong_answers_to", ["6.1", "6.2", "6.3", "6.4"])
def test_no_wrong_cache_passes_your_test(stage, wrong_answers_to, tmp_path):
    _judge(stage.cache_is_right, wrong_answers_to, "C8.5", tmp_path)


@task("8.3", "C8.6")
def test_the_right_engine_passes_your_test(stage):
    _passes(stage.engine_is_right, "C8.6")


@task("8.3", "C8.7")
@pytest.mark.parametrize("wrong_answers_to", ["7.1", "7.2", "7.3"])
def test_no_wrong_engine_passes_your_test(stage, wrong_answers_to, tmp_path):
    _judge(stage.engine_is_right, wrong_answers_to, "C8.7", tmp_path)
