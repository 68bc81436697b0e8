"""Each benchmark once on tiny sizes on a CPU, its timer replaced by one that only calls.

TRITON_INTERPRET=1 python -m pytest tests/gpu_bench_interpreted.py
"""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu import align, tune
from benchmarks.gpu.attention import Heads, decode_figures, prefill_figures
from benchmarks.gpu.first_token import first_token_figures
from benchmarks.gpu.fused import fused_cases, fused_figures
from benchmarks.gpu.report import Report
from benchmarks.gpu.throughput import engine_rate, make_engine, transformers_rate, warm_up
from benchmarks.gpu.tune import Work, split_figures, tile_figures
from benchmarks.gpu.workload import QWEN3_06B, WorkItem, save_random_model
from kernels.launch import Tile
from kernels.paged_attention import paged_attention
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


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def call_each(functions):
    """A timer: every function takes a millisecond."""
    return {name: 1.0 for name, function in functions.items() if function() is not None}


def test_decode_attention_is_measured_in_bytes_beside_a_copy():
    (figure,) = decode_figures(call_each, CPU, torch.float32, ((Heads(4, 2, 16), 2, 40),), 1000)
    assert figure.setting == "batch 2, context 40, 4/2 heads of 16"
    assert figure.ours == pytest.approx(2 * 2 * 40 * 2 * 16 * 4 / 1e6)
    assert figure.theirs == pytest.approx(2000 / 1e6)


def test_prefill_attention_is_measured_in_operations_beside_sdpa_and_a_matmul():
    cases = ((Heads(4, 2, 16), 2, 20),)
    found = list(prefill_figures(call_each, CPU, torch.float32, cases, 8, SDPBackend.MATH))
    assert [figure.beside for figure in found] == ["SDPA, flash", "matmul of 8"]
    assert found[0].share == pytest.approx(1.0)
    assert found[1].theirs == pytest.approx(2 * 8**3 / 1e9)


DECODE = Work(Heads(4, 2, 16), 2, 39, 40)


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

    found = list(fused_figures(call_each, CPU, torch.float32, (3,), compile_function))
    assert [figure.measure for figure in found] == [
        "RMSNorm",
        "residual + RMSNorm",
        "SiLU times up",
        "head norms + rotary + KV store",
    ]
    assert len(compiled) == 4
    assert {figure.ours for figure in found} == {1000.0}


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


def test_the_first_token_is_timed_cold_and_with_the_prefix_cached(random_model):
    engine = make_engine(random_model, CPU, num_kv_blocks=40)
    model = transformers_model(random_model)
    cold, warm = first_token_figures(engine, model, CPU, 32, 4, rounds=1)
    assert engine.stats()["prefix_hit_tokens"] == 2 * 32
    assert (cold.beside, warm.beside) == ("transformers", "cold")
    assert warm.theirs == cold.ours


def test_alignment_holds_in_float32_and_half_precision(tmp_path):
    save_model("qwen3", tmp_path)
    report = Report("align")
    prompts = [[5], list(range(40))]
    align.align_model("qwen3", tmp_path, prompts, CPU, report, ("float32", "bfloat16"))
    assert report.problems == []
    assert [figure.setting for figure in report.figures] == [
        f"qwen3, {dtype}, {cache}"
        for dtype in ("float32", "bfloat16")
        for cache in ("cold", "warm")
    ]
    assert report.figures[2].theirs > 0


def test_alignment_tells_a_wrong_engine(tmp_path, monkeypatch):
    save_model("qwen3", tmp_path)
    other = tmp_path / "other"
    save_model("qwen3", other, seed=1)
    wrong = transformers_model(other)
    monkeypatch.setattr(align, "load_transformers", lambda *_: wrong)
    report = Report("align")
    align.align_model("qwen3", tmp_path, [[5, 6, 7]], CPU, report, ("float32",))
    assert any("tokens are not transformers'" in problem for problem in report.problems)
