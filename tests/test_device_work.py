"""What a step gives a GPU to do, on torch's meta device: tensors with a shape and no numbers.

Whoever asks such a tensor for a number gets an error, and so does who mixes it with one on the
CPU. So a forward pass that goes through waits for no device, which a CUDA graph could not record,
and has all it needs in one place. Kernels are not run: it is noted what they are launched with.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from triton.runtime.jit import JITFunction

from benchmarks.launches import launches_replaced
from kernels.decode_graphs import DecodeGraphs
from kernels.errors import KernelInputError
from minivllm import EngineConfig
from minivllm.core.batch import ScheduledSequence
from minivllm.model import runner as runner_module
from minivllm.model import sampler as sampler_module
from minivllm.model.runner import ModelRunner
from minivllm.model.sampler import Sampler
from minivllm.sampling_params import SamplingParams
from tests.tiny_models import VARIANTS, VOCAB_SIZE, save_model

META = torch.device("meta")
NUM_BLOCKS, BLOCK_SIZE = 20, 16


@pytest.fixture
def launched():
    """The names of the kernels that were launched; each launch is checked to be on one device."""
    names = []

    def launch(kernel, *arguments, **constants):
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        assert {tensor.device for tensor in tensors} == {META}, kernel.__name__
        names.append(kernel.__name__)

    with launches_replaced(launch):
        yield names


def runner_on_meta(monkeypatch, folder):
    """A runner whose weights and KV cache lie on the meta device, with our Triton kernels."""
    monkeypatch.setattr(runner_module, "select_device", lambda requested: META)
    runner = ModelRunner(EngineConfig(model=str(folder), attention_backend="triton"))
    runner.init_kv(NUM_BLOCKS, BLOCK_SIZE)
    return runner


def sequence(start, end, table):
    ids = [position % VOCAB_SIZE for position in range(end)]
    return ScheduledSequence("r", ids, start, end, table, SamplingParams())


def refuse_numbers(monkeypatch):
    """From now on no tensor may be made of numbers on the device, and no list be an index.

    On a GPU the host waits for either. On torch's meta device it would not be noticed.
    """
    make = torch.tensor

    def tensor(data, *, device="cpu", **settings):
        assert torch.device(device).type == "cpu", "made on the device: the host waits for it"
        return make(data, **settings)

    monkeypatch.setattr(torch, "tensor", tensor)
    for name in ("as_tensor", "asarray"):
        monkeypatch.setattr(torch, name, on_the_host(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_tensor", lambda own, data: tensor(data, device=META))
    for method in ("__getitem__", "__setitem__"):
        monkeypatch.setattr(torch.Tensor, method, without_lists(getattr(torch.Tensor, method)))


def on_the_host(method):
    def convert(data, *, device="cpu", **settings):
        assert torch.device(device).type == "cpu", "made on the device: the host waits for it"
        return method(data, **settings)

    return convert


def without_lists(method):
    def index(own, key, *values):
        keys = key if isinstance(key, tuple) else (key,)
        assert not any(isinstance(each, list) for each in keys), "a list: the host waits for it"
        return method(own, key, *values)

    return index


MIXED = [sequence(0, 21, [3, 7]), sequence(32, 40, [1, 2, 9]), sequence(17, 18, [4, 5])]
# As the scheduler puts them: decodes lead.
DECODES_FIRST = [sequence(17, 18, [4, 5]), sequence(5, 6, [8]), *MIXED[:2]]
DECODES = [sequence(39, 40, [1, 2, 9]), sequence(17, 18, [4, 5]), sequence(5, 6, [8])]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_step_of_prompts_chunks_and_decodes_waits_for_nothing(
    monkeypatch, launched, tmp_path, variant
):
    save_model(variant, tmp_path)
    runner = runner_on_meta(monkeypatch, tmp_path)
    refuse_numbers(monkeypatch)
    logits = runner._decoder.logits(runner._compute(MIXED))
    assert (logits.device, logits.shape) == (META, (3, VOCAB_SIZE))
    assert launched.count("paged_attention_kernel") == runner.model_config.num_layers
    assert launched.count("rotary_store_kv_kernel") == runner.model_config.num_layers
    assert launched.count("silu_and_mul_kernel") == runner.model_config.num_layers


@torch.inference_mode()
def test_decodes_beside_a_prompt_are_attended_to_by_a_program_of_their_size(
    monkeypatch, launched, tmp_path
):
    save_model("qwen3", tmp_path)
    runner = runner_on_meta(monkeypatch, tmp_path)
    refuse_numbers(monkeypatch)
    tiles = []
    run = JITFunction.run

    def noting(kernel, *arguments, **constants):
        if kernel.__name__ == "paged_attention_kernel":
            tiles.append(constants["BLOCK_M"])
        run(kernel, *arguments, **constants)

    monkeypatch.setattr(JITFunction, "run", noting)
    hidden = runner._compute(DECODES_FIRST)
    assert (hidden.device, hidden.shape[0]) == (META, 4)
    num_layers = runner.model_config.num_layers
    assert tiles == [16, 64] * num_layers
    assert launched.count("rotary_store_kv_kernel") == num_layers


@torch.inference_mode()
def test_what_a_graph_records_waits_for_nothing_and_the_next_batch_is_only_copied(
    monkeypatch, launched, tmp_path
):
    save_model("qwen3", tmp_path)
    runner = runner_on_meta(monkeypatch, tmp_path)
    recorded = []

    def record(compute):
        compute()
        hidden = compute()
        recorded.append(len(launched))
        return lambda: hidden

    runner._graphs = DecodeGraphs(
        lambda: record,
        device=META,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_context_len=runner.max_model_len,
    )
    refuse_numbers(monkeypatch)
    for _ in range(2):
        hidden = runner._compute(DECODES)
        assert (hidden.device, hidden.shape[0]) == (META, 3)
    # The second batch launched nothing: the recording stands for it.
    assert recorded == [len(launched)]
    # Once eagerly, once for the recording.
    assert launched.count("paged_attention_kernel") == 2 * runner.model_config.num_layers


@torch.inference_mode()
def test_a_layer_that_reads_a_number_back_is_found(monkeypatch, launched, tmp_path):
    save_model("qwen3", tmp_path)
    runner = runner_on_meta(monkeypatch, tmp_path)
    decode = runner._decoder.hidden

    def reads(*arguments):
        hidden = decode(*arguments)
        return hidden * float(hidden.max())

    monkeypatch.setattr(runner._decoder, "hidden", reads)
    with pytest.raises(RuntimeError, match="meta tensors"):
        runner._compute(MIXED)


@torch.inference_mode()
def test_an_operand_that_was_left_on_the_cpu_is_found(monkeypatch, launched, tmp_path):
    save_model("qwen3", tmp_path)
    runner = runner_on_meta(monkeypatch, tmp_path)
    embedding = runner._decoder._embedding
    monkeypatch.setattr(runner._decoder, "_embedding", torch.zeros(embedding.shape))
    with pytest.raises(KernelInputError, match=r"on meta, hidden is .* on cpu: they must agree"):
        runner._compute(MIXED)


MIXED_PARAMS = [
    SamplingParams(temperature=0.0, min_tokens=99, max_tokens=100),
    SamplingParams(temperature=0.7, top_k=5, seed=1),
    SamplingParams(temperature=1.2, top_p=0.9, min_p=0.1, seed=2, repetition_penalty=1.2),
]


@torch.inference_mode()
def test_the_sampler_waits_only_when_everything_is_launched(monkeypatch):
    sequences = [replace(each, params=own) for each, own in zip(DECODES, MIXED_PARAMS, strict=True)]
    drawn = []
    draw = sampler_module._draw

    def noted(*arguments):
        drawn.append(draw(*arguments))
        return drawn[-1]

    refuse_numbers(monkeypatch)
    monkeypatch.setattr(sampler_module, "_draw", noted)
    with pytest.raises(NotImplementedError, match="meta tensor") as caught:
        Sampler().sample(torch.empty(3, VOCAB_SIZE, device=META), sequences, [0])
    assert [(tokens.device, tokens.shape) for tokens in drawn] == [(META, (2,))]
    assert caught.traceback[-1].name == "sample"


@pytest.mark.parametrize("num_rows", [1, 2, 9])
@torch.inference_mode()
def test_log_probabilities_are_read_in_two_pieces_however_many_rows_ask(monkeypatch, num_rows):
    asked = replace(DECODES[0], params=SamplingParams(logprobs=4))
    silent = replace(DECODES[1], params=SamplingParams())
    refuse_numbers(monkeypatch)
    read = []
    for method in ("tolist", "item", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, method, noting(read, getattr(torch.Tensor, method)))
    logits = torch.randn(num_rows + 1, VOCAB_SIZE, generator=torch.manual_seed(0))
    chosen = Sampler().sample(logits, [silent] + [asked] * num_rows, [0])
    assert [len(token.logprobs or ()) for token in chosen] == [0] + [4] * num_rows
    # Two before: the largest logits and the tokens.
    assert len(read) == 2 + 2


def noting(calls, method):
    def call(*arguments):
        calls.append(method)
        return method(*arguments)

    return call
