"""These tests can fail: kernels with one named fault each, and the checks must notice every one.

A mutant is the source of a kernel file with one piece replaced, imported under another name.
"""

import importlib.util
import inspect
from dataclasses import replace

import pytest
import torch
from kernel_testing import DEVICE, INTERPRETED, Guarded, Plan, assert_close, check_attention

from kernels import paged_attention, reference, rotary, split_attention, store_kv
from kernels.launch import Tile
from kernels.layer_parts import HeadNorms

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="a faulty kernel could take a GPU's other tests down with it"
)

# Block 0, where a masked entry of the table points, is nobody's: all NaN.
MIXED = Plan(
    block_size=16,
    num_blocks=12,
    block_tables=[[7, 3, 4], [7, 10, 5, 9], [1], [2, 6, 8]],
    ranges=[(16, 40), (32, 50), (4, 5), (0, 33)],
    num_kv_heads=2,
    group_size=3,
    num_padding=1,
)
DECODE = replace(MIXED, ranges=[(39, 40), (49, 50), (4, 5), (32, 33)])


def check_paged_attention(module):
    for tile in (Tile(32, 16, 4, 2), Tile(16, 16, 4, 2)):
        check_attention(
            MIXED, lambda *inputs, out, t=tile: module.paged_attention(*inputs, out=out, tile=t)
        )


def check_wide_steps(module):
    """A step of 32 keys is two blocks."""
    tile = Tile(16, 32, 4, 2)
    check_attention(MIXED, lambda *i, out: module.paged_attention(*i, out=out, tile=tile))


def check_large_blocks(module):
    """A block of 32 slots is two steps."""
    plan = replace(MIXED, block_size=32, block_tables=[[7, 3], [7, 10], [1], [2, 6]], num_padding=0)
    tile = Tile(16, 16, 4, 2)
    check_attention(plan, lambda *i, out: module.paged_attention(*i, out=out, tile=tile))


def check_split_attention(module):
    def launch(*inputs, out):
        module.split_attention(*inputs, out=out, num_splits=4, tile=Tile(16, 16, 4, 2))

    for plan in (DECODE, MIXED):
        check_attention(plan, launch)


def check_store_kv(module):
    check_storing(lambda query, key, value, *rest, out: module.store_kv(key, value, *rest), turn=0)


def check_rotary(module):
    cos, sin = torch.ones(50, 32), torch.linspace(0, 1, 50 * 32).reshape(50, 32)

    weights = torch.rand(2, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for norms in (None, HeadNorms(*weights, 0.1)):

        def launch(*heads, out, norms=norms):
            *heads, key_cache, value_cache, batch = heads
            angles = cos.to(DEVICE), sin.to(DEVICE)
            caches = key_cache, value_cache
            module.rotary_store_kv(*heads, *angles, *caches, batch, norms=norms, out=out)

        check_storing(launch, turn=(cos.to(DEVICE), sin.to(DEVICE)), norms=norms)


def check_storing(launch, turn, norms=None):
    batch = MIXED.batch()
    heads = torch.randn(3, batch.num_tokens, 6, 64, generator=torch.Generator().manual_seed(0))
    query, key, value = heads.to(DEVICE)
    key, value = key[:, :2], value[:, :2]
    caches = [Guarded(MIXED.cache_shape(), MIXED.dtype, num_guard_rows=1) for _ in range(2)]
    want = [cache.inside.clone() for cache in caches]
    output = Guarded(tuple(query.shape), MIXED.dtype)
    launch(query, key, value, *(cache.inside for cache in caches), batch, out=output.inside)
    if norms:
        query, key = norms.applied(reference.rms_norm, query, key)
    if turn:
        assert_close(output.inside, reference.rotary(query, *turn, batch.positions))
        key = reference.rotary(key, *turn, batch.positions)
    reference.store_kv(key, value, *want, batch)
    for cache, expected in zip(caches, want, strict=True):
        cache.check()
        # What nobody owns stays NaN, which equals nothing: compared as a number instead.
        assert_close(cache.inside.nan_to_num(99.0), expected.nan_to_num(99.0).double())


MUTANTS = {
    # name: (module, check, the piece, what stands there instead)
    "a row sees the key after its own": (
        paged_attention,
        check_paged_attention,
        "keys[None, :] <= positions[:, None]",
        "keys[None, :] <= positions[:, None] + 1",
    ),
    "a row does not see its own key": (
        paged_attention,
        check_paged_attention,
        "keys[None, :] <= positions[:, None]",
        "keys[None, :] < positions[:, None]",
    ),
    "positions count from 0 and not from start": (
        paged_attention,
        check_paged_attention,
        "positions = start + rows // group_size",
        "positions = rows // group_size",
    ),
    "the sum is not rescaled": (
        paged_attention,
        check_paged_attention,
        "row_sum = row_sum * shrink + ",
        "row_sum = row_sum + ",
    ),
    "the output is not rescaled": (
        paged_attention,
        check_paged_attention,
        "accumulator * shrink[:, None]",
        "accumulator",
    ),
    "one tile too many goes without a mask": (
        paged_attention,
        check_paged_attention,
        "+ 1) // BLOCK_N * BLOCK_N",
        "+ BLOCK_N) // BLOCK_N * BLOCK_N",
    ),
    "unwritten values are loaded": (
        paged_attention,
        check_paged_attention,
        "tl.load(value_cache + offsets + blocks, mask=inside, other=0.0)",
        "tl.load(value_cache + offsets + blocks, mask=(dims < HEAD_DIM)[None, :], other=0.0)",
    ),
    "the block table is not asked": (
        paged_attention,
        check_paged_attention,
        "block = tl.load(block_table + logical, mask=written, other=0).to(tl.int64)",
        "block = logical.to(tl.int64)",
    ),
    "a key's place in its block is that of the step's first": (
        paged_attention,
        check_paged_attention,
        "logical, within = tile // BLOCK_SIZE + steps // BLOCK_SIZE, steps % BLOCK_SIZE",
        "logical, within = keys // BLOCK_SIZE, steps // BLOCK_SIZE",
    ),
    "a step has one block": (
        paged_attention,
        check_wide_steps,
        "logical, within = tile // BLOCK_SIZE + steps // BLOCK_SIZE,",
        "logical, within = tile // BLOCK_SIZE + steps * 0,",
    ),
    "a step that is part of a block begins at its start": (
        paged_attention,
        check_large_blocks,
        "logical, within = keys // BLOCK_SIZE, keys % BLOCK_SIZE",
        "logical, within = keys // BLOCK_SIZE, steps % BLOCK_SIZE",
    ),
    "query heads are dealt out round robin": (
        paged_attention,
        check_paged_attention,
        "heads = kv_head * group_size + rows % group_size",
        "heads = kv_head + rows % group_size * num_kv_heads",
    ),
    "a tile writes on behind its sequence": (
        paged_attention,
        check_paged_attention,
        "tl.store(output + output_offsets, accumulator / row_sum[:, None], mask=inside)",
        "tl.store(output + output_offsets, accumulator / row_sum[:, None])",
    ),
    # The same numbers twice: nothing in the output shows it.
    "a tile that is one too many repeats the last one": (
        paged_attention,
        check_paged_attention,
        "    if first_row >= query_len * group_size:",
        "    first_row = min(first_row, (query_len * group_size - 1) // BLOCK_M * BLOCK_M)\n"
        "    if first_row < 0:",
    ),
    "tiles are counted without one more for each sequence": (
        paged_attention,
        check_paged_attention,
        "// tile.block_m + batch.num_sequences",
        "// tile.block_m + 1",
    ),
    "powers of two are taken for powers of e": (
        paged_attention,
        check_paged_attention,
        "scale * math.log2(math.e)",
        "scale",
    ),
    "parts are merged as if equal": (
        split_attention,
        check_split_attention,
        "tl.exp2(sums - largest)",
        "tl.exp2(sums - sums)",
    ),
    "the last key of each part is lost": (
        split_attention,
        check_split_attention,
        "end_key = min(first_key + part, num_keys)",
        "end_key = min(first_key + part - 1, num_keys)",
    ),
    "a decode does not see its own key": (
        split_attention,
        check_split_attention,
        "positions = start + rows // group_size",
        "positions = start + rows // group_size - 1",
    ),
    "parts are of the keys that the tile's first row sees": (
        split_attention,
        check_split_attention,
        "start + (first_row + BLOCK_M - 1) // group_size + 1",
        "start + first_row // group_size + 1",
    ),
    "a part is stored as if its tile were the sequence's first": (
        split_attention,
        check_split_attention,
        "first_token = query_start + first_row // group_size",
        "first_token = query_start",
    ),
    "padding is stored before the cache": (
        store_kv,
        check_store_kv,
        "if slot < 0:",
        "if slot < -1:",
    ),
    "values go to the slots of token rows": (
        store_kv,
        check_store_kv,
        "value_cache + slot * ROW",
        "value_cache + token * ROW",
    ),
    "keys are turned the other way": (
        rotary,
        check_rotary,
        "tl.store(key_cache + cached, first_key * cos - second_key * sin",
        "tl.store(key_cache + cached, first_key * cos + second_key * sin",
    ),
    "keys are normalised by the queries' weights": (
        rotary,
        check_rotary,
        "weight = key_norm + pairs",
        "weight = query_norm + pairs",
    ),
    "both halves take the weights of the first": (
        rotary,
        check_rotary,
        "tl.load(weight + HEAD_DIM // 2,",
        "tl.load(weight,",
    ),
    "the mean is that of half a head": (
        rotary,
        check_rotary,
        "squares / HEAD_DIM + epsilon",
        "squares / (HEAD_DIM // 2) + epsilon",
    ),
    "the norm has no epsilon": (
        rotary,
        check_rotary,
        "squares / HEAD_DIM + epsilon",
        "squares / HEAD_DIM",
    ),
    "all query heads of a group share one norm": (
        rotary,
        check_rotary,
        "weight, epsilon, paired, HEAD_DIM, 1)",
        "weight, epsilon, paired, HEAD_DIM, 0)",
    ),
    "the angle is that of the row and not of the position": (
        rotary,
        check_rotary,
        "tl.load(positions + token)",
        "token",
    ),
}


def mutant(module, old, new, folder):
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is no longer unique in {module.__name__}"
    # Triton reads a kernel's source from its file, so the mutant needs one.
    path = folder / "mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checks_notice_a_kernel_in_which(name, tmp_path):
    module, check, old, new = MUTANTS[name]
    with pytest.raises(
        AssertionError, match=r"elements differ|memory (before|behind)|write to one"
    ):
        check(mutant(module, old, new, tmp_path))


@pytest.mark.parametrize(
    ("module", "check"),
    {(module, check) for module, check, _, _ in MUTANTS.values()},
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_same_checks_pass_the_kernel_itself(module, check):
    check(module)
