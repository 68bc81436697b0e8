"""What the kernel tests share. They launch kernels in one of two ways, with the same tests:

in Triton's interpreter   TRITON_INTERPRET=1 before triton is imported; tensors on the CPU.
                          test_kernels_interpreted.py does that in a process of its own, for a
                          wild address there is a segmentation fault
on a GPU                  where torch sees one and the variable is unset: `pytest tests/kernels`

Four traps are laid in every launch. A slot nobody has written holds NaN, which spreads from a
single unmasked load. An output is NaN before the launch, so an element left out shows. On both
sides of an output lie guard rows that must not change. And in the interpreter no program may
touch what another one writes (program_watch.py).
"""

import os
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.batch import PagedBatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
# tl.dot on bfloat16 returns garbage in the interpreter; test_launch_bfloat16.py says so.
DTYPES_WITH_DOT = (torch.float32, torch.float16)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

launching = settings(
    # On a GPU nearly every example compiles a kernel of its own.
    max_examples=60 if INTERPRETED else 20,
    deadline=None,
    # For the same reason a failing example is not made smaller there.
    phases=tuple(Phase) if INTERPRETED else (Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)


class Guarded:
    """A tensor full of NaN between guard rows; check() after the launch."""

    GUARD = 1234.0

    def __init__(self, shape, dtype, num_guard_rows=32):
        self._all = torch.full((shape[0] + 2 * num_guard_rows, *shape[1:]), self.GUARD, dtype=dtype)
        self._all = self._all.to(DEVICE)
        self.inside = self._all[num_guard_rows:-num_guard_rows]
        self.inside.fill_(float("nan"))
        self._guards = (self._all[:num_guard_rows], self._all[-num_guard_rows:])

    def check(self):
        for side, guard in zip(("before", "behind"), self._guards, strict=True):
            assert (guard == self.GUARD).all(), f"memory {side} the output was written"


def normal(*shape, dtype, generator):
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def rows_apart(tensor):
    """The same values, as the middle part of wider rows of NaN: a slice of a qkv matrix."""
    num_tokens, row = tensor.shape[0], tensor[0].numel()
    wide = torch.full((num_tokens, row + 48), float("nan"), dtype=tensor.dtype, device=DEVICE)
    wide[:, 16 : 16 + row] = tensor.reshape(num_tokens, row)
    strides = (wide.stride(0), *tensor.stride()[1:])
    return wide.as_strided(tensor.shape, strides, storage_offset=16)


def bits(tensor):
    """Comparable with ==, NaN included."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@dataclass
class Plan:
    """A batch before it has tensors: what hypothesis draws and prints."""

    block_size: int
    num_blocks: int
    block_tables: list
    ranges: list
    num_kv_heads: int = 1
    group_size: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    num_padding: int = 0
    strided: bool = False
    seed: int = 0

    def batch(self):
        return PagedBatch.from_host(
            self.block_tables,
            self.ranges,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            device=DEVICE,
            num_sequences=len(self.ranges) + self.num_padding,
        )

    def cache_shape(self):
        return (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)


@st.composite
def plans(
    draw, *, dtypes, decode=False, head_dims=HEAD_DIMS, block_sizes=BLOCK_SIZES, max_sequences=3
):
    """Mixed batches: lengths at block edges, tables in random order, blocks shared.

    A sequence is [shared prefix | computed by itself before | computed now]; without the first
    two it is a prefill, with one token in the last a decode.
    """
    block_size = draw(st.sampled_from((*block_sizes[:2], *block_sizes)))
    edges = [1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1]
    befores = st.sampled_from([0, 0, *edges]) | st.integers(0, 100)
    queries = st.just(1)
    if not decode:
        queries |= st.sampled_from([edge for edge in edges if edge < 70]) | st.integers(1, 70)
    prefix = [("prefix", block) for block in range(draw(st.sampled_from([0, 1, 1, 2])))]
    ranges, owners = [], []
    for index in range(draw(st.sampled_from([1, *range(2, max_sequences + 1)]))):
        shared = prefix if draw(st.booleans()) else []
        start = len(shared) * block_size + draw(befores)
        end = start + draw(queries)
        own = [(index, block) for block in range(len(shared), -(-end // block_size))]
        ranges.append((start, end))
        owners.append([*shared, *own])
    distinct = list(dict.fromkeys(owner for owned in owners for owner in owned))
    num_blocks = len(distinct) + draw(st.integers(0, 3))
    order = draw(st.permutations(range(num_blocks)))
    place = dict(zip(distinct, order, strict=False))
    return Plan(
        block_size=block_size,
        num_blocks=num_blocks,
        block_tables=[[place[owner] for owner in owned] for owned in owners],
        ranges=ranges,
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        group_size=draw(st.integers(1, 16)),
        head_dim=draw(st.sampled_from(head_dims)),
        dtype=draw(st.sampled_from(dtypes)),
        num_padding=draw(st.integers(0, 2)),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


def written_caches(plan, generator):
    """Key and value cache, random where a sequence of the batch has written, else NaN."""
    caches = []
    for _ in range(2):
        cache = torch.full(plan.cache_shape(), float("nan"), dtype=plan.dtype, device=DEVICE)
        for table, (_, end) in zip(plan.block_tables, plan.ranges, strict=True):
            for logical, block in enumerate(table):
                used = min(plan.block_size, end - logical * plan.block_size)
                shape = (used, plan.num_kv_heads, plan.head_dim)
                # A shared block is written again; its values need only be finite.
                cache[block, :used] = normal(*shape, dtype=plan.dtype, generator=generator)
        caches.append(cache)
    return caches


def check_attention(plan, launch):
    """Call launch(query, key_cache, value_cache, batch, out=) and compare with the reference."""
    generator = torch.Generator().manual_seed(plan.seed)
    batch = plan.batch()
    key_cache, value_cache = written_caches(plan, generator)
    before = [bits(cache).clone() for cache in (key_cache, value_cache)]
    shape = (batch.num_tokens, plan.num_kv_heads * plan.group_size, plan.head_dim)
    query = normal(*shape, dtype=plan.dtype, generator=generator)
    want = reference.paged_attention(
        query.double(), key_cache.double(), value_cache.double(), batch
    )
    output = Guarded(shape, plan.dtype)
    launch(
        rows_apart(query) if plan.strided else query,
        key_cache,
        value_cache,
        batch,
        out=output.inside,
    )
    output.check()
    for cache, old in zip((key_cache, value_cache), before, strict=True):
        assert (bits(cache) == old).all(), "attention wrote to the cache"
    assert_close(output.inside, want, batch)


def assert_close(got, want, batch=None):
    """Equal up to rounding, nothing NaN; a failure names the first wrong row."""
    tolerance = TOLERANCES[got.dtype]
    error = (got.double() - want).abs()
    wrong = ~(error <= tolerance * (1 + want.abs()))  # NaN is wrong, too
    if not wrong.any():
        return
    where = tuple(int(index) for index in wrong.nonzero()[0])
    place = f"element {where}"
    if batch is not None:
        token = where[0]
        sequence = int((batch.query_starts <= token).sum()) - 1
        place += f" (sequence {sequence}, position {int(batch.positions[token])})"
    raise AssertionError(
        f"{int(wrong.sum())} of {wrong.numel()} elements differ by more than {tolerance}; first"
        f" {place}: got {float(got[where])}, want {float(want[where])}"
    )
