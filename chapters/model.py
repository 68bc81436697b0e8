"""The real network for a stage's runner: minivllm's layers, attending with what the stages wrote.

The layers, the tokenizer and the loader are the finished engine's. What a reader has written
stands between them: which slot a key goes to, and how a row attends through a block table.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chapters.ch04_paged_attention import reference
from kernels.layer_parts import HeadNorms
from minivllm.config import DEFAULT_MODEL
from minivllm.model.attention import KVCache
from minivllm.model.decoder import Decoder
from minivllm.model.linear import DenseLinear
from minivllm.model.loader import Checkpoint, ModelFolder, resolve_model
from minivllm.model.model_config import ModelConfig, RopeConfig
from minivllm.model.ops import rms_norm
from minivllm.model.rope import Angles, angles_at, rotate
from minivllm.tokenizer import Tokenizer, find_tokenizer

Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(key, value, key_cache, value_cache, slot_mapping): chapter 4's store_kv."""

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""(query, key_cache, value_cache, batch): all rows' attention, shaped like the query.

query   [num_tokens, num_heads, head_dim]
caches  [num_blocks, block_size, num_kv_heads, head_dim]
batch   chapter 5's Batch
"""


class Network(NamedTuple):
    """A network's layers, and what belongs to them."""

    decoder: Decoder
    config: ModelConfig
    device: torch.device
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None


def load_network(model: str = DEFAULT_MODEL, device: str = "cpu") -> Network:
    """The network of a model folder, in float32; the default model is downloaded if need be.

    Raises minivllm.errors.ModelError.
    """
    folder = ModelFolder.open(resolve_model(model))
    place = torch.device(device)
    decoder = Decoder(folder.config, Checkpoint(folder.path, place, torch.float32), DenseLinear)
    tokenizer = find_tokenizer(folder.path)
    return Network(decoder, folder.config, place, folder.eos_token_ids, tokenizer)


def random_network(seed: int = 0) -> Network:
    """A tiny network of random weights, made in milliseconds: for tests. It has no tokenizer."""
    config = ModelConfig(
        model_type="llama",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
    decoder = Decoder(config, _RandomWeights(seed), DenseLinear)
    return Network(decoder, config, torch.device("cpu"))


class _RandomWeights:
    """Implements the decoder's Weights."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        # As large as this, attention is far from uniform, and a wrong mask shows.
        return torch.randn(shape, generator=self._generator) * 0.4 + name.endswith("norm.weight")


class PagedModel:
    """Implements chapter 5's Model: a network and its paged KV cache.

    kv   one layer each; NaN until a slot is written, so that whoever reads too far sees it
    """

    def __init__(
        self, network: Network, store: Store, attend: Attend, num_blocks: int, block_size: int
    ) -> None:
        config = network.config
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        device = network.device
        self.kv = [
            KVCache(*(torch.full(shape, float("nan"), device=device) for _ in range(2)))
            for _ in range(config.num_layers)
        ]
        self._decoder = network.decoder
        self._device = device
        self._store = store
        self._attend = attend

    def hidden(self, batch: Any) -> Tensor:
        """See chapter 5's Model."""
        batch = type(batch)(*(field.to(self._device) for field in batch))
        step = _StepAttention(self._store, self._attend, batch)
        return self._decoder.hidden(batch.token_ids, self.kv, step)

    def logits(self, hidden: Tensor) -> Tensor:
        """See chapter 5's Model. On the CPU, where tokens are chosen."""
        return self._decoder.logits(hidden).cpu()


class _StepAttention:
    """Implements the decoder's StepAttention for one batch."""

    def __init__(self, store: Store, attend: Attend, batch: Any) -> None:
        self._store = store
        self._attend = attend
        self._batch = batch

    def rotate_and_store(
        self, heads: Sequence[Tensor], angles: Angles, cache: KVCache, norms: HeadNorms | None
    ) -> Tensor:
        query, key, value = heads
        if norms is not None:
            query, key = norms.applied(rms_norm, query, key)
        of_rows = angles_at(self._batch.positions, angles, query.dtype)
        slots = self._batch.slot_mapping
        self._store(rotate(key, of_rows), value, cache.keys, cache.values, slots)
        return rotate(query, of_rows)

    def attend(self, query: Tensor, cache: KVCache) -> Tensor:
        return self._attend(query, cache.keys, cache.values, self._batch)


def paged_attention(kernels: Any) -> Attend:
    """Attention with chapter 4's two functions, its kernels or their reference.

    The sequences at the head of a batch that bring one row, its decodes, go to paged_decode; all
    others go to paged_prefill.
    """

    def attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Any) -> Tensor:
        is_one_row = (batch.query_starts.diff() == 1).tolist()
        n = is_one_row.index(False) if False in is_one_row else len(is_one_row)
        outputs = []
        if n > 0:
            tables, lens = batch.block_tables[:n], batch.context_lens[:n]
            outputs.append(kernels.paged_decode(query[:n], key_cache, value_cache, tables, lens))
        if n < len(is_one_row):
            tables, lens = batch.block_tables[n:], batch.context_lens[n:]
            starts = batch.query_starts[n:] - n  # n sequences with one row each come before
            outputs.append(
                kernels.paged_prefill(query[n:], key_cache, value_cache, tables, starts, lens)
            )
        return torch.cat(outputs)

    return attend


def attention_by_sequence(suffix_attention: Any) -> Attend:
    """Attention with chapter 7's function, one sequence after another."""

    def attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Any) -> Tensor:
        starts, ends = batch.query_starts.tolist(), batch.context_lens.tolist()
        block_size = key_cache.shape[1]
        outputs = []
        for i, end in enumerate(ends):
            rows = query[starts[i] : starts[i + 1]]
            table = batch.block_tables[i, : -(-end // block_size)]
            start = end - len(rows)
            outputs.append(suffix_attention(rows, key_cache, value_cache, table, start))
        return torch.cat(outputs)

    return attend


def model_with_kernels(
    kernels: Any, network: Network, num_blocks: int, block_size: int
) -> PagedModel:
    """A network that stores and attends with chapter 4's functions, kernels or reference."""
    attend = paged_attention(kernels)
    return PagedModel(network, kernels.store_kv, attend, num_blocks, block_size)


def model_with_suffix_attention(
    suffix_attention: Any, network: Network, num_blocks: int, block_size: int
) -> PagedModel:
    """A network that attends with chapter 7's function; any device, any range."""
    attend = attention_by_sequence(suffix_attention)
    return PagedModel(network, reference.store_kv, attend, num_blocks, block_size)
