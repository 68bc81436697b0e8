"""Attention in C, out of the paged cache: what a step hands over, and who attends beside whom.

Sequences with the same blocks are laid side by side, and cut into bundles; attention.c then looks
up each chunk of keys that neighbours in a bundle share once for all of them. Block size 64, the
size of a chunk; A, B and C decode:

    sequence   block table      sorted   bundle   looked up, chunk by chunk
    A          7 2 5 4          A        0        7 and 2 for A and B, 5 and 6, 4 and 1
    B          7 2 6 1          B        0
    C          3 9              C        1        3, 9

How rows are bundled changes how often a key is looked up, and no bit of a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.batch import PagedBatch
from kernels.errors import KernelInputError
from kernels.layer_parts import HeadNorms
from kernels.native.ops import NativeOps
from kernels.native.pointers import floats, rows
from kernels.sequence import StepSequence

Pair = tuple[Tensor, Tensor]

# A bundle's queries, scores and sums should stay in the processor's cache.
_MOST_ROWS = 64
# Bundles x KV heads are what the threads take turns at: enough that none waits long at the end.
_ITEMS_A_THREAD = 4


class Span(NamedTuple):
    """Rows at neighbouring positions of one sequence; struct span in kernels.h."""

    sequence: int
    first_row: int
    first_position: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Bundles:
    """The spans of a step, cut into bundles; all numbers are int32.

    spans     [num_spans, 4], each a Span
    starts    [num_bundles + 1]: bundle b is the spans [starts[b], starts[b + 1])
    max_rows  of a bundle
    """

    spans: Tensor
    starts: Tensor
    max_rows: int

    @classmethod
    def of(cls, spans: Sequence[Span], most_rows: int) -> Bundles:
        """The spans in their order, as many at a time as have `most_rows` rows or fewer."""
        starts, sizes = [0], [0]
        for index, span in enumerate(spans):
            if sizes[-1] and sizes[-1] + span.num_rows > most_rows:
                starts.append(index)
                sizes.append(0)
            sizes[-1] += span.num_rows
        starts.append(len(spans))
        as_int32 = partial(torch.tensor, dtype=torch.int32)
        return cls(as_int32(spans), as_int32(starts), max(sizes))


class _Step(ctypes.Structure):
    """Struct step in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "spans", "bundles")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots")),
        *((name, ctypes.c_int) for name in ("max_blocks", "block_size", "num_bundles")),
        *((name, ctypes.c_int) for name in ("max_rows", "num_rows")),
        *((name, ctypes.c_int) for name in ("num_heads", "num_kv_heads", "head_dim")),
    )


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """One step's attention, shared by all layers, as an engine's decoder asks for it.

    library      the compiled C files
    batch        ranges and tables, checked
    bundles      who attends beside whom
    cache_shape  [num_blocks, block_size, num_kv_heads, head_dim], every layer's

    Float32 on the CPU; every method raises KernelInputError on other tensors. Values must be
    finite: a value that is infinite reaches rows that do not see it, as 0 times infinity.
    """

    library: ctypes.CDLL
    batch: PagedBatch
    bundles: Bundles
    cache_shape: tuple[int, ...]
    _step: _Step

    @classmethod
    def begin_step(
        cls, library: ctypes.CDLL, sequences: Sequence[StepSequence], cache: Pair
    ) -> NativeAttention:
        """Check the step and bundle it. KernelInputError: a table that must not be followed."""
        keys, _ = cache
        num_blocks, block_size, num_kv_heads, head_dim = keys.shape
        batch = PagedBatch.from_host(
            [sequence.block_table for sequence in sequences],
            [(sequence.start, sequence.end) for sequence in sequences],
            num_blocks=num_blocks,
            block_size=block_size,
        )
        num_items = _ITEMS_A_THREAD * torch.get_num_threads()
        most_rows = min(_MOST_ROWS, -(-batch.num_tokens * num_kv_heads // num_items))
        bundles = Bundles.of(spans_of(sequences, most_rows), most_rows)
        step = _Step(
            batch.block_tables.data_ptr(),
            bundles.spans.data_ptr(),
            bundles.starts.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            batch.block_tables.shape[1],
            block_size,
            bundles.starts.shape[0] - 1,
            bundles.max_rows,
            batch.num_tokens,
            0,  # query heads: told by struct_for, since a cache does not know them
            num_kv_heads,
            head_dim,
        )
        return cls(library, batch, bundles, tuple(keys.shape), step)

    def rotate_and_store(
        self, heads: Sequence[Tensor], angles: Pair, cache: Pair, norms: HeadNorms | None = None
    ) -> Tensor:
        """Turn query and key, write key and value: the turned key goes only to its slot.

        heads     query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads,
                  head_dim]; rows may lie apart
        angles    cos and sin by absolute position, each [num_positions, head_dim / 2] float32
        norms     of the heads of query and key, applied first
        """
        query, key, value = heads
        if norms is not None:
            query, key = norms.applied(NativeOps(self.library).rms_norm, query, key)
        keys, values = cache
        num_tokens, num_heads = self.batch.num_tokens, query.shape[1]
        self.struct_for(num_heads)
        num_kv_heads, head_dim = self.cache_shape[2:]
        turned = query.new_empty(query.shape)
        self.library.rotary_store_kv(
            rows("query", query, num_tokens, num_heads, head_dim),
            rows("key", key, num_tokens, num_kv_heads, head_dim),
            rows("value", value, num_tokens, num_kv_heads, head_dim),
            *self.angles(angles),
            self.batch.positions.data_ptr(),
            self.batch.slots.data_ptr(),
            turned.data_ptr(),
            floats("keys", keys, *self.cache_shape),
            floats("values", values, *self.cache_shape),
            query.stride(0),
            key.stride(0),
            value.stride(0),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
        )
        return turned

    def attend(self, query: Tensor, cache: Pair) -> Tensor:
        """[num_tokens, num_heads, head_dim] in and out, causal by absolute position.

        Raises MemoryError if there is no room for the threads to work in.
        """
        keys, values = cache
        num_heads = query.shape[1]
        step = self.struct_for(num_heads)
        output = torch.empty_like(query)
        failed = self.library.attend(
            step,
            floats("query", query, self.batch.num_tokens, num_heads, self.cache_shape[3]),
            floats("keys", keys, *self.cache_shape),
            floats("values", values, *self.cache_shape),
            output.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for attention to work in")
        return output

    def struct_for(self, num_heads: int) -> int:
        """The address of a struct step, for so many query heads. Raises KernelInputError."""
        num_kv_heads = self.cache_shape[2]
        if num_heads == 0 or num_heads % num_kv_heads:
            needed = f"a multiple of {num_kv_heads} KV heads"
            raise KernelInputError(f"query has {num_heads} heads; it must be {needed}")
        self._step.num_heads = num_heads
        return ctypes.addressof(self._step)

    def angles(self, angles: Pair) -> tuple[int, int]:
        """The addresses of cos and sin, which reach the last position. Raises KernelInputError."""
        cos, sin = angles
        num_positions, head_dim = cos.shape[0], self.cache_shape[3]
        if head_dim % 2 or self.batch.max_context_len > num_positions:
            needed = "a row a position, head_dim / 2 channels"
            raise KernelInputError(f"cos has shape {list(cos.shape)}; it must have {needed}")
        shape = (num_positions, head_dim // 2)
        return floats("cos", cos, *shape), floats("sin", sin, *shape)


def spans_of(sequences: Sequence[StepSequence], most_rows: int) -> list[Span]:
    """Each sequence's rows in spans of at most `most_rows`, those with the same blocks together.

    Positions [4, 11) in spans of 3: [4, 7), [7, 10) and [10, 11).
    """
    first_rows = [0, *accumulate(sequence.end - sequence.start for sequence in sequences)]
    # In lexicographic order, tables that begin alike are neighbours.
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].block_table)
    return [
        Span(index, first_rows[index] + start - own.start, start, min(most_rows, own.end - start))
        for index in order
        for own in [sequences[index]]
        for start in range(own.start, own.end, most_rows)
    ]
