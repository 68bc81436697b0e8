"""The programs behind the page on CPU speed run, and print what the page shows."""

import sys

import pytest

from benchmarks import cpu_linear, cpu_sharing, cpu_step
from kernels import attention_plan
from minivllm.model.linear import DenseLinear
from tests.tiny_models import one_thread, save_model


@pytest.fixture(autouse=True)
def _single_threaded():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return str(folder)


def called(monkeypatch, program, *arguments):
    monkeypatch.setattr(sys, "argv", [program.__name__, *arguments])
    return program.main()


def test_all_ways_to_multiply_are_right_and_measured():
    found = cpu_linear.measure((96, 48), num_rows=8, num_rounds=2, num_layers=2)
    assert list(found) == list(cpu_linear.WAYS)
    for name, each in found.items():
        assert each.microseconds > 0, name
        assert each.error < 1e-6, name


def test_the_table_of_products_names_every_way_and_counts(monkeypatch, capsys):
    monkeypatch.setattr(cpu_linear, "SHAPES", {"one": (96, 48)})
    monkeypatch.setattr(cpu_linear, "ROWS", (1, 8))
    assert called(monkeypatch, cpu_linear, "--rounds", "1") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in cpu_linear.WAYS)
    assert printed.count(" rows") == 2
    assert "of 2" in printed.splitlines()[-1]


def test_without_packed_weights_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cpu_linear, "select_linear", lambda device, dtype: DenseLinear)
    assert called(monkeypatch, cpu_linear) == 2
    assert "no packed weights" in capsys.readouterr().out


def test_a_steps_time_is_told_by_operator(monkeypatch, capsys, model):
    options = ["--batch", "2", "--prompt", "9", "--new", "4", "--lines", "50"]
    called(monkeypatch, cpu_step, "--model", model, *options)
    _, reading, decoding = capsys.readouterr().out.split("\n\n")
    assert reading.startswith("reading 2 requests of 9 tokens: 1 steps, ")
    assert decoding.startswith("decoding 2 requests of 9 tokens: 3 steps, ")
    for table in (reading, decoding):
        shares = [float(line.split("%")[0]) for line in table.splitlines()[1:] if "%" in line]
        assert 90 < sum(shares) <= 100.5
        assert shares == sorted(shares, reverse=True)


def test_sharing_is_measured_on_the_same_tokens(monkeypatch, capsys, model):
    for name, value in (("REQUESTS", 3), ("SHARED", 64), ("OWN", 5), ("NEW", 4)):
        monkeypatch.setattr(cpu_sharing, name, value)
    monkeypatch.setattr(attention_plan, "_LEAST_SPARED_KEYS", 64)
    assert called(monkeypatch, cpu_sharing, "--model", model, "--rounds", "2") == 0
    printed = capsys.readouterr().out
    assert "together" in printed
    assert "each by itself" in printed
    assert "times as fast" in printed


def test_other_tokens_are_an_error(monkeypatch, capsys, model):
    serve = cpu_sharing.serve

    def wrong(engine, draw):
        seconds, outputs = serve(engine, draw)
        spoilt = attention_plan._LEAST_SPARED_KEYS == cpu_sharing.NEVER
        return seconds, outputs[:-1] if spoilt else outputs

    for name, value in (("REQUESTS", 2), ("SHARED", 32), ("OWN", 3), ("NEW", 2), ("serve", wrong)):
        monkeypatch.setattr(cpu_sharing, name, value)
    monkeypatch.setattr(attention_plan, "_LEAST_SPARED_KEYS", 32)
    assert called(monkeypatch, cpu_sharing, "--model", model, "--rounds", "1") == 1
    assert "other tokens" in capsys.readouterr().out
