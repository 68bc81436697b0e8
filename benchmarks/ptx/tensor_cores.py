"""Products of tiles: mma, by a warp from its registers; wgmma, by four from shared memory.

A tile is spread over a warp in fragments of 8 x 8, see exchange.py. A sum's fragment has two
columns in two registers. Products are exact here and added up in double precision; a GPU keeps
fewer bits on the way.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.ptx.arithmetic import Array, bits_to_float
from benchmarks.ptx.block import Block, Mask, Step
from benchmarks.ptx.exchange import for_whole_warps
from benchmarks.ptx.operands import constant, reader, registers
from benchmarks.ptx.parse import Immediate, Instruction, PtxError, Vector
from benchmarks.ptx.shared_memory import WARP, Numbers, SharedMemory

GROUP = 4 * WARP


def multiply(instruction: Instruction) -> Step:
    """mma.m16n8k16: [16, 16] times [16, 8] and a sum, in each warp."""
    *_, shape, _, _, of_sum, kind, of_right, of_result = instruction.opcode
    if (shape, of_sum, of_right, of_result) != ("m16n8k16", "f32", kind, "f32"):
        raise PtxError(f"unknown instruction {instruction.text}")
    target, left, right, sums = map(registers, instruction.operands)

    def step(block: Block, mask: Mask) -> None:
        for_whole_warps(mask)
        a = left_tiles(block.stacked(left), kind)
        b = right_tiles(block.stacked(right), kind)
        c = sum_tiles(block.stacked(sums).view(np.float32))
        block.unstack(target, sum_fragments(a @ b + c))

    return step


def multiply_async(instruction: Instruction) -> Step:
    """wgmma, on Hopper: a product is begun, and done as late as it may be, when it is waited for.

    Tiles in shared memory are read at once and held until then. Registers are read and written
    only then: who changes its left tile, or reads its sums, too early, computes something else.
    (A wgmma.fence that is missing is not noticed.)
    """
    what = instruction.opcode[1]
    if what == "fence":
        return lambda block, mask: None
    if what == "commit_group":
        return lambda block, mask: block.products.append([])
    if what == "wait_group":
        num_pending = constant(instruction.operands[0])
        return lambda block, mask: block.finish_products(num_pending)
    return _begin_product(instruction)


def _begin_product(instruction: Instruction) -> Step:
    """wgmma.m64nNk16: [64, 16] times [16, N] and a sum, in each group of four warps."""
    *_, shape, of_sum, kind, of_right = instruction.opcode
    found = re.fullmatch(r"m64n(\d+)k16", shape)
    target, left, right, keeps_sum, sign_left, sign_right, *turned = instruction.operands
    plain = (of_sum, of_right, sign_left, sign_right) == ("f32", kind, Immediate(1), Immediate(1))
    if found is None or not plain:
        raise PtxError(f"unknown instruction {instruction.text}")
    num_columns, names, left_names = int(found[1]), registers(target), registers(left)
    kept_of, right_of = reader(keeps_sum, "pred"), reader(right, "u64")
    *turned_left, turned_right = [bool(constant(each)) for each in turned]

    def step(block: Block, mask: Mask) -> None:
        for_whole_warps(mask)
        for first in range(0, block.program.num_threads, GROUP):
            group = slice(first, first + GROUP)
            kept = _one_for_all(np.broadcast_to(kept_of(block), block.program.num_threads)[group])
            b = SharedTile(_one_for_all(right_of(block)[group]), num_columns, turned_right)
            tiles, numbers = [b], [b.hold(block.shared, kind).T]
            if not isinstance(left, Vector):
                where = _one_for_all(block.registers[left_names[0]][group])
                a = SharedTile(where, 64, turned_left[0])
                tiles.append(a)
                numbers.append(a.hold(block.shared, kind).reshape(4, 16, 16))
            finish = partial(_finish, block, group, kept, tiles, numbers)
            block.products[-1].append(finish)

    def _finish(
        block: Block, group: slice, kept: int, tiles: list[SharedTile], numbers: list[Array]
    ) -> None:
        right, *lefts = numbers
        a = lefts[0] if lefts else left_tiles(block.stacked(left_names)[:, group], kind)
        sums = sum_tiles(block.stacked(names)[:, group].view(np.float32)) if kept else 0
        for name, row in zip(names, sum_fragments(a @ right + sums), strict=True):
            block.registers[name].view(np.float32)[group] = row
        for tile in tiles:
            tile.release(block.shared)

    return step


def _one_for_all(values: Array) -> int:
    if (values != values[0]).any():
        raise PtxError("the threads of a group differ in what must be the same for all")
    return int(values[0])


class SharedTile(NamedTuple):
    """A tile [num_rows, 16] of a wgmma in shared memory.

    It lies in pieces of 8 lines, each of 32, 64 or 128 bytes. A line is a part of a row, or of a
    column if the tile is turned. Within a piece bits of a line's number are mixed into the
    addresses (swizzle), so that what lies below each other lies in different banks. By the PTX
    ISA, "Matrix Descriptor": where the tile starts, how far apart the pieces lie in both
    directions, all in units of 16 bytes, and the length of a line.
    """

    descriptor: int
    num_rows: int
    is_turned: bool

    def hold(self, shared: SharedMemory, kind: str) -> Array:
        """[num_rows, 16] float64; nobody may write them before release()."""
        found = _numbers(shared.hold(self._addresses(), 16).view(np.uint32), kind)
        lines = found.reshape(16 if self.is_turned else self.num_rows, -1)
        return lines.T if self.is_turned else lines

    def release(self, shared: SharedMemory) -> None:
        """The product is done."""
        shared.release(self._addresses(), 16)

    def _addresses(self) -> Numbers:
        """Of 16 bytes each, 8 numbers, line by line."""
        start, beside, below = ((self.descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        length = {1: 128, 2: 64, 3: 32}.get(self.descriptor >> 62 & 3)
        if length is None or self.descriptor >> 49 & 7:
            raise PtxError(f"unknown layout of shared memory: descriptor {self.descriptor:#x}")
        num_lines, num_chunks = (16, self.num_rows // 8) if self.is_turned else (self.num_rows, 2)
        lines, chunks = np.meshgrid(np.arange(num_lines), np.arange(num_chunks), indexing="ij")
        pieces, within = np.divmod(16 * chunks, length)
        found = start + lines // 8 * below + lines % 8 * length + pieces * beside + within
        found ^= (found >> 7 & length // 16 - 1) << 4
        return np.asarray(found.ravel())


def left_tiles(fragments: Array, kind: str) -> Array:
    """[num_warps, 16, 16] float64 of [4, num_threads] uint32.

    The registers are the quarters upper left, lower left, upper right, lower right.
    """
    quarters = _numbers(fragments.reshape(4, -1, 8, 4), kind)
    left, right = np.concatenate(quarters[:2], axis=1), np.concatenate(quarters[2:], axis=1)
    return np.concatenate((left, right), axis=2)


def right_tiles(fragments: Array, kind: str) -> Array:
    """[num_warps, 16, 8] float64 of [2, num_threads] uint32; a pair lies in one column."""
    halves = _numbers(fragments.reshape(2, -1, 8, 4), kind)
    return np.concatenate(halves, axis=2).swapaxes(1, 2)


def sum_tiles(fragments: Array) -> Array:
    """[num_warps, 16, 8 n] float64 of [4 n, num_threads] float32.

    For each 8 columns four registers: two columns of a row, and of the row 8 below.
    """
    # [8 columns, lower half, second column, warp, row, pair]
    parts = fragments.reshape(-1, 2, 2, fragments.shape[1] // WARP, 8, 4)
    tiles = parts.transpose(3, 1, 4, 0, 5, 2)
    return tiles.reshape(len(tiles), 16, -1).astype(np.float64)


def sum_fragments(tiles: Array) -> Array:
    """The way back: [4 n, num_threads] float32."""
    # [warp, lower half, row, 8 columns, pair, second column]
    parts = tiles.reshape(len(tiles), 2, 8, -1, 4, 2)
    fragments = parts.transpose(3, 1, 5, 0, 2, 4)
    return fragments.reshape(-1, len(tiles) * WARP).astype(np.float32)


def _numbers(pairs: Array, kind: str) -> Array:
    """float64 [..., 2 n] of uint32 [..., n]; the lower half of each is the first."""
    halves = np.ascontiguousarray(pairs).view(np.uint16)
    numbers = bits_to_float(halves) if kind == "bf16" else halves.view(np.float16)
    return numbers.astype(np.float64)
