"""A decoder layer in two calls of C: the bits of its parts, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import KernelInputError
from kernels.native.attention import NativeAttention
from kernels.native.layer import NativeLayer, Scratch
from tests import native_checks as checks
from tests.native import library, needs_native
from tests.native_checks import Computed, Line, Shape, numbers, threads

BOOLEANS = {"biased": st.booleans(), "head_norms": st.booleans()}


@needs_native
@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 6, 7, 13, 32, 97, 200]),
    inputs=st.integers(1, 300),
    panels=st.integers(1, 5),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_gate_and_up_in_one_have_the_bits_of_two(num_rows, inputs, panels, biased, seed):
    checks.check_gated_linear(library(), num_rows, inputs, 16 * panels, biased=biased, seed=seed)


@needs_native
@pytest.mark.parametrize(
    "check", [checks.check_gated_linear_sizes, checks.check_layer_of_every_kind]
)
def test_the_rare_cases(check):
    check(library())


@needs_native
@given(
    lines=st.lists(
        st.tuples(st.integers(0, 150), st.integers(1, 90)).map(lambda n: Line(n[0], sum(n))),
        min_size=1,
        max_size=4,
    ),
    shape=st.builds(
        lambda hidden, heads, half, panels: Shape(hidden, *heads, 2 * half, 16 * panels),
        st.integers(1, 100),
        st.sampled_from([(1, 1), (4, 2), (9, 3), (5, 1)]),
        st.integers(1, 40),
        st.integers(1, 4),
    ),
    block_size=st.sampled_from([1, 16, 48]),
    num_threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
    **BOOLEANS,
)
@settings(max_examples=60, deadline=None)
def test_a_layer_has_the_bits_of_its_parts(lines, shape, block_size, num_threads, seed, **kind):
    with threads(num_threads):
        checks.check_layer(library(), lines, shape, block_size, seed=seed, **kind)


@needs_native
def test_two_layers_with_one_scratch_do_not_disturb_each_other():
    """As in a decoder: a large step, a small one, and the large one again."""
    layers, scratch = [checks.layer_parts(library(), seed=seed) for seed in (1, 2)], Scratch()
    together = [NativeLayer(library(), scratch, parts) for parts in layers]
    apart = [NativeLayer(library(), Scratch(), parts) for parts in layers]
    angles = numbers(400, 10, seed=9)
    rotation = angles.cos(), angles.sin()
    for num_rows in (100, 1, 100):
        results = []
        for stack in (together, apart):
            cache = tuple(torch.full((8, 16, 2, 20), checks.NAN) for _ in range(2))
            sequence = Computed(0, num_rows, list(range(8)))
            x, update = torch.zeros(num_rows, 48), numbers(num_rows, 48)
            for layer in stack:
                step = NativeAttention.begin_step(library(), [sequence], cache)
                x, heads = layer.attend(x, update, rotation, cache, step)
                x, update = layer.finish(x, heads)
            results.append(x + update)
        checks.assert_same_bits(*results, f"{num_rows} rows")


def test_scratch_is_the_same_memory_until_more_is_needed():
    scratch = Scratch()
    first = scratch.rows("a", 3, 4)
    assert first.shape == (3, 4)
    assert first.is_contiguous()
    assert scratch.rows("a", 3, 4) is first
    assert scratch.rows("a", 2, 5).data_ptr() == first.data_ptr()
    assert scratch.rows("b", 2, 5).data_ptr() != first.data_ptr()
    assert scratch.rows("a", 7, 4).shape == (7, 4)
    assert scratch.rows("a", 3, 4).data_ptr() == scratch.rows("a", 7, 4).data_ptr()


# What must not reach C.


class Uncalled:
    """A library that must not be used."""

    def __getattr__(self, _):
        return lambda *_: pytest.fail("C was called")


PARTS = checks.layer_parts(Uncalled(), head_norms=True)
WIDE = checks.layer_parts(Uncalled(), Shape(hidden=64), head_norms=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output": WIDE.output}, r"sizes \[.*\(80, 64\).*; they must be \[.*\(80, 48\)"),
        ({"gate_up": WIDE.gate_up}, r"sizes .*\(64, 64\), \(32, 48\)\]; they"),
        ({"down": WIDE.down}, r"sizes .*\(32, 64\)\]; they"),
        ({"down": PARTS.gate_up}, r"must be .*\(48, 96\), \(48, 48\)\]$"),
        ({"num_heads": 3}, r"must be \[\(48, 140\), \(60, 48\)"),
        ({"num_kv_heads": 4}, r"must be \[\(48, 240\)"),
        ({"output": torch.nn.Identity()}, "must be NativeLinear"),
        ({"attention_norm": WIDE.mlp_norm}, r"^attention_norm has shape \[64\]; it must be \[48\]"),
        ({"mlp_norm": torch.ones(48).double()}, "^mlp_norm is torch.float64"),
        ({"query_norm": torch.ones(21)}, r"^query_norm has shape \[21\]; it must be \[20\]"),
        ({"key_norm": torch.ones(40)[::2]}, "^key_norm .*contiguous"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(KernelInputError, match=message):
        NativeLayer(Uncalled(), Scratch(), PARTS._replace(**changed))


def test_a_gate_that_does_not_end_with_a_panel_is_refused():
    parts = checks.layer_parts(Uncalled(), Shape(inner=24))
    with pytest.raises(KernelInputError, match="down's inputs a multiple of 16"):
        NativeLayer(Uncalled(), Scratch(), parts)


CACHE = (torch.zeros(10, 4, 2, 20), torch.zeros(10, 4, 2, 20))
ANGLES = torch.ones(9, 10)
GOOD = {
    "x": torch.ones(2, 48),
    "update": torch.ones(2, 48),
    "cos": ANGLES,
    "sin": ANGLES,
    "keys": CACHE[0],
    "values": CACHE[1],
}
ATTENDED = [
    ("x", torch.ones(2, 49), r"must be \[2, 48\]"),
    ("x", torch.ones(3, 48), r"must be \[2, 48\]"),
    ("x", torch.ones(2, 48).double(), "float64"),
    ("x", torch.ones(48, 2).t(), "contiguous"),
    ("update", torch.ones(1, 48), r"must be \[2, 48\]"),
    ("update", torch.ones(2, 48).to("meta"), "meta"),
    ("cos", torch.ones(4, 10), "a row a position"),
    ("sin", torch.ones(9, 9), r"must be \[9, 10\]"),
    ("keys", torch.ones(9, 4, 2, 20), r"must be \[10, 4, 2, 20\]"),
    ("values", CACHE[1].half(), "float16"),
]


def step_of_two_rows(cache=CACHE):
    return NativeAttention.begin_step(Uncalled(), [Computed(3, 5, [7, 2])], cache)


@pytest.mark.parametrize(("name", "tensor", "why"), ATTENDED)
def test_what_cannot_be_attended_is_refused_by_name(name, tensor, why):
    x, update, cos, sin, keys, values = (GOOD | {name: tensor}).values()
    layer = NativeLayer(Uncalled(), Scratch(), PARTS)
    with pytest.raises(KernelInputError, match=f"^{name} .*{why}"):
        layer.attend(x, update, (cos, sin), (keys, values), step_of_two_rows())


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 20), (4, 20), (2, 40), (4, 10)])
def test_a_cache_of_other_heads_is_refused(num_kv_heads, head_dim):
    cache = (torch.zeros(10, 4, num_kv_heads, head_dim),) * 2
    layer = NativeLayer(Uncalled(), Scratch(), PARTS)
    rotation = (torch.ones(9, head_dim // 2),) * 2
    with pytest.raises(
        KernelInputError, match=f"cache has {num_kv_heads} heads of {head_dim}; .* 2 heads of 20"
    ):
        layer.attend(GOOD["x"], GOOD["update"], rotation, cache, step_of_two_rows(cache))


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("x", torch.ones(2, 47), r"must be \[2, 48\]"),
        ("heads", torch.ones(2, 81), r"must be \[2, 80\]"),
        ("heads", torch.ones(1, 80), r"must be \[2, 80\]"),
        ("heads", torch.ones(2, 160)[:, ::2], "contiguous"),
    ],
)
def test_what_cannot_be_finished_is_refused_by_name(name, tensor, why):
    given_ = {"x": torch.ones(2, 48), "heads": torch.ones(2, 80)} | {name: tensor}
    layer = NativeLayer(Uncalled(), Scratch(), PARTS)
    with pytest.raises(KernelInputError, match=f"^{name} .*{why}"):
        layer.finish(**given_)


def test_threads_that_get_no_memory_are_a_memory_error():
    poor = SimpleNamespace(layer_attend=lambda *_: 1, layer_finish=None)
    layer = NativeLayer(poor, Scratch(), PARTS)
    with pytest.raises(MemoryError):
        layer.attend(GOOD["x"], GOOD["update"], (ANGLES, ANGLES), CACHE, step_of_two_rows())


@needs_native
def test_a_layer_keeps_alive_what_c_reads():
    """Its parts are dropped, and their memory is written over, if it is given back."""
    wanted = checks.layer_parts(library(), biased=True, head_norms=True)
    kept = NativeLayer(library(), Scratch(), wanted)
    layer = NativeLayer(
        library(), Scratch(), checks.layer_parts(library(), biased=True, head_norms=True)
    )
    others = [torch.full((size,), 7.0) for size in (20, 48, 64, 80, 160) for _ in range(100)]
    results = [each.finish(GOOD["x"].clone(), numbers(2, 80))[1].clone() for each in (kept, layer)]
    checks.assert_same_bits(*results, f"after {len(others)} others")
