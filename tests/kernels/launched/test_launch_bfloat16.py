"""Attention in bfloat16, which only a GPU can check: the interpreter's tl.dot returns garbage."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from kernel_testing import check_attention, launching, plans

from kernels.attention import attention
from kernels.split_attention import split_attention


@pytest.mark.gpu_only
@launching
@given(plans(dtypes=[torch.bfloat16]))
def test_any_mixed_batch_in_bfloat16_equals_the_reference(plan):
    check_attention(plan, attention)


@pytest.mark.gpu_only
@launching
@given(plans(dtypes=[torch.bfloat16], decode=True), st.sampled_from([1, 2, 8]))
def test_a_split_decode_in_bfloat16_equals_the_reference(plan, num_splits):
    def launch(*inputs, out):
        split_attention(*inputs, num_splits=num_splits, out=out)

    check_attention(plan, launch)


@triton.jit
def product_kernel(left, right, out, SIZE: tl.constexpr):
    """out = left @ right, each [SIZE, SIZE]."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + columns
    tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))


def product_error(dtype):
    """The largest error of a product of two 16 x 16 matrices of normal numbers."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 16, 16, generator=generator).to(dtype)
    found = torch.empty(16, 16)
    product_kernel[(1,)](left, right, found, SIZE=16)
    return (found - left.float() @ right.float()).abs().max().item()


@pytest.mark.interpreter_only
def test_the_interpreter_is_still_wrong_about_products_of_bfloat16():
    assert product_error(torch.float16) < 1e-2
    assert product_error(torch.bfloat16) > 1, (
        "the interpreter has been mended: add bfloat16 to DTYPES_WITH_DOT of kernel_testing.py,"
        " and leave out this test and the marker gpu_only"
    )
