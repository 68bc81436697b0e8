"""What of the GPU benchmarks needs no GPU: the workload, shares, the table, the refusal."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import align
from benchmarks.gpu.align import broken_promises, judge
from benchmarks.gpu.attention import Heads, causal_flops, decode_bytes
from benchmarks.gpu.bench import aims, attempt
from benchmarks.gpu.launched_tests import Outcome, add_outcomes, outcome_of
from benchmarks.gpu.report import Figure, Report, markdown_table
from benchmarks.gpu.tune import best_of_each, decode_tiles, prefill_tiles, take
from benchmarks.gpu.workload import QWEN3_06B, make_workload, weight_shapes
from kernels.paged_attention import attention_tile
from tests.interpreter import ROOT, needs_interpreter, run_in_interpreter
from tests.tiny_models import VARIANTS


def rate(ours, theirs, unit="GB/s", measure="m", setting="s", beside="copy"):
    return Figure(measure, setting, unit, ours, beside, theirs)


def test_the_workload_is_256_requests_of_100_to_1024_tokens_and_the_same_every_time():
    workload = make_workload()
    assert len(workload) == 256
    for lengths in ([len(w.prompt) for w in workload], [w.num_tokens for w in workload]):
        assert 100 <= min(lengths) < 120
        assert 1000 < max(lengths) <= 1024
        assert 500 < sum(lengths) / 256 < 625
    assert make_workload() == workload
    assert make_workload(seed=1) != workload


def test_the_random_model_has_the_size_of_qwen3_06b_and_fits_two_gigabytes():
    num_values = sum(torch.Size(shape).numel() for shape in weight_shapes(QWEN3_06B).values())
    assert num_values == 596_049_920
    assert num_values * torch.bfloat16.itemsize < 2e9


def test_a_decode_reads_every_key_and_value_once():
    # 2 sequences x 10 positions x 3 KV heads x 4 channels, keys and values, 2 bytes each
    assert decode_bytes(Heads(9, 3, 4), 2, 10, 2) == 2 * 10 * 3 * 4 * 2 * 2


def test_a_causal_prefill_counts_only_the_pairs_that_are_seen():
    # 3 positions: 1 + 2 + 3 = 6 pairs; two products, each 2 operations a channel
    assert causal_flops(Heads(2, 1, 8), 1, 3) == 6 * 2 * 2 * 2 * 8
    assert causal_flops(Heads(2, 1, 8), 5, 3) == 5 * causal_flops(Heads(2, 1, 8), 1, 3)


def test_a_share_says_how_many_times_as_fast_for_rates_and_for_times():
    assert rate(80.0, 100.0).share == pytest.approx(0.8)
    assert rate(2.0, 5.0, unit="ms").share == pytest.approx(2.5)
    assert rate(2.0, None).share is None
    assert rate(None, 2.0).share is None


def test_the_table_rounds_to_three_digits_and_says_what_was_not_measured():
    table = markdown_table(
        [
            rate(3456.7, 4000.0, setting="batch 64, context 4,096"),
            Figure("tokens", "s", "ms", None, "transformers", 0.01234, "out of memory"),
        ]
    )
    assert table.splitlines()[2:] == [
        "| m | batch 64, context 4,096 | 3,460 GB/s | copy 4,000 GB/s | 0.86 |",
        "| tokens | s | not measured: out of memory | transformers 0.0123 ms |  |",
    ]


def test_the_json_holds_card_versions_figures_and_shares(tmp_path):
    report = Report("bench", [rate(80.0, 100.0)], ["a problem"])
    report.write(tmp_path / "new" / "gpu.json", "a card", 12.34)
    content = json.loads((tmp_path / "new" / "gpu.json").read_text())
    assert (content["card"], content["part"], content["seconds"]) == ("a card", "bench", 12.3)
    assert content["versions"]["torch"] == torch.__version__
    assert content["figures"][0]["share"] == pytest.approx(0.8)
    assert content["problems"] == ["a problem"]


def test_aims_are_told_for_the_two_kernels_they_are_set_for():
    decode = {"measure": "decode attention", "setting": "batch 64, context 4,096, 32/8 heads"}
    prefill = {"measure": "prefill attention", "unit": "TFLOP/s"}
    found = aims(
        [
            rate(81.0, 100.0, **decode),
            rate(10.0, 100.0, measure="decode attention", setting="batch 1, context 4,096"),
            rate(60.0, 100.0, beside="SDPA, flash", **prefill),
            rate(10.0, 100.0, beside="matmul of 8,192", **prefill),
        ]
    )
    assert [line.endswith("aim 0.8 reached") for line in found] == [True, False]
    assert found[1].endswith("0.60 of SDPA, flash, aim 0.7 not reached")


def test_the_fastest_tile_of_each_setting_is_told_in_units_of_the_engines_own():
    own = {"unit": "ms", "beside": "the engine's 16x32 4w 5s"}
    figures = [
        rate(2.0, 1.0, measure="tile 16x32 2w 5s", setting="decode", **own),
        rate(0.8, 1.0, measure="tile 16x64 4w 5s", setting="decode", **own),
        rate(None, None, measure="tile 16x128 4w 7s", setting="decode", **own),
        rate(4.0, 5.0, measure="tile 64x32 4w 5s", setting="prefill", **own),
    ]
    assert best_of_each(figures) == [
        "decode: tile 16x64 4w 5s is 1.25 times as fast as the engine's 16x32 4w 5s",
        "prefill: tile 64x32 4w 5s is 1.25 times as fast as the engine's 16x32 4w 5s",
    ]


def test_candidates_are_taken_until_the_time_is_over():
    report = Report("tune")
    take(report, iter([rate(1.0, 2.0, measure="first"), rate(1.0, 2.0)]), deadline=0.0)
    assert [figure.measure for figure in report.figures] == ["first"]
    assert report.notes == ["out of time behind first, s"]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_engines_own_tiles_are_among_the_candidates_and_show_the_noise(head_dim):
    for num_rows, tiles in ((4, decode_tiles()), (4096, prefill_tiles())):
        assert len(set(tiles)) == len(tiles)
        for capability in (90, 100):
            assert attention_tile(head_dim, torch.bfloat16, num_rows, capability) in tiles


def test_a_section_that_fails_keeps_its_first_figures_and_is_a_problem(capsys):
    def figures():
        yield rate(1.0, 2.0)
        raise RuntimeError("no memory")

    report = Report("bench")
    attempt(report, "decode attention", figures)
    assert report.figures == [rate(1.0, 2.0)]
    assert report.problems == ["decode attention ended with RuntimeError: no memory"]


# Three tokens, vocabulary of 2; the gaps of `theirs` are 4, 0.1 and 4, its error 0.5.
EXACT = torch.tensor([[4.5, 0.0], [0.0, 0.1], [0.0, 4.0]])
THEIRS = torch.tensor([[4.0, 0.0], [0.0, 0.1], [0.0, 4.0]])


def test_a_token_may_differ_where_the_gap_is_within_the_error_and_nowhere_else():
    near = judge(torch.tensor([0, 0, 1]), THEIRS, THEIRS, EXACT)
    assert (near.num_decided, near.num_wrong) == (2, 0)
    assert list(broken_promises(near)) == []
    wrong = judge(torch.tensor([0, 1, 0]), THEIRS, THEIRS, EXACT)
    assert wrong.num_wrong == 1
    (problem,) = broken_promises(wrong)
    assert problem == "1 of 2 decided tokens are not transformers'"


@pytest.mark.parametrize(("shift", "num_problems"), [(0.9, 0), (1.1, 1)])
def test_our_error_may_be_twice_transformers_own(shift, num_problems):
    verdict = judge(torch.tensor([0, 1, 1]), EXACT - shift, THEIRS, EXACT)
    assert verdict.their_error == pytest.approx(0.5)
    assert verdict.our_error == pytest.approx(shift)
    assert len(list(broken_promises(verdict))) == num_problems


def test_a_model_for_which_there_was_no_time_is_a_problem_and_not_left_out(monkeypatch):
    monkeypatch.setattr(align, "MOST_SECONDS", -1.0)
    report = Report("align")
    align.align(torch.device("cpu"), report)
    skipped = [problem.split(" ")[0] for problem in report.problems]
    assert skipped[: len(VARIANTS)] == list(VARIANTS)
    assert report.figures == []


def test_in_float32_every_token_is_decided_however_small_the_gap():
    verdict = judge(torch.tensor([0, 0, 1]), EXACT, EXACT, EXACT)
    assert (verdict.their_error, verdict.num_decided, verdict.num_wrong) == (0.0, 3, 1)


def test_launched_tests_are_counted_by_file_and_what_failed_is_a_problem():
    report = Report("tests")
    outcomes = [
        outcome_of("a/test_x.py::one", 0, "..s\n2 passed, 1 skipped in 3s"),
        outcome_of("a/test_x.py::two", 1, "the traceback\n1 failed, 4 passed in 3s"),
        outcome_of("a/test_y.py::one", 0, "1 skipped in 3s"),
        outcome_of("a/test_y.py::two", -11, "no last line"),
        Outcome("a/test_y.py::three", 0, 0, "was not finished in time", ""),
    ]
    add_outcomes(report, outcomes)
    assert [(f.setting, f.ours, f.theirs) for f in report.figures] == [
        ("test_x", 1, 2),
        ("test_y", 0, 2),
    ]
    assert [problem.split("\n")[0] for problem in report.problems] == [
        "a/test_x.py::two ended with 1",
        "a/test_y.py::two ended with -11",
        "a/test_y.py::three was not finished in time",
    ]
    assert report.notes == ["a/test_x.py::one: 1 skipped", "a/test_y.py::one: 1 skipped"]


@pytest.mark.parametrize("part", command_line.PARTS)
def test_without_a_gpu_each_part_says_so_in_one_line_and_ends_with_2(monkeypatch, capsys, part):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command_line.main([part]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"benchmarks.gpu {part}: torch sees no CUDA GPU on this machine\n"


def test_a_missing_package_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command_line.missing_here("tests") == "the package triton is not installed"


def test_the_command_itself_ends_with_2():
    command = [sys.executable, "-m", "benchmarks.gpu", "align"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 2
    assert len(child.stderr.splitlines()) == 1


@pytest.mark.kernels
@needs_interpreter
def test_what_is_measured_runs_in_the_interpreter(tmp_path):
    run_in_interpreter("tests/gpu_bench_interpreted.py", tmp_path / "report.xml")
