"""From an instruction's operands to what reads and writes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.ptx.arithmetic import TYPES, Array
from benchmarks.ptx.block import Block
from benchmarks.ptx.parse import Address, Immediate, Operand, PtxError, Register, Vector

Read = Callable[[Block], Array]


def reader(operand: Operand, kind: str) -> Read:
    """What gives an operand's value, as numbers of a type: [num_threads], or one for all."""
    dtype = np.dtype(TYPES[kind])
    if isinstance(operand, Register):
        name = operand.name
        if "." in name:
            return lambda block: block.special[name]
        if dtype == np.bool_:
            return lambda block: block.registers[name]
        return lambda block: block.registers[name].view(dtype)
    if isinstance(operand, Immediate):
        unsigned = np.dtype(f"u{dtype.itemsize}")
        bits = operand.value & (1 << 8 * dtype.itemsize) - 1
        constant = np.array(bits, unsigned).view(dtype)
        return lambda block: constant
    if isinstance(operand, str):  # the one array in shared memory, which starts at 0
        return lambda block: np.zeros((), dtype)
    raise PtxError(f"{operand} is no number")


def addresses(operand: Operand) -> Read:
    """[num_threads] int64: what stands in brackets."""
    if not isinstance(operand, Address):
        raise PtxError(f"{operand} is no address")
    base, offset = operand.base, operand.offset
    if isinstance(base, Register):
        return lambda block: block.registers[base.name].astype(np.int64) + offset
    return lambda block: np.full(block.program.num_threads, offset)


def register(operand: Operand) -> str:
    """The name of a single register."""
    if not isinstance(operand, Register):
        raise PtxError(f"{operand} is no register")
    return operand.name


def registers(operand: Operand) -> list[str]:
    """The names of one or more."""
    parts = operand.registers if isinstance(operand, Vector) else (operand,)
    return [register(each) for each in parts]


def constant(operand: Operand) -> int:
    """A number that stands in the instruction."""
    if not isinstance(operand, Immediate):
        raise PtxError(f"{operand} is no constant")
    return operand.value
