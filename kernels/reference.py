"""What each kernel must compute, in plain torch: no tile, no trick, one sequence at a time.

The tests run these in float64 against the kernels. They take any dtype and any device.
Shapes are those of the kernels; see `kernels` for the memory layout.
"""

from __future__ import annotations

import torch

from kernels.batch import PagedBatch


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
) -> None:
    """Write each token's key and value into its slot; a token with slot -1 has none."""
    has_slot = batch.slots >= 0
    slots = batch.slots[has_slot].long()
    key_cache.flatten(0, 1)[slots] = key[has_slot]
    value_cache.flatten(0, 1)[slots] = value[has_slot]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v, each row over the positions up to and with its own.

    A padding sequence (empty context) attends to nothing; its row is zero.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    group_size = query.shape[1] // key_cache.shape[2]
    output = torch.zeros_like(query)
    for index in range(batch.num_sequences):
        rows = slice(int(batch.query_starts[index]), int(batch.query_starts[index + 1]))
        context_len = int(batch.context_lens[index])
        if context_len == 0:
            continue
        key, value = (
            gather(cache, batch.block_tables[index], context_len).repeat_interleave(group_size, 1)
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows], key) * scale
        # Token row r stands at positions[r]; a query that starts at 0 is only one case of many.
        own = batch.positions[rows]
        later = torch.arange(context_len, device=own.device) > own[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, value)
    return output


def gather(cache: torch.Tensor, block_table: torch.Tensor, context_len: int) -> torch.Tensor:
    """The first context_len positions of one sequence, [context_len, num_kv_heads, head_dim]."""
    num_blocks = -(-context_len // cache.shape[1])
    return cache[block_table[:num_blocks].long()].flatten(0, 1)[:context_len]


def rotary(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its position's angle.

    heads [num_tokens, any number of heads, head_dim]; cos, sin [num_positions, head_dim / 2].
    """
    first, second = heads.chunk(2, dim=-1)
    cos, sin = (table[positions.long()][:, None] for table in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
) -> torch.Tensor:
    """Rotate query and key, store the rotated key and the value, return the rotated query."""
    store_kv(rotary(key, cos, sin, batch.positions), value, key_cache, value_cache, batch)
    return rotary(query, cos, sin, batch.positions)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Each row divided by its root mean square, times the weight."""
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon) * weight


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sum normalised, the sum): the sum is the residual of the next layer."""
    total = hidden + residual
    return rms_norm(total, weight, epsilon), total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate is the first half of each row and up the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
