"""A small batch with traps laid around it, so that a wrong kernel fails and does not get lucky.

unused slots     hold NaN: a single load of one spreads to the output
block 0          is nobody's, and it is what rows of the block table are padded with
wide rows        have more entries than any context has tokens: a wrong index lands in the padding
output           holds UNTOUCHED before the launch, between guard rows that must keep it
around a cache   lie blocks of NaN: an address that is a little wrong stays inside this memory
"""

import os
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chapters.ch04_paged_attention import reference
from chapters.testing import Broken

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
UNTOUCHED = 12345.0
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}
GUARD = 16  # rows or blocks on each side: a whole tile
MIN_WIDTH = 32  # of a row of the block table
NAN = float("nan")


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers from a normal distribution, the same for everybody."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def guarded(*shape: int, fill: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(all of it, the inside): a tensor of `shape` between guards of the same content."""
    whole = torch.full((shape[0] + 2 * GUARD, *shape[1:]), fill, dtype=dtype, device=DEVICE)
    return whole, whole[GUARD:-GUARD]


class Caches(NamedTuple):
    """Each [num_blocks, block_size, num_kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Batch:
    """What a kernel gets, and how a failure tells about it.

    tables      one block table a sequence, without padding, none with block 0
    ranges      the positions [start, end) a sequence computes now; [0, end) is written
    stale       what unused slots hold: NaN, or a number as from an earlier owner
    """

    tables: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...]
    block_size: int = 4
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    stale: float = NAN
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows of all sequences."""
        return sum(end - start for start, end in self.ranges)

    def query(self, size: float = 1.0) -> Tensor:
        """[num_tokens, num_heads, head_dim], random; with size 0 all scores are 0."""
        shape = (self.num_tokens, self.num_heads, self.head_dim)
        return random(*shape, seed=self.seed, dtype=self.dtype) * size

    def slots(self, sequence: int) -> list[int]:
        """Where the positions 0, 1, ... of a sequence lie."""
        table, (_, end) = self.tables[sequence], self.ranges[sequence]
        size = self.block_size
        return [table[p // size] * size + p % size for p in range(end)]

    def caches(self) -> Caches:
        """Random numbers where a sequence has written, `stale` elsewhere."""
        num_blocks = 1 + max(block for table in self.tables for block in table)
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        written = sorted({slot for i in range(len(self.tables)) for slot in self.slots(i)})
        caches = []
        for seed in (self.seed + 1, self.seed + 2):
            _, cache = guarded(*shape, fill=self.stale, dtype=self.dtype)
            content = random(*shape, seed=seed, dtype=self.dtype)
            cache.flatten(0, 1)[written] = content.flatten(0, 1)[written]
            caches.append(cache)
        return Caches(*caches)

    def positions_as_values(self) -> Caches:
        """As caches, but the value at each position is the position."""
        caches = self.caches()
        for sequence, (_, end) in enumerate(self.ranges):
            positions = torch.arange(end, dtype=self.dtype, device=DEVICE)[:, None, None]
            caches.values.flatten(0, 1)[self.slots(sequence)] = positions
        return caches

    def rising_scores(self, first: float, slope: float) -> tuple[Tensor, Caches]:
        """(query, caches) such that position p has the score first + slope * p."""
        caches = self.caches()
        query = torch.zeros_like(self.query())
        query[..., 0] = self.head_dim**0.5
        for sequence, (_, end) in enumerate(self.ranges):
            scores = first + slope * torch.arange(end, dtype=self.dtype, device=DEVICE)
            caches.keys.flatten(0, 1)[self.slots(sequence), :, 0] = scores[:, None]
        return query, caches

    def tensors(self) -> dict[str, Tensor]:
        """block_tables, query_starts and context_lens, all int32."""
        width = max(MIN_WIDTH, *(end for _, end in self.ranges))
        starts = accumulate((end - start for start, end in self.ranges), initial=0)
        named = {
            "block_tables": [[*table, *[0] * (width - len(table))] for table in self.tables],
            "query_starts": list(starts),
            "context_lens": [end for _, end in self.ranges],
        }
        return {
            name: torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
            for name, numbers in named.items()
        }

    def expected(self, query: Tensor, caches: Caches) -> Tensor:
        """What the reference says, in float64."""
        doubles = [tensor.double() for tensor in (query, *caches)]
        return reference.paged_prefill(*doubles, **self.tensors())

    def place(self, row: int) -> str:
        """Whose a row of the output is, in words."""
        for sequence, (start, end) in enumerate(self.ranges):
            if row < end - start:
                return (
                    f"row {row}: sequence {sequence}, position {start + row} of the range"
                    f" [{start}, {end}), block table {list(self.tables[sequence])}, block size"
                    f" {self.block_size}"
                )
            row -= end - start
        raise IndexError(row)


def run_decode(kernels: Any, batch: Batch, query: Tensor, caches: Caches) -> Tensor:
    """The decode kernel's output for a batch whose sequences compute one row each."""
    whole, out = guarded(*query.shape, fill=UNTOUCHED, dtype=batch.dtype)
    named = batch.tensors()
    del named["query_starts"]
    kernels.paged_decode(query, *caches, **named, out=out)
    check_written(whole, out, batch, "C4.15")
    return out


def run_prefill(kernels: Any, batch: Batch, query: Tensor, caches: Caches) -> Tensor:
    """The prefill kernel's output."""
    whole, out = guarded(*query.shape, fill=UNTOUCHED, dtype=batch.dtype)
    kernels.paged_prefill(query, *caches, **batch.tensors(), out=out)
    check_written(whole, out, batch, "C4.17")
    return out


def check_written(whole: Tensor, out: Tensor, batch: Batch, broken: str) -> None:
    """Broken unless all of `out` was written, and nothing around it."""
    around = torch.cat([whole[:GUARD], whole[-GUARD:]])
    if not (around == UNTOUCHED).all():
        raise Broken(broken, "memory beside the output was written: a store lacks part of its mask")
    missing = (out == UNTOUCHED).nonzero()
    if len(missing):
        row, head, dim = missing[0].tolist()
        raise Broken(
            broken,
            f"{len(missing)} of {out.numel()} elements of the output were never written;"
            f" the first is dimension {dim} of head {head} in {batch.place(row)}",
        )


def check_means(got: Tensor, batch: Batch, broken: str) -> None:
    """With equal weights over positions as values, a row at position p gets their mean, p / 2."""
    positions = [position for span in batch.ranges for position in range(*span)]
    for row, position in enumerate(positions):
        value = got[row, 0, 0].item()
        if not abs(value - position / 2) < 1e-3:
            raise Broken(
                broken,
                f"all scores are 0 and the value at each position is the position: expected"
                f" {position / 2}, the mean of 0 .. {position}, got {value:.5g} in"
                f" {batch.place(row)}",
            )


def check_equal(got: Tensor, expected: Tensor, batch: Batch, broken: str) -> None:
    """Broken, with the first wrong element, unless both are equal up to rounding."""
    error = (got.double() - expected).abs()
    wrong = ~(error <= TOLERANCE[batch.dtype] * (1 + expected.abs()))  # NaN is wrong, too
    if wrong.any():
        row, head, dim = wrong.nonzero()[0].tolist()
        raise Broken(
            broken,
            f"expected {expected[row, head, dim]:.5g}, got {got[row, head, dim]:.5g} in dimension"
            f" {dim} of head {head} in {batch.place(row)};"
            f" {int(wrong.sum())} of {wrong.numel()} elements are wrong",
        )


def check_decode(kernels: Any, batch: Batch, broken: str, *given: Any) -> None:
    """Broken unless the decode kernel equals the reference; `given` are query and caches."""
    query, caches = given or (batch.query(), batch.caches())
    got = run_decode(kernels, batch, query, caches)
    check_equal(got, batch.expected(query, caches), batch, broken)


def check_prefill(kernels: Any, batch: Batch, broken: str, *given: Any) -> None:
    """As check_decode, for the prefill kernel."""
    query, caches = given or (batch.query(), batch.caches())
    got = run_prefill(kernels, batch, query, caches)
    check_equal(got, batch.expected(query, caches), batch, broken)
