"""What of the GPU benchmarks needs no GPU: the workload, shares, the table, the refusal."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu import align, dense, launched_tests, timing
from benchmarks.gpu.align import broken_promises, figures_of, judge
from benchmarks.gpu.attention import DECODES, SMALL, SMALL_BYTES, Heads, causal_flops, decode_bytes
from benchmarks.gpu.bench import aims
from benchmarks.gpu.dense import MOST_ERROR, doubt, largest_distance
from benchmarks.gpu.fused import NUM_ROWS
from benchmarks.gpu.launched_tests import Ended, Outcome, collected_from, outcome_of, tell
from benchmarks.gpu.measured import Measured, described, made_late, measured, middle
from benchmarks.gpu.recordings import check_recordings
from benchmarks.gpu.report import Figure, Report, figure_of, markdown_table, row_of
from benchmarks.gpu.tune import best_of_each, decode_tiles, prefill_tiles, take
from benchmarks.gpu.workload import QWEN3_06B, make_workload, weight_shapes
from kernels import reference
from kernels.batch import PagedBatch
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
            Figure("error", "s", "", 0.5, "transformers", None),
        ]
    )
    assert table.splitlines()[2:] == [
        "| m | batch 64, context 4,096 | 3,460 GB/s | copy 4,000 GB/s | 0.86 |  |",
        "| tokens | s | not measured | transformers 0.0123 ms |  | out of memory |",
        "| error | s | 0.5 | transformers not measured |  |  |",
    ]


def test_a_row_shows_a_problem_before_the_note_in_one_short_line():
    figure = Figure("m", "s", "ms", 1.0, "copy", 2.0, f"a | b\n{'c' * 1000}", "off by 2 %")
    row = row_of(figure)
    assert "| PROBLEM: off by 2 %; a / b ccc" in row
    assert (row.count("|"), row.count("\n")) == (7, 0)
    assert len(row) < 320


def test_the_json_holds_card_versions_figures_and_shares(tmp_path):
    report = Report("bench", [rate(80.0, 100.0)], ["a problem"])
    report.write(tmp_path / "new" / "gpu.json", "a card", 12.34)
    content = json.loads((tmp_path / "new" / "gpu.json").read_text())
    assert (content["card"], content["part"], content["seconds"]) == ("a card", "bench", 12.3)
    assert content["versions"]["torch"] == torch.__version__
    assert content["figures"][0]["share"] == pytest.approx(0.8)
    assert content["problems"] == ["a problem"]
    assert content["finished"] is False


def test_a_file_that_is_cut_off_while_it_is_written_leaves_the_old_one_whole(tmp_path, monkeypatch):
    def cut_off(path, text):
        with path.open("w") as file:
            file.write(text[:10])
        raise KeyboardInterrupt

    path = tmp_path / "gpu.json"
    Report("bench").write(path, "a card", 1.0)
    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(KeyboardInterrupt):
        Report("bench", [rate(1.0, 2.0)]).write(path, "a card", 2.0)
    assert json.loads(path.read_text())["seconds"] == 1.0


def test_a_figure_is_printed_with_its_numbers_and_kept_when_it_is_added(capsys):
    kept = []
    report = Report("bench")
    report.keep = lambda: kept.append((len(report.figures), len(report.problems)))
    report.add(Figure("m", "s", "ms", 1.0, "copy", 2.0, problem="off by 2 %"))
    assert capsys.readouterr().out.splitlines() == [
        "| m | s | 1 ms | copy 2 ms | 2.00 | PROBLEM: off by 2 % |",
        "PROBLEM: m, s: off by 2 %",
    ]
    assert kept == [(1, 0), (1, 1)]
    report.add(Figure("m", "s", "ms", 1.0, "matmul", 2.0, problem="off by 2 %"))
    assert report.problems == ["m, s: off by 2 %"]


# A number, or why there is none


def failing(*_):
    raise RuntimeError("no memory")


def test_a_yardstick_that_fails_is_a_note_and_does_not_take_our_number_with_it():
    figure = figure_of("m", "s", "ms", measured(lambda: 2.0), "copy", measured(failing), note="n")
    assert (figure.ours, figure.theirs, figure.problem) == (2.0, None, "")
    assert figure.note.startswith("n; copy: RuntimeError('no memory') at measured.py:")


def test_that_we_fail_is_a_problem_and_the_yardstick_is_measured():
    figure = figure_of(
        "m", "s", "ms", measured(failing), "copy", measured(lambda: 2.0), problem="p"
    )
    assert (figure.ours, figure.theirs, figure.note) == (None, 2.0, "")
    assert figure.problem.startswith("p; RuntimeError('no memory') at ")


def test_an_error_is_told_in_one_line_with_its_cause_and_its_places():
    try:
        try:
            failing()
        except RuntimeError as error:
            raise ValueError(f"first\n{'x' * 10_000}last") from error
    except ValueError as error:
        text = described(error)
    assert "\n" not in text
    assert text.startswith("ValueError('first")
    assert "last') because of RuntimeError('no memory') at test_gpu_bench.py:" in text
    assert len(text) < 1000


def test_a_median_is_none_if_one_measurement_failed():
    assert middle([Measured(3.0), Measured(1.0), Measured(2.0)]) == Measured(2.0)
    assert middle([Measured(3.0), Measured(None, "why")]) == Measured(None, "why")
    assert Measured(None, "why").into(lambda ms: 1 / ms) == Measured(None, "why")


def test_a_late_function_is_made_once_and_only_when_it_is_called():
    made = []

    def make():
        made.append(1)
        return lambda: len(made)

    function = made_late(make)
    assert made == []
    assert (function(), function()) == (1, 1)
    assert measured(made_late(failing)).value is None


def test_a_function_that_fails_is_timed_once_and_the_others_in_every_round(monkeypatch):
    calls = []

    def milliseconds(function):
        calls.append(function)
        return function()

    monkeypatch.setattr(timing, "_milliseconds", milliseconds)
    times = timing.time_side_by_side({"sdpa": failing, "ours": lambda: 2.0})
    assert times["ours"] == Measured(2.0)
    assert times["sdpa"].value is None
    assert (calls.count(failing), len(calls)) == (1, 1 + timing.ROUNDS)


# Dense attention


@pytest.fixture
def inputs():
    """Two sequences, the computed ranges [3, 9) and [0, 5), blocks in disorder."""
    torch.manual_seed(0)
    batch = PagedBatch.from_host([[4, 0, 2], [3, 1]], [(3, 9), (0, 5)], num_blocks=5, block_size=4)
    keys, values = torch.randn(2, 5, 4, 2, 8)
    return torch.randn(11, 4, 8), keys, values, batch


def test_a_result_near_dense_attention_is_not_doubted(inputs):
    right = reference.paged_attention(*inputs)
    assert doubt(lambda: right, inputs) == ""
    assert doubt(lambda: right * (1 + 0.9 * MOST_ERROR), inputs) == ""
    assert doubt(lambda: right * 1.02, inputs) == "off by 2 % from dense attention"


@pytest.mark.parametrize("row", [0, 5, 6, 10])
def test_each_sequence_is_compared_for_itself_and_nan_is_far(inputs, row):
    result = reference.paged_attention(*inputs)
    result[row] *= 2
    assert largest_distance(result, inputs) > 0.1
    result[row] = math.nan
    assert doubt(lambda: result, inputs) == "off by nan % from dense attention"


def test_only_the_last_rows_of_a_long_sequence_are_compared(inputs, monkeypatch):
    monkeypatch.setattr(dense, "COMPARED_ROWS", 2)
    result = reference.paged_attention(*inputs)
    result[:4] = result[6:9].sum()
    assert doubt(lambda: result, inputs) == ""
    result[4] = 0
    assert doubt(lambda: result, inputs) != ""


def test_a_result_that_could_not_be_compared_is_doubted(inputs):
    assert doubt(failing, inputs).startswith("not compared with dense attention: RuntimeError")


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


def test_a_read_that_is_small_or_a_result_that_is_wrong_is_not_held_against_the_aim():
    decode = {"measure": "decode attention", "setting": "batch 64, context 4,096, 9/3 heads"}
    small = Figure(unit="GB/s", ours=81.0, beside="copy", theirs=100.0, note=SMALL, **decode)
    wrong = Figure(unit="GB/s", ours=81.0, beside="copy", theirs=100.0, problem="off", **decode)
    assert aims([small, wrong]) == []


def test_the_aims_own_case_is_not_small_and_those_of_134_megabytes_are():
    small = [decode_bytes(*case, item_bytes=2) < SMALL_BYTES for case in DECODES]
    assert small == [False, False, False, True, True, True]


def test_no_fused_kernel_is_timed_on_the_few_rows_of_a_decode_step():
    assert min(NUM_ROWS) >= 4096


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
    def figures():
        yield rate(1.0, 2.0, measure="first")
        time.sleep(0.02)
        yield rate(1.0, 2.0, measure="second")
        yield rate(1.0, 2.0, measure="third")

    report = Report("tune")
    take(report, "tiles, s", figures(), time.monotonic() + 0.01)
    assert [figure.measure for figure in report.figures] == ["first", "second"]
    assert report.notes == ["out of time: tiles, s"]


def test_what_comes_after_a_section_of_candidates_that_failed_is_still_measured():
    def figures():
        yield rate(1.0, 2.0)
        raise RuntimeError("no memory")

    report = Report("tune")
    take(report, "tiles", figures(), math.inf)
    take(report, "splits", iter([rate(3.0, 4.0)]), math.inf)
    assert report.figures == [rate(1.0, 2.0), rate(3.0, 4.0)]
    assert report.problems[0].startswith("tiles ended with RuntimeError('no memory') at ")
    assert report.notes == []


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_engines_own_tiles_are_among_the_candidates_and_show_the_noise(head_dim):
    for num_rows, tiles in ((4, decode_tiles()), (4096, prefill_tiles())):
        assert len(set(tiles)) == len(tiles)
        for capability in (90, 100):
            assert attention_tile(head_dim, torch.bfloat16, num_rows, capability) in tiles


# Alignment

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
    theirs = EXACT + 0.5 * torch.tensor([[1.0, -1.0], [1.0, -1.0], [1.0, -1.0]])
    verdict = judge(torch.tensor([0, 0, 1]), EXACT - shift, theirs, EXACT)
    assert verdict.theirs == pytest.approx((0.5, 0.5))
    assert verdict.ours == pytest.approx((shift, shift))
    assert len(list(broken_promises(verdict))) == num_problems


def test_one_logit_that_is_further_off_than_any_of_transformers_is_told_and_no_problem():
    ours = THEIRS.clone()
    ours[0, 0], ours[0, 1] = 5.6, 0.0
    theirs = EXACT + 0.5
    verdict = judge(torch.tensor([0, 1, 1]), ours, theirs, EXACT)
    assert verdict.ours.largest > 2 * verdict.theirs.largest
    assert verdict.ours.root_mean_square < verdict.theirs.root_mean_square
    assert list(broken_promises(verdict)) == []
    mean, largest = figures_of("s", verdict, 3)
    assert (mean.ours, mean.theirs) == (verdict.ours[1], verdict.theirs[1])
    assert (largest.ours, largest.theirs) == (verdict.ours[0], verdict.theirs[0])
    assert largest.note == "2 of 3 tokens decided, 0 wrong"


@pytest.mark.parametrize("theirs", [EXACT, THEIRS], ids=["float32", "half"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_no_number_is_a_problem(theirs, bad):
    ours = theirs.clone()
    ours[1, 1] = bad
    (problem,) = broken_promises(judge(torch.tensor([0, 1, 1]), ours, theirs, EXACT))
    assert problem == f"our error is {bad}: not all logits are numbers"


def test_nan_in_transformers_logits_does_not_let_everything_pass():
    theirs = THEIRS.clone()
    theirs[1, 1] = math.nan
    problems = list(broken_promises(judge(torch.tensor([0, 1, 1]), THEIRS, theirs, EXACT)))
    assert problems[0].startswith("no token is decided")
    assert problems[1] == "our error 0.204 is more than twice transformers' nan"


def test_that_no_token_is_decided_is_a_problem():
    theirs = EXACT.clone()
    theirs[1, 1] -= 10.0
    (problem,) = broken_promises(judge(torch.tensor([0, 0, 1]), theirs, theirs, EXACT))
    assert problem.startswith("no token is decided")


def test_a_model_for_which_there_was_no_time_is_a_problem_and_not_left_out(monkeypatch):
    monkeypatch.setattr(align, "MOST_SECONDS", -1.0)
    report = Report("align")
    align.align(torch.device("cpu"), report)
    skipped = [problem.split(" ")[0] for problem in report.problems]
    assert skipped[: len(VARIANTS)] == list(VARIANTS)
    assert report.figures == []


def test_a_model_that_fails_is_a_problem_and_the_others_are_compared(monkeypatch):
    compared = []

    def align_model(name, *_):
        compared.append(name)
        if name == "qwen2":
            raise RuntimeError("no memory")

    monkeypatch.setattr(align, "align_model", align_model)
    report = Report("align")
    align.align(torch.device("cpu"), report)
    assert compared[: len(VARIANTS)] == list(VARIANTS)
    (problem,) = report.problems
    assert problem.startswith("qwen2 ended with RuntimeError('no memory') at ")


def engine_of(device, graphs):
    return SimpleNamespace(runner=SimpleNamespace(device=torch.device(device), _graphs=graphs))


@pytest.mark.parametrize(
    ("device", "graphs", "is_problem"),
    [
        ("cpu", None, False),
        ("cuda", SimpleNamespace(num_recordings=3), False),
        ("cuda", SimpleNamespace(num_recordings=0), True),
        ("cuda", None, True),
    ],
)
def test_an_engine_that_decodes_without_recordings_on_a_gpu_is_a_problem(
    device, graphs, is_problem
):
    report = Report("bench")
    check_recordings(engine_of(device, graphs), "throughput", report)
    assert report.problems == ["throughput: decode steps ran without recordings"] * is_problem


def test_in_float32_every_token_is_decided_however_small_the_gap():
    verdict = judge(torch.tensor([0, 0, 1]), EXACT, EXACT, EXACT)
    assert (verdict.theirs.largest, verdict.num_decided, verdict.num_wrong) == (0.0, 3, 1)


def test_launched_tests_are_counted_by_file_and_what_failed_is_a_problem(capsys):
    kept = []
    report = Report("tests")
    report.keep = lambda: kept.append(sum(figure.theirs for figure in report.figures))
    outcomes = []
    for test, ended in (
        ("a/test_x.py::one", Ended(0, "..s\n2 passed, 1 skipped in 3s")),
        ("a/test_y.py::one", Ended(0, "1 skipped in 3s")),
        ("a/test_x.py::two", Ended(1, "the traceback\n1 failed, 4 passed in 3s")),
        ("a/test_y.py::two", Ended(-11, "no last line")),
        ("a/test_y.py::three", Ended(None, "...")),
    ):
        outcomes.append(outcome_of(test, ended))
        tell(report, outcomes)
    assert [(f.setting, f.ours, f.theirs) for f in report.figures] == [
        ("test_x", 1, 2),
        ("test_y", 0, 2),
    ]
    assert report.problems == [
        "a/test_x.py::two ended with 1\nthe traceback\n1 failed, 4 passed in 3s",
        "a/test_y.py::two ended with -11\nno last line",
        "a/test_y.py::three was not finished in time\n...",
    ]
    assert report.notes == ["a/test_x.py::one: 1 skipped", "a/test_y.py::one: 1 skipped"]
    assert [kept[0], kept[-1]] == [1, 4]
    assert "a/test_x.py::two: 4 passed, 0 skipped ended with 1" in capsys.readouterr().out


FOUND = f"{launched_tests.FOLDER}/test_x.py::one[1]\n{launched_tests.FOLDER}/test_x.py::one[2]\n"


@pytest.mark.parametrize(
    ("ended", "how"),
    [
        (Ended(0, ""), "found none"),
        (Ended(2, f"{FOUND}ERROR test_y.py - ImportError"), "ended with 2"),
        (Ended(None, FOUND), "was not finished in time"),
    ],
)
def test_a_collection_that_failed_is_a_problem_with_what_pytest_printed(ended, how):
    tests, problem = collected_from(ended)
    assert tests == [f"{launched_tests.FOLDER}/test_x.py::one"] * bool(ended.output)
    assert problem == f"collecting the tests {how}\n{ended.output}"


def test_a_collection_that_succeeded_is_no_problem():
    assert collected_from(Ended(0, FOUND)).problem == ""


def test_what_was_collected_runs_although_the_rest_was_not_and_one_that_raises_is_a_problem(
    monkeypatch,
):
    def run_one(test, deadline):
        if test == "a.py::two":
            raise OSError("no process")
        return Outcome(test, 1, 0, "", "")

    found = launched_tests.Collected(["a.py::one", "a.py::two", "a.py::three"], "collecting failed")
    monkeypatch.setattr(launched_tests, "collect", lambda: found)
    monkeypatch.setattr(launched_tests, "run_one", run_one)
    report = Report("tests")
    launched_tests.run_launched_tests(report)
    assert [(f.setting, f.ours, f.theirs) for f in report.figures] == [("a", 2, 2)]
    assert report.problems[0] == "collecting failed"
    assert report.problems[1].startswith("a.py::two ended with OSError('no process') at ")


# What goes to stdout stays in a buffer, unless the process is told otherwise.
PRINTS = "import sys, time; print('.F', end=''); print('a warning', file=sys.stderr);"


@pytest.mark.parametrize(
    ("then", "seconds", "problem"),
    [("time.sleep(60)", 5.0, "was not finished in time"), ("sys.exit(3)", 60.0, "ended with 3")],
)
def test_what_a_process_printed_on_both_streams_is_passed_on(monkeypatch, then, seconds, problem):
    monkeypatch.setattr(launched_tests, "PYTEST", (sys.executable, "-c", PRINTS + then))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    outcome = launched_tests.run_one("a.py::one", time.monotonic() + seconds)
    assert (outcome.problem, outcome.output) == (problem, ".Fa warning\n")


def test_on_a_gpu_a_failing_example_is_not_made_smaller_and_in_the_interpreter_it_is():
    program = "from kernel_testing import launching; print([p.name for p in launching.phases])"
    for interpreted, shrinks in (("0", False), ("1", True)):
        child = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ
            | {"TRITON_INTERPRET": interpreted, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/kernels"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "'generate'" in child.stdout
        assert ("'shrink'" in child.stdout) == shrinks


# The command line


@pytest.fixture
def card(monkeypatch):
    """As if there were a card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    # main() sets it for the process.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_part_that_raises_leaves_its_figures_on_screen_and_in_the_file(
    card, monkeypatch, capsys, tmp_path
):
    out = tmp_path / "gpu.json"

    def run_part(part, device, report):
        assert json.loads(out.read_text())["figures"] == []
        report.add(rate(80.0, 100.0))
        # A run that is killed here leaves this.
        content = json.loads(out.read_text())
        assert (len(content["figures"]), content["finished"]) == (1, False)
        raise RuntimeError("no memory")

    monkeypatch.setattr(command_line, "run_part", run_part)
    assert command_line.main(["bench", "--out", str(out)]) == 1
    content = json.loads(out.read_text())
    assert [figure["ours"] for figure in content["figures"]] == [80.0]
    assert content["problems"][0].startswith("bench ended with RuntimeError('no memory') at ")
    assert "test_gpu_bench.py:" in content["problems"][0]
    assert content["finished"] is True
    printed = capsys.readouterr().out
    assert printed.count("| m | s | 80 GB/s | copy 100 GB/s | 0.80 |  |") == 2
    assert "PROBLEM: bench ended with" in printed


def test_an_interrupted_part_leaves_its_file(card, monkeypatch, tmp_path):
    def run_part(part, device, report):
        report.notes.append("a note")
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run_part", run_part)
    with pytest.raises(KeyboardInterrupt):
        command_line.main(["bench", "--out", str(tmp_path / "gpu.json")])
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert (content["notes"], content["finished"]) == (["a note"], False)


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    card, monkeypatch, tmp_path
):
    monkeypatch.setattr(command_line, "run_part", failing)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        command_line.main(["bench", "--out", str(tmp_path / "file" / "gpu.json")])


def test_a_disk_that_is_full_for_a_while_does_not_stop_the_measuring(card, monkeypatch, tmp_path):
    def full(*_):
        raise OSError("no space left")

    def run_part(part, device, report):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full)
            report.add(rate(1.0, 2.0))
        report.add(rate(3.0, 4.0))

    monkeypatch.setattr(command_line, "run_part", run_part)
    assert command_line.main(["bench", "--out", str(tmp_path / "gpu.json")]) == 0
    assert len(json.loads((tmp_path / "gpu.json").read_text())["figures"]) == 2


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("given", "place"), [((), "build/gpu-align.json"), (("OUT=a b",), "a b/gpu-align.json")]
)
def test_make_gpu_takes_the_folder_for_the_figures(given, place):
    # Nothing of a make that may have started the tests.
    outer = {"OUT", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"}
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "-n", "gpu", "PYTHON=python3", "PART=align", *given]
    child = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert child.stdout == f'python3 -m benchmarks.gpu align --out "{place}"\n'


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
