"""What the 32 threads of a warp do together: exchange registers, and share tiles of memory.

A matrix of 8 x 8 numbers of 2 bytes is spread over a warp like this, by the PTX ISA: thread l holds
row l / 4, and of that the pair of columns that begins with 2 (l % 4). One register holds the pair.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.ptx.arithmetic import Array
from benchmarks.ptx.block import Block, Mask, Step
from benchmarks.ptx.operands import addresses, reader, register, registers
from benchmarks.ptx.parse import Immediate, Instruction, PtxError
from benchmarks.ptx.shared_memory import WARP, Numbers


def for_whole_warps(mask: Mask) -> None:
    """Raise PtxError unless all threads take part."""
    if mask is not None:
        raise PtxError("only some threads of a warp take part")


def shuffle(instruction: Instruction) -> Step:
    """shfl: each thread gets the value of thread l ^ mask of its warp (bfly), or of l (idx)."""
    target, source, lane, *clamp_and_members = instruction.operands
    name, mode = register(target), instruction.opcode[2]
    if mode not in ("bfly", "idx") or clamp_and_members != [Immediate(31), Immediate(-1)]:
        raise PtxError(f"unknown instruction {instruction.text}")
    value_of, lane_of = reader(source, "u32"), reader(lane, "u32")

    def step(block: Block, mask: Mask) -> None:
        for_whole_warps(mask)
        values = value_of(block).reshape(-1, WARP)
        lanes = np.broadcast_to(lane_of(block), values.size).reshape(values.shape).astype(np.int64)
        if mode == "bfly":
            lanes = np.arange(WARP) ^ lanes
        block.put(name, np.take_along_axis(values, lanes % WARP, axis=1).ravel(), None)

    return step


def add_up(instruction: Instruction) -> Step:
    """redux.add: each thread gets the sum of its warp."""
    if instruction.opcode[2:] != ("add", "s32"):
        raise PtxError(f"unknown instruction {instruction.text}")
    name, values = register(instruction.operands[0]), reader(instruction.operands[1], "s32")

    def step(block: Block, mask: Mask) -> None:
        for_whole_warps(mask)
        sums = values(block).reshape(-1, WARP).sum(axis=1, dtype=np.int32)
        block.put(name, np.repeat(sums, WARP), None)

    return step


def load_matrices(instruction: Instruction) -> Step:
    """ldmatrix: one, two or four matrices of 8 x 8 from shared memory.

    Threads 8 i to 8 i + 7 of a warp say where the rows of its matrix i lie, 16 bytes each. With
    .trans a thread gets a pair of rows in a column instead.
    """
    names, where = registers(instruction.operands[0]), addresses(instruction.operands[1])
    transposed = "trans" in instruction.opcode

    def step(block: Block, mask: Mask) -> None:
        for_whole_warps(mask)
        who = _row_holders(block, len(names))
        rows = block.shared.read(where(block)[who], 16, who).view(np.uint16)
        matrices = _maybe_transposed(rows.reshape(-1, len(names), 8, 8), transposed)
        pairs = matrices.view(np.uint32)  # [warp, matrix, row, pair]
        block.unstack(names, pairs.swapaxes(0, 1).reshape(len(names), -1))

    return step


def store_matrices(instruction: Instruction) -> Step:
    """stmatrix: the way back."""
    where, names = addresses(instruction.operands[0]), registers(instruction.operands[1])
    transposed = "trans" in instruction.opcode

    def step(block: Block, mask: Mask) -> None:
        for_whole_warps(mask)
        who = _row_holders(block, len(names))
        pairs = block.stacked(names).reshape(len(names), -1, WARP).swapaxes(0, 1)
        matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, len(names), 8, 8)
        rows = _maybe_transposed(matrices, transposed).reshape(-1, 8)
        block.shared.write(where(block)[who], rows.view(np.uint8), who)

    return step


def _row_holders(block: Block, num_matrices: int) -> Numbers:
    """The threads whose addresses count."""
    return np.flatnonzero(np.arange(block.program.num_threads) % WARP < 8 * num_matrices)


def _maybe_transposed(matrices: Array, transposed: bool) -> Array:
    return np.ascontiguousarray(matrices.swapaxes(2, 3)) if transposed else matrices


EXCHANGES: dict[str, Callable[[Instruction], Step]] = {
    "shfl": shuffle,
    "redux": add_up,
    "ldmatrix": load_matrices,
    "stmatrix": store_matrices,
}
