"""Which tile and how many splits are fastest on this card: each beside the engine's own choice."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.attention import LLAMA3_8B, QWEN3_06B, SMOLLM2, Heads, name_of, paged_inputs
from benchmarks.gpu.dense import MOST_ERROR, Inputs, distance, doubt
from benchmarks.gpu.measured import measured
from benchmarks.gpu.report import Figure, Report
from benchmarks.gpu.timing import Timer, time_side_by_side
from kernels.attention import attention, splits_of
from kernels.launch import Tile, capability
from kernels.paged_attention import attention_tile, paged_attention
from kernels.split_attention import split_attention

Attend = Callable[[], torch.Tensor]

MOST_SECONDS = 420.0


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
# Decodes, and the last 64 tokens of a prompt behind a prefix that was found in the cache.
SPLITS = (
    Work(LLAMA3_8B, 1, 32767, 32768),
    Work(LLAMA3_8B, 8, 4095, 4096),
    Work(LLAMA3_8B, 64, 4095, 4096),
    Work(QWEN3_06B, 1, 4096, 4160),
    Work(LLAMA3_8B, 1, 32768, 32832),
)


def decode_tiles() -> list[Tile]:
    """Tiles of 16 rows: two warps have less to tell each other, more stages hide more of memory."""
    shapes = ((32, 2), (32, 4), (64, 2), (64, 4), (128, 4))
    return [Tile(16, *shape, stages) for shape, stages in itertools.product(shapes, (3, 5, 7))]


def prefill_tiles() -> list[Tile]:
    """Tall tiles; of those with 64 rows and four warps, two programs share a multiprocessor."""
    shapes = ((128, 32, 4), (128, 32, 8), (128, 64, 8), (128, 128, 8), (64, 32, 4), (64, 64, 4))
    return [Tile(*shape, stages) for shape, stages in itertools.product(shapes, (3, 5, 7))]


def tile_figures(
    timer: Timer, work: Work, tiles: Iterable[Tile], device: torch.device, dtype: torch.dtype
) -> Iterator[Figure]:
    """Milliseconds of each tile beside the engine's; one that cannot start says why not."""
    inputs = paged_inputs(work.heads, work.num_sequences, (work.start, work.end), device, dtype)
    num_rows = (work.end - work.start) * (work.heads.num_heads // work.heads.num_kv_heads)
    own = attention_tile(work.heads.head_dim, dtype, num_rows, capability(device))
    run = partial(paged_attention, *inputs)
    candidates = {f"tile {tile}": partial(run, tile=tile) for tile in tiles}
    as_is = partial(run, tile=own)
    yield from _beside(timer, work, inputs, as_is, f"the engine's {own}", candidates)


def split_figures(
    timer: Timer,
    work: Work,
    device: torch.device,
    dtype: torch.dtype,
    counts: Iterable[int] = (1, 2, 4, 8, 16, 32, 64),
) -> Iterator[Figure]:
    """Milliseconds of each number of splits beside the engine's."""
    inputs = paged_inputs(work.heads, work.num_sequences, (work.start, work.end), device, dtype)
    query, keys, _, batch = inputs
    own = splits_of(query, keys, batch)
    run = partial(split_attention, *inputs)
    candidates = {f"{count} splits": partial(run, num_splits=count) for count in counts}
    as_is = partial(attention, *inputs)
    yield from _beside(timer, work, inputs, as_is, f"the engine's {own}", candidates)


def _beside(
    timer: Timer,
    work: Work,
    inputs: Inputs,
    own: Attend,
    name: str,
    candidates: Mapping[str, Attend],
) -> Iterator[Figure]:
    # What all candidates are compared with must itself be right.
    doubtful = doubt(own, inputs)
    problem = f"{name}: {doubtful}" if doubtful else ""
    expected = own()
    for measure, tried in candidates.items():
        figure = Figure(measure, work.setting, "ms", None, name, None, problem=problem)
        yield _measured(figure, timer, {"own": own, "tried": tried}, expected)


def _measured(
    figure: Figure, timer: Timer, functions: Mapping[str, Attend], expected: torch.Tensor
) -> Figure:
    """The figure with both times, if the tried one starts and computes the same; or with a note.

    Whatever keeps it from starting is this candidate's result.
    """
    apart = measured(lambda: distance(functions["tried"](), expected))
    if apart.value is None:
        return replace(figure, note=apart.error)
    if not apart.value <= MOST_ERROR:  # NaN, too
        return replace(figure, note=f"its result is off by {100 * apart.value:.3g} %")
    times = timer(functions)
    note = times["tried"].error or times["own"].error
    return replace(figure, ours=times["tried"].value, theirs=times["own"].value, note=note)


def tune(device: torch.device, report: Report) -> None:
    """All candidates, as many as MOST_SECONDS allow; the best of each work as a note."""
    deadline = time.monotonic() + MOST_SECONDS
    for section, figures in sections(time_side_by_side, device, torch.bfloat16):
        take(report, section, figures, deadline)
    report.notes += best_of_each(report.figures)


def sections(
    timer: Timer, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Iterator[Figure]]]:
    """What is tried, section by section; what decodes comes first."""
    for work in DECODES:
        yield f"tiles, {work.setting}", tile_figures(timer, work, decode_tiles(), device, dtype)
    for work in SPLITS:
        yield f"splits, {work.setting}", split_figures(timer, work, device, dtype)
    for work in PREFILLS:
        yield f"tiles, {work.setting}", tile_figures(timer, work, prefill_tiles(), device, dtype)


def take(report: Report, section: str, figures: Iterator[Figure], deadline: float) -> None:
    """Add the section's figures as they come, until the deadline; one cut short is a note."""
    with report.attempt(section):
        while time.monotonic() <= deadline:
            figure = next(figures, None)
            if figure is None:
                return
            report.add(figure)
        report.notes.append(f"out of time: {section}")


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
