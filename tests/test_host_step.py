"""The programs that measure what the host does for a step count everything, and once."""

import ast
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import host_launches, host_step
from benchmarks.cpu_step import add_requests
from benchmarks.gpu.host_share import decode_step_figure
from benchmarks.gpu.workload import QWEN3_06B, save_random_model
from benchmarks.host_step import PARTS, Stopwatch
from kernels.available import INTERPRET
from tests.interpreter import needs_triton
from tests.tiny_models import one_thread

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _single_threaded():
    with one_thread():
        yield


@pytest.fixture
def model(tmp_path):
    return save_random_model(QWEN3_06B | host_step.TINY, tmp_path / "tiny", torch.device("cpu"))


def test_each_part_counts_for_itself_and_not_for_what_it_calls(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(host_step, "perf_counter", lambda: clock.now)

    def taking(seconds, *calls):
        def method():
            clock.now += seconds
            for owner, name in calls:
                getattr(owner, name)()

        return method

    graphs = SimpleNamespace(hidden=taking(2))
    runner = SimpleNamespace(_graphs=graphs, execute=taking(4, (graphs, "hidden")))
    scheduler = SimpleNamespace(schedule=taking(8), commit=taking(16))
    calls = (scheduler, "schedule"), (runner, "execute"), (scheduler, "commit")
    engine = SimpleNamespace(runner=runner, scheduler=scheduler, step=taking(32, *calls))
    watch = Stopwatch()
    with watch.watching(engine):
        engine.step()
        engine.step()
    engine.step()
    seconds = {"schedule": 8, "hidden": 2, "execute": 4, "commit": 16, "step": 32}
    assert watch.steps == [seconds, seconds]


def test_it_prints_a_column_a_batch_size_and_the_parts_add_up(monkeypatch, capsys):
    monkeypatch.setattr(host_step, "resolve_model", lambda name: name)
    monkeypatch.setattr(host_step, "Tokenizer", lambda folder: None)
    arguments = ["--batches", "1", "3", "--context", "40", "--steps", "9"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.host_step", *arguments])
    assert host_step.main() == 0
    _, title, head, *rows, total = capsys.readouterr().out.splitlines()
    assert "40 tokens in each sequence" in title
    assert head.split() == ["sequences", "1", "3"]
    assert [row[:52].strip() for row in rows] == list(PARTS.values())
    columns = zip(*(map(float, row[52:].split()) for row in rows), strict=True)
    for column, whole in zip(columns, map(float, total[52:].split()), strict=True):
        assert sum(column) == pytest.approx(whole, abs=0.005 * (len(PARTS) + 1))
        assert whole > 0


def test_a_step_in_which_not_all_decode_is_not_measured(model):
    engine = host_step.make_engine(model, None, num_blocks=8, most_tokens=64)
    add_requests(engine, 2, 20, 9)
    with pytest.raises(RuntimeError, match="not every sequence"):
        host_step.decode_steps(engine, batch=3, num_steps=1)


def test_a_gpus_step_is_told_beside_the_part_in_which_it_is_waited_for(model):
    engine = host_step.make_engine(model, None, num_blocks=36, most_tokens=64)
    figure = decode_step_figure(engine, batch=3, context=50, num_steps=4)
    assert figure.setting == "3 sequences of 50 tokens"
    assert 0 < figure.theirs < figure.ours
    assert 0 < figure.share < 1
    assert "schedule" in figure.note
    assert "execute" not in figure.note
    assert not engine.has_unfinished_requests()


def test_a_card_with_little_memory_decodes_as_many_sequences_as_its_pool_holds(model):
    # 50 + 128 tokens need 12 blocks, and three times that the pool does not have.
    engine = host_step.make_engine(model, None, num_blocks=30, most_tokens=64)
    figure = decode_step_figure(engine, batch=3, context=50, num_steps=4)
    assert figure.setting == "2 sequences of 50 tokens"
    assert engine.stats()["preemptions"] == 0
    assert not engine.has_unfinished_requests()


# benchmarks.host_launches


@needs_triton
def test_every_launch_of_an_unrecorded_step_is_counted(monkeypatch, capsys):
    monkeypatch.delenv(INTERPRET, raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmarks.host_launches", "--layers", "2", "--steps", "3"])
    assert host_launches.main() == 0
    _, setting, *rows, total, time = capsys.readouterr().out.splitlines()
    assert setting == "2 layers, 32 tokens behind 4,096 cached ones"
    counts = {name: int(count) for count, name in map(str.split, rows)}
    # Two norms a layer, and one before the head; those of query and key are part of the rotation.
    assert counts == {
        "add_rms_norm_kernel": 4,
        "merge_splits_kernel": 2,
        "rms_norm_kernel": 1,
        "rotary_store_kv_kernel": 2,
        "silu_and_mul_kernel": 2,
        "split_attention_kernel": 2,
    }
    assert total.split()[0] == str(sum(counts.values()))
    assert float(time.split()[0]) > 0
    assert INTERPRET not in os.environ


def test_launches_are_not_measured_without_triton(monkeypatch, capsys):
    monkeypatch.setattr(host_launches, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks.host_launches"])
    assert host_launches.main() == 2
    assert "triton is not installed" in capsys.readouterr().out


def test_launches_are_not_measured_in_the_interpreter(monkeypatch, capsys):
    monkeypatch.setenv(INTERPRET, "1")
    monkeypatch.setattr(sys, "argv", ["benchmarks.host_launches"])
    assert host_launches.main() == 2
    assert "nothing must be interpreted" in capsys.readouterr().out


def test_no_kernel_module_makes_a_message_before_something_is_wrong():
    # An f-string that is an argument is made before the call. Launchers check a lot in each layer.
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and not ast.unparse(node.func).endswith("Error"):
                made = [each for each in node.args if isinstance(each, ast.JoinedStr)]
                assert not made, f"{path.name}, line {node.lineno}"
