"""The decoder of Llama, Qwen2 and Qwen3: one network with a few parts that may be absent.

    x = embedding[token]
    each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = head(norm(x))

The three differ only in which projections have a bias and in Qwen3's norms on q and k (Llama 2,
Touvron et al. 2023; Qwen2, Yang et al. 2024; Qwen3, Yang et al. 2025). Parameters are taken from
the checkpoint when a layer is built, and never initialised: what a checkpoint lacks is an error.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from minivllm.model.attention import KVCache, StepAttention
from minivllm.model.linear import Linear, LinearFactory
from minivllm.model.model_config import ModelConfig
from minivllm.model.ops import TORCH_OPS, Ops
from minivllm.model.rope import (
    RotaryTable,
    Rotation,
    inverse_frequencies,
    rotary_table,
    rotation_at,
)


class Weights(Protocol):
    """Where parameters come from; the loader implements it."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, in the dtype and on the device the network runs in.

        Raises ModelError if there is none, or if its shape is another one.
        """


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        self._weight = weight
        self._eps = eps
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the dtype of x."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def of_sum(self, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of x + update, x + update); each [num_tokens, size]."""
        return self._ops.add_rms_norm(update, x, self._weight, self._eps)


class _Parts:
    """Builds the parts of the network from the tensors below one prefix."""

    def __init__(
        self, config: ModelConfig, weights: Weights, linear: LinearFactory, ops: Ops
    ) -> None:
        self.config = config
        self.ops = ops
        self._weights = weights
        self._linear = linear

    def linear(self, name: str, out_features: int, in_features: int, bias: bool) -> Linear:
        return self.linears({name: out_features}, in_features, bias)

    def linears(self, out_features: dict[str, int], in_features: int, bias: bool) -> Linear:
        """Several layers with one input as one matrix product; their outputs lie side by side."""
        names = out_features.items()
        weights = [self._weights.take(f"{name}.weight", (n, in_features)) for name, n in names]
        biases = [self._weights.take(f"{name}.bias", (n,)) for name, n in names if bias]
        return self._linear(_joined(weights), _joined(biases) if bias else None)

    def norm(self, name: str, size: int) -> RMSNorm:
        weight = self._weights.take(f"{name}.weight", (size,))
        return RMSNorm(weight, self.config.rms_norm_eps, self.ops)

    def head_norm(self, name: str) -> Callable[[Tensor], Tensor]:
        """The norm of every query or key head; where a model has none, they stay as they are."""
        return self.norm(name, self.config.head_dim) if self.config.qk_norm else _unchanged


def _unchanged(heads: Tensor) -> Tensor:
    return heads


def _joined(tensors: list[Tensor]) -> Tensor:
    """One below the other. A single one is not copied: it may be a file mapped into memory."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class Attention:
    """Grouped-query attention over the paged cache, with rotary positions.

    output  the projection of what the heads give: [num_rows, heads] -> [num_rows, hidden]
    """

    def __init__(self, parts: _Parts, name: str) -> None:
        config = parts.config
        hidden, head_dim = config.hidden_size, config.head_dim
        query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self._head_dim = head_dim
        self._num_heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self._query_key_value = parts.linears(
            {f"{name}.{part}": size for part, size in sizes.items()}, hidden, config.qkv_bias
        )
        self.output = parts.linear(f"{name}.o_proj", hidden, query_size, config.output_bias)
        self._query_norm = parts.head_norm(f"{name}.q_norm")
        self._key_norm = parts.head_norm(f"{name}.k_norm")

    def __call__(
        self, x: Tensor, rotation: Rotation, cache: KVCache, step: StepAttention
    ) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, heads], writing the rows' keys and values."""
        heads = self._query_key_value(x).view(len(x), -1, self._head_dim)
        query, key, value = heads.split_with_sizes(self._num_heads, dim=1)
        query, key = self._query_norm(query), self._key_norm(key)
        query = step.rotate_and_store(query, key, value, rotation, cache)
        return step.attend(query, cache).flatten(1)


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, parts: _Parts, name: str) -> None:
        hidden, inner = parts.config.hidden_size, parts.config.intermediate_size
        bias = parts.config.mlp_bias
        self._gate_up = parts.linears(
            {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden, bias
        )
        self._silu_and_mul = parts.ops.silu_and_mul
        self._down = parts.linear(f"{name}.down_proj", hidden, inner, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, hidden] -> [num_rows, hidden]."""
        return self._down(self._silu_and_mul(self._gate_up(x)))


class DecoderLayer:
    """Attention, then MLP, each on a normalised input and added to the residual.

    Every addition is followed by a norm, which may do both in one pass over memory. So a layer
    hands on the residual x and, not yet added, the update of its MLP: the next norm adds it.
    """

    def __init__(self, parts: _Parts, name: str) -> None:
        hidden = parts.config.hidden_size
        self._attention_norm = parts.norm(f"{name}.input_layernorm", hidden)
        self._attention = Attention(parts, f"{name}.self_attn")
        self._mlp_norm = parts.norm(f"{name}.post_attention_layernorm", hidden)
        self._mlp = MLP(parts, f"{name}.mlp")

    def attend(
        self, x: Tensor, update: Tensor, rotation: Rotation, cache: KVCache, step: StepAttention
    ) -> tuple[Tensor, Tensor]:
        """(x, update) -> (x, heads), all [num_tokens, ...]; writes the rows' keys and values."""
        normed, x = self._attention_norm.of_sum(x, update)
        return x, self._attention(normed, rotation, cache, step)

    def finish(self, x: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """(x, heads) -> (x, update): the part in which a row needs no other row."""
        normed, x = self._mlp_norm.of_sum(x, self._attention.output(heads))
        return x, self._mlp(normed)


class Decoder:
    """The whole network. Holds parameters and no state: the KV cache is passed in."""

    def __init__(
        self, config: ModelConfig, weights: Weights, linear: LinearFactory, ops: Ops = TORCH_OPS
    ) -> None:
        parts = _Parts(config, weights, linear, ops)
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
        cos, sin = rotary_table(
            inverse_frequencies(config.rope, config.head_dim), config.max_position_embeddings
        )
        device = self._embedding.device
        self._rotary = RotaryTable(cos.to(device), sin.to(device))

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: Sequence[KVCache],
        step: StepAttention,
        wanted: Tensor | slice = slice(None),
    ) -> Tensor:
        """The wanted rows' last hidden states, before the final norm: [num_wanted, hidden].

        token_ids, positions  [num_tokens] int64, on the decoder's device
        kv                    one KVCache a layer; the rows' slots are written
        step                  attention for exactly these rows
        wanted                which rows; all by default. Of the others the last layer computes
                              keys and values only: nobody reads more of them
        """
        # The embedding is the first update of an empty residual.
        update = self._embedding[token_ids]
        x = torch.zeros_like(update)
        rotation = rotation_at(positions, self._rotary, x.dtype)
        for layer, cache in zip(self._layers, kv, strict=True):
            x, heads = layer.attend(x, update, rotation, cache, step)
            if layer is self._layers[-1]:
                x, heads = x[wanted], heads[wanted]
            x, update = layer.finish(x, heads)
        return x + update

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token after each given row: [num_rows, vocab_size] float32.

        The head is the largest product of all: ask only for the rows that need it.
        """
        return self._head(self._norm(hidden)).float()
