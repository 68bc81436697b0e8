"""The one attention call an engine needs: picks the kernel that suits the batch."""

from __future__ import annotations

from functools import partial

import torch

from kernels.batch import PagedBatch
from kernels.launch import capability, num_multiprocessors
from kernels.paged_attention import count_tiles, paged_attention
from kernels.split_attention import SHORT, TALL, choose_num_splits, split_attention, split_tile


def attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """paged_attention, or split_attention for few rows over long contexts.

    Arguments, result and errors are those of paged_attention. Splits are counted from
    batch.max_context_len; a CUDA graph keeps the count it was captured with, right for any length.
    """
    num_splits = splits_of(query, key_cache, batch)
    attend = partial(split_attention, num_splits=num_splits) if num_splits > 1 else paged_attention
    return attend(query, key_cache, value_cache, batch, scale=scale, out=out)


def splits_of(query: torch.Tensor, key_cache: torch.Tensor, batch: PagedBatch) -> int:
    """Into how many parts the contexts are split; 1 where splitting would not help."""
    if query.dim() != 3 or key_cache.dim() != 4:
        return 1  # what is wrong is said where it is computed
    num_kv_heads, head_dim = key_cache.shape[2:]
    group_size = query.shape[1] // num_kv_heads
    num_rows = batch.max_query_len * group_size
    tile = split_tile(head_dim, query.dtype, num_rows, capability(query.device))
    return choose_num_splits(
        count_tiles(batch, group_size, tile),
        num_kv_heads,
        batch.max_context_len,
        num_multiprocessors(query.device),
        SHORT if num_rows <= 16 else TALL,
    )
