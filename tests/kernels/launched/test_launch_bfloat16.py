"""Attention in bfloat16, which only a GPU can check: the interpreter's tl.dot returns garbage."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_testing import INTERPRETED, check_attention, launching, plans

from kernels.attention import attention
from kernels.split_attention import split_attention

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="tl.dot on bfloat16 is wrong in Triton's interpreter: needs a GPU"
)


@launching
@given(plans(dtypes=[torch.bfloat16]))
def test_any_mixed_batch_in_bfloat16_equals_the_reference(plan):
    check_attention(plan, attention)


@launching
@given(plans(dtypes=[torch.bfloat16], decode=True), st.sampled_from([1, 2, 8]))
def test_a_split_decode_in_bfloat16_equals_the_reference(plan, num_splits):
    def launch(*inputs, out):
        split_attention(*inputs, num_splits=num_splits, out=out)

    check_attention(plan, launch)
