"""The programs behind the page on CPU speed run, and print what the page shows."""

import ctypes
import sys
from time import sleep

import pytest
import torch

from benchmarks import cpu_attention, cpu_linear, cpu_step
from benchmarks.cpu_attention import Case
from benchmarks.cpu_linear import Found, Layer
from kernels.native.layer import PARTS
from kernels.native.linear import NativeLinear
from minivllm.model.backend import ENVIRONMENT_VARIABLE
from tests import native
from tests.native import needs_native
from tests.tiny_models import one_thread, save_model


@pytest.fixture(autouse=True)
def _single_threaded(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
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


@pytest.mark.parametrize("program", [cpu_linear, cpu_step, cpu_attention])
def test_without_our_kernels_a_program_says_what_is_missing(monkeypatch, capsys, program):
    monkeypatch.setattr(program, "why_not", lambda name, *_: f"{name} has no compiler")
    assert called(monkeypatch, program) == 2
    assert capsys.readouterr().out == f"{program.__name__}: native has no compiler\n"


# cpu_linear


@pytest.fixture
def small_layers(monkeypatch):
    layers = {"one": Layer((96, 48), (1, 8, 512)), "head": Layer((104, 48), (1, 8))}
    for name, value in (("LAYERS", layers), ("NUM_MATRICES", 2), ("BYTES_TO_SUM", 4_000)):
        monkeypatch.setattr(cpu_linear, name, value)


@needs_native
def test_all_ways_to_multiply_are_right_and_measured(small_layers):
    found = cpu_linear.measure(cpu_linear.LAYERS["one"], num_rounds=2)
    assert list(found) == [1, 8, 512]
    for num_rows, row in found.items():
        assert list(row) == list(cpu_linear.ways())
        for name, each in row.items():
            assert 0 < each.microseconds < float("inf"), (num_rows, name)
            assert each.error < 1e-6, (num_rows, name)
    assert all(row["ours"].bits_as_alone for row in found.values())


def test_a_wrong_product_and_a_row_that_sees_its_neighbours_are_told():
    rows, weight = torch.randn(4, 8), torch.randn(6, 8)
    exact = rows.double() @ weight.double().t()
    right = cpu_linear._judge(lambda x: x @ weight.t(), rows, exact, 2e-6)
    off_by_one = cpu_linear._judge(lambda x: x @ weight.t() + len(x), rows, exact, 2e-6)
    assert right.error < 1e-6
    assert right.microseconds == pytest.approx(2)
    assert off_by_one.error == pytest.approx(4, abs=1e-5)
    assert not off_by_one.bits_as_alone


@needs_native
def test_the_table_of_products_names_every_way_and_counts(monkeypatch, capsys, small_layers):
    assert called(monkeypatch, cpu_linear, "--rounds", "1") == 0
    head, products, rates = capsys.readouterr().out.split("\n\n")
    assert head.count("\n") == 0 or not cpu_linear.has_onednn()
    names, *rows, errors, bits = products.splitlines()
    assert names.split("product")[1].split("  ")[-1].strip() == "ours"
    assert all(name in names for name in cpu_linear.ways())
    assert [row.split(" rows")[0].split() for row in rows] == [
        *(["one", number] for number in ("1", "8", "512")),
        *(["head", number] for number in ("1", "8")),
    ]
    assert len(errors.removeprefix("mean error").split()) == len(cpu_linear.ways())
    assert bits.endswith(" 5 of 5")
    _, one, of_head, memory = rates.splitlines()
    name, gigabytes, gigaflops = one.split()
    assert name == "one"
    assert float(gigabytes) >= 0
    assert int(gigaflops) >= 0
    assert of_head.split()[::2] == ["head", "-"]
    assert memory.startswith("memory brings ")


@needs_native
def test_without_packed_weights_that_way_is_left_out_and_said(monkeypatch, capsys, small_layers):
    monkeypatch.setattr(cpu_linear, "has_onednn", lambda: False)
    assert called(monkeypatch, cpu_linear, "--rounds", "1") == 0
    head, products, _ = capsys.readouterr().out.split("\n\n")
    assert "oneDNN packed is left out" in head
    assert "oneDNN" not in products


def test_the_matrices_of_a_layer_fit_in_memory():
    counts = {name: cpu_linear.matrices_for(layer) for name, layer in cpu_linear.LAYERS.items()}
    assert counts == {"qkv": 30, "output": 30, "gate, up": 30, "down": 30, "head": 1}
    for name, layer in cpu_linear.LAYERS.items():
        assert 3 * counts[name] * layer.num_bytes <= cpu_linear.MOST_BYTES, name


def test_rates_are_bytes_with_one_row_and_operations_with_many():
    layer = Layer((100, 50), (1, 512))  # 20,000 bytes; 2 x 5,000 operations a row
    found = {1: {"ours": Found(2, 0, True)}, 512: {"ours": Found(64, 0, True)}}
    assert cpu_linear.rates_of_ours(layer, found) == (10, 80)
    assert cpu_linear.rates_of_ours(layer, {1: found[1]}) == (10, None)


def a_clock(monkeypatch, program, *turns):
    """Turns of these lengths, in seconds, with an hour between them."""
    starts = [3_600 * number for number in range(len(turns))]
    times = [
        time for start, turn in zip(starts, turns, strict=True) for time in (start, start + turn)
    ]
    monkeypatch.setattr(program, "perf_counter", iter(times).__next__)


def test_ways_take_turns_and_the_lowest_of_all_rounds_counts(monkeypatch):
    a_clock(monkeypatch, cpu_linear, 3, 7, 2, 9, 4, 8)
    order = []
    found = cpu_linear.fastest_of(3, lambda: order.append("a"), lambda: order.append("b"))
    assert found == [2, 7]
    assert order == ["a", "b"] * 3


# cpu_step


def rows_of(table):
    """(first line, {name: (share, calls a step, us a call, ms a step)}) of a printed table."""
    first, _, *lines = table.splitlines()
    split = [line.replace(",", "").replace("%", "").split(maxsplit=4) for line in lines]
    return first, {name: tuple(map(float, numbers)) for *numbers, name in split}


@needs_native
def test_a_steps_time_is_told_by_function(monkeypatch, capsys, model):
    options = ["--batch", "2", "--prompt", "9", "--new", "4", "--lines", "50"]
    assert called(monkeypatch, cpu_step, "--model", model, *options) == 0
    _, reading, decoding = capsys.readouterr().out.split("\n\n")
    assert reading.startswith("reading 2 requests of 9 tokens: 1 steps, ")
    assert decoding.startswith("decoding 2 requests of 9 tokens: 3 steps, ")
    for table in (reading, decoding):
        first, rows = rows_of(table)
        shares = [share for share, *_ in rows.values()]
        assert sum(shares) == pytest.approx(100, abs=1)
        assert shares == sorted(shares, reverse=True)
        calls = {name: number for name, (_, number, _, _) in rows.items()}
        # Three layers with two norms each, and 97 tokens to choose from.
        parts = (name.replace(",", "") for name in PARTS)  # commas were dropped above
        assert calls == {
            **dict.fromkeys(parts, 3),
            "norms": 6,
            **dict.fromkeys(("rms_norm", "linear 48 x 97", cpu_step.REST), 1),
        }
        milliseconds = float(first.split(" ms")[0].split()[-1])
        assert sum(row[-1] for row in rows.values()) == pytest.approx(milliseconds, abs=0.2)


@needs_native
def test_by_parts_each_function_is_called_from_python(monkeypatch, capsys, model):
    options = ["--by-parts", "--batch", "1", "--prompt", "9", "--new", "3", "--lines", "50"]
    assert called(monkeypatch, cpu_step, "--model", model, *options) == 0
    for table in capsys.readouterr().out.split("\n\n")[1:]:
        # Three layers of 48 with 4 heads and 2 KV heads of 16, and 97 tokens to choose from.
        assert {name: number for name, (_, number, _, _) in rows_of(table)[1].items()} == {
            **{f"linear {shape}": 3 for shape in ("48 x 128", "64 x 48", "48 x 160", "80 x 48")},
            **dict.fromkeys(("attend", "rotary_store_kv", "silu_and_mul"), 3),
            "add_rms_norm": 6,
            **dict.fromkeys(("rms_norm", "linear 48 x 97", cpu_step.REST), 1),
        }


@needs_native
def test_an_environment_that_wants_other_kernels_is_no_step_of_ours(monkeypatch, capsys):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "torch")
    assert called(monkeypatch, cpu_step) == 2
    assert capsys.readouterr().out == "benchmarks.cpu_step: MINIVLLM_ATTENTION is torch\n"


@needs_native
def test_the_costliest_lines_are_shown_and_no_steps_are_no_table(monkeypatch, capsys, model):
    options = ["--batch", "1", "--prompt", "5", "--new", "1", "--lines", "2"]
    assert called(monkeypatch, cpu_step, "--model", model, *options) == 0
    _, reading, decoding = capsys.readouterr().out.split("\n\n")
    assert len(rows_of(reading)[1]) == 2
    assert decoding == "decoding 1 requests of 5 tokens: no steps\n"


@needs_native
def test_functions_that_are_timed_compute_the_same_and_are_put_back():
    library = native.library()
    before = dict(vars(library))
    weight, rows = torch.randn(20, 12), torch.randn(3, 12)
    expected = NativeLinear(library, weight, None)(rows)
    with pytest.raises(KeyboardInterrupt), cpu_step.timed(library) as times:
        assert torch.equal(NativeLinear(library, weight, None)(rows), expected)
        raise KeyboardInterrupt
    assert vars(library) == before
    assert times.calls == {"linear 12 x 20": 1}
    assert 0 < times.seconds["linear 12 x 20"] < 1


def test_calls_add_up_by_function_and_by_shape_until_they_are_forgotten():
    times = cpu_step.Times()
    nap = cpu_step.Timed(lambda seconds: sleep(seconds) or "rested", "nap", times)
    assert [nap(0.01), nap(0.02)] == ["rested", "rested"]
    linear = cpu_step.Timed(lambda *arguments: arguments, "linear", times)
    assert linear(1, 2, 3, 4, 5, 576, 1_536) == (1, 2, 3, 4, 5, 576, 1_536)
    assert times.calls == {"nap": 2, "linear 576 x 1,536": 1}
    assert times.seconds["nap"] >= 0.03
    times.forget()
    assert times.calls == times.seconds == {}


def test_a_layer_tells_the_time_of_its_parts_alone():
    times = cpu_step.Times()

    def attend(first, seconds):
        assert first == "first"
        told = (ctypes.c_double * len(PARTS)).from_address(seconds)
        told[0], told[3] = 0.25, 0.5
        return 0

    layer = cpu_step.Timed(attend, "layer_attend", times)
    assert [layer("first", None), layer("first", None)] == [0, 0]
    assert times.calls == {PARTS[0]: 2, PARTS[3]: 2}
    assert times.seconds == {PARTS[0]: 0.5, PARTS[3]: 1.0}


# cpu_attention


@pytest.fixture
def small_cases(monkeypatch):
    own = Case("own", 3, 70, 1)
    shared = own._replace(name="shared", num_shared=64)
    cases = (Case("prompt", 1, 20, 20), own, shared, Case("suffixes", 2, 69, 5, 64))
    changes = {"OWN": own, "SHARED": shared, "CASES": cases, "NUM_LAYERS": 2}
    for name, value in {**changes, "BYTES_BETWEEN": 4_000}.items():
        monkeypatch.setattr(cpu_attention, name, value)


@needs_native
def test_both_ways_attend_alike(small_cases):
    blocks = list(range(15))[::-1]
    cache, other = cpu_attention.new_caches(blocks)
    assert cache[0].data_ptr() != other[0].data_ptr()
    for case in cpu_attention.CASES:
        sequences, query = cpu_attention.sequences_of(case, blocks), cpu_attention.query_of(case)
        plain, ours = (
            begin(sequences, cache).attend(query, cache) for begin in cpu_attention.WAYS.values()
        )
        assert plain.shape == (case.num_sequences * case.num_rows, 9, 64)
        torch.testing.assert_close(ours, plain, msg=lambda text, name=case.name: f"{name}: {text}")


@needs_native
def test_the_table_of_attention_has_every_case_and_both_ways(monkeypatch, capsys, small_cases):
    assert called(monkeypatch, cpu_attention, "--rounds", "2") == 0
    _, table = capsys.readouterr().out.split("\n\n")
    _, *rows, last = table.splitlines()
    assert [row.split()[0] for row in rows] == ["prompt", "own", "shared", "suffixes"]
    for row in rows:
        plain, ours, ratio = (float(each.replace(",", "")) for each in row.split()[1:])
        assert min(plain, ours) > 0
        assert (plain - 0.5) / (ours + 0.5) - 0.1 < ratio < (plain + 0.5) / (ours - 0.5) + 0.1
    assert "times as fast with shared blocks" in last


@needs_native
def test_a_call_takes_what_its_layers_took_in_the_lowest_round(monkeypatch, small_cases):
    blocks = list(range(15))
    monkeypatch.setattr(cpu_attention, "CASES", (cpu_attention.OWN,))
    a_clock(monkeypatch, cpu_attention, 10, 4, 6, 8)
    found = cpu_attention.measure(cpu_attention.new_caches(blocks), blocks, num_rounds=2)
    assert found == {"own": {"torch": 3e6, "ours": 2e6}}


@needs_native
def test_other_bits_are_an_error(monkeypatch, capsys, small_cases):
    monkeypatch.setattr(cpu_attention, "copy_shared", lambda *_: None)
    assert called(monkeypatch, cpu_attention, "--rounds", "1") == 1
    assert (
        capsys.readouterr().out == "benchmarks.cpu_attention: other bits where blocks are shared\n"
    )


def test_shared_blocks_are_those_of_the_first_sequence(monkeypatch):
    monkeypatch.setattr(cpu_attention, "BLOCK_SIZE", 4)
    case = Case("", 2, 9, 1, num_shared=4)
    first, second = cpu_attention.sequences_of(case, [5, 2, 0, 7, 4, 1])
    assert (first.block_table, second.block_table) == ([5, 2, 0], [5, 4, 1])
    assert (second.start, second.end) == (8, 9)


def test_the_cases_share_and_own_the_same_number_of_keys():
    own, shared = cpu_attention.OWN, cpu_attention.SHARED
    assert own._replace(name=shared.name, num_shared=1_024) == shared
    assert {own, shared} < set(cpu_attention.CASES)
