"""The decoder of Llama, Qwen2 and Qwen3: one network with a few parts that may be absent.

    x = embedding[token]
    each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = head(norm(x))

The three differ only in which projections have a bias and in Qwen3's norms on q and k (Llama 2,
Touvron et al. 2023; Qwen2, Yang et al. 2024; Qwen3, Yang et al. 2025). Parameters are taken from
the checkpoint when a layer is built, and never initialised: what a checkpoint lacks is an error.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.layer_parts import LayerParts, Linear
from minivllm.model.attention import KVCache, StepAttention
from minivllm.model.layer import TORCH_LAYER, LayerFactory
from minivllm.model.linear import LinearFactory
from minivllm.model.model_config import ModelConfig
from minivllm.model.ops import TORCH_OPS, Ops
from minivllm.model.rope import Angles, inverse_frequencies, rotary_table


class Weights(Protocol):
    """Where parameters come from; the loader implements it."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, in the dtype and on the device the network runs in.

        Raises ModelError if there is none, or if its shape is another one.
        """


class _Parts:
    """Takes the parts of the network from a checkpoint."""

    def __init__(self, config: ModelConfig, weights: Weights, linear: LinearFactory) -> None:
        self._config = config
        self._weights = weights
        self._linear = linear

    def linears(self, prefix: str, sizes: dict[str, int], in_features: int, bias: bool) -> Linear:
        """Layers with one input as one matrix product; their outputs lie side by side.

        sizes  outputs of each, by its name behind the prefix
        """
        names = [(prefix + name, size) for name, size in sizes.items()]
        weights = [self._weights.take(f"{name}.weight", (n, in_features)) for name, n in names]
        biases = [self._weights.take(f"{name}.bias", (n,)) for name, n in names if bias]
        return self._linear(_joined(weights), _joined(biases) if bias else None)

    def layer(self, name: str) -> LayerParts:
        """All of one layer."""
        config, attention, mlp = self._config, f"{name}.self_attn.", f"{name}.mlp."
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        query, key = config.num_heads * dim, config.num_kv_heads * dim
        heads, mlp_bias = {"q_proj": query, "k_proj": key, "v_proj": key}, config.mlp_bias
        return LayerParts(
            attention_norm=self.norm(f"{name}.input_layernorm", hidden),
            query_key_value=self.linears(attention, heads, hidden, config.qkv_bias),
            output=self.linears(attention, {"o_proj": hidden}, query, config.output_bias),
            query_norm=self.norm(f"{attention}q_norm", dim) if config.qk_norm else None,
            key_norm=self.norm(f"{attention}k_norm", dim) if config.qk_norm else None,
            mlp_norm=self.norm(f"{name}.post_attention_layernorm", hidden),
            gate_up=self.linears(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, mlp_bias),
            down=self.linears(mlp, {"down_proj": hidden}, inner, mlp_bias),
            epsilon=config.rms_norm_eps,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=dim,
        )

    def norm(self, name: str, size: int) -> Tensor:
        """The weight of a norm."""
        return self._weights.take(f"{name}.weight", (size,))


def _joined(tensors: list[Tensor]) -> Tensor:
    """One below the other. A single one is not copied: it may be a file mapped into memory."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class Decoder:
    """The whole network. Holds parameters and no state: the KV cache is passed in."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        linear: LinearFactory,
        ops: Ops = TORCH_OPS,
        layer: LayerFactory = TORCH_LAYER,
    ) -> None:
        parts = _Parts(config, weights, linear)
        table_shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", table_shape)
        self._layers = [layer(parts.layer(f"model.layers.{i}")) for i in range(config.num_layers)]
        self._norm = parts.norm("model.norm", config.hidden_size), config.rms_norm_eps
        self._rms_norm = ops.rms_norm
        self._head = (
            linear(self._embedding, None)
            if config.tie_word_embeddings
            else parts.linears("", {"lm_head": config.vocab_size}, config.hidden_size, bias=False)
        )
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        table = rotary_table(frequencies, config.max_position_embeddings)
        self._rotary = Angles(*(angles.to(self._embedding.device) for angles in table))

    def hidden(
        self,
        token_ids: Tensor,
        kv: Sequence[KVCache],
        step: StepAttention,
        wanted: Tensor | slice = slice(None),
    ) -> Tensor:
        """The wanted rows' last hidden states, before the final norm: [num_wanted, hidden].

        token_ids  [num_tokens] int64, on the decoder's device
        kv         one KVCache a layer; the rows' slots are written
        step       attention for exactly these rows, at their positions
        wanted     which rows; all by default. Of the others the last layer computes keys and
                   values only: nobody reads more of them
        """
        # The embedding is the first update of an empty residual.
        update = self._embedding[token_ids]
        x = torch.zeros_like(update)
        for layer, cache in zip(self._layers, kv, strict=True):
            x, heads = layer.attend(x, update, self._rotary, cache, step)
            if layer is self._layers[-1]:
                x, heads = x[wanted], heads[wanted]
            x, update = layer.finish(x, heads)
        return x + update

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token after each given row: [num_rows, vocab_size] float32.

        The head is the largest product of all: ask only for the rows that need it.
        """
        return self._head(self._rms_norm(hidden, *self._norm)).float()
