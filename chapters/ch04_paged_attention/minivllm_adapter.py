"""Chapter 4's names over the finished engine's kernels."""

from types import SimpleNamespace

import torch
from torch import Tensor

from kernels.attention import attention
from kernels.batch import PagedBatch
from kernels.block_tables import validate_block_tables
from kernels.errors import KernelInputError
from kernels.store_kv import store_kv as kernels_store_kv


def check_tables(
    block_tables: Tensor, context_lens: Tensor, num_blocks: int, block_size: int
) -> None:
    """The check of a step in which each sequence computes its newest position."""
    ends = context_lens.tolist()
    validate_block_tables(
        _without_padding(block_tables, ends, block_size),
        [(end - 1, end) for end in ends],
        num_blocks=num_blocks,
        block_size=block_size,
    )


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The finished kernel reads nothing of a batch but its slots and the cache's shape."""
    none = torch.empty(0, dtype=torch.int32, device=key.device)
    num_blocks, block_size = key_cache.shape[:2]
    batch = PagedBatch(
        block_tables=none,
        query_starts=none,
        context_lens=none,
        positions=none,
        slots=slot_mapping.to(torch.int32),
        num_blocks=num_blocks,
        block_size=block_size,
        max_query_len=1,
        max_context_len=1,
        num_singles=0,
        longest_contexts=(0, 1),
        packed=none,
    )
    kernels_store_kv(key, value, key_cache, value_cache, batch)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """A batch in which each sequence has one row."""
    query_starts = torch.arange(len(query) + 1)
    return paged_prefill(
        query, key_cache, value_cache, block_tables, query_starts, context_lens, out
    )


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The finished attention, with the ranges and tables as its batch takes them."""
    num_blocks, block_size = key_cache.shape[:2]
    ends = context_lens.tolist()
    starts = [end - rows for end, rows in zip(ends, query_starts.diff().tolist(), strict=True)]
    batch = PagedBatch.from_host(
        _without_padding(block_tables, ends, block_size),
        list(zip(starts, ends, strict=True)),
        num_blocks=num_blocks,
        block_size=block_size,
        device=query.device,
    )
    return attention(query, key_cache, value_cache, batch, out=out)


def _without_padding(block_tables: Tensor, ends: list[int], block_size: int) -> list[list[int]]:
    """The finished engine's tables are lists, each as long as it is."""
    rows = block_tables.tolist()
    return [row[: -(-end // block_size)] for row, end in zip(rows, ends, strict=True)]


def adapt() -> SimpleNamespace:
    """The names of chapter 4 that its tests use."""
    return SimpleNamespace(
        TableError=KernelInputError,
        check_tables=check_tables,
        store_kv=store_kv,
        paged_decode=paged_decode,
        paged_prefill=paged_prefill,
    )
