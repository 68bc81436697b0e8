"""The linear layer in C: every size against float64, its rounding, and a row's bits anywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear as linear_of_torch

from kernels.errors import KernelInputError
from kernels.native.linear import NativeLinear, pack
from tests import native_checks as checks
from tests.native import library, needs_native
from tests.native_checks import assert_same_bits, numbers, threads

NUM_ROWS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 32, 96, 97, 200])
SIZES = {
    "inputs": st.integers(1, 400),
    "outputs": st.integers(1, 80),
    "seed": st.integers(0, 2**31),
}


@needs_native
@given(num_rows=NUM_ROWS, biased=st.booleans(), **SIZES)
@settings(max_examples=150, deadline=None)
def test_every_size_is_exact_up_to_rounding_and_writes_its_results_alone(
    num_rows, inputs, outputs, biased, seed
):
    checks.check_linear(library(), num_rows, inputs, outputs, biased=biased, seed=seed)


@needs_native
def test_the_sizes_at_every_edge_are_exact_up_to_rounding():
    checks.check_linear_sizes(library())


@needs_native
@given(data=st.data(), biased=st.booleans(), **SIZES)
@settings(max_examples=100, deadline=None)
def test_a_row_has_the_same_bits_alone_and_at_any_place_in_any_batch(
    data, inputs, outputs, biased, seed
):
    rows, weight = numbers(12, inputs, seed=seed), numbers(outputs, inputs, seed=seed + 1)
    layer = NativeLinear(library(), weight, numbers(outputs, seed=seed + 2) if biased else None)
    alone = torch.cat([layer(row[None]) for row in rows])
    places = st.lists(st.integers(0, 11), min_size=1, max_size=110)
    batch = data.draw(places, label="rows of the batch")
    assert_same_bits(layer(rows[batch]), alone[batch], "in the batch")


@needs_native
def test_a_row_has_the_same_bits_alone_and_among_up_to_200():
    checks.check_linear_bits(library())


@needs_native
@pytest.mark.parametrize("num_rows", [1, 6, 97, 200])
def test_a_row_has_the_same_bits_with_two_threads(num_rows):
    layer = NativeLinear(library(), numbers(90, 300), numbers(90, seed=1))
    rows = numbers(num_rows, 300, seed=2)
    with threads(2):
        together = layer(rows)
    assert_same_bits(together, layer(rows), "with two threads")


@needs_native
@pytest.mark.parametrize("num_rows", [1, 32])
def test_it_loses_no_more_to_rounding_than_torch(num_rows):
    rows, weight = numbers(num_rows, 1536), numbers(400, 1536, seed=1)
    exact = rows.double() @ weight.double().t()
    ours, theirs = (
        float((result.double() - exact).abs().mean())
        for result in (NativeLinear(library(), weight, None)(rows), linear_of_torch(rows, weight))
    )
    assert ours <= 1.5 * theirs, f"mean error {ours:.2e}; torch's is {theirs:.2e}"


@needs_native
def test_a_layer_keeps_its_numbers_when_the_weight_changes():
    weight, rows = numbers(20, 9), numbers(3, 9, seed=1)
    layer = NativeLinear(library(), weight, None)
    before = layer(rows)
    weight.zero_()
    assert_same_bits(layer(rows), before, "after the weight changed")


@needs_native
def test_a_layer_keeps_its_bias_alive():
    layer = NativeLinear(library(), torch.zeros(33, 4), torch.full((33,), 7.0))
    others = [torch.zeros(33) for _ in range(100)]
    assert (layer(numbers(2, 4)) == 7).all(), len(others)


def test_weights_are_packed_sixteen_outputs_side_by_side_and_zeros_behind_the_last():
    weight = torch.arange(1.0, 18 * 3 + 1).view(18, 3)
    panels = pack(weight)
    assert panels.shape == (2, 3, 16)
    assert panels[0].tolist() == weight[:16].t().tolist()
    assert panels[1, :, :2].tolist() == weight[16:].t().tolist()
    assert (panels[1, :, 2:] == 0).all()


GOOD = {"weight": torch.ones(5, 3), "bias": torch.ones(5), "rows": torch.ones(2, 3)}
WRONG = [
    ("weight", torch.ones(5), "has 1 dimensions"),
    ("weight", torch.ones(5, 3).double(), "float64"),
    ("weight", torch.ones(5, 3).half(), "float16"),
    ("weight", torch.ones(3, 5).t(), "contiguous"),
    ("weight", torch.ones(5, 3, device="meta"), "meta"),
    ("bias", torch.ones(5).bfloat16(), "bfloat16"),
    ("bias", torch.ones(4), r"\[4\]; it must be \[5\]"),
    ("bias", torch.ones(1, 5), r"\[1, 5\]; it must be \[5\]"),
    ("bias", torch.ones(10)[::2], "contiguous"),
    ("bias", torch.ones(5, device="meta"), "meta"),
    ("rows", torch.ones(2, 3).int(), "int32"),
    ("rows", torch.ones(2, 4), r"\[2, 4\]; it must be \[2, 3\]"),
    ("rows", torch.ones(3), r"\[3\]; it must be \[3, 3\]"),
    ("rows", torch.ones(1, 2, 3), r"\[1, 2, 3\]; it must be"),
    ("rows", torch.ones(3, 2).t(), "contiguous"),
    ("rows", torch.ones(2, 3, device="meta"), "meta"),
]


class Uncalled:
    """A library that must not be used."""

    def linear(self, *_):
        pytest.fail("C was called")


@pytest.mark.parametrize(("name", "tensor", "why"), WRONG, ids=lambda part: str(part)[:30])
def test_a_tensor_that_c_would_misread_is_refused_by_name(name, tensor, why):
    given_ = GOOD | {name: tensor}
    with pytest.raises(KernelInputError, match=f"^{name} .*{why}"):
        NativeLinear(Uncalled(), given_["weight"], given_["bias"])(given_["rows"])
