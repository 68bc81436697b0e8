"""What the three kernels must compute, in plain torch: one sequence at a time, without a trick.

Given to the reader. Imports no triton: on a machine without a GPU the engine of chapter 5 attends
with these. They take any float dtype; the tests run them in float64. Shapes are those of the
kernels, see solution.py.
"""

import torch
from torch import Tensor


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write row i of key and value to slot slot_mapping[i] of their caches."""
    key_cache.flatten(0, 1)[slot_mapping] = key
    value_cache.flatten(0, 1)[slot_mapping] = value


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """One row a sequence, the newest token, which sees all context_lens[i] keys."""
    query_starts = torch.arange(len(query) + 1)
    return paged_prefill(query, key_cache, value_cache, block_tables, query_starts, context_lens)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """The last rows of each sequence: softmax(q k * head_dim ** -0.5) v over the keys each sees.

    A row at absolute position p sees the keys 0 .. p. The last row of a sequence stands at
    context_lens[i] - 1, so the first one stands at context_lens[i] minus the number of rows.
    """
    starts, ends = query_starts.tolist(), context_lens.tolist()
    outputs = []
    for i, end in enumerate(ends):
        rows = query[starts[i] : starts[i + 1]]
        keys = gather(key_cache, block_tables[i], end)
        values = gather(value_cache, block_tables[i], end)
        outputs.append(attend(rows, keys, values, start=end - len(rows)))
    return torch.cat(outputs)


def gather(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """The first context_len positions of one sequence: [context_len, num_kv_heads, head_dim]."""
    num_blocks = -(-context_len // cache.shape[1])
    return cache[block_table[:num_blocks]].flatten(0, 1)[:context_len]


def attend(query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Causal attention of rows at positions start, start + 1, ... to keys at positions 0, 1, ...

    query         [num_rows, num_heads, head_dim]
    keys, values  [context_len, num_kv_heads, head_dim]; head h uses KV head h // group, where
                  group = num_heads // num_kv_heads
    """
    num_rows, num_heads, head_dim = query.shape
    group = num_heads // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * head_dim**-0.5
    positions = torch.arange(start, start + num_rows, device=query.device)
    later = torch.arange(len(keys), device=query.device) > positions[:, None]
    weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
