"""From instructions to functions: control, memory, and what threads do for themselves.

Tensor cores and the exchange between threads have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.ptx.arithmetic import TYPES, signature
from benchmarks.ptx.block import Block, Mask, Step
from benchmarks.ptx.exchange import EXCHANGES, for_whole_warps
from benchmarks.ptx.global_memory import GlobalMemory
from benchmarks.ptx.operands import addresses, constant, reader, register, registers
from benchmarks.ptx.parse import Address, Immediate, Instruction, Program, PtxError, Vector
from benchmarks.ptx.shared_memory import SharedMemory
from benchmarks.ptx.tensor_cores import multiply, multiply_async


def step_of(instruction: Instruction, program: Program) -> Step:
    """The function that does an instruction. Raises PtxError if it is not known."""
    name = instruction.opcode[0]
    if name in ("bra", "ret"):
        return _jump(instruction, program)
    if name == "mov" and any(isinstance(each, Vector) for each in instruction.operands):
        return _repack(instruction)
    return _STEPS.get(name, _arithmetic)(instruction)


def _arithmetic(instruction: Instruction) -> Step:
    operation, result, kinds = signature(instruction)
    target, *sources = instruction.operands
    name, dtype = register(target), TYPES[result]
    reads = [reader(each, kind) for each, kind in zip(sources, kinds, strict=True)]

    def step(block: Block, mask: Mask) -> None:
        values = operation(*[read(block) for read in reads])
        block.put(name, values.astype(dtype, copy=False), mask)

    return step


def _repack(instruction: Instruction) -> Step:
    """One register to several that get its parts, the lowest first; or the other way."""
    target, source = instruction.operands
    targets, sources = registers(target), registers(source)

    def step(block: Block, mask: Mask) -> None:
        parts = np.stack([block.registers[name] for name in sources], axis=1)
        size = parts.nbytes // len(parts) // len(targets)
        parts = parts.view(f"u{size}")
        for part, name in enumerate(targets):
            block.put(name, parts[:, part], mask)

    return step


def _jump(instruction: Instruction, program: Program) -> Step:
    target = len(program.instructions)
    if instruction.opcode[0] == "bra":
        target = program.labels[str(instruction.operands[-1])]

    def step(block: Block, mask: Mask) -> int:
        if mask is not None:
            raise PtxError("some threads go this way and others do not")
        return target

    return step


def _fence(instruction: Instruction) -> Step:
    if instruction.opcode[1:3] != ("proxy", "async"):
        raise PtxError(f"unknown instruction {instruction.text}")
    return lambda block, mask: block.shared.fence()


def _barrier(instruction: Instruction) -> Step:
    if instruction.opcode == ("bar", "warp", "sync"):
        return lambda block, mask: None
    if instruction.opcode != ("bar", "sync") or instruction.operands != (Immediate(0),):
        raise PtxError(f"unknown instruction {instruction.text}")

    def step(block: Block, mask: Mask) -> None:
        if mask is not None:
            raise PtxError("not all threads come to the barrier")
        block.shared.barrier()

    return step


def _memory(instruction: Instruction) -> Callable[[Block], GlobalMemory | SharedMemory]:
    """Which of a program's two memories a load or a store is for."""
    space, _, whose = instruction.opcode[1].partition("::")
    if space == "shared" and whose in ("", "cta"):
        return lambda block: block.shared
    if space == "global":
        return lambda block: block.memory
    raise PtxError(f"unknown instruction {instruction.text}")


def _load(instruction: Instruction) -> Step:
    kind = instruction.opcode[-1]
    target, source = instruction.operands
    if instruction.opcode[1] == "param":
        return _load_parameter(register(target), source)
    memory_of = _memory(instruction)
    names, where = registers(target), addresses(source)
    size = np.dtype(TYPES[kind]).itemsize
    width = size * len(names)

    def step(block: Block, mask: Mask) -> None:
        who = block.threads(mask)
        found = memory_of(block).read(where(block)[who], width, who).view(f"u{size}")
        for part, name in enumerate(names):
            if name != "_":
                block.registers[name][who] = found[:, part]

    return step


def _load_parameter(name: str, source: object) -> Step:
    if not isinstance(source, Address):
        raise PtxError(f"{source} is no parameter")
    parameter = str(source.base)

    def step(block: Block, mask: Mask) -> None:
        # A narrow one in a wide register: a number without sign, as all of Triton's are.
        block.registers[name][...] = block.parameters[parameter]

    return step


def _store(instruction: Instruction) -> Step:
    kind, memory_of = instruction.opcode[-1], _memory(instruction)
    target, source = instruction.operands
    values = source.registers if isinstance(source, Vector) else (source,)
    reads, where = [reader(each, kind) for each in values], addresses(target)

    def step(block: Block, mask: Mask) -> None:
        who, num_threads = block.threads(mask), block.program.num_threads
        parts = [np.broadcast_to(read(block), num_threads)[who] for read in reads]
        memory_of(block).write(where(block)[who], np.stack(parts, axis=1).view(np.uint8), who)

    return step


def _copy(instruction: Instruction) -> Step:
    """cp.async: a copy to shared memory beside the arithmetic, and the waiting for it."""
    what = instruction.opcode[2]
    if what in ("commit_group", "wait_group"):
        return _wait_for_copies(instruction)
    if what not in ("ca", "cg"):
        raise PtxError(f"unknown instruction {instruction.text}")
    to, source, size, *rest = instruction.operands
    target, where, width = addresses(to), addresses(source), constant(size)
    # How many bytes are read; the others become zero. Our kernels read all or none.
    num_bytes = reader(rest[0] if rest else size, "u32")

    def step(block: Block, mask: Mask) -> None:
        who = block.threads(mask)
        asked = np.broadcast_to(num_bytes(block), block.program.num_threads)[who]
        if ((asked != 0) & (asked != width)).any():
            raise PtxError("a copy of a part")
        values = np.zeros((len(who), width), np.uint8)
        readers = who[asked > 0]
        values[asked > 0] = block.memory.read(where(block)[readers], width, readers)
        block.shared.begin_copy(target(block)[who], values, who)

    return step


def _wait_for_copies(instruction: Instruction) -> Step:
    num_pending = constant(instruction.operands[0]) if instruction.operands else None

    def step(block: Block, mask: Mask) -> None:
        for_whole_warps(mask)
        if num_pending is None:
            block.shared.commit_group()
        else:
            block.shared.wait_group(num_pending)

    return step


_STEPS: dict[str, Callable[[Instruction], Step]] = {
    "bar": _barrier,
    "fence": _fence,
    "ld": _load,
    "st": _store,
    "cp": _copy,
    "mma": multiply,
    "wgmma": multiply_async,
    **EXCHANGES,
}
