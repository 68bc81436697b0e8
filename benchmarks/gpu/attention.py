"""The attention kernels: decode as a share of copy bandwidth, prefill beside SDPA and a matmul."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.report import Figure
from benchmarks.gpu.timing import Timer
from kernels.attention import attention
from kernels.batch import PagedBatch

COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192
BLOCK_SIZE = 16


class Heads(NamedTuple):
    """The shape of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


QWEN3_06B = Heads(16, 8, 128)
LLAMA3_8B = Heads(32, 8, 128)
SMOLLM2 = Heads(9, 3, 64)

# (heads, sequences, positions each); the first is the aim's.
DECODES = (
    (LLAMA3_8B, 64, 4096),
    (QWEN3_06B, 64, 4096),
    (QWEN3_06B, 256, 1024),
    (SMOLLM2, 64, 4096),
    (LLAMA3_8B, 8, 4096),
    (LLAMA3_8B, 1, 32768),
)
PREFILLS = ((LLAMA3_8B, 1, 4096), (LLAMA3_8B, 1, 16384), (QWEN3_06B, 8, 1024), (SMOLLM2, 4, 2048))


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
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


def decode_figures(
    timer: Timer,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    cases: tuple[tuple[Heads, int, int], ...] = DECODES,
    copy_bytes: int = COPY_BYTES,
) -> Iterator[Figure]:
    """Bytes per second of the decode kernel beside those of a device copy, read and written."""
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for heads, num_sequences, context_len in cases:
        span = (context_len - 1, context_len)
        query, keys, values, batch = paged_inputs(heads, num_sequences, span, device, dtype)
        milliseconds = timer(
            {
                "ours": partial(attention, query, keys, values, batch),
                "copy": partial(target.copy_, source),
            }
        )
        read = decode_bytes(heads, num_sequences, context_len, keys.element_size())
        yield Figure(
            "decode attention",
            f"batch {num_sequences}, context {context_len:,}, {name_of(heads)}",
            "GB/s",
            read / milliseconds["ours"] / 1e6,
            "device copy",
            2 * copy_bytes / milliseconds["copy"] / 1e6,
        )


def prefill_figures(
    timer: Timer,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    cases: tuple[tuple[Heads, int, int], ...] = PREFILLS,
    matmul_size: int = MATMUL_SIZE,
    backend: SDPBackend = SDPBackend.FLASH_ATTENTION,
) -> Iterator[Figure]:
    """FLOP rate of the prefill kernel beside SDPA's flash path and beside a large matmul.

    SDPA reads contiguous keys, already repeated for the heads that share them.
    """
    left, right = torch.randn(2, matmul_size, matmul_size, device=device, dtype=dtype)
    for heads, num_sequences, length in cases:
        query, keys, values, batch = paged_inputs(heads, num_sequences, (0, length), device, dtype)
        dense_query, dense_keys, dense_values = torch.randn(
            3, num_sequences, heads.num_heads, length, heads.head_dim, device=device, dtype=dtype
        )
        with sdpa_kernel(backend):
            milliseconds = timer(
                {
                    "ours": partial(attention, query, keys, values, batch),
                    "sdpa": partial(
                        F.scaled_dot_product_attention,
                        dense_query,
                        dense_keys,
                        dense_values,
                        is_causal=True,
                    ),
                    "matmul": partial(torch.mm, left, right),
                }
            )
        flops = causal_flops(heads, num_sequences, length)
        ours = flops / milliseconds["ours"] / 1e9
        setting = f"{num_sequences} x {length:,} tokens, {name_of(heads)}"
        sdpa = flops / milliseconds["sdpa"] / 1e9
        matmul = 2 * matmul_size**3 / milliseconds["matmul"] / 1e9
        yield Figure("prefill attention", setting, "TFLOP/s", ours, "SDPA, flash", sdpa)
        beside = f"matmul of {matmul_size:,}"
        yield Figure("prefill attention", setting, "TFLOP/s", ours, beside, matmul)


def name_of(heads: Heads) -> str:
    """Query heads, KV heads and head size, as in "32/8 heads of 128"."""
    return f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}"
