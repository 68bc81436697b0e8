"""The linear layer: packed or not, every row is its product with the weight."""

import pytest
import torch

from minivllm.model.linear import DenseLinear, PackedLinear, packed_if_wide, select_linear

CPU = torch.device("cpu")
HAS_PACKED = select_linear(CPU, torch.float32) is packed_if_wide


def test_float32_on_an_x86_cpu_is_packed():
    capability = torch.backends.cpu.get_cpu_capability()
    assert HAS_PACKED is (capability in ("AVX2", "AVX512"))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8, 9, 32, 33, 130])
@pytest.mark.parametrize("shape", [(96, 32), (49, 24), (8, 40)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_layer_is_the_product_in_float64(num_rows, shape, has_bias):
    if not HAS_PACKED:
        # Where there is none, nothing may choose it.
        assert select_linear(CPU, torch.float32) is DenseLinear
        return
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0])
    rows = torch.randn(num_rows, shape[1], generator=generator)
    exact = rows.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    with torch.inference_mode():
        found = PackedLinear(weight, bias if has_bias else None)(rows)
    torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=1e-5)


def test_packing_leaves_the_weight_as_it_was():
    weight = torch.randn(64, 32)
    kept = weight.clone()
    packed_if_wide(weight, None)
    assert torch.equal(weight, kept)


@pytest.mark.parametrize(("out_features", "packs"), [(64, True), (63, False), (32, False)])
def test_only_what_is_twice_as_wide_as_its_input_is_packed(out_features, packs):
    if not HAS_PACKED:
        assert select_linear(CPU, torch.float32) is DenseLinear
        return
    layer = packed_if_wide(torch.randn(out_features, 32), None)
    assert isinstance(layer, PackedLinear if packs else DenseLinear)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_stay_as_they_are(dtype):
    assert select_linear(CPU, dtype) is DenseLinear


def test_a_gpu_stays_as_it_is():
    assert select_linear(torch.device("cuda"), torch.float32) is DenseLinear
