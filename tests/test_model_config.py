"""What config.json says: every spelling is read, and what is not computed is refused by name."""

import json
import math

import pytest
import torch

from minivllm.errors import ModelError, UnsupportedModelError
from minivllm.model.model_config import (
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    eos_token_ids,
    read_json,
    weight_dtype,
)
from minivllm.model.rope import inverse_frequencies

LLAMA3_VALUES = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(architecture="LlamaForCausalLM", **changes):
    fields = {
        "architectures": [architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        **changes,
    }
    return {name: value for name, value in fields.items() if value != "missing"}


def read(architecture="LlamaForCausalLM", **changes):
    return ModelConfig.from_json(config(architecture, **changes))


def test_every_size_is_read():
    found = read()
    sizes = (found.vocab_size, found.hidden_size, found.intermediate_size, found.num_layers)
    heads = (found.num_heads, found.num_kv_heads, found.head_dim)
    assert sizes == (100, 64, 96, 2)
    assert heads == (4, 2, 16)
    assert (found.max_position_embeddings, found.rms_norm_eps) == (512, 1e-5)


@pytest.mark.parametrize(
    ("architecture", "head_dim", "expected"),
    [
        ("LlamaForCausalLM", "missing", 16),
        ("LlamaForCausalLM", None, 16),
        ("LlamaForCausalLM", 32, 32),
        ("Qwen2ForCausalLM", "missing", 16),
        ("Qwen3ForCausalLM", "missing", 128),
        ("Qwen3ForCausalLM", 20, 20),
    ],
)
def test_head_dim_is_explicit_or_derived(architecture, head_dim, expected):
    assert read(architecture, head_dim=head_dim).head_dim == expected


@pytest.mark.parametrize(
    ("architecture", "flags", "expected"),
    [
        ("LlamaForCausalLM", {}, (False, False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_follow_the_architecture(architecture, flags, expected):
    found = read(architecture, **flags)
    assert (found.qkv_bias, found.output_bias, found.mlp_bias, found.qk_norm) == expected


@pytest.mark.parametrize("kv_heads", ["missing", None])
def test_a_llama_without_kv_heads_has_as_many_as_query_heads(kv_heads):
    assert read(num_key_value_heads=kv_heads).num_kv_heads == 4


def test_model_type_stands_in_for_missing_architectures():
    assert read(architectures="missing", model_type="qwen2").qkv_bias


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({}, RopeConfig(10_000.0)),
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 5e5}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, RopeConfig(5e5)),
    ],
)
def test_both_spellings_of_the_default_rope_are_read(spelling, expected):
    assert read(**spelling).rope == expected


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_VALUES}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_VALUES}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_VALUES}},
    ],
)
def test_all_three_spellings_of_llama3_rope_are_read(spelling):
    assert read(**spelling).rope == RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ["MistralForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["SequenceClassification"]),
        ({"architectures": None, "model_type": "gpt2"}, ["gpt2", "LlamaForCausalLM"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear", "default, llama3"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["yarn", "default, llama3"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, ["each layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "full attention"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "float32"]),
    ],
)
def test_what_is_not_computed_is_refused_by_name_with_what_is_supported(changes, words):
    with pytest.raises(UnsupportedModelError) as refusal:
        read(**changes)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "missing"}, "hidden_size is None"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers is '12'"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, which is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rope_parameters": "llama3"}, "rope parameters are 'llama3'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is None"),
    ],
)
def test_a_broken_field_is_named_with_its_value(changes, words):
    with pytest.raises(ModelError, match=words):
        read(**changes)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (None, None, ()),
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (None, 7, (7,)),
        (2, [7, 2], (2, 7)),
    ],
)
def test_eos_ids_come_from_both_files(in_config, in_generation, expected):
    assert eos_token_ids({"eos_token_id": in_config}, {"eos_token_id": in_generation}) == expected


def test_an_eos_id_that_is_no_id_is_named():
    with pytest.raises(ModelError, match="eos_token_id is '</s>'"):
        eos_token_ids({"eos_token_id": "</s>"}, {})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
    ],
)
def test_both_spellings_of_the_dtype_are_read(fields, expected):
    assert weight_dtype(fields) == expected


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"float8_e4m3fn.*bfloat16"):
        weight_dtype({"dtype": "float8_e4m3fn"})


@pytest.mark.parametrize(("text", "words"), [("{", "cannot read"), ("[1]", "object, not a list")])
def test_a_broken_json_file_is_named(tmp_path, text, words):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match=words) as refusal:
        read_json(file)
    assert str(file) in str(refusal.value)


def test_a_json_file_is_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"a": 1}))
    assert read_json(file) == {"a": 1}


def test_default_frequencies_fall_from_one_turn_per_two_pi_positions_to_the_base():
    found = inverse_frequencies(RopeConfig(10_000.0), head_dim=4)
    assert torch.allclose(found, torch.tensor([1.0, 0.01]))


def test_llama3_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    # Turns within the original 64 positions: 64 f / 2 pi; kept from 4 on, slowed by 8 below 1.
    plain = inverse_frequencies(RopeConfig(100.0), head_dim=8)
    turns = 64 * plain / (2 * math.pi)
    assert [round(turn, 2) for turn in turns.tolist()] == [10.19, 3.22, 1.02, 0.32]

    stretched = inverse_frequencies(RopeConfig(100.0, Llama3Scaling(8.0, 1.0, 4.0, 64)), head_dim=8)

    kept = [1.0, (turns[1].item() - 1) / 3, (turns[2].item() - 1) / 3, 0.0]
    slowed = [share + (1 - share) / 8 for share in kept]
    assert stretched.tolist() == pytest.approx((plain * torch.tensor(slowed)).tolist())
