"""From the default model's GGUF file to a Hugging Face folder, so that one loader reads them all.

The package `gguf` parses the file and undoes the quantisation. Here stands what is particular:
names, the order of the rows of q and k, and a tokenizer made from the file's own fields.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from minivllm.errors import ModelError, UnsupportedModelError

_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_SUPPORTED_FIELDS = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, float32 weights and tokenizer files of `gguf_file` into `folder`.

    Shows its progress on stderr. Raises ModelError if the file cannot be read,
    UnsupportedModelError if it is not a Llama with a byte-level BPE tokenizer and the
    pre-tokenizer `smollm`.
    """
    try:
        reader = GGUFReader(gguf_file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"cannot read {gguf_file}: {error}") from error
    for key, wanted in _SUPPORTED_FIELDS.items():
        if (found := fields.get(key)) != wanted:
            raise UnsupportedModelError(f"{gguf_file}: {key} is {found!r}; supported is {wanted!r}")
    weights = _weights(reader, fields)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", _config(fields, tied="lm_head.weight" not in weights))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of a q or k projection back into Hugging Face's order. [heads * dim, hidden].

    GGUF rotates neighbours (2i, 2i + 1) of a head, Hugging Face (i, i + dim / 2): the conversion
    to GGUF moved the two halves of each head between each other, and this moves them back.
    """
    half = len(rows) // num_heads // 2
    return rows.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def hugging_face_name(name: str) -> str:
    """The same tensor's other name: blk.3.attn_q.weight, model.layers.3.self_attn.q_proj.weight."""
    *block, module, kind = name.split(".")
    modules = _LAYER_MODULES if block else _MODULES
    if module not in modules:
        raise UnsupportedModelError(f"the GGUF file has a tensor {name}, unknown here")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{modules[module]}.{kind}"


def _weights(reader: GGUFReader, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """All tensors by their Hugging Face names, in float32."""
    num_heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    weights = {}
    for tensor in tqdm(reader.tensors, desc="converting weights", unit=" tensors"):
        values = dequantize(tensor.data, tensor.tensor_type)
        module = tensor.name.split(".")[-2]
        if module in num_heads:
            values = unpermute(values, fields[num_heads[module]])
        weights[hugging_face_name(tensor.name)] = values
    return weights


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """What config.json says, in the spelling of transformers 5; without Llama's own defaults."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": fields["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **{f"{name}_id": token_id for name, token_id in _special_ids(fields).items()},
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Ids of the special tokens by Hugging Face's names."""
    return {name: fields[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL.items()}


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; the pre-tokenizer `smollm` splits digits one by one before the bytes."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, types, strict=True)
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == TokenType.CONTROL])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[token_id] for name, token_id in _special_ids(fields).items()},
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
