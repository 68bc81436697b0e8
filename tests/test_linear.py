"""Which linear layer goes with which backend, and the plain one."""

import torch

from kernels.native.linear import NativeLinear
from minivllm.model.linear import DenseLinear, select_linear
from tests.native import needs_native


@needs_native
def test_native_weights_are_packed_and_the_checkpoints_stay_as_they_are():
    weight = torch.randn(33, 24)
    kept = weight.clone()
    layer = select_linear("native")(weight, None)
    assert isinstance(layer, NativeLinear)
    rows = torch.randn(5, 24)
    exact = rows.double() @ kept.double().t()
    torch.testing.assert_close(layer(rows).double(), exact, atol=1e-5, rtol=1e-5)
    assert torch.equal(weight, kept)


def test_torch_and_triton_multiply_with_the_weights_as_they_are():
    assert select_linear("torch") is DenseLinear
    assert select_linear("triton") is DenseLinear


def test_the_plain_layer_is_the_product_with_its_bias():
    weight, bias, rows = torch.randn(3, 4), torch.randn(3), torch.randn(2, 4)
    torch.testing.assert_close(DenseLinear(weight, bias)(rows), rows @ weight.t() + bias)
