"""The decoder of Llama, Qwen2 and Qwen3: one network with a few parts that may be absent.

    x = embedding[token]
    each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = head(norm(x))

The three differ only in which projections have a bias and in Qwen3's norms on q and k (Llama 2,
Touvron et al. 2023; Qwen2, Yang et al. 2024; Qwen3, Yang et al. 2025). Parameters are taken from
the checkpoint when a layer is built, and never initialised: what a checkpoint lacks is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from minivllm.model.attention import KVCache, StepAttention
from minivllm.model.linear import Linear, LinearFactory
from minivllm.model.model_config import ModelConfig
from minivllm.model.rope import Rotation, inverse_frequencies, rotate, rotation_at


class Weights(Protocol):
    """Where parameters come from; the loader implements it."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, in the dtype and on the device the network runs in.

        Raises ModelError if there is none, or if its shape is another one.
        """
        ...


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    Normalised in float32 and rounded before the weight is applied, as the models were trained.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size], in the dtype of x."""
        normalised = F.rms_norm(x.float(), (x.shape[-1],), eps=self._eps)
        return normalised.to(x.dtype) * self._weight


class _Parts:
    """Builds the parts of the network from the tensors below one prefix."""

    def __init__(self, config: ModelConfig, weights: Weights, linear: LinearFactory) -> None:
        self.config = config
        self._weights = weights
        self._linear = linear

    def linear(self, name: str, out_features: int, in_features: int, bias: bool) -> Linear:
        weight = self._weights.take(f"{name}.weight", (out_features, in_features))
        return self._linear(
            weight, self._weights.take(f"{name}.bias", (out_features,)) if bias else None
        )

    def norm(self, name: str, size: int) -> RMSNorm:
        weight = self._weights.take(f"{name}.weight", (size,))
        return RMSNorm(weight, self.config.rms_norm_eps)


class Attention:
    """Grouped-query attention over the paged cache, with rotary positions."""

    def __init__(self, parts: _Parts, name: str) -> None:
        config = parts.config
        hidden, head_dim = config.hidden_size, config.head_dim
        query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self._head_dim = head_dim
        self._query = parts.linear(f"{name}.q_proj", query_size, hidden, config.qkv_bias)
        self._key = parts.linear(f"{name}.k_proj", kv_size, hidden, config.qkv_bias)
        self._value = parts.linear(f"{name}.v_proj", kv_size, hidden, config.qkv_bias)
        self._output = parts.linear(f"{name}.o_proj", hidden, query_size, config.output_bias)
        self._query_norm: _HeadNorm = _unchanged
        self._key_norm: _HeadNorm = _unchanged
        if config.qk_norm:
            self._query_norm = parts.norm(f"{name}.q_norm", head_dim)
            self._key_norm = parts.norm(f"{name}.k_norm", head_dim)

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, cache: KVCache, step: StepAttention
    ) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]; writes the rows' keys and values."""
        query = rotate(self._query_norm(self._heads(self._query(x))), rotation)
        key = rotate(self._key_norm(self._heads(self._key(x))), rotation)
        step.store(cache, key, self._heads(self._value(x)))
        attended = step.attend(query, cache)
        return self._output(attended.flatten(1))

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_tokens, heads * head_dim] -> [num_tokens, heads, head_dim]."""
        return rows.view(len(rows), -1, self._head_dim)


_HeadNorm = Callable[[torch.Tensor], torch.Tensor]


def _unchanged(heads: torch.Tensor) -> torch.Tensor:
    """What stands in place of the q and k norms where a model has none."""
    return heads


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, parts: _Parts, name: str) -> None:
        hidden, inner = parts.config.hidden_size, parts.config.intermediate_size
        bias = parts.config.mlp_bias
        self._gate = parts.linear(f"{name}.gate_proj", inner, hidden, bias)
        self._up = parts.linear(f"{name}.up_proj", inner, hidden, bias)
        self._down = parts.linear(f"{name}.down_proj", hidden, inner, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        return self._down(F.silu(self._gate(x)) * self._up(x))


class DecoderLayer:
    """Attention, then MLP, each on a normalised input and added to the residual."""

    def __init__(self, parts: _Parts, name: str) -> None:
        hidden = parts.config.hidden_size
        self._attention_norm = parts.norm(f"{name}.input_layernorm", hidden)
        self._attention = Attention(parts, f"{name}.self_attn")
        self._mlp_norm = parts.norm(f"{name}.post_attention_layernorm", hidden)
        self._mlp = MLP(parts, f"{name}.mlp")

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, cache: KVCache, step: StepAttention
    ) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        x = x + self._attention(self._attention_norm(x), rotation, cache, step)
        return x + self._mlp(self._mlp_norm(x))


class Decoder:
    """The whole network. Holds parameters and no state: the KV cache is passed in."""

    def __init__(self, config: ModelConfig, weights: Weights, linear: LinearFactory) -> None:
        parts = _Parts(config, weights, linear)
        table_shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", table_shape)
        self._layers = [
            DecoderLayer(parts, f"model.layers.{index}") for index in range(config.num_layers)
        ]
        self._norm = parts.norm("model.norm", config.hidden_size)
        self._head = (
            linear(self._embedding, None)
            if config.tie_word_embeddings
            else parts.linear("lm_head", *table_shape, bias=False)
        )
        self._inv_frequencies = inverse_frequencies(config.rope, config.head_dim).to(
            self._embedding.device
        )

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[KVCache],
        step: StepAttention,
    ) -> torch.Tensor:
        """The rows' last hidden states, before the final norm: [num_tokens, hidden].

        token_ids, positions  [num_tokens] int64, on the decoder's device
        kv                    one KVCache a layer; the rows' slots are written
        step                  attention for exactly these rows
        """
        x = self._embedding[token_ids]
        rotation = rotation_at(positions, self._inv_frequencies, x.dtype)
        for layer, cache in zip(self._layers, kv, strict=True):
            x = layer(x, rotation, cache, step)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token after each given row: [num_rows, vocab_size] float32.

        The head is the largest product of all: ask only for the rows that need it.
        """
        return self._head(self._norm(hidden)).float()
