"""Which layer goes with which backend, and that it changes no bit."""

import pytest
import torch

from kernels.native.layer import NativeLayer
from minivllm.model.decoder import Decoder
from minivllm.model.layer import TORCH_LAYER, DecoderLayer, select_layer
from minivllm.model.linear import select_linear
from minivllm.model.loader import Checkpoint, ModelFolder
from minivllm.model.ops import select_ops
from tests.alignment import RecordingEngine
from tests.native import library, needs_native
from tests.native_checks import Shape, assert_same_bits, layer_parts
from tests.tiny_models import VARIANTS, save_model


def decoder_of(folder, backend):
    opened = ModelFolder.open(folder)
    checkpoint = Checkpoint(opened.path, torch.device("cpu"), torch.float32)
    kernels = (select_linear(backend), select_ops(backend), select_layer(backend))
    return Decoder(opened.config, checkpoint, *kernels)


def test_plain_torch_computes_a_layer_by_its_parts(tmp_path):
    save_model("llama", tmp_path)
    layers = decoder_of(tmp_path, "torch")._layers
    assert {type(layer) for layer in layers} == {DecoderLayer}
    assert select_layer("torch").func is TORCH_LAYER.func is DecoderLayer


@needs_native
@pytest.mark.parametrize("variant", VARIANTS)
def test_c_computes_it_in_two_calls(variant, tmp_path):
    save_model(variant, tmp_path)
    assert {type(layer) for layer in decoder_of(tmp_path, "native")._layers} == {NativeLayer}


@needs_native
def test_c_computes_it_by_its_parts_where_a_panel_does_not_end_with_the_gates():
    whole, odd = (layer_parts(library(), Shape(inner=inner)) for inner in (32, 40))
    assert isinstance(select_layer("native")(whole), NativeLayer)
    by_parts = select_layer("native")(odd)
    assert isinstance(by_parts, DecoderLayer)
    assert by_parts.ops.rms_norm.__module__ == "kernels.native.ops"


PROMPTS = {"a": list(range(2, 90)), "b": list(range(2, 70)), "c": [5, 6, 7]}


@needs_native
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_engine_gives_the_same_bits_either_way(variant, tmp_path, monkeypatch):
    save_model(variant, tmp_path)
    in_two_calls = RecordingEngine(tmp_path, block_size=8)
    outputs = in_two_calls.run(PROMPTS, 12)
    monkeypatch.setattr(NativeLayer, "takes", staticmethod(lambda parts: False))
    by_parts = RecordingEngine(tmp_path, block_size=8)
    assert {name: output.token_ids for name, output in by_parts.run(PROMPTS, 12).items()} == {
        name: output.token_ids for name, output in outputs.items()
    }
    for name in PROMPTS:
        assert_same_bits(in_two_calls.logits(name, 12), by_parts.logits(name, 12), name)
