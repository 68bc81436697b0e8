"""Planted faults: each changes one place of the C text, and a check must find it.

The checks are those that test_native_linear, _ops and _attention run on the real library: so they
can fail, and each rare case they play is one that a wrong line would get wrong. A fault in the last
group changes nothing but bits.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kernels.native import library as native
from tests import native_checks as checks
from tests.native import needs_native

pytestmark = needs_native

KERNELS = Path(native.__file__).parent


class Kernel(NamedTuple):
    """A C file that is compiled alone, or with `others`, and what is called in them."""

    file: str
    functions: tuple[str, ...]
    others: tuple[str, ...] = ()


LINEAR = Kernel("linear.c", ("linear",))
GATED = Kernel("linear.c", ("linear", "gated_linear", "silu_and_mul"), ("silu_and_mul.c",))
LAYER = Kernel(
    "layer.c",
    tuple(native._ARGUMENTS),
    ("attention.c", "linear.c", "rms_norm.c", "rotary.c", "silu_and_mul.c"),
)
ATTENTION = Kernel("attention.c", ("attend",))
ROTARY = Kernel("rotary.c", ("rotary_store_kv",))
NORM = Kernel("rms_norm.c", ("rms_norm", "add_rms_norm"))
SILU = Kernel("silu_and_mul.c", ("silu_and_mul",))


class Fault(NamedTuple):
    """`right` stands once in the file and becomes `wrong`; `check` finds it."""

    name: str
    kernel: Kernel
    check: Callable
    right: str
    wrong: str
    header: str | None = None


FAULTS = [
    # linear.c and tile.h
    Fault(
        "a chain that is not whole is dropped",
        LINEAR,
        checks.check_linear_sizes,
        "for (int i = 0; i < inputs; i += CHAIN)",
        "for (int i = 0; i + CHAIN <= inputs; i += CHAIN)",
    ),
    Fault(
        "the last panel is taken for a whole one",
        LINEAR,
        checks.check_linear_sizes,
        "width = outputs - column < WIDTH ? outputs - column : WIDTH",
        "width = WIDTH",
    ),
    Fault(
        "the bias is added once a chain",
        LINEAR,
        checks.check_linear_sizes,
        "(bias ? bias[column + c] : 0)",
        "(bias ? bias[column + c] * ((inputs + CHAIN - 1) / CHAIN) : 0)",
    ),
    Fault(
        "the last of several blocks loses a row",
        LINEAR,
        checks.check_linear_sizes,
        "return (int)((long)num_rows * block / blocks_of(num_rows));",
        "return (int)((long)(num_rows - (block > 1)) * block / blocks_of(num_rows));",
    ),
    Fault(
        "five rows are done as four",
        LINEAR,
        checks.check_linear_sizes,
        "case 5: tile_of(5,",
        "case 5: tile_of(4,",
        "tile.h",
    ),
    # attention.c
    Fault(
        "a row sees the key behind its own",
        ATTENTION,
        checks.check_prefill,
        "span->first_position + i + 1 - run->first",
        "span->first_position + i + 2 - run->first",
    ),
    Fault(
        "a row does not see its own key",
        ATTENTION,
        checks.check_prefill,
        "span->first_position + i + 1 - run->first",
        "span->first_position + i - run->first",
    ),
    Fault(
        "keys behind a row's own are not masked",
        ATTENTION,
        checks.check_prefill,
        "for (int i = seen; i < width; i++) scores[i] = -INFINITY;",
        "",
    ),
    Fault(
        "raw scores stay where a row sees nothing of a chunk",
        ATTENTION,
        checks.check_prefill,
        "memset(scores + at * CHUNK, 0, sizeof(float) * padded);",
        ";",
    ),
    Fault(
        "the rows of a prompt see only what its first rows see",
        ATTENTION,
        checks.check_prefill,
        "span->first_position + i + positions - run->first, run->count",
        "span->first_position + i + 1 - run->first, run->count",
    ),
    Fault(
        "every piece of a prompt is its first rows",
        ATTENTION,
        checks.check_prefill,
        "int i = skipped; i < span->num_rows",
        "int i = 0; i < span->num_rows",
    ),
    Fault(
        "a slot is where its block begins",
        ATTENTION,
        checks.check_prefill,
        "ptrdiff_t slot = (ptrdiff_t)*block * step->block_size + offset",
        "ptrdiff_t slot = (ptrdiff_t)*block * step->block_size",
    ),
    Fault(
        "weighted sums are not rescaled",
        ATTENTION,
        checks.check_a_largest_score_that_moves,
        "load(sums + i) * shrink",
        "load(sums + i)",
    ),
    Fault(
        "the sum of the weights is not rescaled",
        ATTENTION,
        checks.check_a_largest_score_that_moves,
        "*weight * shrink[0] + sum_of(total)",
        "*weight + sum_of(total)",
    ),
    Fault(
        "the largest score is not carried over",
        ATTENTION,
        checks.check_a_largest_score_that_moves,
        "*largest = new_largest;",
        "",
    ),
    Fault(
        "the largest score is the last chunk's, which fell too far",
        ATTENTION,
        checks.check_a_largest_score_that_moves,
        "larger(*largest, largest_of(top))",
        "largest_of(top)",
    ),
    Fault(
        "e^x is not 0 far below",
        ATTENTION,
        checks.check_a_largest_score_that_moves,
        "(x < -87.0f)",
        "(x < -1e30f)",
        "vectors.h",
    ),
    Fault(
        "the largest of eight is the largest of seven",
        ATTENTION,
        checks.check_a_largest_score_that_moves,
        "larger(v[3], v[7])",
        "v[3]",
        "vectors.h",
    ),
    Fault(
        "all neighbours have the same blocks",
        ATTENTION,
        checks.check_neighbours,
        "if (a == b) return 1;",
        "return 1;",
    ),
    Fault(
        "the last block of a chunk is not compared",
        ATTENTION,
        checks.check_neighbours,
        "sizeof(int) * (until - from)",
        "sizeof(int) * (until - from - 1)",
    ),
    Fault(
        "a block behind a chunk's edge is not compared",
        ATTENTION,
        checks.check_neighbours,
        "(first + CHUNK - 1) / step->block_size + 1",
        "from + (CHUNK - 1) / step->block_size + 1",
    ),
    Fault(
        "a run has as many keys as its first sequence, which is padded",
        ATTENTION,
        checks.check_padding_like_block_0,
        "if (end_of(span) > end) end = end_of(span);",
        "if (!end) end = end_of(span);",
    ),
    Fault(
        "a run has as many keys as its first sequence, which is behind",
        ATTENTION,
        checks.check_a_neighbour_further_ahead,
        "if (end_of(span) > end) end = end_of(span);",
        "if (!end) end = end_of(span);",
    ),
    Fault(
        "a bundle ends with its first sequence",
        ATTENTION,
        checks.check_unlike_lengths,
        "if (end_of(span) > context) context = end_of(span);",
        "if (!context) context = end_of(span);",
    ),
    Fault(
        "the rows of a run with no keys left are not passed over",
        ATTENTION,
        checks.check_unlike_lengths,
        "if (next->count <= 0) next->row += next->num_rows;",
        "",
    ),
    Fault(
        "two lanes are swapped when keys are turned",
        ATTENTION,
        checks.check_head_sizes,
        "0, 8, 2, 10, 4, 12, 6, 14",
        "0, 8, 2, 10, 6, 12, 4, 14",
    ),
    Fault(
        "keys behind the last eight of a head are left out",
        ATTENTION,
        checks.check_head_sizes,
        "panel[c * WIDTH + lane] = run->key[i + lane][c];",
        "panel[c * WIDTH + lane] = 0;",
    ),
    Fault(
        "values behind the last sixteen of a head are left out",
        ATTENTION,
        checks.check_head_sizes,
        "to->values[c / WIDTH * WIDTH * CHUNK + i * WIDTH + c % WIDTH] = run->value[i][c];",
        ";",
    ),
    Fault(
        "a group reads the next group's keys and values",
        ATTENTION,
        checks.check_groups,
        "(slot * step->num_kv_heads + kv_head)",
        "(slot * step->num_kv_heads + (kv_head + 1) % step->num_kv_heads)",
    ),
    # rotary.c
    Fault(
        "the second half is turned the other way",
        ROTARY,
        checks.check_rotary_of_a_mixed_batch,
        "second * cos[i] + first * sin[i]",
        "second * cos[i] - first * sin[i]",
    ),
    Fault(
        "a key is stored as it came",
        ROTARY,
        checks.check_rotary_of_a_mixed_batch,
        "turn(key + row * key_stride + h * head_dim, row_cos, row_sin, half, "
        "key_to + h * head_dim);",
        "memcpy(key_to + h * head_dim, key + row * key_stride + h * head_dim, 4 * head_dim);",
    ),
    Fault(
        "rows of values are taken for neighbours",
        ROTARY,
        checks.check_rotary_of_a_mixed_batch,
        "value + row * value_stride",
        "value + row * kv_size",
    ),
    Fault(
        "a row is turned by its place in the batch",
        ROTARY,
        checks.check_rotary_of_a_mixed_batch,
        "cos + positions[row] * half",
        "cos + row * half",
    ),
    # rms_norm.c
    Fault(
        "epsilon is left out",
        NORM,
        checks.check_rms_norm_of_small_rows,
        "sum / size + epsilon",
        "sum / size",
    ),
    Fault(
        "a lane is left out of a sum",
        NORM,
        checks.check_rms_norm_sizes,
        "(v[3] + v[7])",
        "v[3]",
        "vectors.h",
    ),
    Fault(
        "squares behind the last eight are left out",
        NORM,
        checks.check_rms_norm_sizes,
        "for (; i < size; i++) sum += row[i] * row[i];",
        "",
    ),
    Fault(
        "rows are taken for neighbours",
        NORM,
        checks.check_rms_norm_sizes,
        "rows + r * stride + h * size",
        "rows + (r * heads + h) * size",
    ),
    Fault(
        "the sum that is passed on is the row alone",
        NORM,
        checks.check_add_rms_norm_sizes,
        "normalise(total + at, weight, epsilon, size, result + at);",
        "normalise(total + at, weight, epsilon, size, result + at);\n"
        "    for (int i = 0; i < size; i++) total[at + i] = rows[at + i];",
    ),
    # silu_and_mul.c
    Fault(
        "a negative gate is taken for a positive one",
        SILU,
        checks.check_silu_sizes,
        "choose(is_negative, e, spread(1.0f))",
        "spread(1.0f)",
        "vectors.h",
    ),
    Fault(
        "e^-x overflows",
        SILU,
        checks.check_silu_at_the_edges,
        "vec e = exp_of(choose(is_negative, x, -x)); /* e^-|x|, which cannot overflow */\n"
        "  return x * choose(is_negative, e, spread(1.0f)) / (e + 1.0f);",
        "return x / (exp_of(-x) + 1.0f);",
        "vectors.h",
    ),
    Fault(
        "what is behind the last eight is not written",
        SILU,
        checks.check_silu_sizes,
        "for (; i < size; i++) to[i] = silu(spread(gate[i]))[0] * up[i];",
        "",
    ),
    # linear.c, gate and up in one
    Fault(
        "a gate's next panel is taken for its up",
        GATED,
        checks.check_gated_linear_sizes,
        "(ptrdiff_t)column * 2 * inputs",
        "(ptrdiff_t)column * inputs",
    ),
    Fault(
        "ups get the gates' bias",
        GATED,
        checks.check_gated_linear_sizes,
        "bias + outputs + column + c",
        "bias + column + c",
    ),
    Fault(
        "the second half of a panel is the first",
        GATED,
        checks.check_gated_linear_sizes,
        "load(gate + r * WIDTH + c)",
        "load(gate + r * WIDTH)",
    ),
    # layer.c
    Fault(
        "the residual of the attention is not handed on",
        LAYER,
        checks.check_layer_of_every_kind,
        "add_rms_norm(projected, x, layer->mlp_norm, normed, x,",
        "add_rms_norm(projected, x, layer->mlp_norm, normed, projected,",
    ),
    Fault(
        "the MLP gets the attention's norm",
        LAYER,
        checks.check_layer_of_every_kind,
        "add_rms_norm(projected, x, layer->mlp_norm,",
        "add_rms_norm(projected, x, layer->attention_norm,",
    ),
    Fault(
        "keys get the queries' norm",
        LAYER,
        checks.check_layer_of_every_kind,
        "rms_norm(key, layer->key_norm,",
        "rms_norm(key, layer->query_norm,",
    ),
    Fault(
        "norms of heads are forgotten",
        LAYER,
        checks.check_layer_of_every_kind,
        "if (layer->query_norm) {",
        "if (0) {",
    ),
    Fault(
        "keys are taken for values",
        LAYER,
        checks.check_layer_of_every_kind,
        "*value = key + kv_size",
        "*value = key",
    ),
    Fault(
        "turned queries lie where keys still are",
        LAYER,
        checks.check_layer_of_every_kind,
        "*turned = take(&scratch, (size_t)num_rows * query_size)",
        "*turned = query + query_size",
    ),
    Fault(
        "scratch is written behind its end",
        LAYER,
        checks.check_layer_of_every_kind,
        "*normed = take(&scratch, (size_t)num_rows * hidden);\n  double",
        "*normed = take(&scratch, (size_t)num_rows * (hidden + 60));\n  double",
    ),
    # Only bits.
    Fault(
        "a row alone is added up backwards",
        LINEAR,
        checks.check_linear_bits,
        "for (int i = 0; i < length; i++) {\n    const float *weights",
        "for (int k = 0; k < length; k++) {\n    int i = rows == 1 ? length - 1 - k : k;\n"
        "    const float *weights",
        "tile.h",
    ),
    Fault(
        "a decode's values are added up backwards",
        ATTENTION,
        checks.check_bits_of_a_mixed_batch,
        "for (int i = 0; i < length; i++) {\n    const float *weights",
        "for (int k = 0; k < length; k++) {\n    int i = rows == 1 ? length - 1 - k : k;\n"
        "    const float *weights",
        "tile.h",
    ),
    Fault(
        "many rows get shorter chains than few",
        LINEAR,
        checks.check_linear_bits,
        "  for (int i = 0; i < inputs; i += CHAIN) {\n",
        "#define CHAIN chain\n"
        "  int chain = count > 32 ? 64 : 128;\n"
        "  for (int i = 0; i < inputs; i += CHAIN) {\n",
    ),
    Fault(
        "where a chain of values ends depends on who else is in the run",
        ATTENTION,
        checks.check_bits_of_a_prefill,
        "panel_product(num_rows, scores, CHUNK, scratch->values + c * CHUNK, count, sums + c, "
        "width,\n                  ask_values, &channels);",
        "for (int i = 0, half = count / 2; i < 2; i++)\n"
        "      panel_product(num_rows, scores + i * half, CHUNK,\n"
        "                    scratch->values + c * CHUNK + i * half * WIDTH,\n"
        "                    i ? count - half : half, sums + c, width, ask_values, &channels);",
    ),
    Fault(
        "the largest score counts keys that the row does not see",
        ATTENTION,
        checks.check_bits_of_a_prefill,
        "for (int i = seen; i < width; i++) scores[i] = -INFINITY;\n  vec top = load(scores);\n"
        "  for (int i = LANES; i < width; i += LANES) {\n    vec next = load(scores + i);\n"
        "    top = choose(next > top, next, top);\n  }\n",
        "vec top = load(scores);\n"
        "  for (int i = LANES; i < width; i += LANES) {\n    vec next = load(scores + i);\n"
        "    top = choose(next > top, next, top);\n  }\n"
        "  for (int i = seen; i < width; i++) scores[i] = -INFINITY;\n",
    ),
]


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Compile one kernel, with a fault in it or none."""

    def build(kernel, fault=None):
        for file in (
            *KERNELS.glob("*.h"),
            *(KERNELS / name for name in (kernel.file, *kernel.others)),
        ):
            shutil.copy(file, tmp_path)
        if fault is not None:
            path = tmp_path / (fault.header or kernel.file)
            text = path.read_text()
            assert text.count(fault.right) == 1, (
                "the place for the fault is not there, or not alone"
            )
            path.write_text(text.replace(fault.right, fault.wrong))
        arguments = {name: native._ARGUMENTS[name] for name in kernel.functions}
        monkeypatch.setattr(native, "_FOLDER", tmp_path)
        monkeypatch.setattr(native, "_ARGUMENTS", arguments)
        # With -O1 a file is compiled in a third of the time.
        flags = tuple(flag.replace("-O3", "-O1") for flag in native._FLAGS)
        monkeypatch.setattr(native, "_FLAGS", flags)
        return native.load.__wrapped__(tmp_path / "built")

    return build


@pytest.mark.parametrize(
    "kernel",
    [LINEAR, GATED, ATTENTION, ROTARY, NORM, SILU, LAYER],
    ids=lambda kernel: kernel.functions[-1],
)
def test_no_check_finds_a_fault_where_none_is_planted(kernel, compiled):
    right = compiled(kernel)
    for check in {fault.check for fault in FAULTS if fault.kernel == kernel}:
        check(right)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_check_finds_the_planted_fault(fault, compiled):
    wrong = compiled(fault.kernel, fault)
    with pytest.raises(AssertionError):
        fault.check(wrong)
