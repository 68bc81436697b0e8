"""The runner: a scheduled batch in, tokens out, and everything the engine asks of it."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minivllm.config import EngineConfig
from minivllm.core.batch import ScheduledBatch, ScheduledSequence
from minivllm.engine import LLMEngine
from minivllm.errors import ConfigError, DeviceError, ModelError
from minivllm.model import runner as runner_module
from minivllm.model.runner import ModelRunner, select_device, select_dtype
from minivllm.sampling_params import SamplingParams
from tests.tiny_models import VOCAB_SIZE, one_thread, save_model

BLOCK_SIZE = 4
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(VOCAB_SIZE) for _ in range(length)] for length in (9, 1, 22)]
TABLES = [[7, 2, 11, 3], [5], [0, 9, 4, 10, 1, 8]]


@pytest.fixture(scope="module", autouse=True)
def _single_threaded():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, save_model("qwen3", folder)


def make_runner(folder, **config):
    runner = ModelRunner(EngineConfig(model=str(folder), device="cpu", **config))
    runner.init_kv(12, BLOCK_SIZE)
    return runner


@pytest.fixture
def runner(saved):
    return make_runner(saved[0])


def scheduled(i, start, end, num_tokens=None, **options):
    ids = PROMPTS[i][:num_tokens]
    params = options.pop("params", SamplingParams())
    return ScheduledSequence(
        f"r{i}", ids, start, end, TABLES[i], params, num_prompt_tokens=len(ids), **options
    )


def oracle_logits(model, token_ids):
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def test_it_tells_the_engine_what_the_model_is(runner):
    assert runner.vocab_size == VOCAB_SIZE
    assert runner.max_model_len == 256
    assert runner.eos_token_ids == (2,)
    assert (runner.device.type, runner.dtype) == ("cpu", torch.float32)


def test_kv_bytes_are_keys_and_values_of_every_layer_and_head(saved, runner):
    # 2 (k and v) x 3 layers x 2 heads x 20 channels x 4 bytes, for each of 16 tokens
    assert runner.kv_bytes_per_block(16) == 2 * 3 * 2 * 20 * 4 * 16
    assert make_runner(saved[0], dtype="float16").kv_bytes_per_block(16) == 2 * 3 * 2 * 20 * 2 * 16


def test_only_sequences_that_compute_their_newest_token_get_one_in_batch_order(saved, runner):
    batch = ScheduledBatch(
        [scheduled(0, 0, 9), scheduled(2, 0, 13), scheduled(1, 0, 1)]  # r2 is only chunked
    )
    tokens = runner.execute(batch)
    expected = [oracle_logits(saved[1], PROMPTS[i])[-1].argmax().item() for i in (0, 1)]
    assert [token.token_id for token in tokens] == expected


def test_a_batch_in_which_nobody_finishes_gives_no_tokens(runner):
    assert runner.execute(ScheduledBatch([scheduled(2, 0, 5)])) == []


def test_steps_of_chunks_and_decodes_give_the_oracles_token(saved, runner):
    runner.execute(ScheduledBatch([scheduled(2, 0, 13), scheduled(0, 0, 3)]))
    runner.execute(ScheduledBatch([scheduled(0, 3, 4, 4), scheduled(2, 13, 21, 21)]))
    (token,) = runner.execute(ScheduledBatch([scheduled(2, 21, 22), scheduled(0, 4, 5)]))
    assert token.token_id == oracle_logits(saved[1], PROMPTS[2])[-1].argmax().item()


@pytest.mark.parametrize("rows_at_a_time", [1, 5, 128])
def test_prompt_logprobs_are_filled_over_chunks(saved, runner, monkeypatch, rows_at_a_time):
    monkeypatch.setattr("minivllm.model.runner._SCORED_ROWS", rows_at_a_time)
    filled = [None] * 22
    options = {"params": SamplingParams(prompt_logprobs=2), "prompt_logprobs": filled}
    runner.execute(ScheduledBatch([scheduled(1, 0, 1), scheduled(2, 0, 7, **options)]))
    assert [row is None for row in filled] == [True] + [False] * 7 + [True] * 14
    runner.execute(ScheduledBatch([scheduled(2, 7, 22, **options)]))

    assert [row is None for row in filled] == [True] + [False] * 21
    logprobs = oracle_logits(saved[1], PROMPTS[2]).log_softmax(-1)
    for position, found in enumerate(filled[1:], 1):
        chosen = PROMPTS[2][position]
        best = logprobs[position - 1].topk(2).indices.tolist()
        assert set(found) == {chosen, *best}, f"position {position}"
        for token, value in found.items():
            assert value == pytest.approx(logprobs[position - 1, token].item(), abs=1e-4)


def test_generated_tokens_are_not_scored_as_prompt(runner):
    filled = [None] * 6
    sequence = ScheduledSequence(
        "r", PROMPTS[2], 0, 22, TABLES[2], SamplingParams(prompt_logprobs=0), (), 0, 6, filled
    )
    runner.execute(ScheduledBatch([sequence]))
    assert [row is None for row in filled] == [True] + [False] * 5


def test_other_weights_of_the_same_network_are_taken(runner, tmp_path):
    model = save_model("qwen3", tmp_path, seed=5)
    runner.load_weights(str(tmp_path))
    (token,) = runner.execute(ScheduledBatch([scheduled(0, 0, 9)]))
    assert token.token_id == oracle_logits(model, PROMPTS[0])[-1].argmax().item()


def test_another_network_is_refused_with_what_differs(runner, tmp_path):
    save_model("qwen3-biases", tmp_path)
    with pytest.raises(ModelError, match="head_dim is 16, not 20"):
        runner.load_weights(str(tmp_path))


@pytest.mark.parametrize("breakage", ["another network", "truncated"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    saved, runner, tmp_path, breakage
):
    save_model("qwen3-biases" if breakage == "another network" else "qwen3", tmp_path, seed=5)
    if breakage == "truncated":
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelError, match=str(tmp_path)):
        runner.load_weights(str(tmp_path))
    (token,) = runner.execute(ScheduledBatch([scheduled(0, 0, 9)]))
    assert token.token_id == oracle_logits(saved[1], PROMPTS[0])[-1].argmax().item()


def test_position_config_tells_one_rope_from_another(saved, runner, tmp_path):
    save_model("llama3-rope", tmp_path)
    other = make_runner(tmp_path)
    assert "llama3" in other.position_config.lower()
    assert runner.position_config != other.position_config
    assert runner.position_config == make_runner(saved[0]).position_config


def test_a_pool_that_no_memory_holds_is_refused_with_its_size(runner):
    with pytest.raises(ConfigError, match=r"1000000000000 KV blocks need .* bytes.*lower num_kv"):
        runner.init_kv(10**12, 16)


def test_on_a_cpu_the_pool_has_a_gibibyte_where_nobody_says(runner):
    assert runner.spare_bytes == 1 << 30


GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as its memory is asked for; `free` counts what torch keeps once it lets go."""
    memory = SimpleNamespace(free=24 * GIB, kept=6 * GIB)

    def mem_get_info(device):
        assert device.type == "cuda"
        return memory.free - memory.kept, 24 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(memory, "kept", 0))
    return memory


def on_cuda(saved, **config):
    runner = ModelRunner(EngineConfig(model=str(saved[0]), device="cpu", **config))
    runner.device = torch.device("cuda")
    # The shape of Qwen3-0.6B.
    runner.model_config = replace(
        runner.model_config, vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
        num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    runner.dtype = torch.bfloat16
    return runner


def test_on_a_gpu_the_pool_has_what_is_free_less_what_a_step_computes_in(saved, gpu):
    runner = on_cuda(saved, max_num_seqs=256, max_num_batched_tokens=8192)
    rows = 8192 * (5 * 1024 + (3 * 16 + 2 * 8) * 128 + 3 * 3072) * 2
    scores = 256 * 151_936 * 64
    assert runner.spare_bytes == int(0.9 * 24 * GIB) - rows - scores
    assert runner.spare_bytes > 18 * GIB


def test_a_pool_that_will_be_given_back_counts_as_free(saved, gpu):
    runner = on_cuda(saved)
    before = runner.spare_bytes
    runner._kv = [SimpleNamespace(nbytes=3 * GIB)] * 2, [SimpleNamespace(nbytes=2 * GIB)] * 2
    gpu.free -= 10 * GIB
    assert runner.spare_bytes == before


def test_a_tiny_model_on_a_large_gpu_does_not_get_a_hundred_million_blocks(saved, gpu):
    runner = ModelRunner(EngineConfig(model=str(saved[0]), device="cpu", block_size=4))
    runner.device = torch.device("cuda")
    assert runner.spare_bytes == (1 << 20) * runner.kv_bytes_per_block(4)


def test_a_gpu_without_room_for_a_step_is_refused(saved, gpu):
    gpu.free = GIB // 4
    config = EngineConfig(model=str(saved[0]), device="cpu")
    with pytest.raises(ConfigError, match="kv_cache_bytes is 0: a pool of 0 blocks; one block of"):
        LLMEngine(config, on_cuda(saved))


def test_an_error_of_a_gpu_is_not_taken_for_one_of_memory(saved, monkeypatch):
    runner = on_cuda(saved)

    def empty(*_, **__):
        raise raised

    monkeypatch.setattr(torch, "empty", empty)
    raised = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.init_kv(4, 16)
    raised = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ConfigError, match=r"4 KV blocks need .* bytes, more than cuda has"):
        runner.init_kv(4, 16)


def test_weights_that_a_gpu_has_no_memory_for_are_a_model_error(saved, monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner_module, "Decoder", no_room)
    with pytest.raises(ModelError, match=r"^cpu has too little memory for "):
        make_runner(saved[0])


def test_cuda_without_a_gpu_is_a_device_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        DeviceError, match=r"^device is 'cuda', but torch sees no CUDA GPU; use cpu or auto$"
    ):
        select_device("cuda")


@pytest.mark.parametrize(
    ("requested", "has_cuda", "expected"),
    [("auto", False, "cpu"), ("auto", True, "cuda"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_auto_is_cuda_where_torch_sees_one(monkeypatch, requested, has_cuda, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert select_device(requested).type == expected


@pytest.mark.parametrize(
    ("requested", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float16", "cpu", torch.float16),
        ("float32", "cuda", torch.float32),
    ],
)
def test_auto_dtype_is_float32_on_a_cpu_and_the_checkpoints_on_cuda(requested, device, expected):
    assert select_dtype(requested, torch.device(device), "bfloat16") == expected
