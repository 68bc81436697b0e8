"""From a name to tensors: what is found, and what is refused with the file and tensor named."""

import json
import os
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.errors import ModelError, UnsupportedModelError
from minivllm.model.decoder import Decoder
from minivllm.model.linear import DenseLinear
from minivllm.model.loader import Checkpoint, ModelFolder, resolve_model
from tests.tiny_models import save_model

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_model("qwen2", folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the tiny model that a test may break."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(folder, dtype=torch.float32):
    """Everything the runner does to a folder; returns the checkpoint."""
    checkpoint = Checkpoint(folder, CPU, dtype)
    Decoder(ModelFolder.open(folder).config, checkpoint, DenseLinear)
    checkpoint.check_all_used()
    return checkpoint


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder):
    with pytest.raises(ModelError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_is_itself(folder):
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("model", ["nope", "a/b/c", "./nowhere", "/nowhere/at/all", "two words/x"])
def test_what_is_neither_name_nor_folder_nor_hub_id_is_told_what_is(model):
    with pytest.raises(ModelError) as error:
        resolve_model(model)
    for word in (repr(model), "smollm2-135m", "folder", "owner/name"):
        assert word in str(error.value)


def test_a_file_is_not_a_model(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    file = f"{folder.name}/config.json"
    with pytest.raises(ModelError, match=r"config\.json'; it must be"):
        resolve_model(file)


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no config.json") as error:
        ModelFolder.open(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_hub_id_is_asked_for_at_the_hub_with_what_the_engine_reads(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("owner/name-1.5") == tmp_path
    assert asked["repo_id"] == "owner/name-1.5"
    assert "*.safetensors" in asked["allow_patterns"]
    assert "*.bin" not in asked["allow_patterns"]


def test_a_hub_that_fails_is_one_clear_line(monkeypatch):
    def snapshot_download(repo_id, **options):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=r"owner/name.*ConnectionError: no route") as error:
        resolve_model("owner/name")
    assert "\n" not in str(error.value)


def test_a_cached_hub_model_is_found_offline(tmp_path):
    cached = tmp_path / "hub" / "models--owner--name"
    snapshot = cached / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc123")
    code = "from minivllm.model.loader import resolve_model; print(resolve_model('owner/name'))"

    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout.strip() == str(snapshot)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_every_dtype_is_read_into_every_dtype(folder, stored, wanted):
    original = load_file(folder / "model.safetensors")[Q_PROJ]
    change_tensors(folder, lambda tensors: tensors.update({Q_PROJ: original.to(stored)}))
    tensor = Checkpoint(folder, CPU, wanted).take(Q_PROJ, tuple(original.shape))
    assert torch.equal(tensor, original.to(stored).to(wanted))


def test_shards_hold_the_same_tensors_as_one_file(saved, tmp_path):
    model = save_model("qwen2", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    checkpoint = load(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.take(name, tuple(tensor.shape)), tensor), name


def test_a_missing_shard_is_named(tmp_path):
    save_model("qwen2", tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert str(shard) in refusal(tmp_path)


def test_an_index_without_a_weight_map_is_named(folder):
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}}))
    assert f"{index} has no weight_map" in refusal(folder)


def test_a_folder_without_weights_says_which_files_it_looked_for(folder):
    (folder / "model.safetensors").unlink()
    message = refusal(folder)
    assert "model.safetensors" in message
    assert "model.safetensors.index.json" in message


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_named(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert f"cannot read {file}" in refusal(folder)


def test_a_file_of_something_else_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 1\n")
    assert f"cannot read {file}" in refusal(folder)


def test_a_missing_tensor_is_named_with_its_shape(folder):
    change_tensors(folder, lambda tensors: tensors.pop(Q_PROJ))
    assert f"{folder} has no tensor {Q_PROJ} of shape [48, 48]" in refusal(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder):
    change_tensors(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(48, 47)}))
    message = refusal(folder)
    assert f"{folder / 'model.safetensors'}: tensor {Q_PROJ} has shape [48, 47]" in message
    assert "asks for [48, 48]" in message


def test_a_tensor_of_integers_is_refused(folder):
    whole = torch.zeros(48, 48, dtype=torch.int8)
    change_tensors(folder, lambda tensors: tensors.update({Q_PROJ: whole}))
    assert f"tensor {Q_PROJ} is torch.int8" in refusal(folder)


def test_a_tensor_without_a_place_is_refused(folder):
    bias = "model.layers.1.self_attn.o_proj.bias"
    change_tensors(folder, lambda tensors: tensors.update({bias: torch.ones(48)}))
    with pytest.raises(UnsupportedModelError, match=bias):
        load(folder)


def test_stored_rotary_frequencies_and_a_stored_tied_head_are_no_obstacle(tmp_path):
    save_model("qwen2-tied", tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
        "lm_head.weight": torch.ones(97, 48),
    }
    change_tensors(tmp_path, lambda tensors: tensors.update(extra))
    load(tmp_path)


def test_generation_config_adds_eos_ids(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert ModelFolder.open(folder).eos_token_ids == (2, 9)
