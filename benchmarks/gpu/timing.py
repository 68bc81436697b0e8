"""Functions timed in turns, so that a slow moment of the machine hits them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import torch

Timer = Callable[[Mapping[str, Callable[[], object]]], dict[str, float]]
"""functions by name -> milliseconds a call, by name."""

ROUNDS = 3


def time_side_by_side(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds a call: the median of ROUNDS medians, the functions taking turns.

    Triton's do_bench empties the L2 cache before every call and times on the device.
    """
    from triton.testing import do_bench

    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            found[name].append(do_bench(function, warmup=10, rep=60, return_mode="median"))
    return {name: median(times) for name, times in found.items()}


def synchronize(device: torch.device) -> None:
    """Wait until the device has computed everything; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
