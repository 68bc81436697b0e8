"""Tiny random models of all three architectures, made with transformers and saved as folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 97

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    # The usual 0.02 gives nearly uniform attention, in which a wrong mask hardly shows.
    "initializer_range": 0.3,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (transformers' config class, model class, what differs from _SIZES)
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama3-rope": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 1}),
    "qwen2-tied": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 20}),
    "qwen3-biases": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def make_model(variant: str, seed: int = 0) -> Any:
    """A transformers model in float32 whose biases and norm weights are random too."""
    config_class, model_class, changes = VARIANTS[variant]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**_SIZES, **changes})
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts these at 0 and 1, where leaving them out would not show.
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save_model(variant: str, folder: Path, *, seed: int = 0, **save_options: Any) -> Any:
    """Make the model, save it to `folder`, and return it: the oracle."""
    model = make_model(variant, seed)
    model.save_pretrained(folder, **save_options)
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: on a busy machine two that wait for each other at every
    tiny operation take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
