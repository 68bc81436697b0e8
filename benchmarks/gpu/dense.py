"""Dense attention, which the kernels' results are compared with at the lengths that are timed.

The tests are exact, and their sequences short. Here the inputs are those of the timed call, and
the reference reads them in float32. Of each sequence only the last rows are compared: the scores
of all 16,384 x 16,384 pairs in 32 heads would take 34 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.measured import measured
from kernels import reference
from kernels.batch import PagedBatch

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]
"""Query, key cache, value cache and batch, as the launchers take them."""

MOST_ERROR = 0.01
"""Of a result's distance from another one, as a share of that one's length.

The two add in different orders and round to bfloat16: more is a wrong result.
"""
COMPARED_ROWS = 256


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the two as vectors, as a share of the length of `expected`; NaN if a number is."""
    expected = expected.float()
    return float((result.float() - expected).norm() / expected.norm())


def doubt(attend: Callable[[], torch.Tensor], inputs: Inputs) -> str:
    """Why the result of attend(), which reads `inputs`, is not to be trusted; "" if it is."""
    found = measured(lambda: largest_distance(attend(), inputs))
    if found.value is None:
        return f"not compared with dense attention: {found.error}"
    # NaN is no distance that is small enough.
    if not found.value <= MOST_ERROR:
        return f"off by {100 * found.value:.3g} % from dense attention"
    return ""


def largest_distance(result: torch.Tensor, inputs: Inputs) -> float:
    """Of the sequence that is furthest from dense attention; NaN if one of them has a NaN."""
    distances = [distance(result[rows], expected) for rows, expected in dense_rows(inputs)]
    return float(torch.tensor(distances).max())  # Python's max() would pass over NaN


def dense_rows(inputs: Inputs) -> Iterator[tuple[slice, torch.Tensor]]:
    """For each sequence its last rows, COMPARED_ROWS at most, and what they must be, in float32.

    A sequence's blocks, gathered, are a cache of its own.
    """
    query, key_cache, value_cache, batch = inputs
    starts = batch.query_starts.tolist()
    for index, end in enumerate(batch.context_lens.tolist()):
        rows = slice(max(starts[index], starts[index + 1] - COMPARED_ROWS), starts[index + 1])
        table = batch.block_tables[index, : -(-end // batch.block_size)].long()
        alone = PagedBatch.from_host(
            [list(range(len(table)))],
            [(end - (rows.stop - rows.start), end)],
            num_blocks=len(table),
            block_size=batch.block_size,
            device=query.device,
        )
        keys, values = (cache[table].float() for cache in (key_cache, value_cache))
        yield rows, reference.paged_attention(query[rows].float(), keys, values, alone)
