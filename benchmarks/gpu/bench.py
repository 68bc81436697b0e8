"""Every speed figure, one section after the other; one that fails leaves the others standing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import decode_figures, prefill_figures
from benchmarks.gpu.first_token import first_token_figures
from benchmarks.gpu.fused import fused_figures
from benchmarks.gpu.host_share import decode_step_figure
from benchmarks.gpu.report import Figure, Report
from benchmarks.gpu.throughput import make_engine, throughput_figure, warm_up
from benchmarks.gpu.timing import time_side_by_side
from benchmarks.gpu.workload import NUM_REQUESTS, QWEN3_06B, make_workload, save_random_model

MAX_NUM_BATCHED_TOKENS = 16_384
DECODE_AIM, PREFILL_AIM = 0.8, 0.7


def bench(device: torch.device, report: Report) -> None:
    """All sections, into the report."""
    timer = time_side_by_side
    attempt(report, "decode attention", lambda: decode_figures(timer, device))
    attempt(report, "prefill attention", lambda: prefill_figures(timer, device))
    attempt(report, "fused kernels", lambda: fused_figures(timer, device))
    attempt(report, "engine", lambda: engine_figures(device))
    report.notes += aims(report.figures)


def attempt(report: Report, section: str, figures: Callable[[], Iterable[Figure]]) -> None:
    """Add the section's figures as they come; what ends it early is a problem, not the end."""
    try:
        for figure in figures():
            print(f"{figure.measure}, {figure.setting}: done", flush=True)
            report.figures.append(figure)
    except Exception as error:
        report.problems.append(f"{section} ended with {type(error).__name__}: {error}")


def engine_figures(device: torch.device) -> Iterator[Figure]:
    """Time to first token and throughput on Qwen3-0.6B's shape; weights only for this run."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = save_random_model(QWEN3_06B, Path(name, "qwen3-0.6b-random"), device)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        engine = make_engine(
            folder,
            device,
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=8192,
        )
    model.to(device).eval()
    yield from first_token_figures(engine, model, device)
    warm_up(engine, NUM_REQUESTS)
    yield decode_step_figure(engine, NUM_REQUESTS, context=1024, num_steps=50)
    yield throughput_figure(engine, model, make_workload(), device)


def aims(figures: Iterable[Figure]) -> list[str]:
    """Whether the decode kernel and the prefill kernel reach what they were meant to."""
    found = []
    for figure in figures:
        if figure.share is None:
            continue
        aim = None
        if figure.measure == "decode attention" and "batch 64, context 4,096" in figure.setting:
            aim = DECODE_AIM
        elif figure.measure == "prefill attention" and figure.beside.startswith("SDPA"):
            aim = PREFILL_AIM
        if aim is not None:
            reached = "reached" if figure.share >= aim else "not reached"
            found.append(
                f"{figure.measure}, {figure.setting}: {figure.share:.2f} of {figure.beside},"
                f" aim {aim} {reached}"
            )
    return found
