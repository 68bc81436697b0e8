"""Which kernels compute where: the choice, its reasons, and what goes with it."""

import importlib.util

import pytest
import torch

from kernels import available
from kernels.native import library as native
from kernels.native.attention import NativeAttention
from minivllm import EngineConfig
from minivllm.errors import ConfigError
from minivllm.model import backend
from minivllm.model.attention import TorchAttention, select_attention_backend
from minivllm.model.backend import choose_backend
from minivllm.model.ops import TORCH_OPS, select_ops
from tests.interpreter import needs_triton
from tests.native import needs_native

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch):
    monkeypatch.delenv("MINIVLLM_ATTENTION", raising=False)


@pytest.fixture
def no_compiler(monkeypatch):
    """As on a machine without one; nothing that was loaded before is remembered."""
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def gpu_of(monkeypatch, capability):
    monkeypatch.setattr("kernels.launch.capability", lambda device: capability)


@needs_triton
@pytest.mark.parametrize("capability", [80, 86, 90, 120])
def test_auto_is_triton_on_cuda_in_every_dtype(monkeypatch, capability):
    gpu_of(monkeypatch, capability)
    assert choose_backend("auto", CUDA, FLOAT32) == "triton"
    assert choose_backend("auto", CUDA, BFLOAT16) == "triton"


@needs_triton
def test_auto_on_a_gpu_older_than_an_a100_is_torch_and_says_so(monkeypatch, caplog):
    gpu_of(monkeypatch, 75)
    assert choose_backend("auto", CUDA, FLOAT32) == "torch"
    problem = "it needs a GPU of compute capability 8.0 or newer and this one has 7.5"
    assert [record.message for record in caplog.records] == [
        f"plain torch computes, not triton: {problem}"
    ]
    with pytest.raises(ConfigError, match=problem):
        choose_backend("triton", CUDA, FLOAT32)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "triton", "is_fenced"),
    [
        (90, "3.6.0", False),
        (90, "3.7.0", False),
        (100, "3.6.0+git1234", False),
        (90, "3.7.1", True),
        (90, "3.10.0", True),
        (80, "3.6.0", True),  # tensor cores read registers there
        (120, "3.6.0", True),
        (90, "source", True),  # built by oneself: nobody can know
    ],
)
def test_a_compiler_that_leaves_out_a_fence_is_named_and_the_kernels_run(
    monkeypatch, caplog, capability, triton, is_fenced
):
    gpu_of(monkeypatch, capability)
    monkeypatch.setattr(available, "version", lambda package: triton)
    assert choose_backend("auto", CUDA, BFLOAT16) == "triton"
    messages = [record.message for record in caplog.records]
    assert len(messages) == (not is_fenced)
    if messages:
        assert f"triton {triton[:5]} leaves out a fence" in messages[0]
        assert "triton 3.7.1 or newer has the fence" in messages[0]


@needs_native
def test_auto_is_native_on_a_cpu_in_float32_even_with_the_interpreter(monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("auto", CPU, FLOAT32) == "native"
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_auto_on_a_cpu_in_half_precision_is_torch_and_native_says_why_not(dtype):
    assert choose_backend("auto", CPU, dtype) == "torch"
    with pytest.raises(ConfigError, match=r"computes float32 on cpu, not .*float16 on cpu; use"):
        choose_backend("native", CPU, dtype)


def test_auto_without_a_compiler_is_torch_and_says_so_and_native_is_refused(no_compiler, caplog):
    assert choose_backend("auto", CPU, FLOAT32) == "torch"
    assert [record.message for record in caplog.records] == [
        "plain torch computes, not native: there is no C compiler (cc, gcc, clang) on the PATH"
    ]
    with pytest.raises(ConfigError, match=r"no C compiler \(cc, gcc, clang\).*use auto or torch"):
        choose_backend("native", CPU, FLOAT32)


def test_native_on_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="not float32 on cuda"):
        choose_backend("native", CUDA, FLOAT32)


def test_auto_on_a_gpu_without_triton_is_torch_and_asking_for_triton_names_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_backend("auto", CUDA, FLOAT32) == "torch"
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        choose_backend("triton", CUDA, FLOAT32)


@needs_triton
@pytest.mark.parametrize(
    ("triton", "numpy", "problem"),
    [
        ("3.6.0", "2.3.5", None),
        ("3.6.0", "2.4.0", "interpreter of triton 3.6 does not work with numpy 2.4: install"),
        ("3.6.0", "2.5.2", "interpreter of triton 3.6 does not work with numpy 2.5: install"),
        ("3.7.1", "2.5.2", None),
        ("3.10.0", "3.0.0", None),
        ("source", "2.5.2", None),  # built by oneself: nobody can know
    ],
)
def test_the_pair_that_breaks_the_interpreter_is_named(monkeypatch, triton, numpy, problem):
    versions = {"triton": triton, "numpy": numpy}
    monkeypatch.setattr(available, "version", versions.__getitem__)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if problem is None:
        assert choose_backend("triton", CPU, FLOAT32) == "triton"
    else:
        with pytest.raises(ConfigError, match=problem):
            choose_backend("triton", CPU, FLOAT32)
    gpu_of(monkeypatch, 90)
    assert choose_backend("triton", CUDA, FLOAT32) == "triton"


@needs_triton
def test_triton_on_a_bare_cpu_is_refused_and_told_of_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"CUDA GPU.*device is cpu.*TRITON_INTERPRET=1"):
        choose_backend("triton", CPU, FLOAT32)


def test_the_environment_overrides_the_config(monkeypatch):
    monkeypatch.setenv("MINIVLLM_ATTENTION", "torch")
    assert choose_backend("triton", CPU, FLOAT32) == "torch"


def test_an_unknown_backend_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("MINIVLLM_ATTENTION", "flash")
    with pytest.raises(ConfigError, match=r"'flash'.*one of auto, native, torch, triton"):
        choose_backend("auto", CPU, FLOAT32)


def test_an_unknown_backend_in_the_config_is_named():
    with pytest.raises(ConfigError, match=r"attention_backend .*'flash'"):
        EngineConfig(attention_backend="flash")


def test_torch_stands_for_torch_everywhere():
    assert select_attention_backend("torch").__self__ is TorchAttention
    assert select_ops("torch") is TORCH_OPS


@needs_native
def test_native_stands_for_the_c_functions_everywhere():
    assert select_attention_backend("native").func.__self__ is NativeAttention
    assert select_ops("native").rms_norm.__self__.library is backend.native_library()


@needs_triton
def test_triton_stands_for_its_kernels_everywhere():
    assert select_ops("triton").rms_norm.__module__ == "kernels.rms_norm"
    assert select_attention_backend("triton").__self__.__name__ == "TritonAttention"
