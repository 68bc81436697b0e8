"""Which tile and how many splits are fastest on this card: each beside the engine's own choice."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.attention import LLAMA3_8B, SMOLLM2, Heads, name_of, paged_inputs
from benchmarks.gpu.report import Figure, Report
from benchmarks.gpu.timing import Timer, time_side_by_side
from kernels.attention import attention
from kernels.launch import Tile, capability, num_multiprocessors
from kernels.paged_attention import attention_tile, paged_attention
from kernels.split_attention import choose_num_splits, split_attention

Attend = Callable[[], torch.Tensor]

MOST_SECONDS = 420.0
MOST_ERROR = 0.01
"""Of a candidate's result from the engine's, as a share of its length."""


class Work(NamedTuple):
    """A batch of equal sequences, each computing the positions [start, end)."""

    heads: Heads
    num_sequences: int
    start: int
    end: int

    @property
    def setting(self) -> str:
        """As the table names it."""
        computed = f"[{self.start:,}, {self.end:,})"
        return f"{self.num_sequences} x {computed}, {name_of(self.heads)}"


DECODES = (Work(LLAMA3_8B, 64, 4095, 4096), Work(SMOLLM2, 64, 4095, 4096))
PREFILLS = (Work(LLAMA3_8B, 1, 0, 4096), Work(SMOLLM2, 4, 0, 2048))
SPLITS = (
    Work(LLAMA3_8B, 1, 32767, 32768),
    Work(LLAMA3_8B, 8, 4095, 4096),
    Work(LLAMA3_8B, 64, 4095, 4096),
)


def decode_tiles() -> list[Tile]:
    """Tiles of 16 rows: two warps have less to tell each other, more stages hide more of memory."""
    shapes = ((32, 2), (32, 4), (64, 2), (64, 4), (128, 4))
    return [Tile(16, *shape, stages) for shape, stages in itertools.product(shapes, (3, 5, 7))]


def prefill_tiles() -> list[Tile]:
    """Tall tiles; of those with 64 rows and four warps, two programs share a multiprocessor."""
    shapes = ((128, 32, 8), (128, 64, 8), (128, 128, 8), (64, 32, 4), (64, 64, 4))
    return [Tile(*shape, stages) for shape, stages in itertools.product(shapes, (3, 5, 7))]


def tile_figures(
    timer: Timer, work: Work, tiles: Iterable[Tile], device: torch.device, dtype: torch.dtype
) -> Iterator[Figure]:
    """Milliseconds of each tile beside the engine's; one that cannot start says why not."""
    query, keys, values, batch = paged_inputs(
        work.heads, work.num_sequences, (work.start, work.end), device, dtype
    )
    num_rows = (work.end - work.start) * (work.heads.num_heads // work.heads.num_kv_heads)
    own = attention_tile(work.heads.head_dim, dtype, num_rows, capability(device))
    run = partial(paged_attention, query, keys, values, batch)
    candidates = {f"tile {tile}": partial(run, tile=tile) for tile in tiles}
    yield from _beside(timer, work, partial(run, tile=own), f"the engine's {own}", candidates)


def split_figures(
    timer: Timer,
    work: Work,
    device: torch.device,
    dtype: torch.dtype,
    counts: Iterable[int] = (1, 2, 4, 8, 16, 32, 64),
) -> Iterator[Figure]:
    """Milliseconds of each number of splits beside the engine's."""
    query, keys, values, batch = paged_inputs(
        work.heads, work.num_sequences, (work.start, work.end), device, dtype
    )
    own = choose_num_splits(
        work.num_sequences, work.heads.num_kv_heads, work.end, num_multiprocessors(device)
    )
    run = partial(split_attention, query, keys, values, batch)
    candidates = {f"{count} splits": partial(run, num_splits=count) for count in counts}
    as_is = partial(attention, query, keys, values, batch)
    yield from _beside(timer, work, as_is, f"the engine's {own}", candidates)


def _beside(
    timer: Timer, work: Work, own: Attend, name: str, candidates: Mapping[str, Attend]
) -> Iterator[Figure]:
    expected = own()
    for measure, tried in candidates.items():
        figure = Figure(measure, work.setting, "ms", None, name, None)
        yield _measured(figure, timer, {"own": own, "tried": tried}, expected)


def _measured(
    figure: Figure, timer: Timer, functions: Mapping[str, Attend], expected: torch.Tensor
) -> Figure:
    """The figure with both times, if the tried one starts and computes the same; or with a note."""
    try:
        result = functions["tried"]()
    except Exception as error:  # whatever keeps it from starting is this candidate's result
        return replace(figure, note=str(error.__cause__ or error).strip().splitlines()[-1][:80])
    apart = float((result.float() - expected.float()).norm() / expected.float().norm())
    # They add in different orders and round to bfloat16: more is a wrong result, and so is NaN.
    if not apart <= MOST_ERROR:
        return replace(figure, note=f"its result is off by {100 * apart:.3g} %")
    times = timer(functions)
    return replace(figure, ours=times["tried"], theirs=times["own"])


def tune(device: torch.device, report: Report) -> None:
    """All candidates, as many as MOST_SECONDS allow; the best of each work as a note."""
    timer, dtype = time_side_by_side, torch.bfloat16
    sections = [
        *(tile_figures(timer, work, decode_tiles(), device, dtype) for work in DECODES),
        *(split_figures(timer, work, device, dtype) for work in SPLITS),
        *(tile_figures(timer, work, prefill_tiles(), device, dtype) for work in PREFILLS),
    ]
    take(report, itertools.chain(*sections), time.monotonic() + MOST_SECONDS)
    report.notes += best_of_each(report.figures)


def take(report: Report, figures: Iterator[Figure], deadline: float) -> None:
    """Add the figures as they come, until the deadline; what is left out then is a note."""
    for figure in figures:
        report.figures.append(figure)
        if time.monotonic() > deadline:
            report.notes.append(f"out of time behind {figure.measure}, {figure.setting}")
            return


def best_of_each(figures: Iterable[Figure]) -> list[str]:
    """For each setting the fastest candidate, in units of the engine's own choice."""
    measured = sorted((figure for figure in figures if figure.share), key=_share)
    # Of equal keys the last one stays: the fastest.
    best = {(figure.setting, figure.beside): figure for figure in measured}
    return [
        f"{setting}: {figure.measure} is {figure.share:.2f} times as fast as {beside}"
        for (setting, beside), figure in best.items()
    ]


def _share(figure: Figure) -> float:
    return figure.share or 0.0
