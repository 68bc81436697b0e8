"""Time to first token of a prompt whose long prefix was seen before, and of one that is new."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.measured import Measured, measured, middle
from benchmarks.gpu.report import Figure, figure_of
from benchmarks.gpu.timing import synchronize
from minivllm import LLMEngine, SamplingParams

PREFIX_LEN, QUESTION_LEN = 4096, 64
ROUNDS = 5


def time_to_first_token(engine: LLMEngine, prompt: list[int]) -> float:
    """Seconds from adding the request to its first token, nobody else in the engine."""
    engine.add_request("first token", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while True:
        for output in engine.step():
            if output.finished and output.time_to_first_token is not None:
                return output.time_to_first_token


@torch.inference_mode()
def transformers_first_token(model: Any, prompt: list[int], device: torch.device) -> float:
    """Seconds of one forward pass over the prompt, up to the token's id on the host."""
    synchronize(device)
    started = time.perf_counter()
    logits = model(torch.tensor([prompt], device=device), logits_to_keep=1).logits
    logits[0, -1].argmax().item()
    return time.perf_counter() - started


def first_token_figures(
    engine: LLMEngine,
    load_model: Callable[[], Any],
    device: torch.device,
    prefix_len: int = PREFIX_LEN,
    question_len: int = QUESTION_LEN,
    rounds: int = ROUNDS,
) -> Iterator[Figure]:
    """Cold beside transformers, and warm beside cold: medians of rounds in turns.

    A round before them is not counted: it compiles and loads whatever the sizes need.
    """
    rng = random.Random(0)
    cold, warm, theirs = [], [], []
    for _ in range(rounds + 1):
        prefix = [rng.randrange(engine.runner.vocab_size) for _ in range(prefix_len)]
        questions = [
            [rng.randrange(engine.runner.vocab_size) for _ in range(question_len)] for _ in "ab"
        ]
        engine.reset_prefix_cache()
        cold.append(time_to_first_token(engine, prefix + questions[0]))
        warm.append(time_to_first_token(engine, prefix + questions[1]))
        theirs.append(measured(partial(_theirs, load_model, prefix + questions[0], device)))
    ms = [Measured(1e3 * median(times[1:])) for times in (cold, warm)]
    setting = f"{prefix_len:,} tokens of prefix, {question_len} of question"
    beside = middle(theirs[1:]).into(lambda seconds: 1e3 * seconds)
    yield figure_of("first token, cold", setting, "ms", ms[0], "transformers", beside)
    yield figure_of("first token, warm", setting, "ms", ms[1], "cold", ms[0])


def _theirs(load_model: Callable[[], Any], prompt: list[int], device: torch.device) -> float:
    return transformers_first_token(load_model(), prompt, device)
