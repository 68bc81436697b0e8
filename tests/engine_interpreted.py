"""The engine on our own kernels gives the same tokens and logits as on torch.

Runs in Triton's interpreter, in a process of its own that test_triton_backend.py starts:

    TRITON_INTERPRET=1 python -m pytest tests/engine_interpreted.py
"""

import random

import pytest
import torch

from kernels.decode_graphs import DecodeGraphs
from kernels.split_attention import split_attention
from minivllm import EngineConfig, SamplingParams
from minivllm.core.batch import ScheduledSequence
from minivllm.errors import RunnerError
from minivllm.model.runner import ModelRunner
from tests.alignment import ATOL, BLOCK_SIZE, RecordingEngine
from tests.tiny_models import VOCAB_SIZE, one_thread, save_model

CPU = torch.device("cpu")
NUM_TOKENS = 6

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module", autouse=True)
def _single_threaded():
    with one_thread():
        yield


def prompts(*lengths):
    rng = random.Random(str(lengths))
    return {f"r{length}": [rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths}


def compare(folder, prompts, num_tokens=NUM_TOKENS, runs=1, prepare=None, **config):
    """Run the same prompts on both backends; both outputs, and the Triton engine."""
    torch_engine = RecordingEngine(folder, attention_backend="torch", **config)
    engine = RecordingEngine(folder, attention_backend="triton", **config)
    if prepare:
        prepare(engine.engine.runner)
    for _ in range(runs):
        outputs = engine.run(prompts, num_tokens)
        expected = torch_engine.run(prompts, num_tokens)
        for name in prompts:
            assert outputs[name].token_ids == expected[name].token_ids, name
            assert outputs[name].num_cached_tokens == expected[name].num_cached_tokens, name
            torch.testing.assert_close(
                engine.logits(name, num_tokens),
                torch_engine.logits(name, num_tokens),
                atol=ATOL,
                rtol=ATOL,
            )
    return outputs, engine.engine


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """Norms on q and k, head size 20: no power of two."""
    folder = tmp_path_factory.mktemp("qwen3")
    save_model("qwen3", folder)
    return folder


def test_recordings_are_made_on_a_gpu_only_and_for_every_batch_that_may_run(qwen3, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", object)
    config = EngineConfig(
        model=str(qwen3), device="cpu", attention_backend="triton", max_num_seqs=100
    )
    runner = ModelRunner(config)
    assert runner._decode_graphs(300, BLOCK_SIZE) is None
    runner.device = torch.device("cuda")
    graphs = runner._decode_graphs(300, BLOCK_SIZE)
    decodes = [ScheduledSequence("r", [1], 0, 1, [i], SamplingParams()) for i in range(101)]
    assert graphs.fits(decodes[:100])
    assert not graphs.fits(decodes)


@pytest.mark.parametrize("variant", ["llama", "llama3-rope", "llama-biases", "qwen2"])
def test_every_architecture_gives_the_torch_backends_tokens_and_logits(tmp_path, variant):
    save_model(variant, tmp_path)
    compare(tmp_path, prompts(1, 18), num_tokens=4)


def test_a_prefix_hit_gives_the_torch_backends_tokens_and_logits(qwen3):
    outputs, _ = compare(qwen3, prompts(21, 48), runs=2)
    assert outputs["r48"].num_cached_tokens == 2 * BLOCK_SIZE


def test_chunks_beside_decodes_give_the_torch_backends_tokens_and_logits(qwen3):
    _, engine = compare(qwen3, prompts(5, 40), max_num_batched_tokens=16)
    assert engine.stats()["steps"] > NUM_TOKENS


def test_split_contexts_give_the_torch_backends_tokens_and_logits(qwen3, monkeypatch):
    split = []

    def watched(*inputs, num_splits, **options):
        split.append(inputs[3].max_query_len)
        return split_attention(*inputs, num_splits=num_splits, **options)

    monkeypatch.setattr("kernels.attention.choose_num_splits", lambda *_: 4)
    monkeypatch.setattr("kernels.attention.split_attention", watched)
    outputs, _ = compare(qwen3, prompts(21, 48), runs=2, max_num_batched_tokens=20)
    assert outputs["r48"].num_cached_tokens == 2 * BLOCK_SIZE
    assert {length > 1 for length in split} == {False, True}


def test_preemption_gives_the_torch_backends_tokens_and_logits(qwen3):
    # Room for both prompts, and none for what they generate.
    _, engine = compare(qwen3, prompts(15, 32), num_kv_blocks=3)
    assert engine.stats()["preemptions"] > 0


def test_half_precision_runs_and_stays_near_single_precision(qwen3):
    # The interpreter is right for float16, not for bfloat16's matrix products.
    half = RecordingEngine(qwen3, attention_backend="triton", dtype="float16")
    single = RecordingEngine(qwen3, attention_backend="torch")
    half.run(prompts(21), 1)
    single.run(prompts(21), 1)
    expected = single.logits("r21", 1)
    error = (half.logits("r21", 1) - expected).abs().max()
    assert 0 < error < 0.02 * expected.abs().max()


def recording_with(record):
    """What gives a runner the recordings of a GPU, with a stand-in that records."""

    def prepare(runner):
        runner._graphs = DecodeGraphs(
            lambda: record,
            device=CPU,
            num_blocks=len(runner._kv[0].keys),
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_context_len=runner.max_model_len,
        )

    return prepare


def test_decodes_through_the_graphs_bookkeeping_give_the_same_tokens_and_logits(qwen3):
    calls = []

    def record(compute):
        compute()  # as a CudaGraphRecorder does

        def replay():
            calls.append(None)
            return compute()

        return replay

    # Three sequences run as four; a fourth row is padding.
    _, engine = compare(qwen3, prompts(3, 17, 20), prepare=recording_with(record))
    assert len(calls) == engine.stats()["steps"] - 1  # all but the prefill


def test_where_recordings_fail_the_tokens_and_logits_are_the_same_without_them(qwen3, caplog):
    def record(compute):
        compute()
        raise RuntimeError("the recording was not finished")

    _, engine = compare(qwen3, prompts(3, 17), prepare=recording_with(record))
    assert caplog.messages == [
        "decode steps run without recordings: the recording was not finished"
    ]
    assert engine.stats()["steps"] > 2


def test_new_weights_are_not_computed_with_the_old_recordings(qwen3, tmp_path):
    forgotten = []
    engine = RecordingEngine(qwen3, attention_backend="triton").engine
    engine.runner._graphs = type("Graphs", (), {"forget": lambda self: forgotten.append(True)})()
    save_model("qwen3", tmp_path, seed=5)
    engine.load_weights(str(tmp_path))
    assert forgotten == [True]


def test_a_table_outside_the_pool_is_a_runner_error_and_the_request_goes_on(qwen3):
    recording = RecordingEngine(qwen3, attention_backend="triton")
    engine = recording.engine
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=1, ignore_eos=True))
    execute = engine.runner.execute

    def execute_wrongly(batch):
        table = batch.sequences[0].block_table
        right, table[:] = list(table), [10_000] * len(table)
        try:
            return execute(batch)
        finally:
            table[:] = right

    engine.runner.execute = execute_wrongly
    with pytest.raises(RunnerError, match=r"KernelInputError: sequence 0 has block 10000"):
        engine.step()
    engine.runner.execute = execute
    (output,) = engine.step()
    assert len(output.token_ids) == 1
