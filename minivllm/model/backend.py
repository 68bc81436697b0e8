"""Which kernels compute: chosen once for a runner, by device, dtype and what can run here.

    triton  our Triton kernels, on a CUDA GPU (or in Triton's interpreter)
    native  our kernels in C, compiled here, in float32 on a CPU
    torch   plain torch, everywhere

Attention, the small operations and the linear layer each have a select function of their own, which
takes the name.
"""

import logging
import os
from ctypes import CDLL

import torch

from kernels.available import why_no_triton
from kernels.native.library import NativeError, load
from minivllm.config import ATTENTION_BACKENDS
from minivllm.errors import ConfigError
from minivllm.model.download import cache_folder

ENVIRONMENT_VARIABLE = "MINIVLLM_ATTENTION"


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """Triton, native or torch: what EngineConfig.attention_backend or MINIVLLM_ATTENTION comes to.

    Auto is triton on a GPU and native on a CPU; where these cannot run it is torch, and a warning
    says why. Raises ConfigError for an unknown name, and for a backend where it cannot run.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE) or requested
    if name not in ATTENTION_BACKENDS:
        allowed = ", ".join(ATTENTION_BACKENDS)
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} is {name!r}; it must be one of {allowed}")
    if name == "auto":
        best = "triton" if device.type == "cuda" else "native"
        if missing := why_not(best, device, dtype):
            logging.getLogger(__name__).warning("plain torch computes, not %s: %s", best, missing)
        return "torch" if missing else best
    if missing := why_not(name, device, dtype):
        raise ConfigError(f"attention_backend is {name!r}, but {missing}; use auto or torch")
    return name


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """The first thing that the backend of that name lacks here; None: it can run."""
    if name == "triton":
        return why_no_triton(device)
    if name == "native" and (device.type != "cpu" or dtype is not torch.float32):
        return f"it computes float32 on cpu, not {str(dtype).removeprefix('torch.')} on {device}"
    if name == "native":
        try:
            native_library()
        except NativeError as error:
            return str(error)
    return None


def native_library() -> CDLL:
    """The C kernels, compiled once below cache_folder(). Raises kernels.native.NativeError."""
    return load(cache_folder() / "native")
