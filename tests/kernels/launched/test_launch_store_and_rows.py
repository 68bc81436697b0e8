"""The kernels without a matrix product: store_kv, rotary, RMSNorm, SiLU. In bfloat16, too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_testing import (
    DEVICE,
    DTYPES,
    Guarded,
    assert_close,
    bits,
    launching,
    normal,
    plans,
    rows_apart,
)

from kernels import reference
from kernels.batch import PagedBatch
from kernels.layer_parts import HeadNorms
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary_store_kv
from kernels.silu_and_mul import silu_and_mul
from kernels.store_kv import store_kv

EPSILON = 1e-5
SIZES = st.sampled_from([1, 20, 64, 80, 576, 1000, 1024, 1030])


def step_inputs(plan, generator):
    """(query, key, value) of a step, with rows apart if the plan says so."""
    num_tokens = plan.batch().num_tokens
    num_heads = plan.num_kv_heads * plan.group_size
    heads = [
        normal(num_tokens, count, plan.head_dim, dtype=plan.dtype, generator=generator)
        for count in (num_heads, plan.num_kv_heads, plan.num_kv_heads)
    ]
    return [rows_apart(tensor) for tensor in heads] if plan.strided else heads


def guarded_caches(plan):
    return [Guarded(plan.cache_shape(), plan.dtype, num_guard_rows=1) for _ in range(2)]


def assert_other_slots_untouched(cache, batch):
    slots = bits(cache.flatten(0, 1))
    written = torch.zeros(len(slots), dtype=torch.bool, device=DEVICE)
    written[batch.slots[batch.slots >= 0].long()] = True
    nan = bits(torch.full((1,), float("nan"), dtype=cache.dtype, device=DEVICE))
    assert (slots[~written] == nan).all(), "a slot that is nobody's was written"


@launching
@given(plans(dtypes=DTYPES, head_dims=(20, 64, 80)))
def test_each_token_is_stored_in_its_slot_and_nowhere_else(plan):
    generator = torch.Generator().manual_seed(plan.seed)
    batch = plan.batch()
    _, key, value = step_inputs(plan, generator)
    guarded = guarded_caches(plan)
    caches = [cache.inside for cache in guarded]
    want = [cache.clone() for cache in caches]
    store_kv(key, value, *caches, batch)
    reference.store_kv(key, value, *want, batch)
    for cache, expected, guards in zip(caches, want, guarded, strict=True):
        guards.check()
        assert (bits(cache) == bits(expected)).all(), "a copy must be exact"
        assert_other_slots_untouched(cache, batch)


@launching
@given(plans(dtypes=DTYPES, head_dims=(20, 64, 80, 96)), st.booleans())
def test_rotated_keys_are_stored_and_rotated_queries_returned(plan, normed):
    generator = torch.Generator().manual_seed(plan.seed)
    batch = plan.batch()
    query, key, value = step_inputs(plan, generator)
    angles = torch.rand(batch.max_context_len, plan.head_dim // 2, generator=generator) * 7
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    guarded = guarded_caches(plan)
    caches = [cache.inside for cache in guarded]
    want_caches = [cache.double() for cache in caches]
    doubles = [tensor.double() for tensor in (query, key, value, cos, sin)]
    norms = None
    if normed:
        weights = [normal(plan.head_dim, dtype=plan.dtype, generator=generator) for _ in range(2)]
        norms = HeadNorms(*weights, EPSILON)
        wide = HeadNorms(*(weight.double() for weight in weights), EPSILON)
        doubles[:2] = wide.applied(reference.rms_norm, *doubles[:2])
    want = reference.rotary_store_kv(*doubles, *want_caches, batch)
    output = Guarded(tuple(query.shape), plan.dtype)
    rotary_store_kv(query, key, value, cos, sin, *caches, batch, norms=norms, out=output.inside)
    output.check()
    assert_close(output.inside, want, batch)
    slots = batch.slots[batch.slots >= 0].long()
    for cache, expected, guards in zip(caches, want_caches, guarded, strict=True):
        guards.check()
        assert_other_slots_untouched(cache, batch)
        assert_close(cache.flatten(0, 1)[slots], expected.flatten(0, 1)[slots])


@launching
@given(st.integers(1, 4), SIZES, st.sampled_from(DTYPES), st.integers(0, 99))
def test_rms_norm_equals_the_reference(num_tokens, size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = normal(num_tokens, size, dtype=dtype, generator=generator)
    weight = normal(size, dtype=dtype, generator=generator)
    want = reference.rms_norm(hidden.double(), weight.double(), EPSILON)
    output = Guarded((num_tokens, size), dtype)
    rms_norm(rows_apart(hidden), weight, EPSILON, out=output.inside)
    output.check()
    assert_close(output.inside, want)


@launching
@given(st.integers(1, 4), SIZES, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_the_residual_is_added_before_the_norm_and_returned(num_tokens, size, dtype, place, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = normal(num_tokens, size, dtype=dtype, generator=generator)
    weight = normal(size, dtype=dtype, generator=generator)
    residual = Guarded((num_tokens, size), dtype)
    residual.inside.copy_(normal(num_tokens, size, dtype=dtype, generator=generator))
    want = reference.add_rms_norm(
        hidden.double(), residual.inside.double(), weight.double(), EPSILON
    )
    output = Guarded((num_tokens, size), dtype)
    total = residual if place else Guarded((num_tokens, size), dtype)
    add_rms_norm(
        hidden, residual.inside, weight, EPSILON, out=output.inside, residual_out=total.inside
    )
    for guarded, expected in zip((output, total), want, strict=True):
        guarded.check()
        assert_close(guarded.inside, expected)


@launching
@given(st.integers(1, 4), SIZES, st.sampled_from(DTYPES), st.integers(0, 99))
def test_silu_of_the_gate_times_up_equals_the_reference(num_tokens, size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    gate_up = normal(num_tokens, 2 * size, dtype=dtype, generator=generator)
    output = Guarded((num_tokens, size), dtype)
    silu_and_mul(rows_apart(gate_up), out=output.inside)
    output.check()
    assert_close(output.inside, reference.silu_and_mul(gate_up.double()))


@pytest.mark.parametrize("gate", [-1e4, -90.0, 0.0, 90.0, 1e4])
def test_silu_does_not_overflow(gate):
    gate_up = torch.tensor([[gate, 2.0]], device=DEVICE)
    assert_close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up.double()))


def test_a_slot_beyond_2_to_the_31_elements_is_written():
    num_blocks = 2**31 // (16 * 64) + 2
    try:
        cache = torch.empty(num_blocks, 16, 1, 64, dtype=torch.float16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no 4 GB address range to be had: {error}")
    batch = PagedBatch.from_host(
        [[num_blocks - 1]], [(0, 3)], num_blocks=num_blocks, block_size=16, device=DEVICE
    )
    key = torch.randn(3, 1, 64).to(DEVICE, torch.float16)
    store_kv(key, key, cache, cache, batch)
    assert (cache[-1, :3] == key).all()
    cos, sin = torch.ones(3, 32, device=DEVICE), torch.zeros(3, 32, device=DEVICE)
    rotary_store_kv(key, -key, -key, cos, sin, cache, cache, batch)
    assert (cache[-1, :3] == -key).all()
