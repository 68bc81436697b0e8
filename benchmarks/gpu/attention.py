"""The attention kernels: decode as a share of copy bandwidth, prefill beside SDPA and a matmul."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.dense import Inputs, doubt
from benchmarks.gpu.measured import Function, made_late
from benchmarks.gpu.report import Figure, figure_of
from benchmarks.gpu.timing import Timer
from kernels.attention import attention
from kernels.batch import PagedBatch

COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192
BLOCK_SIZE = 16

# The timer clears the cache by filling it. With fewer bytes to read, writing that back counts.
SMALL_BYTES = 1 << 28
SMALL = "small: includes writing back what cleared the cache"


class Heads(NamedTuple):
    """The shape of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


QWEN3_06B = Heads(16, 8, 128)
LLAMA3_8B = Heads(32, 8, 128)
SMOLLM2 = Heads(9, 3, 64)


class Case(NamedTuple):
    """A batch of equal sequences: how many, and how many positions each has."""

    heads: Heads
    num_sequences: int
    length: int

    @property
    def setting(self) -> str:
        """As the table names it."""
        return f"{self.num_sequences} x {self.length:,} tokens, {name_of(self.heads)}"


# The first is the aim's.
DECODES = (
    Case(LLAMA3_8B, 64, 4096),
    Case(QWEN3_06B, 64, 4096),
    Case(QWEN3_06B, 256, 1024),
    Case(SMOLLM2, 64, 4096),
    Case(LLAMA3_8B, 8, 4096),
    Case(LLAMA3_8B, 1, 32768),
)
PREFILLS = (
    Case(LLAMA3_8B, 1, 4096),
    Case(LLAMA3_8B, 1, 16384),
    Case(QWEN3_06B, 8, 1024),
    Case(SMOLLM2, 4, 2048),
)


def decode_bytes(heads: Heads, num_sequences: int, context_len: int, item_bytes: int) -> int:
    """What a decode step must read: each key and value once, whoever shares it."""
    values = 2 * num_sequences * context_len * heads.num_kv_heads * heads.head_dim
    return values * item_bytes


def causal_flops(heads: Heads, num_sequences: int, length: int) -> int:
    """Two products of 2 * head_dim operations for each (query, key) pair; half are masked."""
    pairs = num_sequences * length * (length + 1) // 2
    return 4 * heads.head_dim * heads.num_heads * pairs


def paged_inputs(
    heads: Heads,
    num_sequences: int,
    span: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    """Query, key cache, value cache and batch; blocks in random order, as after a long run."""
    start, end = span
    blocks_each = -(-end // BLOCK_SIZE)
    order = list(range(num_sequences * blocks_each))
    random.Random(0).shuffle(order)
    tables = [order[i * blocks_each : (i + 1) * blocks_each] for i in range(num_sequences)]
    batch = PagedBatch.from_host(
        tables, [span] * num_sequences, num_blocks=len(order), block_size=BLOCK_SIZE, device=device
    )
    shape = (2, len(order), BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    keys, values = torch.randn(shape, device=device, dtype=dtype)
    num_rows = num_sequences * (end - start)
    query = torch.randn(num_rows, heads.num_heads, heads.head_dim, device=device, dtype=dtype)
    return query, keys, values, batch


def decode_figure(
    timer: Timer,
    case: Case,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    copy_bytes: int = COPY_BYTES,
) -> Figure:
    """Bytes per second of the decode kernel beside those of a device copy, read and written."""
    heads, num_sequences, context_len = case
    inputs = paged_inputs(heads, num_sequences, (context_len - 1, context_len), device, dtype)
    attend = partial(attention, *inputs)
    problem = doubt(attend, inputs)
    times = timer({"ours": attend, "copy": made_late(partial(copying, copy_bytes, device))})
    read = decode_bytes(heads, num_sequences, context_len, dtype.itemsize)
    return figure_of(
        "decode attention",
        f"batch {num_sequences}, context {context_len:,}, {name_of(heads)}",
        "GB/s",
        times["ours"].into(lambda ms: read / ms / 1e6),
        "device copy",
        times["copy"].into(lambda ms: 2 * copy_bytes / ms / 1e6),
        note=SMALL if read < SMALL_BYTES else "",
        problem=problem,
    )


def prefill_figures(
    timer: Timer,
    case: Case,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    matmul_size: int = MATMUL_SIZE,
    backend: SDPBackend = SDPBackend.FLASH_ATTENTION,
) -> Iterator[Figure]:
    """FLOP rate of the prefill kernel beside SDPA's flash path and beside a large matmul."""
    heads, num_sequences, length = case
    inputs = paged_inputs(heads, num_sequences, (0, length), device, dtype)
    attend = partial(attention, *inputs)
    problem = doubt(attend, inputs)
    functions: dict[str, Function] = {
        "ours": attend,
        "sdpa": made_late(partial(sdpa, case, device, dtype)),
        "matmul": made_late(partial(multiplying, matmul_size, device, dtype)),
    }
    with sdpa_kernel(backend):
        times = timer(functions)
    flops = causal_flops(heads, num_sequences, length)
    ours, flash = (times[name].into(lambda ms: flops / ms / 1e9) for name in ("ours", "sdpa"))
    matmul = times["matmul"].into(lambda ms: 2 * matmul_size**3 / ms / 1e9)
    for beside, theirs in (("SDPA, flash", flash), (f"matmul of {matmul_size:,}", matmul)):
        yield figure_of(
            "prefill attention", case.setting, "TFLOP/s", ours, beside, theirs, problem=problem
        )


def copying(num_bytes: int, device: torch.device) -> Function:
    """A copy of so many bytes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def multiplying(size: int, device: torch.device, dtype: torch.dtype) -> Function:
    """A product of two square matrices."""
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    return partial(torch.mm, left, right)


def sdpa(case: Case, device: torch.device, dtype: torch.dtype) -> Function:
    """Causal attention in torch, over contiguous keys, repeated for the heads that share them."""
    shape = (3, case.num_sequences, case.heads.num_heads, case.length, case.heads.head_dim)
    query, keys, values = torch.randn(shape, device=device, dtype=dtype)
    return partial(F.scaled_dot_product_attention, query, keys, values, is_causal=True)


def name_of(heads: Heads) -> str:
    """Query heads, KV heads and head size, as in "32/8 heads of 128"."""
    return f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}"
