"""nano-vllm's benchmark workload, and a model of random weights to run it on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

SHORTEST, LONGEST = 100, 1024
NUM_REQUESTS = 256

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
"""The shape of Qwen3-0.6B, as its config.json spells it. In bfloat16 1.2 GB."""


class WorkItem(NamedTuple):
    """One request: its prompt, and how many tokens it generates, whatever they are."""

    prompt: list[int]
    num_tokens: int


def make_workload(
    num_requests: int = NUM_REQUESTS, seed: int = 0, vocab_size: int = 10_000
) -> list[WorkItem]:
    """Prompt and output lengths uniform in [100, 1024], token ids uniform in the vocabulary."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(vocab_size) for _ in range(rng.randint(SHORTEST, LONGEST))]
        for _ in range(num_requests)
    ]
    return [WorkItem(prompt, rng.randint(SHORTEST, LONGEST)) for prompt in prompts]


def save_random_model(config: dict[str, Any], folder: Path, device: torch.device) -> Path:
    """Write a Qwen3 folder with seeded random weights; `folder` is made, and returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, config["torch_dtype"])
    weights = {}
    for name, shape in weight_shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=dtype)
            continue
        values = torch.randn(shape, generator=generator, device=device) * 0.02
        weights[name] = values.to("cpu", dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tied Qwen3, by its name in the checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    return shapes
