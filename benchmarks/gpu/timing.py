"""Functions timed in turns, so that a slow moment of the machine hits them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.gpu.measured import Measured, measured, middle

Timer = Callable[[Mapping[str, Callable[[], object]]], dict[str, Measured]]
"""functions by name -> milliseconds a call, by name."""

ROUNDS = 3


def time_side_by_side(functions: Mapping[str, Callable[[], object]]) -> dict[str, Measured]:
    """Milliseconds a call: the median of ROUNDS medians, the functions taking turns.

    Triton's do_bench empties the L2 cache before every call and times on the device. A function
    that fails is not tried again, and the others are timed all the same.
    """
    found: dict[str, list[Measured]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            if all(times.value is not None for times in found[name]):
                found[name].append(measured(partial(_milliseconds, function)))
    return {name: middle(times) for name, times in found.items()}


def _milliseconds(function: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(function, warmup=10, rep=60, return_mode="median"))


def synchronize(device: torch.device) -> None:
    """Wait until the device has computed everything; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
