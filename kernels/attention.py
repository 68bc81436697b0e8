"""The one attention call an engine needs: picks the kernel that suits the batch."""

from __future__ import annotations

import torch

from kernels.batch import PagedBatch
from kernels.launch import num_multiprocessors
from kernels.paged_attention import paged_attention
from kernels.split_attention import choose_num_splits, split_attention


def attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """paged_attention, or split_attention for few sequences that decode over long contexts.

    Arguments, result and errors are those of paged_attention. Splits are counted from
    batch.max_context_len; a CUDA graph keeps the count it was captured with, right for any length.
    """
    if batch.max_query_len == 1 and key_cache.dim() == 4:
        num_splits = choose_num_splits(
            batch.num_sequences,
            key_cache.shape[2],
            batch.max_context_len,
            num_multiprocessors(query.device),
        )
        if num_splits > 1:
            return split_attention(
                query, key_cache, value_cache, batch, num_splits=num_splits, scale=scale, out=out
            )
    return paged_attention(query, key_cache, value_cache, batch, scale=scale, out=out)
