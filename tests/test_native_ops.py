"""RMSNorm and the gated half in C: every size against float64, the edges, and a row's bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import KernelInputError
from kernels.native.ops import NativeOps
from tests import native_checks as checks
from tests.native import library, needs_native
from tests.native_checks import EDGES, assert_same_bits, columns, numbers, threads

SEEDS = st.integers(0, 2**31)


@needs_native
@given(
    num_rows=st.integers(1, 20),
    heads=st.sampled_from([None, 1, 3]),
    size=st.integers(1, 150),
    scale=st.sampled_from([1.0, 1e-4, 0.0, 1e4]),
    epsilon=st.sampled_from([1e-5, 1e-6]),
    seed=SEEDS,
)
@settings(max_examples=120, deadline=None)
def test_rms_norm_is_the_reference_for_rows_and_heads_that_lie_apart(
    num_rows, heads, size, scale, epsilon, seed
):
    shape = (num_rows, size) if heads is None else (num_rows, heads, size)
    checks.check_rms_norm(library(), shape, scale=scale, epsilon=epsilon, seed=seed)


@needs_native
@given(num_rows=st.integers(0, 20), size=st.integers(1, 150), seed=SEEDS)
@settings(max_examples=80, deadline=None)
def test_add_rms_norm_is_the_reference_and_its_sum_is_torchs(num_rows, size, seed):
    checks.check_add_rms_norm(library(), num_rows, size, seed)


@needs_native
@given(num_rows=st.integers(0, 20), size=st.integers(1, 150), seed=SEEDS)
@settings(max_examples=80, deadline=None)
def test_silu_and_mul_is_the_reference(num_rows, size, seed):
    checks.check_silu_and_mul(library(), num_rows, size, seed)


FIXED = [
    checks.check_rms_norm_sizes,
    checks.check_rms_norm_of_small_rows,
    checks.check_add_rms_norm_sizes,
    checks.check_silu_sizes,
    checks.check_silu_at_the_edges,
]


@needs_native
@pytest.mark.parametrize("check", FIXED, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_rare_cases(check):
    check(library())


@needs_native
def test_no_rows_in_are_no_rows_out():
    ops, none, weight = NativeOps(library()), torch.ones(0, 8), torch.ones(8)
    assert ops.rms_norm(none, weight, 1e-6).shape == (0, 8)
    assert ops.rms_norm(torch.ones(0, 3, 8), weight, 1e-6).shape == (0, 3, 8)
    assert [part.shape for part in ops.add_rms_norm(none, none, weight, 1e-6)] == [(0, 8)] * 2
    assert ops.silu_and_mul(none).shape == (0, 4)


@needs_native
def test_silu_of_a_gate_of_minus_0_is_0_and_of_infinity_is_the_infinity_of_its_sign():
    gate = torch.tensor([-0.0, 0.0, math.inf, math.inf, 100.0])
    up = torch.tensor([3.0, 3.0, 2.0, -2.0, 2.0])
    got = checks.silu_and_mul(library(), torch.cat((gate, up))[None])
    assert got.tolist() == [[0.0, 0.0, math.inf, -math.inf, 200.0]]


def in_batches(function, *rows):
    """The function of each row alone, and of all rows, then each with 1 and with 2 threads."""
    alone = torch.cat([function(*(part[i : i + 1] for part in rows)) for i in range(len(rows[0]))])
    for num_rows in range(2, len(alone) + 1, 5):
        among = function(*(part[-num_rows:] for part in rows))
        assert_same_bits(among, alone[-num_rows:], f"among {num_rows}")
    with threads(2):
        assert_same_bits(function(*rows), alone, "with two threads")


@needs_native
@given(size=st.integers(1, 100), seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_with_two_threads(size, seed):
    ops = NativeOps(library())
    hidden, residual = numbers(23, size, seed=seed), numbers(23, size, seed=seed + 1)
    heads, gate_up = numbers(23, 2, size, seed=seed + 2), numbers(23, 2 * size, seed=seed + 3)
    weight = numbers(size, seed=seed + 4)
    in_batches(lambda rows: ops.rms_norm(rows, weight, 1e-6), hidden)
    in_batches(lambda rows: ops.rms_norm(columns(rows), weight, 1e-6), heads)
    in_batches(lambda *rows: torch.cat(ops.add_rms_norm(*rows, weight, 1e-6), 1), hidden, residual)
    in_batches(ops.silu_and_mul, gate_up)


@needs_native
def test_the_edges_have_the_same_bits_at_every_place_of_a_row():
    edges = torch.tensor(EDGES[:-1])
    edges = edges[edges.isfinite()]
    size = len(edges)
    want = None
    for turned in range(size):
        gate = edges.roll(turned)
        row = torch.cat((gate, torch.ones(size)))[None]
        got = NativeOps(library()).silu_and_mul(row)[0].roll(-turned)
        want = got if want is None else want
        assert_same_bits(got, want, f"turned by {turned}")


class Uncalled:
    """A library that must not be used."""

    def __getattr__(self, _):
        return lambda *_: pytest.fail("C was called")


ROW, SIZE = torch.ones(2, 6), torch.ones(6)
WRONG = [
    ("rms_norm", "hidden", (ROW.double(), SIZE, 1e-6), "float64"),
    ("rms_norm", "hidden", (torch.ones(6, 2).t(), SIZE, 1e-6), "a row must be contiguous"),
    ("rms_norm", "hidden", (torch.ones(2, 4, 6)[:, ::2], SIZE, 1e-6), "a row must be contiguous"),
    ("rms_norm", "hidden", (torch.ones(2, 3, 8)[..., :6], SIZE, 1e-6), "a row must be contiguous"),
    ("rms_norm", "hidden", (ROW.to("meta"), SIZE, 1e-6), "meta"),
    ("rms_norm", "weight", (ROW, SIZE.half(), 1e-6), "float16"),
    ("rms_norm", "weight", (ROW, torch.ones(5), 1e-6), r"\[5\]; it must be \[6\]"),
    ("rms_norm", "weight", (ROW, torch.ones(12)[::2], 1e-6), "contiguous"),
    ("add_rms_norm", "hidden", (ROW.bfloat16(), ROW, SIZE, 1e-6), "bfloat16"),
    ("add_rms_norm", "hidden", (torch.ones(2, 9)[:, :6], ROW, SIZE, 1e-6), "contiguous"),
    ("add_rms_norm", "residual", (ROW, ROW.double(), SIZE, 1e-6), "float64"),
    ("add_rms_norm", "residual", (ROW, torch.ones(3, 6), SIZE, 1e-6), r"must be \[2, 6\]"),
    ("add_rms_norm", "residual", (ROW, torch.ones(2, 9)[:, :6], SIZE, 1e-6), "contiguous"),
    ("add_rms_norm", "weight", (ROW, ROW, torch.ones(7), 1e-6), r"must be \[6\]"),
    ("rms_norm", "hidden", (torch.ones(6), SIZE, 1e-6), "has 1 dimensions"),
    ("rms_norm", "hidden", (torch.ones(2, 2, 2, 6), SIZE, 1e-6), "has 4 dimensions"),
    ("add_rms_norm", "hidden", (torch.ones(6), torch.ones(6), SIZE, 1e-6), "has 1 dimensions"),
    ("silu_and_mul", "gate_up", (torch.ones(2, 5),), "two halves a row"),
    ("silu_and_mul", "gate_up", (torch.ones(6),), "two halves a row"),
    ("silu_and_mul", "gate_up", (torch.ones(2, 2, 6),), "two halves a row"),
    ("silu_and_mul", "gate_up", (ROW.half(),), "float16"),
    ("silu_and_mul", "gate_up", (torch.ones(2, 9)[:, :6],), "contiguous"),
    ("silu_and_mul", "gate_up", (ROW.to("meta"),), "meta"),
]


@pytest.mark.parametrize(("function", "name", "inputs", "why"), WRONG)
def test_a_tensor_that_c_would_misread_is_refused_by_name(function, name, inputs, why):
    with pytest.raises(KernelInputError, match=f"^{name} .*{why}"):
        getattr(NativeOps(Uncalled()), function)(*inputs)
