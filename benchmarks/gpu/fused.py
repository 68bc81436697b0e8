"""The fused kernels beside what torch.compile makes of the same lines of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.attention import QWEN3_06B, paged_inputs
from benchmarks.gpu.measured import Function, made_late
from benchmarks.gpu.report import Figure, figure_of
from benchmarks.gpu.timing import Timer
from kernels.layer_parts import HeadNorms
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary_store_kv
from kernels.silu_and_mul import silu_and_mul
from minivllm.model.ops import TORCH_OPS
from minivllm.model.rope import Angles, angles_at, rotate

# Not the few rows of a decode step: with them a launch takes longer than what is launched, and the
# figures would compare the launchers. The engine replays recordings, which have no launcher.
NUM_ROWS = (4096, 65_536)
HIDDEN, INNER = 1024, 3072  # Qwen3-0.6B's
EPS = 1e-6


class Case(NamedTuple):
    """One fused kernel, the same in torch, and arguments for both."""

    name: str
    ours: Function
    in_torch: Function
    arguments: tuple[Any, ...]


def rotary_store_in_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: Angles,
    caches: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    norms: HeadNorms,
) -> torch.Tensor:
    """What rotary_store_kv does, in the lines of the torch backend."""
    query, key = norms.applied(TORCH_OPS.rms_norm, query, key)
    angles = angles_at(positions, table, query.dtype)
    for cache, rows in zip(caches, (rotate(key, angles), value), strict=True):
        cache.flatten(0, 1).index_copy_(0, slots, rows)
    return rotate(query, angles)


def fused_cases(num_rows: int, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Every fused kernel on Qwen3-0.6B's shapes."""
    x, update = torch.randn(2, num_rows, HIDDEN, device=device, dtype=dtype)
    weight = torch.randn(HIDDEN, device=device, dtype=dtype)
    gate_up = torch.randn(num_rows, 2 * INNER, device=device, dtype=dtype)
    norm = (x, weight, EPS)
    both = (update, x, weight, EPS)
    return [
        Case("RMSNorm", rms_norm, TORCH_OPS.rms_norm, norm),
        Case("residual + RMSNorm", add_rms_norm, TORCH_OPS.add_rms_norm, both),
        Case("SiLU times up", silu_and_mul, TORCH_OPS.silu_and_mul, (gate_up,)),
        _rotary_case(num_rows, device, dtype),
    ]


def _rotary_case(num_rows: int, device: torch.device, dtype: torch.dtype) -> Case:
    query, keys, values, batch = paged_inputs(QWEN3_06B, 1, (0, num_rows), device, dtype)
    shape = (2, num_rows, QWEN3_06B.num_kv_heads, QWEN3_06B.head_dim)
    key, value = torch.randn(shape, device=device, dtype=dtype)
    angles = torch.randn(num_rows, QWEN3_06B.head_dim // 2, device=device)
    table = Angles(angles.cos(), angles.sin())
    positions, slots = batch.positions.long(), batch.slots.long()

    query_norm, key_norm = torch.randn(2, QWEN3_06B.head_dim, device=device, dtype=dtype)
    norms = HeadNorms(query_norm, key_norm, EPS)

    def ours(*_: object) -> torch.Tensor:
        return rotary_store_kv(query, key, value, *table, keys, values, batch, norms=norms)

    arguments = (query, key, value, table, (keys, values), positions, slots, norms)
    return Case("head norms + rotary + KV store", ours, rotary_store_in_torch, arguments)


def fused_figures(
    timer: Timer,
    num_rows: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    compile_function: Callable[[Function], Function] = torch.compile,
) -> Iterator[Figure]:
    """Microseconds of each fused kernel beside the compiled torch lines."""
    for case in fused_cases(num_rows, device, dtype):
        # Each case anew: a compilation for any number of rows would be a slower one.
        torch.compiler.reset()
        times = timer(
            {
                "ours": partial(case.ours, *case.arguments),
                "compiled": made_late(partial(_compiled, compile_function, case)),
            }
        )
        ours, theirs = (times[name].into(lambda ms: 1e3 * ms) for name in ("ours", "compiled"))
        yield figure_of(case.name, f"{num_rows:,} rows", "us", ours, "torch.compile", theirs)


def _compiled(compile_function: Callable[[Function], Function], case: Case) -> Function:
    return partial(compile_function(case.in_torch), *case.arguments)
