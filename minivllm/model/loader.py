"""From what a person names to tensors: resolve the model, read its folder, check every tensor."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivllm.config import DEFAULT_MODEL
from minivllm.errors import ModelError, UnsupportedModelError
from minivllm.model import model_config
from minivllm.model.download import ensure_default_model
from minivllm.model.model_config import WEIGHT_DTYPES, ModelConfig, read_json

# Stored by some though others determine them: frequencies, and the head where it is tied.
_DERIVED_TENSOR = re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def resolve_model(model: str) -> Path:
    """The folder of `model`: the default model's name, a local folder, or a hub id.

    The default model is fetched and converted if it is not in the cache yet; a hub id is
    downloaded unless huggingface_hub has it. Raises ModelError.
    """
    if model == DEFAULT_MODEL:
        return ensure_default_model()
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(model):
        allowed = f"{DEFAULT_MODEL}, a folder or a hub id owner/name"
        raise ModelError(f"model is {model!r}; it must be {allowed}")
    from huggingface_hub import snapshot_download

    try:  # the hub's own cache has it, or what the engine reads of it is downloaded
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # the hub client raises its own, httpx's and the system's errors
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        raise ModelError(f"model {model!r} is no folder, and the hub failed: {reason}") from error


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder whose config was read and can be computed; no weight is read yet.

    weight_dtype   dtype the checkpoint was saved in, a torch dtype's name
    eos_token_ids  every id that ends an output
    """

    path: Path
    config: ModelConfig
    weight_dtype: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read config.json and, if there is one, generation_config.json. Raises ModelError."""
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model folder: it has no config.json")
        config = read_json(path / "config.json")
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else {}
        dtype = model_config.weight_dtype(config)
        eos_token_ids = model_config.eos_token_ids(config, generation)
        return cls(path, ModelConfig.from_json(config), dtype, eos_token_ids)


class Checkpoint:
    """The tensors of a folder's safetensors files, by name, as one device and dtype.

    Files are mapped into memory: a tensor that already has the wanted dtype and stays on the CPU
    is not copied, and its pages are read when they are first used.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._folder = folder
        self._device = device
        self._dtype = dtype
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in _weight_files(folder):
            try:
                file: Any = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), (path, file)))
        self._unused = set(self._files)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`; ModelError names the file if it is missing, misshapen or not float."""
        if name not in self._files:
            raise ModelError(f"{self._folder} has no tensor {name} of shape {list(shape)}")
        self._unused.discard(name)
        path, file = self._files[name]
        tensor: Tensor = file.get_tensor(name)
        found, what = list(tensor.shape), f"{path}: tensor {name}"
        if found != list(shape):
            raise ModelError(f"{what} has shape {found}; config.json asks for {list(shape)}")
        if str(tensor.dtype).removeprefix("torch.") not in WEIGHT_DTYPES:
            raise ModelError(f"{what} is {tensor.dtype}; supported are {', '.join(WEIGHT_DTYPES)}")
        return tensor.to(self._device, self._dtype)

    def check_all_used(self) -> None:
        """Refuse a tensor nobody took: a bias that config.json does not mention, for example."""
        for name in sorted(self._unused):
            if not _DERIVED_TENSOR.fullmatch(name):
                path, _ = self._files[name]
                raise UnsupportedModelError(f"{path}: tensor {name} has no place in the network")


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{folder} has neither {single.name} nor {index.name}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map from tensors to files")
    return [folder / name for name in sorted(set(map(str, weight_map.values())))]
