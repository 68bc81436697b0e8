"""Which backend is chosen, and the whole engine on the kernels in Triton's interpreter.

TRITON_INTERPRET is read when triton is imported: engine_interpreted.py runs in its own process.
"""

import importlib.util

import pytest
import torch

from minivllm.errors import ConfigError
from minivllm.model.attention import TorchAttention, choose_backend, select_attention_backend
from minivllm.model.ops import TORCH_OPS, select_ops
from tests.interpreter import run_in_interpreter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton exists for Linux only"
)


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch):
    monkeypatch.delenv("MINIVLLM_ATTENTION", raising=False)


@needs_triton
def test_auto_is_triton_on_cuda_and_torch_on_a_cpu_even_with_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("auto", CUDA) == "triton"
    assert choose_backend("auto", CPU) == "torch"


def test_auto_on_a_gpu_without_triton_is_torch_and_asking_for_triton_names_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_backend("auto", CUDA) == "torch"
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        choose_backend("triton", CUDA)


@needs_triton
def test_triton_on_a_bare_cpu_is_refused_and_told_of_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"CUDA GPU.*device is cpu.*TRITON_INTERPRET=1"):
        choose_backend("triton", CPU)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        select_ops("triton", CPU)


@needs_triton
def test_the_environment_chooses_ops_and_attention_together(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("MINIVLLM_ATTENTION", "triton")
    assert select_ops("auto", CPU).rms_norm.__module__ == "kernels.rms_norm"
    owner = select_attention_backend("auto", CPU).__self__
    assert owner.__name__ == "TritonAttention"
    monkeypatch.setenv("MINIVLLM_ATTENTION", "torch")
    assert select_ops("triton", CPU) is TORCH_OPS
    assert select_attention_backend("triton", CPU).__self__ is TorchAttention


@pytest.mark.kernels
@needs_triton
def test_the_engine_in_the_interpreter(tmp_path):
    run_in_interpreter("tests/engine_interpreted.py", tmp_path / "report.xml")
