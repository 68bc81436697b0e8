"""What an instruction does within each thread: numbers in registers to numbers in registers.

The values of all threads are one numpy array, so an instruction is a few operations of numpy.
Floats are computed as IEEE 754 says. What a GPU only approximates (2 ** x, 1 / sqrt(x), the `full`
division) is computed more exactly here: the same to a few units in the last place, not to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.ptx.parse import Instruction, PtxError

Array: TypeAlias = npt.NDArray[Any]
Operation: TypeAlias = Callable[..., Any]

TYPES: dict[str, Any] = {
    "pred": np.bool_,
    **dict.fromkeys(("b16", "u16", "bf16"), np.uint16),  # numpy has no bfloat16: its bits
    **dict.fromkeys(("b32", "u32", "bf16x2", "f16x2"), np.uint32),
    **dict.fromkeys(("b64", "u64", "f32x2"), np.uint64),
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
}
HALVES = ("bf16", "bf16x2", "f16x2")
"""Only moved, chosen from, and converted here: to add their bits would be wrong."""

WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


class Signature(NamedTuple):
    """What computes an instruction, and the types of its result and of its sources."""

    operation: Operation
    result: str
    sources: tuple[str, ...]


Modifiers: TypeAlias = tuple[str, ...]
"""An opcode's parts behind its name: ("wide", "s32") of mul.wide.s32."""


def signature(instruction: Instruction) -> Signature:
    """Types and operation. Raises PtxError for an instruction that is not known."""
    name, *modifiers = instruction.opcode
    num_sources = len(instruction.operands) - 1
    if name in ("min", "max"):  # Blackwell has them of three numbers, too
        name += str(num_sources)
    try:
        # One that is not known might change the meaning.
        found = _FAMILIES[name](tuple(modifiers)) if _KNOWN.issuperset(modifiers) else None
    except KeyError:
        found = None
    if found is None or len(found.sources) != num_sources:
        raise PtxError(f"unknown instruction {instruction.text}")
    if not {found.result, *found.sources} <= TYPES.keys():
        raise PtxError(f"unknown instruction {instruction.text}")
    return found


def bits_to_float(bits: Array) -> Array:
    """bfloat16, as its bits, to float32, whose upper half it is."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bits(values: Array) -> Array:
    """float32 to the bits of the nearest bfloat16, the even one of two; NaN stays NaN."""
    bits = np.atleast_1d(values).view(np.uint32)
    is_odd = bits >> np.uint32(16) & np.uint32(1)
    rounded = bits + np.uint32(0x7FFF) + is_odd >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _is_float(kind: str) -> bool:
    return kind in ("f16", "f32")


def _bitwise(operation: Operation, num_sources: int) -> Callable[[Modifiers], Signature]:
    """All operands have the type that ends the opcode, whatever their bits mean."""

    def make(modifiers: Modifiers) -> Signature:
        (kind,) = modifiers
        return Signature(operation, kind, (kind,) * num_sources)

    return make


def _same(operation: Operation, num_sources: int) -> Callable[[Modifiers], Signature]:
    """All operands have the type that ends the opcode, and are numbers of it."""

    def make(modifiers: Modifiers) -> Signature:
        if modifiers[-1] in HALVES:
            raise KeyError(modifiers)
        kind, once = modifiers[-1], _flushing(modifiers, operation)
        return Signature(_twice(once) if kind == "f32x2" else once, kind, (kind,) * num_sources)

    return make


def _twice(operation: Operation) -> Operation:
    """For registers of 64 bits that hold two floats, on Blackwell."""

    def both(*values: Array) -> Array:
        halves = [np.atleast_1d(each).view(np.float32).reshape(-1, 2) for each in values]
        return np.ascontiguousarray(operation(*halves)).view(np.uint64).ravel()

    return both


def _flushing(modifiers: Modifiers, operation: Operation) -> Operation:
    """With .ftz: numbers too small to be normal count as 0, and become 0."""
    if "ftz" not in modifiers:
        return operation
    return lambda *values: _flush(operation(*map(_flush, values)))


def _flush(values: Array) -> Array:
    too_small = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(too_small, np.copysign(np.float32(0), values), values)


def _multiply(modifiers: Modifiers) -> Signature:
    kind = modifiers[-1]
    if "wide" in modifiers:
        wide = TYPES[WIDER[kind]]
        return Signature(lambda a, b: a.astype(wide) * b.astype(wide), WIDER[kind], (kind, kind))
    if "hi" in modifiers:
        wide, size = TYPES[WIDER[kind]], 8 * np.dtype(TYPES[kind]).itemsize
        upper_half: Operation = lambda a, b: a.astype(wide) * b.astype(wide) >> wide(size)  # noqa: E731
        return Signature(upper_half, kind, (kind, kind))
    return _same(lambda a, b: a * b, 2)(modifiers)


def _multiply_add(modifiers: Modifiers) -> Signature:
    multiply, result, sources = _multiply(modifiers)
    return Signature(lambda a, b, c: multiply(a, b) + c, result, (*sources, result))


def _fused(modifiers: Modifiers) -> Signature:
    if modifiers[-2:] == ("f32", "bf16"):  # on Blackwell
        return Signature(_multiply_bits_add, "f32", ("bf16", "bf16", "f32"))
    if modifiers[-1] not in ("f32", "f32x2"):
        raise KeyError(modifiers)
    return _same(_multiply_add_once, 3)(modifiers)


def _multiply_add_once(a: Array, b: Array, c: Array) -> Array:
    # The product is exact in double precision. The sum is rounded to that first, which changes
    # the last bit once in half a billion times.
    return np.asarray(a.astype(np.float64) * b + c, np.float32)


def _multiply_bits_add(a: Array, b: Array, c: Array) -> Array:
    return _multiply_add_once(bits_to_float(a), bits_to_float(b), c)


def _divide(modifiers: Modifiers) -> Signature:
    of_floats = _is_float(modifiers[-1])
    return _same((lambda a, b: a / b) if of_floats else _quotient, 2)(modifiers)


def _quotient(a: Array, b: Array) -> Array:
    """Towards zero. Who divides by zero gets something, and must not read it."""
    b = np.where(b == 0, 1, b).astype(b.dtype)
    size = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return np.where((a < 0) == (b < 0), size, -size).astype(a.dtype)


def _extreme(number: Operation, nan: Operation, num_sources: int) -> Callable[..., Signature]:
    """Of a number and NaN they give the number, unless the opcode says NaN."""

    def make(modifiers: Modifiers) -> Signature:
        of_two = nan if "NaN" in modifiers else number
        return _same(lambda *values: reduce(of_two, values), num_sources)(modifiers)

    return make


def _shift(operation: Operation) -> Callable[[Modifiers], Signature]:
    """By as many bits as a number has, or more: numpy does what PTX says, no bit is left."""

    def make(modifiers: Modifiers) -> Signature:
        kind = modifiers[-1]
        return Signature(lambda a, n: operation(a, n.astype(a.dtype)), kind, (kind, "u32"))

    return make


def _extract(modifiers: Modifiers) -> Signature:
    (kind,) = modifiers
    if kind not in ("u32", "s32"):
        raise KeyError(kind)
    return Signature(_bits, kind, (kind, "u32", "u32"))


def _bits(a: Array, first: Array, length: Array) -> Array:
    """Bits [first, first + length) of 32; the uppermost is the sign of a type that has one."""
    if (length == 0).any() or (first.astype(np.int64) + length > 32).any():
        raise PtxError("bits outside of a register")
    above = (32 - first.astype(np.int64) - length).astype(a.dtype)
    shifted: Array = (a << above) >> (32 - length.astype(np.int64)).astype(a.dtype)
    return shifted


def _permute(modifiers: Modifiers) -> Signature:
    if modifiers != ("b32",):
        raise KeyError(modifiers)
    return Signature(_chosen_bytes, "b32", ("b32", "b32", "b32"))


def _chosen_bytes(a: Array, b: Array, choice: Array) -> Array:
    """Each 4 bits of `choice` name one of the 8 bytes of b and a; above 7, its sign 8 times."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    found = np.zeros((), np.uint32)
    for place in range(0, 32, 8):
        number = (choice >> np.uint32(place // 2) & np.uint32(0xF)).astype(np.uint64)
        byte = (both >> np.uint64(8) * (number & np.uint64(7)) & np.uint64(0xFF)).astype(np.uint32)
        signs = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
        found = found | np.where(number > 7, signs, byte) << np.uint32(place)
    return found


def _compare(modifiers: Modifiers) -> Signature:
    relation, kind = modifiers if len(modifiers) == 2 else ("", "")
    if kind in HALVES:
        raise KeyError(modifiers)
    if _is_float(kind) and relation.endswith("u"):  # true if one is NaN
        opposite = _ORDERED[_OPPOSITES[relation[:-1]]]
        return Signature(lambda a, b: ~opposite(a, b), "pred", (kind, kind))
    return Signature(_ORDERED[relation], "pred", (kind, kind))


def _select(modifiers: Modifiers) -> Signature:
    (kind,) = modifiers
    return Signature(lambda a, b, first: np.where(first, a, b), kind, (kind, kind, "pred"))


def _convert(modifiers: Modifiers) -> Signature:
    *_, target, source = modifiers
    if target in ("bf16x2", "f16x2") and source == "f32":
        half = target.removesuffix("x2")
        return Signature(
            lambda a, b: _pair(_narrow(a, half), _narrow(b, half)), target, ("f32",) * 2
        )
    if target in ("bf16", "f16") and source == "f32":
        return Signature(lambda a: _narrow(a, target).view(TYPES[target]), target, (source,))
    if source == "bf16" and target == "f32":
        return Signature(bits_to_float, target, (source,))
    if "bf16" in (target, source) or (_is_float(source) and not _is_float(target)):
        raise KeyError(modifiers)  # how to round would have to be asked
    return Signature(lambda a: a.astype(TYPES[target]), target, (source,))


def _pair(upper: Array, lower: Array) -> Array:
    return upper.astype(np.uint32) << np.uint32(16) | lower


def _narrow(values: Array, kind: str) -> Array:
    """The bits of float32 values in half precision."""
    if kind == "bf16":
        return float_to_bits(values)
    return np.atleast_1d(values).astype(np.float16).view(np.uint16)


# Of NaN none of these is true.
_ORDERED: dict[str, Operation] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_OPPOSITES = {"eq": "ne", "ne": "eq", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}

_FAMILIES: dict[str, Callable[[Modifiers], Signature]] = {
    "mov": _bitwise(lambda a: a, 1),
    "add": _same(lambda a, b: a + b, 2),
    "sub": _same(lambda a, b: a - b, 2),
    "mul": _multiply,
    "mad": _multiply_add,
    "fma": _fused,
    "div": _divide,
    "rem": _same(lambda a, b: a - _quotient(a, b) * b, 2),
    "min2": _extreme(np.fmin, np.minimum, 2),
    "min3": _extreme(np.fmin, np.minimum, 3),
    "max2": _extreme(np.fmax, np.maximum, 2),
    "max3": _extreme(np.fmax, np.maximum, 3),
    "neg": _same(np.negative, 1),
    "abs": _same(np.abs, 1),
    "not": _bitwise(np.invert, 1),
    "and": _bitwise(lambda a, b: a & b, 2),
    "or": _bitwise(lambda a, b: a | b, 2),
    "xor": _bitwise(lambda a, b: a ^ b, 2),
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "bfe": _extract,
    "prmt": _permute,
    "setp": _compare,
    "selp": _select,
    "cvt": _convert,
    "ex2": _same(lambda a: np.exp2(a.astype(np.float64)).astype(a.dtype), 1),
    "rsqrt": _same(lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype), 1),
}
_KNOWN = {
    *TYPES, *_ORDERED, *(f"{relation}u" for relation in _ORDERED),
    "rn", "ftz", "approx", "full", "NaN", "lo", "hi", "wide",
}  # fmt: skip
