"""The step timelines that stand in the code, run: DESIGN section 4 and core/scheduler.py."""

import doctest
import importlib

import pytest

from tests.model_free import HistoryRunner, make_engine, params

A, B, C, D, E, F, X, Y = range(1, 9)


def table_after_each_step(engine, request_id):
    """[(start, end), blocks in the table while computing, computed, tokens, published] a step."""
    sequence = engine.scheduler.waiting[0]
    rows = []
    while engine.has_unfinished_requests():
        finished = {o.request_id for o in engine.step() if o.finished}
        _, _, start, end, table = next(
            row for row in engine.runner.batches[-1] if row[0] == request_id
        )
        published = [i for i, b in enumerate(table) if engine.kv.cache.at(b) is not None]
        computed = end if request_id in finished else sequence.num_computed_tokens
        rows.append(((start, end), len(table), computed, sequence.num_tokens, published))
        if request_id in finished:
            break
    return rows


def test_one_request_runs_as_the_design_says():
    engine = make_engine(HistoryRunner())
    engine.add_request("r", [A, B, C, D, E, F], params(max_tokens=3))
    assert table_after_each_step(engine, "r") == [
        ((0, 6), 2, 6, 7, [0]),
        ((6, 7), 2, 7, 8, [0]),
        ((7, 8), 2, 8, 9, [0, 1]),
    ]


def test_a_second_request_is_charged_only_its_suffix():
    engine = make_engine(HistoryRunner())
    engine.add_request("first", [A, B, C, D, E, F], params(max_tokens=3))
    engine.step()
    engine.add_request("second", [A, B, C, D, X, Y], params(max_tokens=3))
    engine.step()
    first, second = engine.runner.batches[-1]
    assert first[2:4] == (6, 7)
    assert second[2:4] == (4, 6)
    assert first[4][0] == second[4][0], "block 0 is shared"
    assert first[4][1] != second[4][1], "what comes behind it is not"


def test_the_schedulers_timeline_holds():
    engine = make_engine(HistoryRunner(), max_num_batched_tokens=8)
    engine.add_request("A", list(range(6)), params(max_tokens=9))
    engine.add_request("B", list(range(10, 19)), params(max_tokens=9))
    sequences = list(engine.scheduler.waiting)
    rows = []
    for _ in range(3):
        engine.step()
        charged = [(name, start, end) for name, _, start, end, _ in engine.runner.batches[-1]]
        rows.append((charged, [sequence.num_tokens for sequence in sequences]))
    assert rows == [
        ([("A", 0, 6), ("B", 0, 2)], [7, 9]),
        ([("A", 6, 7), ("B", 2, 9)], [8, 10]),
        ([("A", 7, 8), ("B", 9, 10)], [9, 11]),
    ]


@pytest.mark.parametrize("module", ["block_manager"])
def test_the_examples_in_the_docstrings_hold(module):
    result = doctest.testmod(importlib.import_module(f"minivllm.core.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
