"""Generated tokens per second on the workload: the engine, and transformers in static batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measured import measured
from benchmarks.gpu.report import Figure, figure_of
from benchmarks.gpu.timing import synchronize
from benchmarks.gpu.workload import WorkItem
from minivllm import EngineConfig, LLMEngine, SamplingParams

ENGINE_SECONDS = 120.0
TRANSFORMERS_SECONDS = 60.0
TRANSFORMERS_BATCH = 32
# Of the card's free memory; the rest is for transformers' cache, logits and recordings.
KV_MEMORY_SHARE = 0.5


def make_engine(folder: Path, device: torch.device, **settings: Any) -> LLMEngine:
    """An engine with a pool of what the card has to spare, and at least a usual one."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        settings.setdefault("kv_cache_bytes", int(free * KV_MEMORY_SHARE))
    return LLMEngine(EngineConfig(model=str(folder), device=device.type, **settings))


def warm_up(engine: LLMEngine, num_sequences: int, prompt_len: int = 32) -> None:
    """Compile every kernel and record every batch size: sequences that end one after another."""
    for index in range(num_sequences):
        params = SamplingParams(max_tokens=2 + index, ignore_eos=True)
        engine.add_request(
            f"warm-up {index}", [index % engine.runner.vocab_size] * prompt_len, params
        )
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()


def engine_rate(engine: LLMEngine, workload: Sequence[WorkItem], most_seconds: float) -> float:
    """Generated tokens per second, greedy; what is not done after most_seconds is aborted."""
    for index, item in enumerate(workload):
        params = SamplingParams(max_tokens=item.num_tokens, ignore_eos=True)
        engine.add_request(str(index), item.prompt, params)
    num_tokens, started = 0, time.perf_counter()
    while engine.has_unfinished_requests() and time.perf_counter() - started < most_seconds:
        num_tokens += len(engine.step())
    seconds = time.perf_counter() - started
    abort_all(engine)
    return num_tokens / seconds


def abort_all(engine: LLMEngine) -> None:
    """Leave the engine empty, also behind a step that failed."""
    for name in list(engine._requests):
        engine.abort(name)
    while engine.has_unfinished_requests():
        engine.step()


def transformers_rate(
    model: Any, workload: Sequence[WorkItem], device: torch.device, most_seconds: float
) -> float:
    """Wanted tokens per second of one static batch, padded on the left, stopped after a while.

    A sequence that wants fewer tokens than the longest is computed on, and that is not counted:
    static batching has this price.
    """
    longest = max(len(item.prompt) for item in workload)
    padded = [[0] * (longest - len(item.prompt)) + item.prompt for item in workload]
    mask = [[0] * (longest - len(item.prompt)) + [1] * len(item.prompt) for item in workload]
    most_tokens = max(item.num_tokens for item in workload)
    ids = torch.tensor(padded, device=device)
    synchronize(device)
    started = time.perf_counter()
    result = model.generate(
        ids,
        attention_mask=torch.tensor(mask, device=device),
        do_sample=False,
        max_new_tokens=most_tokens,
        min_new_tokens=most_tokens,
        max_time=most_seconds,
        eos_token_id=None,
        pad_token_id=0,
    )
    synchronize(device)
    seconds = time.perf_counter() - started
    num_steps = int(result.shape[1]) - longest
    return sum(min(item.num_tokens, num_steps) for item in workload) / seconds


def throughput_figure(
    engine: LLMEngine,
    load_model: Callable[[], Any],
    workload: Sequence[WorkItem],
    device: torch.device,
) -> Figure:
    """The engine on the whole workload, transformers on its first TRANSFORMERS_BATCH requests."""
    part = workload[:TRANSFORMERS_BATCH]
    return figure_of(
        "throughput",
        f"{len(workload)} requests, prompts and outputs of 100 to 1,024 tokens, greedy",
        "tokens/s",
        measured(lambda: engine_rate(engine, workload, ENGINE_SECONDS)),
        f"transformers, one batch of {len(part)}",
        measured(lambda: transformers_rate(load_model(), part, device, TRANSFORMERS_SECONDS)),
    )
