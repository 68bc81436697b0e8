"""Each benchmark once on tiny sizes on a CPU, its timer replaced by one that only calls.

TRITON_INTERPRET=1 python -m pytest tests/gpu_bench_interpreted.py
"""

import math
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu import align, attention, bench, tune
from benchmarks.gpu.attention import SMALL, Case, Heads, decode_figure, prefill_figures
from benchmarks.gpu.first_token import first_token_figures
from benchmarks.gpu.fused import fused_cases, fused_figures
from benchmarks.gpu.measured import measured
from benchmarks.gpu.report import Report
from benchmarks.gpu.throughput import (
    abort_all,
    engine_rate,
    make_engine,
    throughput_figure,
    transformers_rate,
    warm_up,
)
from benchmarks.gpu.tune import Work, split_figures, tile_figures
from benchmarks.gpu.workload import QWEN3_06B, WorkItem, save_random_model
from kernels.launch import Tile
from kernels.paged_attention import paged_attention
from kernels.split_attention import split_attention
from tests.tiny_models import one_thread, save_model

CPU = torch.device("cpu")
TINY = QWEN3_06B | {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module", autouse=True)
def _single_threaded():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return save_random_model(TINY, tmp_path_factory.mktemp("tiny"), CPU)


def failing(*_, **__):
    raise RuntimeError("no memory")


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def call_each(functions):
    """A timer: every function that does not fail takes a millisecond."""

    def milliseconds(function):
        assert function() is not None
        return 1.0

    return {name: measured(partial(milliseconds, function)) for name, function in functions.items()}


HEADS = Heads(4, 2, 16)
DECODED = Case(HEADS, 2, 40)
PREFILLED = Case(HEADS, 2, 20)
decode_one = partial(decode_figure, call_each, DECODED, CPU, torch.float32, 1000)
prefill_one = partial(
    prefill_figures, call_each, PREFILLED, CPU, torch.float32, 8, backend=SDPBackend.MATH
)


def test_decode_attention_is_measured_in_bytes_beside_a_copy():
    figure = decode_one()
    assert figure.setting == "batch 2, context 40, 4/2 heads of 16"
    assert figure.ours == pytest.approx(2 * 2 * 40 * 2 * 16 * 4 / 1e6)
    assert figure.theirs == pytest.approx(2000 / 1e6)
    assert (figure.note, figure.problem) == (SMALL, "")


def test_prefill_attention_is_measured_in_operations_beside_sdpa_and_a_matmul():
    found = list(prefill_one())
    assert [figure.beside for figure in found] == ["SDPA, flash", "matmul of 8"]
    assert {figure.setting for figure in found} == {"2 x 20 tokens, 4/2 heads of 16"}
    assert found[0].share == pytest.approx(1.0)
    assert found[1].theirs == pytest.approx(2 * 8**3 / 1e9)
    assert {figure.problem for figure in found} == {""}


def test_attention_is_measured_also_where_its_yardstick_fails(monkeypatch):
    monkeypatch.setattr(attention, "copying", failing)
    monkeypatch.setattr(attention, "sdpa", failing)
    flash, matmul = prefill_one()
    for figure in (decode_one(), flash):
        assert figure.ours > 0
        assert (figure.theirs, figure.problem) == (None, "")
        assert f"{figure.beside}: RuntimeError('no memory')" in figure.note
    assert matmul.share > 0


def test_a_result_that_is_wrong_at_the_timed_length_is_a_problem_of_its_figures(monkeypatch):
    right = attention.attention
    monkeypatch.setattr(attention, "attention", lambda *inputs: 1.02 * right(*inputs))
    for figure in (decode_one(), *prefill_one()):
        assert figure.problem == "off by 2 % from dense attention"
        assert figure.ours > 0


def test_a_split_decode_at_its_timed_length_equals_dense_attention(monkeypatch):
    splits = []

    def watched(*inputs, num_splits, **options):
        splits.append(num_splits)
        return split_attention(*inputs, num_splits=num_splits, **options)

    monkeypatch.setattr("kernels.attention.split_attention", watched)
    figure = decode_figure(call_each, Case(Heads(2, 1, 16), 1, 1024), CPU, torch.float32, 1000)
    assert figure.problem == ""
    assert min(splits) > 1


DECODE = Work(HEADS, 2, 39, 40)


def test_tiles_are_tried_beside_the_engines_own_and_what_cannot_start_says_why():
    tiles = [Tile(16, 32, 4, 3), Tile(24, 32, 4, 3)]
    tried, refused = tile_figures(call_each, DECODE, tiles, CPU, torch.float32)
    assert (tried.measure, tried.setting) == ("tile 16x32 4w 3s", "2 x [39, 40), 4/2 heads of 16")
    assert (tried.beside, tried.ours, tried.theirs) == ("the engine's 16x32 4w 5s", 1.0, 1.0)
    assert refused.ours is None
    assert "power of 2" in refused.note


def test_a_tile_with_another_result_is_not_timed(monkeypatch):
    def wrong(*arguments, tile):
        return paged_attention(*arguments, tile=tile) * (1.02 if tile.num_stages == 3 else 1)

    monkeypatch.setattr(tune, "paged_attention", wrong)
    (figure,) = tile_figures(call_each, DECODE, [Tile(16, 32, 4, 3)], CPU, torch.float32)
    assert (figure.ours, figure.note) == (None, "its result is off by 2 %")


def test_a_wrong_result_of_the_engines_own_is_a_problem_of_all_it_is_compared_with(monkeypatch):
    monkeypatch.setattr(
        tune, "paged_attention", lambda *inputs, tile: 1.02 * paged_attention(*inputs, tile=tile)
    )
    (figure,) = tile_figures(call_each, DECODE, [Tile(16, 32, 4, 3)], CPU, torch.float32)
    assert figure.problem == "the engine's 16x32 4w 5s: off by 2 % from dense attention"


def test_numbers_of_splits_are_tried_beside_the_engines_own():
    found = list(split_figures(call_each, DECODE, CPU, torch.float32, (1, 4)))
    assert [figure.measure for figure in found] == ["1 splits", "4 splits"]
    assert {(figure.beside, figure.ours) for figure in found} == {("the engine's 1", 1.0)}


def test_every_fused_kernel_and_its_torch_lines_give_the_same():
    torch.manual_seed(0)
    for case in fused_cases(3, CPU, torch.float32):
        ours, in_torch = case.ours(*case.arguments), case.in_torch(*case.arguments)
        torch.testing.assert_close(ours, in_torch, msg=case.name)


def test_every_fused_kernel_is_measured_beside_the_compiled_lines():
    compiled = []

    def compile_function(function):
        compiled.append(function)
        return function

    found = list(fused_figures(call_each, 3, CPU, torch.float32, compile_function))
    assert [figure.measure for figure in found] == [
        "RMSNorm",
        "residual + RMSNorm",
        "SiLU times up",
        "head norms + rotary + KV store",
    ]
    assert len(compiled) == 4
    assert {figure.ours for figure in found} == {1000.0}


def test_a_compilation_that_fails_takes_no_other_figure_with_it():
    cases = fused_cases(3, CPU, torch.float32)

    def compile_function(function):
        if function is cases[1].in_torch:
            failing()
        return failing if function is cases[2].in_torch else function

    found = list(fused_figures(call_each, 3, CPU, torch.float32, compile_function))
    assert [figure.ours for figure in found] == [1000.0] * 4
    assert [figure.theirs for figure in found] == [1000.0, None, None, 1000.0]
    for figure in found[1:3]:
        assert figure.note.startswith("torch.compile: RuntimeError('no memory')")


def test_the_engine_and_transformers_run_a_workload_of_the_random_model(random_model):
    engine = make_engine(random_model, CPU, num_kv_blocks=40)
    warm_up(engine, 5, prompt_len=3)
    before = engine.stats()["generated_tokens"]
    workload = [WorkItem([1, 2, 3], 4), WorkItem([4, 5], 6)]
    assert engine_rate(engine, workload, math.inf) > 0
    assert engine.stats()["generated_tokens"] - before == 10
    assert transformers_rate(transformers_model(random_model), workload, CPU, 60.0) > 0


def test_a_workload_out_of_time_leaves_an_empty_engine(random_model):
    engine = make_engine(random_model, CPU, num_kv_blocks=40)
    engine_rate(engine, [WorkItem([1, 2, 3], 200)], 0.01)
    assert engine.stats()["generated_tokens"] < 200
    assert not engine.has_unfinished_requests()
    assert engine.stats()["blocks_in_use"] == 0


def test_an_engine_with_a_failed_step_behind_it_can_be_emptied(random_model, monkeypatch):
    engine = make_engine(random_model, CPU, num_kv_blocks=40)
    engine.add_request("0", [1, 2, 3])
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", failing)
        with pytest.raises(RuntimeError):
            engine.step()
    abort_all(engine)
    assert not engine.has_unfinished_requests()
    assert engine.stats()["blocks_in_use"] == 0


def test_the_first_token_is_timed_cold_and_with_the_prefix_cached(random_model):
    engine = make_engine(random_model, CPU, num_kv_blocks=40)
    model = transformers_model(random_model)
    cold, warm = first_token_figures(engine, lambda: model, CPU, 32, 4, rounds=1)
    assert engine.stats()["prefix_hit_tokens"] == 2 * 32
    assert (cold.beside, warm.beside) == ("transformers", "cold")
    assert warm.theirs == cold.ours
    assert cold.share > 0


def test_the_engine_is_measured_also_where_transformers_fails(random_model):
    engine = make_engine(random_model, CPU, num_kv_blocks=40)
    cold, warm = first_token_figures(engine, failing, CPU, 32, 4, rounds=1)
    rate = throughput_figure(engine, failing, [WorkItem([1, 2, 3], 4)], CPU)
    for figure in (cold, rate):
        assert figure.ours > 0
        assert (figure.theirs, figure.problem) == (None, "")
        assert f"{figure.beside}: RuntimeError('no memory')" in figure.note
    assert warm.share > 0


@pytest.fixture
def tiny_bench(monkeypatch):
    """All of bench() on sizes that an interpreter can compute."""
    sizes = {
        "DECODES": (DECODED, DECODED._replace(num_sequences=1)),
        "PREFILLS": (PREFILLED,),
        "COPY_BYTES": 1000,
        "MATMUL_SIZE": 8,
        "NUM_ROWS": (3,),
        "QWEN3_06B": TINY,
        "MAX_MODEL_LEN": 256,
        "PREFIX_LEN": 32,
        "CONTEXT_LEN": 40,
        "NUM_REQUESTS": 3,
        "make_workload": lambda num_requests: [WorkItem([1, 2, 3], 4)] * num_requests,
        "time_side_by_side": call_each,
        "decode_figure": partial(decode_figure, dtype=torch.float32),
        "prefill_figures": partial(prefill_figures, dtype=torch.float32, backend=SDPBackend.MATH),
        "fused_figures": partial(fused_figures, compile_function=lambda function: function),
    }
    for name, value in sizes.items():
        monkeypatch.setattr(bench, name, value)


def measures(report):
    return [figure.measure for figure in report.figures]


def test_a_decode_step_that_cannot_be_timed_does_not_lose_the_throughput(tiny_bench, monkeypatch):
    checked = []
    monkeypatch.setattr(bench, "check_recordings", lambda _, setting, __: checked.append(setting))
    report = Report("bench")
    bench.bench(CPU, report)
    # Without recordings there is no part in which the host waits for one: here it is this that
    # fails, with all its requests in the engine.
    (problem,) = report.problems
    assert problem.startswith("decode step ended with AttributeError")
    assert measures(report) == [
        *["decode attention"] * 2,
        *["prefill attention"] * 2,
        "RMSNorm",
        "residual + RMSNorm",
        "SiLU times up",
        "head norms + rotary + KV store",
        "first token, cold",
        "first token, warm",
        "throughput",
    ]
    assert all(figure.share for figure in report.figures)
    assert checked == ["warm-up", "decode step", "throughput"]


def test_whatever_fails_in_the_bench_what_comes_after_it_is_measured(tiny_bench, monkeypatch):
    def failing_for_two(heads, num_sequences, *rest):
        return failing() if num_sequences == 2 else inputs(heads, num_sequences, *rest)

    inputs = attention.paged_inputs
    monkeypatch.setattr(attention, "paged_inputs", failing_for_two)
    monkeypatch.setattr(bench, "fused_figures", failing)
    monkeypatch.setattr(bench, "first_token_figures", failing)
    monkeypatch.setattr(bench, "warm_up", failing)
    monkeypatch.setattr(bench, "load_transformers", failing)
    report = Report("bench")
    bench.bench(CPU, report)
    assert measures(report) == ["decode attention", "throughput"]
    assert report.figures[1].theirs is None
    assert [problem.split(" ended with ")[0] for problem in report.problems] == [
        "decode attention, 2 x 40 tokens, 4/2 heads of 16",
        "prefill attention, 2 x 20 tokens, 4/2 heads of 16",
        "fused kernels, 3 rows",
        "first token",
        "warm-up",
        "decode step",
    ]


def test_all_sections_of_candidates_are_tried_and_the_best_of_each_is_told(monkeypatch):
    monkeypatch.setattr(tune, "time_side_by_side", call_each)
    monkeypatch.setattr(tune, "sections", partial(float32_sections, tune.sections))
    monkeypatch.setattr(tune, "decode_tiles", lambda: [Tile(16, 32, 4, 3)])
    monkeypatch.setattr(tune, "prefill_tiles", lambda: [Tile(64, 32, 4, 3)])
    monkeypatch.setattr(tune, "DECODES", (DECODE._replace(num_sequences=0), DECODE))
    monkeypatch.setattr(tune, "SPLITS", (DECODE,))
    monkeypatch.setattr(tune, "PREFILLS", (Work(HEADS, 1, 0, 40),))
    report = Report("tune")
    tune.tune(CPU, report)
    # One without sequences has no inputs.
    (problem,) = report.problems
    assert problem.startswith("tiles, 0 x [39, 40), 4/2 heads of 16 ended with ")
    splits = [f"{2**power} splits" for power in range(7)]
    assert measures(report) == ["tile 16x32 4w 3s", *splits, "tile 64x32 4w 3s"]
    assert len(report.notes) == 3


def float32_sections(sections, timer, device, _):
    return sections(timer, device, torch.float32)


def test_alignment_holds_in_float32_and_half_precision(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(align, "check_recordings", lambda _, setting, __: checked.append(setting))
    save_model("qwen3", tmp_path)
    report = Report("align")
    prompts = [[5], list(range(40))]
    align.align_model("qwen3", tmp_path, prompts, CPU, report, ("float32", "bfloat16"))
    assert report.problems == []
    settings = [
        f"qwen3, {dtype}, {cache}"
        for dtype in ("float32", "bfloat16")
        for cache in ("cold", "warm")
    ]
    assert checked == settings
    assert [(figure.setting, figure.measure) for figure in report.figures] == [
        (setting, f"{which} logit error")
        for setting in settings
        for which in ("root mean square", "largest")
    ]
    assert report.figures[4].theirs > 0


def test_a_precision_that_fails_is_a_problem_and_the_next_one_is_compared(tmp_path):
    save_model("qwen3", tmp_path)
    report = Report("align")
    align.align_model("qwen3", tmp_path, [[5, 6]], CPU, report, ("float13", "float32"))
    assert report.problems[0].startswith("qwen3, float13 ended with AttributeError")
    assert {figure.setting for figure in report.figures} == {
        "qwen3, float32, cold",
        "qwen3, float32, warm",
    }


def test_alignment_tells_a_wrong_engine(tmp_path, monkeypatch):
    save_model("qwen3", tmp_path)
    other = tmp_path / "other"
    save_model("qwen3", other, seed=1)
    wrong = transformers_model(other)
    monkeypatch.setattr(align, "load_transformers", lambda *_: wrong)
    report = Report("align")
    align.align_model("qwen3", tmp_path, [[5, 6, 7]], CPU, report, ("float32",))
    assert any("tokens are not transformers'" in problem for problem in report.problems)
