"""Chapter 7. Compute only what the cache does not hold, at its true positions.

Block size 4. The cache holds `1 2 3 4 | 5 6 7 8` in blocks 0 and 1. B = `1 2 3 4 5 6 7 8 3 3`:

    looked up      8 of 10 tokens match, at most 9 may
    charged        2 tokens, not 10
    computed       [8, 10)           positions 8 and 9, written to B's own block 2
    attends to     positions 0 .. 8, and 0 .. 9: through the table [0, 1, 2]

Prefill, decode and suffix are one case now: a sequence computes the positions [start, end).
A whole prompt is [0, n), a decode is [n - 1, n), a suffix is [cached, n).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from chapters.stages import stage

ch02 = stage("ch02_scheduler")
ch05 = stage("ch05_model_runner")


class ScheduledSequence(NamedTuple):
    """A sequence and the positions [start, end) it computes now; [0, start) is written."""

    sequence: Any
    start: int
    end: int


def build_batch(scheduled: list[ScheduledSequence], pool: Any) -> Any:
    """Chapter 5's batch for any range: a ch05.Batch, all fields as described there.

    Positions count from the start of the sequence, not of the range: the suffix [8, 10) has the
    positions 8 and 9. A context is what the last row attends to, so it is `end` long: neither
    only the suffix nor the tokens that are known but not computed.
    """
    # task 7.1
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    for sequence, start, end in scheduled:
        token_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        slots += pool.slot_mapping(sequence, start, end)
        query_starts.append(len(token_ids))
    return ch05.make_batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_starts=query_starts,
        context_lens=[end for _, _, end in scheduled],
        block_tables=[sequence.block_table for sequence, _, _ in scheduled],
    )
    # end of task


def suffix_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, start: int
) -> Tensor:
    """Attention of one sequence's rows at positions [start, start + n) to all before them.

    query        [n, num_heads, head_dim]
    caches       [num_blocks, block_size, num_kv_heads, head_dim]; positions [0, start + n) of
                 the sequence are written
    block_table  [at least ceil((start + n) / block_size)] integer
    returns      [n, num_heads, head_dim]; row i sees keys 0 .. start + i
    """
    # task 7.2
    num_rows, num_heads, head_dim = query.shape
    end = start + num_rows
    keys = key_cache[block_table].flatten(0, 1)[:end]
    values = value_cache[block_table].flatten(0, 1)[:end]
    group = num_heads // key_cache.shape[2]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * head_dim**-0.5
    hidden = torch.ones(num_rows, end, dtype=torch.bool).triu(start + 1)
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)
    # end of task


class Scheduler(ch02.Scheduler):
    """Chapter 2's scheduler over chapter 6's pool: a waiting prompt is looked up, then charged."""

    def schedule(self) -> list[ScheduledSequence]:
        """Decide what to compute now: a range of positions for each sequence, decodes first."""
        step = super().schedule()
        return [
            ScheduledSequence(sequence, sequence.num_computed_tokens, sequence.num_tokens)
            for sequence in step.decodes + step.prefills
        ]

    def commit(self, scheduled: list[ScheduledSequence], token_ids: list[int]) -> None:
        """The step is computed: take over one token for each sequence, in order."""
        super().commit(ch02.Step([each.sequence for each in scheduled], []), token_ids)

    def _admit_waiting(self) -> list[Any]:
        """Admit from the front while there is a seat, budget for the suffix, and memory.

        A sequence whose next block is being computed by one admitted in this very step is passed
        over: it keeps its place, those behind it may go, and in the next step it finds the block.
        The first one that does not fit ends the admission.
        """
        # task 7.3
        admitted: list[Any] = []
        under_way: set[bytes] = set()
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_num_seqs:
                break
            hits = self.pool.match(sequence)
            if self._next_block_is_under_way(sequence, hits, under_way):
                continue
            num_tokens = sequence.num_tokens - len(hits) * self.pool.block_size
            if num_tokens > self.budget_left:
                break
            if not self.pool.can_allocate(sequence, num_tokens, hits):
                break
            self.pool.allocate(sequence, num_tokens, hits)
            self.budget_left -= num_tokens
            self.waiting.remove(sequence)
            sequence.run()
            self.running.append(sequence)
            admitted.append(sequence)
            under_way |= set(self.pool.keys(sequence)[len(hits) :])
        # Who was passed over arrived earlier, but is admitted later: the newest is the last again.
        self.running.sort(key=lambda running: running.arrival)
        return admitted
        # end of task

    def _next_block_is_under_way(
        self, sequence: Any, hits: list[int], under_way: set[bytes]
    ) -> bool:
        """True if `under_way` has the key of the first block it could match but did not.

        A block is worth waiting for only if a lookup may use it: at most num_tokens - 1 tokens.
        """
        # task 7.3
        limit = (sequence.num_tokens - 1) // self.pool.block_size
        keys = self.pool.keys(sequence)[:limit]
        return len(hits) < len(keys) and keys[len(hits)] in under_way
        # end of task
