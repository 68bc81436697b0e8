"""Products of tiles: mma, by a warp from its registers; wgmma, by four from shared memory.

A tile is spread over a warp in fragments of 8 x 8, see exchange.py. A sum's fragment has two
columns in two registers. Products are exact here and added up in double precision; a GPU keeps
fewer bits on the way.
"""

from __future__ import annotations

import re

import numpy as np

from benchmarks.ptx.arithmetic import Array, bits_to_float
from benchmarks.ptx.block import Block, Mask, Step
from benchmarks.ptx.exchange import for_whole_warps
from benchmarks.ptx.operands import constant, reader, registers
from benchmarks.ptx.parse import Immediate, Instruction, PtxError, Vector
from benchmarks.ptx.shared_memory import WARP, SharedMemory

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
    """wgmma, on Hopper. A product is begun, and done as late as it may be: when it is waited for.

    Until then nobody may change its tiles or read its sums; who does it all the same computes with
    what is there too early or too late, and the result shows it.
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

    def left_tile(block: Block, group: slice, descriptors: Array) -> Array:
        if isinstance(left, Vector):
            return left_tiles(block.stacked(left_names)[:, group], kind).reshape(64, 16)
        where = _one_for_all(descriptors[group])
        return tile_in_shared(block.shared, where, 64, turned_left[0], kind)

    def step(block: Block, mask: Mask) -> None:
        for_whole_warps(mask)
        # Read now: where tiles lie in shared memory, and whether sums are kept.
        kept = np.broadcast_to(kept_of(block), block.program.num_threads).copy()
        lefts, rights = block.registers[left_names[0]].copy(), right_of(block).copy()

        def finish() -> None:
            product = np.empty((len(names), block.program.num_threads), np.float32)
            for first in range(0, block.program.num_threads, GROUP):
                group = slice(first, first + GROUP)
                a = left_tile(block, group, lefts)
                where = _one_for_all(rights[group])
                b = tile_in_shared(block.shared, where, num_columns, turned_right, kind).T
                c = sum_tiles(block.stacked(names)[:, group].view(np.float32))
                kept_sums = c if _one_for_all(kept[group]) else 0
                product[:, group] = sum_fragments(a.reshape(4, 16, 16) @ b + kept_sums)
            block.unstack(names, product)

        block.products[-1].append(finish)

    return step


def _one_for_all(values: Array) -> int:
    if (values != values[0]).any():
        raise PtxError("the threads of a group differ in what must be the same for all")
    return int(values[0])


def tile_in_shared(
    shared: SharedMemory, descriptor: int, num_rows: int, turned: bool, kind: str
) -> Array:
    """[num_rows, 16] float64 from where a descriptor says that a wgmma's tile lies.

    A tile lies in pieces of 8 lines, each of 32, 64 or 128 bytes. A line is a part of a row, or of
    a column if the tile is turned. Within a piece bits of a line's number are mixed into the
    addresses (swizzle), so that what lies below each other lies in different banks. By the PTX
    ISA, "Matrix Descriptor": where the tile starts, how far apart the pieces lie in both
    directions, all in units of 16 bytes, and the length of a line.
    """
    start, beside, below = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    length = {1: 128, 2: 64, 3: 32}.get(descriptor >> 62 & 3)
    if length is None or descriptor >> 49 & 7:
        raise PtxError(f"unknown layout of shared memory in descriptor {descriptor:#x}")
    num_lines, num_chunks = (16, num_rows // 8) if turned else (num_rows, 2)
    lines, chunks = np.meshgrid(np.arange(num_lines), np.arange(num_chunks), indexing="ij")
    pieces, within = np.divmod(16 * chunks, length)  # a chunk is 8 numbers, 16 bytes
    addresses = start + lines // 8 * below + lines % 8 * length + pieces * beside + within
    addresses ^= (addresses >> 7 & length // 16 - 1) << 4
    found = _numbers(shared.read_by_all(addresses.ravel(), 16).view(np.uint32), kind)
    return found.reshape(num_lines, -1).T if turned else found.reshape(num_lines, -1)


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
