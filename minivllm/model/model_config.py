"""What a model folder's config.json says, read once and checked: the shape of the network.

Whatever this engine does not compute is refused here by name, before a single weight is read.
The field names and defaults are those of transformers' LlamaConfig, Qwen2Config and Qwen3Config.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from minivllm.errors import ModelError, UnsupportedModelError

Json = Mapping[str, Any]

ARCHITECTURES = {f"{name}ForCausalLM": name.lower() for name in ("Llama", "Qwen2", "Qwen3")}
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")


class Llama3Scaling(NamedTuple):
    """How Llama 3.1 stretches the rotary wavelengths to a longer context (see rope.py)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class RopeConfig(NamedTuple):
    """Rotary embedding: the base of the frequencies, and `scaling` for rope type llama3."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The network's shape. Two equal ones can exchange their weights.

    model_type             "llama", "qwen2" or "qwen3"
    max_position_embeddings  tokens the model was trained for
    qkv_bias, output_bias  a bias on the q, k, v projections; on the attention's output
    mlp_bias               a bias on all three projections of the MLP
    qk_norm                RMSNorm over head_dim on every query and key head (Qwen3)
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_json(cls, config: Json) -> Self:
        """Read the dict of a config.json.

        Raises UnsupportedModelError for a network this engine does not compute, and ModelError
        for a field that is missing or not a number.
        """
        model_type = _model_type(config)
        _refuse_unsupported(config)
        num_heads = _positive_int(config, "num_attention_heads")
        max_positions = 2048 if model_type == "llama" else 32768
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=model_type,
            vocab_size=_positive_int(config, "vocab_size"),
            hidden_size=_positive_int(config, "hidden_size"),
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_layers=_positive_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(config, model_type, num_heads),
            head_dim=_head_dim(config, model_type, num_heads),
            max_position_embeddings=_positive_int(config, "max_position_embeddings", max_positions),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope=_rope(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            # Qwen2 has these three biases always, and no field that says so.
            qkv_bias=model_type == "qwen2" or attention_bias,
            output_bias=model_type != "qwen2" and attention_bias,
            mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError names the file if it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def weight_dtype(config: Json) -> str:
    """The dtype the checkpoint was saved in; config.json calls it dtype or torch_dtype."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return _supported("dtype", dtype, WEIGHT_DTYPES)


def eos_token_ids(config: Json, generation_config: Json) -> tuple[int, ...]:
    """Every id that ends an output: those of config.json, then those of generation_config.json.

    Either file may name none, one, or a list; chat models often name further ones in the second.
    """
    ids: list[int] = []
    for source in (config, generation_config):
        value = source.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in found):
            raise ModelError(f"eos_token_id is {value!r}; it must be a token id or a list of them")
        ids += found
    return tuple(dict.fromkeys(ids))


def _model_type(config: Json) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    found = name or config.get("model_type")
    if name is None and found in ARCHITECTURES.values():
        return str(found)
    return ARCHITECTURES[_supported("architecture", found, ARCHITECTURES)]


def _refuse_unsupported(config: Json) -> None:
    """Refuse what would change the computation and is not implemented."""
    _supported("quantization_config", config.get("quantization_config") or "float32", WEIGHT_DTYPES)
    if config.get("use_sliding_window"):
        _supported("use_sliding_window", True, ["full attention"])
    for layer_type in config.get("layer_types") or ():
        _supported("layer_types", layer_type, ["full_attention"])
    # Two names of one function.
    _supported("hidden_act", config.get("hidden_act", "silu"), ["silu", "swish"])


def _supported(what: str, value: Any, supported: Collection[Any]) -> str:
    """`value`, if it is among the supported ones; else UnsupportedModelError names them."""
    if value not in supported:
        names = ", ".join(map(str, supported))
        raise UnsupportedModelError(f"{what} {value!r} is not supported; supported: {names}")
    return str(value)


def _num_kv_heads(config: Json, model_type: str, num_heads: int) -> int:
    """Missing: as many as query heads in Llama, 32 in Qwen; null: as many as query heads."""
    default = num_heads if model_type == "llama" else 32
    if config.get("num_key_value_heads", default) is None:
        return num_heads
    num_kv_heads = _positive_int(config, "num_key_value_heads", default)
    if num_heads % num_kv_heads:
        allowed = f"a multiple of num_key_value_heads, which is {num_kv_heads}"
        raise ModelError(f"num_attention_heads is {num_heads}; it must be {allowed}")
    return num_kv_heads


def _head_dim(config: Json, model_type: str, num_heads: int) -> int:
    default = 128 if model_type == "qwen3" else config["hidden_size"] // num_heads
    # An explicit null means the same as a missing field.
    explicit = {} if config.get("head_dim") is None else config
    head_dim = _positive_int(explicit, "head_dim", default)
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}; rotary embeddings need an even one")
    return head_dim


def _rope(config: Json) -> RopeConfig:
    """Both spellings: rope_parameters (transformers 5), rope_theta with rope_scaling (4)."""
    spelled: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(spelled, Mapping):
        raise ModelError(f"rope parameters are {spelled!r}; they must be a JSON object")
    if any(isinstance(value, Mapping) for value in spelled.values()):
        _supported("rope parameters:", "a set for each layer type", ["one set for all"])
    rope_type = spelled.get("rope_type", spelled.get("type", "default"))
    _supported("rope type", rope_type, ["default", "llama3"])
    for source in (spelled, config):
        _supported("partial_rotary_factor", source.get("partial_rotary_factor"), (None, 1))
    theta = _number(spelled if "rope_theta" in spelled else config, "rope_theta", 10_000.0)
    return RopeConfig(theta, _llama3_scaling(spelled) if rope_type == "llama3" else None)


def _llama3_scaling(spelled: Json) -> Llama3Scaling:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (_number(spelled, name) for name in names)
    original_max_positions = _positive_int(spelled, "original_max_position_embeddings")
    return Llama3Scaling(factor, low, high, original_max_positions)


def _positive_int(config: Json, name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} is {value!r}; it must be a whole number, 1 or more")
    return value


def _number(config: Json, name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"{name} is {value!r}; it must be a number above 0")
    return float(value)
