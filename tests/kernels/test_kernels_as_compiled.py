"""The kernels as a GPU would run them: compiled, and their PTX executed on a CPU (benchmarks/ptx).

The interpreter runs what a kernel says; this runs what the compiler made of it. Products of
bfloat16 are computed as tensor cores do, which the interpreter cannot, and float32 is seen to be
multiplied in float32. The traps are those of kernel_testing.py. Others come with the machine: no
address outside of a tensor, and no race for shared memory.
"""

import re
from dataclasses import replace

import kernel_testing
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_testing import Guarded, Plan, assert_close, check_attention, normal, plans, rows_apart

pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl

from benchmarks.ptx.launch import PtxMachine
from benchmarks.ptx.parse import PtxError
from kernels import reference
from kernels.attention import attention
from kernels.layer_parts import HeadNorms
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary_store_kv
from kernels.silu_and_mul import silu_and_mul
from kernels.split_attention import split_attention
from kernels.step_attention import TritonAttention
from kernels.store_kv import store_kv
from tests.interpreter import needs_compiler

pytestmark = [pytest.mark.kernels, needs_compiler]

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
EPSILON = 1e-5
# An A100, an H100, an RTX 5090: mma, wgmma, and mma with instructions for pairs of floats.
CAPABILITIES = (80, 90, 120)
MIXED = Plan(
    block_size=16,
    num_blocks=12,
    # Block 0, where a masked entry of the table points, is nobody's: all NaN.
    block_tables=[[1], [7, 3, 4], [7, 10, 5, 9], [2, 6, 8]],
    ranges=[(4, 5), (16, 40), (32, 50), (0, 33)],
    num_kv_heads=2,
    group_size=3,
    dtype=BFLOAT16,
    num_padding=1,
)
DECODE = replace(MIXED, ranges=[(4, 5), (39, 40), (49, 50), (32, 33)])


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """A machine for each capability; what is compiled goes to a throw-away folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        # Also where there is a GPU.
        patch.setattr(kernel_testing, "DEVICE", "cpu")
        yield {capability: PtxMachine(capability) for capability in CAPABILITIES}


@pytest.fixture(params=CAPABILITIES)
def machine(machines, request):
    with machines[request.param].launching() as machine:
        yield machine


def executed(machine):
    """The names of all instructions that were executed, and of the kernels that they belong to."""
    names = set()
    for launch in machine.launches:
        pairs = zip(launch.program.instructions, launch.executed, strict=True)
        names |= {instruction.opcode[0] for instruction, count in pairs if count}
    return names, {launch.kernel for launch in machine.launches}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prompt_chunk_and_decode_in_one_batch_equal_the_reference(machine, head_dim):
    check_attention(replace(MIXED, head_dim=head_dim), attention)
    names, kernels = executed(machine)
    assert kernels == {"paged_attention_kernel"}
    assert ("wgmma" if machine.capability == 90 else "mma") in names
    assert "cp" in names


def test_decodes_equal_the_reference(machine):
    check_attention(DECODE, attention)
    names, _ = executed(machine)
    assert {"mma", "cp", "ldmatrix"} <= names


@pytest.mark.parametrize("plan", [MIXED, DECODE], ids=["mixed", "decode"])
def test_split_contexts_equal_the_reference(machine, plan):
    check_attention(plan, lambda *inputs, out: split_attention(*inputs, num_splits=4, out=out))
    _, kernels = executed(machine)
    assert kernels == {"split_attention_kernel", "merge_splits_kernel"}


def test_decodes_and_the_rest_each_by_a_kernel_of_their_own_equal_the_reference(machine):
    def launch(query, key_cache, value_cache, batch, out):
        step = TritonAttention.of(batch)
        assert len(step.parts) == 2
        out.copy_(step.attend(query, (key_cache, value_cache)))

    check_attention(replace(MIXED, num_padding=0), launch)
    assert len(machine.launches) == 2


# Some of each, and 20: no power of two, and hardly larger than a product.
@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "block_size"),
    [
        (80, 20, BFLOAT16, 16),
        (80, 80, FLOAT16, 32),
        (80, 256, BFLOAT16, 128),
        (90, 80, BFLOAT16, 256),
        (90, 96, BFLOAT16, 16),
        (90, 256, FLOAT16, 64),
        (120, 96, FLOAT16, 128),
        (120, 256, BFLOAT16, 32),
    ],
)
def test_head_sizes_and_block_sizes(machines, capability, head_dim, dtype, block_size):
    plan = Plan(
        block_size, 8, [[5, 3], [7, 1], [5, 2, 6]],
        [(block_size, block_size + 1), (0, block_size + 1), (2 * block_size, 2 * block_size + 3)],
        num_kv_heads=1, group_size=2, head_dim=head_dim, dtype=dtype,
    )  # fmt: skip
    with machines[capability].launching():
        check_attention(plan, attention)


def test_float32_is_multiplied_in_float32(machines):
    # A tensor core would take 10 bits of each number; the interpreter could not tell.
    with machines[80].launching() as machine:
        check_attention(replace(DECODE, dtype=FLOAT32), attention)
    names, _ = executed(machine)
    assert "mma" not in names
    assert "fma" in names


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
)
# One head size and one block size: each other one is a compilation.
@given(
    plans(dtypes=[BFLOAT16], head_dims=[64], block_sizes=[16], max_sequences=2),
    st.sampled_from([1, 2, 8]),
)
def test_drawn_batches_equal_the_reference(machine, plan, num_splits):
    def launch(*inputs, out):
        if num_splits == 1:
            paged_attention(*inputs, out=out)
        else:
            split_attention(*inputs, num_splits=num_splits, out=out)

    check_attention(plan, launch)


@pytest.mark.parametrize("normed", [False, True])
def test_rotated_keys_are_stored_and_rotated_queries_returned(machine, normed):
    generator = torch.Generator().manual_seed(0)
    batch = MIXED.batch()
    query, key, value = (
        rows_apart(normal(batch.num_tokens, heads, 64, dtype=BFLOAT16, generator=generator))
        for heads in (6, 2, 2)
    )
    angles = 7 * torch.rand(50, 32, generator=generator)
    doubles = [tensor.double() for tensor in (query, key, value, angles.cos(), angles.sin())]
    norms = None
    if normed:
        norms = HeadNorms(*torch.rand(2, 64, generator=generator).to(BFLOAT16), EPSILON)
        wide = HeadNorms(norms.query.double(), norms.key.double(), EPSILON)
        doubles[:2] = wide.applied(reference.rms_norm, *doubles[:2])
    caches = [Guarded(MIXED.cache_shape(), BFLOAT16, num_guard_rows=1) for _ in range(2)]
    want_caches = [cache.inside.double() for cache in caches]
    want = reference.rotary_store_kv(*doubles, *want_caches, batch)
    output = Guarded(tuple(query.shape), BFLOAT16)
    inside = [cache.inside for cache in caches]
    rotary_store_kv(
        query, key, value, angles.cos(), angles.sin(), *inside, batch, norms=norms,
        out=output.inside,
    )  # fmt: skip
    output.check()
    assert_close(output.inside, want, batch)
    for cache, expected in zip(caches, want_caches, strict=True):
        cache.check()
        assert (cache.inside.isnan() == expected.isnan()).all(), "a slot that is nobody's"
        assert_close(cache.inside.nan_to_num(), expected.nan_to_num())


def test_each_token_is_stored_in_its_slot_and_nowhere_else(machine):
    batch = MIXED.batch()
    key, value = torch.randn(2, batch.num_tokens, 2, 64).to(BFLOAT16)
    caches = [Guarded(MIXED.cache_shape(), BFLOAT16, num_guard_rows=1) for _ in range(2)]
    want = [cache.inside.clone() for cache in caches]
    store_kv(rows_apart(key), value, *(cache.inside for cache in caches), batch)
    reference.store_kv(key, value, *want, batch)
    for cache, expected in zip(caches, want, strict=True):
        cache.check()
        torch.testing.assert_close(cache.inside, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [576, 1030])
def test_norms_and_silu_equal_the_reference(machine, size):
    hidden, residual, weight = torch.randn(3, 4, size).to(BFLOAT16)
    outputs = [Guarded((4, size), BFLOAT16) for _ in range(4)]
    normed, added, total, gated = (output.inside for output in outputs)
    rms_norm(rows_apart(hidden), weight[0], EPSILON, out=normed)
    add_rms_norm(hidden, residual, weight[0], EPSILON, out=added, residual_out=total)
    silu_and_mul(rows_apart(torch.cat((hidden, residual), dim=1)), out=gated)
    doubles = hidden.double(), residual.double(), weight[0].double()
    assert_close(normed, reference.rms_norm(doubles[0], doubles[2], EPSILON))
    for found, want in zip((added, total), reference.add_rms_norm(*doubles, EPSILON), strict=True):
        assert_close(found, want)
    assert_close(gated, reference.silu_and_mul(torch.cat(doubles[:2], dim=1)))
    for output in outputs:
        output.check()


@triton.jit
def product_kernel(left, right, out, SIZE: tl.constexpr):
    """out = left @ right, each [SIZE, SIZE]."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + columns
    tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("size", [16, 64])
def test_a_product_has_one_error_of_rounding(machine, size, dtype):
    left, right = torch.randn(2, size, size).to(dtype)
    found = torch.full((size, size), float("nan"))
    product_kernel[(1,)](left, right, found, SIZE=size)
    torch.testing.assert_close(found.double(), left.double() @ right.double(), rtol=1e-6, atol=1e-5)


# The machine finds what the compiler could have done wrong: one line of its PTX is changed.


class Changed:
    """Changes the line of a kernel's PTX that is `which`-th among those that a pattern matches."""

    def __init__(self, pattern, replacement, which=0):
        self.pattern, self.replacement, self.which = pattern, replacement, which
        self.num_found = 0

    def __call__(self, ptx):
        places = list(re.finditer(self.pattern, ptx))
        self.num_found = len(places)
        place = places[self.which]
        return ptx[: place.start()] + place.expand(self.replacement) + ptx[place.end() :]


def check_changed(capability, plan, change):
    with PtxMachine(capability, change).launching():
        check_attention(plan, paged_attention)


# Several steps of 64 keys.
LONG_DECODE = replace(
    DECODE, num_blocks=24, block_tables=[[*range(1, 20)]], ranges=[(300, 301)], num_padding=0
)
LONG_PROMPT = replace(LONG_DECODE, ranges=[(250, 301)])


@pytest.mark.parametrize(
    ("what", "capability", "change", "message"),
    [
        ("a copy is not waited for", 80, Changed(r"cp\.async\.wait_group\s+\d+;", ""), "race"),
        ("one copy too few is waited for", 80,
         Changed(r"(cp\.async\.wait_group\s+)3;", r"\g<1>4;"), "race|differ"),
        ("an address is one element too far", 80,
         Changed(r"(ld\.global\.b32 \{[^}]*\}, \[ %rd\d+ \+ )0", r"\g<1>2"), "misaligned"),
        ("a fragment is taken for another", 80,
         Changed(r"(mma\.sync\S* \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\g<1>\3, \2"), "differ"),
        ("two rows meet in one place of the banks", 90,
         Changed(r"xor\.b32", "or.b32"), "race|differ"),
        ("a product is not waited for", 90,
         Changed(r"wgmma\.wait_group\.sync\.aligned 0;", "", 1), "race|products under way|differ"),
        ("one product is added to the last one's sum", 90,
         Changed(r"(wgmma\.mma_async[^;]*?%rd\d+, %rd\d+, )0", r"\g<1>1", 0), "differ"),
        ("a matrix is read by columns", 80,
         Changed(r"\.x4\.trans\.shared", ".x4.shared"), "differ"),
    ],
)  # fmt: skip
def test_the_machine_notices_that(machines, what, capability, change, message):
    plan = LONG_DECODE if capability == 80 else LONG_PROMPT
    with pytest.raises((AssertionError, PtxError), match=message):
        check_changed(capability, plan, change)


@pytest.mark.parametrize(("capability", "plan"), [(80, LONG_DECODE), (90, LONG_PROMPT)])
def test_the_machine_has_nothing_against_what_was_not_changed(machines, capability, plan):
    check_changed(capability, plan, lambda ptx: ptx)


def test_the_machine_notices_fences_that_are_missing(machines):
    fence = r"fence\.proxy\.async\S*;"
    change = Changed(fence, "fence.proxy.async;")
    check_changed(90, LONG_PROMPT, change)
    noticed = [is_missed(90, LONG_PROMPT, fence, n, "fence") for n in range(change.num_found)]
    # Each loop has one, and the compiler puts another before each loop.
    assert noticed.count(True) >= 2


def test_the_machine_notices_a_product_that_does_not_wait_for_its_keys(machines):
    """The wait for a copy, and the barrier, stand behind the product instead of before it."""
    waiting = r"cp\.async\.wait_group\s+3;\s*bar\.sync\s+0;"

    def change(ptx):
        found = re.search(rf"({waiting})(.*?)(?=wgmma\.wait_group)", ptx, re.S)
        return ptx[: found.start()] + found[2] + found[1] + "\n" + ptx[found.end() :]

    with pytest.raises(PtxError, match="read before"):
        check_changed(90, LONG_PROMPT, change)


def test_the_machine_notices_barriers_that_are_missing(machines):
    barrier = r"bar\.sync\s+0;"
    change = Changed(barrier, "bar.sync 0;")
    check_changed(80, LONG_DECODE, change)
    noticed = [is_missed(80, LONG_DECODE, barrier, n, "race") for n in range(change.num_found)]
    # The compiler puts some where nobody could meet, before the first copy for example: one with
    # triton 3.7, five with 3.6.
    assert noticed.count(True) > 5
    assert noticed.count(True) > noticed.count(False)


def is_missed(capability, plan, pattern, which, message):
    """Whether the machine says `message` when this line is left out."""
    try:
        check_changed(capability, plan, Changed(pattern, "", which))
    except PtxError as error:
        return message in str(error)
    return False
