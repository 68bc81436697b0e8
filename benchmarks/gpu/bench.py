"""Every speed figure, one after the other; one that fails leaves the others standing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import (
    COPY_BYTES,
    DECODES,
    MATMUL_SIZE,
    PREFILLS,
    SMALL,
    decode_figure,
    prefill_figures,
)
from benchmarks.gpu.first_token import PREFIX_LEN, first_token_figures
from benchmarks.gpu.fused import NUM_ROWS, fused_figures
from benchmarks.gpu.host_share import decode_step_figure
from benchmarks.gpu.recordings import check_recordings
from benchmarks.gpu.report import Figure, Report
from benchmarks.gpu.throughput import abort_all, make_engine, throughput_figure, warm_up
from benchmarks.gpu.timing import time_side_by_side
from benchmarks.gpu.workload import NUM_REQUESTS, QWEN3_06B, make_workload, save_random_model
from minivllm import LLMEngine

MAX_NUM_BATCHED_TOKENS = 16_384
MAX_MODEL_LEN = 8192
CONTEXT_LEN = 1024
DECODE_AIM, PREFILL_AIM = 0.8, 0.7


def bench(device: torch.device, report: Report) -> None:
    """All figures, into the report."""
    timer = time_side_by_side
    for case in DECODES:
        with report.attempt(f"decode attention, {case.setting}"):
            report.add(decode_figure(timer, case, device, copy_bytes=COPY_BYTES))
    for case in PREFILLS:
        with report.attempt(f"prefill attention, {case.setting}"):
            report.add_all(prefill_figures(timer, case, device, matmul_size=MATMUL_SIZE))
    for num_rows in NUM_ROWS:
        with report.attempt(f"fused kernels, {num_rows:,} rows"):
            report.add_all(fused_figures(timer, num_rows, device))
    with report.attempt("engine"):
        bench_engine(device, report)
    report.notes += aims(report.figures)


def bench_engine(device: torch.device, report: Report) -> None:
    """Engine and transformers on Qwen3-0.6B's shape; the weights are only there for this run."""
    with tempfile.TemporaryDirectory() as name:
        folder = save_random_model(QWEN3_06B, Path(name, "qwen3-0.6b-random"), device)
        engine = make_engine(
            folder,
            device,
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
        )
        # Loaded when first needed: if it cannot be, the engine is measured all the same.
        engine_figures(engine, cache(partial(load_transformers, folder, device)), device, report)


def engine_figures(
    engine: LLMEngine, load_model: Callable[[], Any], device: torch.device, report: Report
) -> None:
    """Time to first token, a decode step and throughput; each finds an empty engine."""
    with on_engine(engine, "first token", report):
        report.add_all(first_token_figures(engine, load_model, device, PREFIX_LEN))
    with on_engine(engine, "warm-up", report):
        warm_up(engine, NUM_REQUESTS)
    check_recordings(engine, "warm-up", report)
    with on_engine(engine, "decode step", report):
        report.add(decode_step_figure(engine, NUM_REQUESTS, CONTEXT_LEN, num_steps=50))
    check_recordings(engine, "decode step", report)
    with on_engine(engine, "throughput", report):
        report.add(throughput_figure(engine, load_model, make_workload(NUM_REQUESTS), device))
    check_recordings(engine, "throughput", report)


@contextmanager
def on_engine(engine: LLMEngine, what: str, report: Report) -> Iterator[None]:
    """Attempt something with the engine, and leave the engine empty whatever becomes of it."""
    with report.attempt(what):
        yield
    with report.attempt(f"{what}: emptying the engine"):
        abort_all(engine)


def load_transformers(folder: Path, device: torch.device) -> Any:
    """The model in `folder` as transformers runs it."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.to(device).eval()


def aims(figures: Iterable[Figure]) -> list[str]:
    """Whether the decode kernel and the prefill kernel reach what they were meant to."""
    found = []
    for figure in figures:
        # A small read understates the kernel; a wrong result has no speed.
        if figure.share is None or figure.problem or SMALL in figure.note:
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
