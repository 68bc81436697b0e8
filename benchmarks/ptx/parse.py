"""PTX text to instructions. Only what Triton's compiler emits for our kernels is understood."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class PtxError(Exception):
    """The PTX has something that this machine does not know, or a program did what none may do."""


class Register(NamedTuple):
    """A register by its name, `%r12`; a special one, `%tid.x`; or `_`, which keeps nothing."""

    name: str


class Immediate(NamedTuple):
    """A constant: a whole number, or the bits of a float where PTX writes 0f3F800000."""

    value: int


class Vector(NamedTuple):
    """`{%r1, %r2}`: registers that are read or written together."""

    registers: tuple[Register | Immediate, ...]


class Address(NamedTuple):
    """`[%rd1 + 16]`: a register or the name of a parameter or an array, and bytes behind it."""

    base: Register | str
    offset: int


Operand: TypeAlias = Register | Immediate | Vector | Address | str
"""A plain str is a label, or the name of an array in shared memory."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line: `@!%p1 add.s32 %r1, %r2, 3;` has opcode ("add", "s32") and three operands.

    predicate  the register that says which threads take part, and what it must be; None: all
    source     "file:line" of the Python that it was compiled from, if that is known
    """

    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: tuple[str, bool] | None
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel: its instructions, where its labels point, and its registers.

    labels      name -> index of the instruction behind it
    registers   (prefix, type, count) of each declaration: ("%r", "b32", 100) is %r0 to %r99
    parameters  the types of the kernel's parameters, in order
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: tuple[tuple[str, str, int], ...]
    parameters: tuple[str, ...]
    num_threads: int


_ENTRY = re.compile(
    r"\.visible \.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)[^{]*\{(.*?)^\}", re.M | re.S
)
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>;")
_DIRECTIVES = (".reg ", ".loc", ".pragma")
_PLACE = re.compile(r"\.loc\s.*//\s*(\S+:\d+):")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?);", re.S)


def parse(text: str) -> Program:
    """The one kernel of a PTX file. Raises PtxError if there is none."""
    entry = _ENTRY.search(text)
    if entry is None:
        raise PtxError("no kernel in this PTX")
    name, parameters, num_threads, body = entry.groups()
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source = ""
    for line in body.splitlines():
        if located := _PLACE.search(line):
            source = located[1]
        code = line.partition("//")[0].strip()
        if label := re.fullmatch(r"(\$\w+):", code):
            labels[label[1]] = len(instructions)
        elif code and not (code in "{}" or code.startswith(_DIRECTIVES)):
            instructions.append(_instruction(code, source))
    return Program(
        name=name,
        instructions=tuple(instructions),
        labels=labels,
        registers=tuple((prefix, kind, int(n)) for kind, prefix, n in _REGISTERS.findall(body)),
        parameters=tuple(re.findall(r"\.param \.(\w+)", parameters)),
        num_threads=int(num_threads),
    )


def _instruction(code: str, source: str) -> Instruction:
    found = _INSTRUCTION.fullmatch(code)
    if found is None:
        raise PtxError(f"cannot read the line {code!r}")
    negated, predicate, opcode, operands = found.groups()
    return Instruction(
        opcode=tuple(opcode.split(".")),
        operands=tuple(map(_operand, _split(operands))),
        predicate=(predicate, not negated) if predicate else None,
        source=source,
        text=code,
    )


def _split(operands: str) -> list[str]:
    """At the commas outside of braces and brackets."""
    return [
        each.strip() for each in re.findall(r"\s*((?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+)", operands)
    ]


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return Vector(tuple(_register_or_number(each.strip()) for each in text[1:-1].split(",")))
    if text.startswith("["):
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return Address(Register(base) if base.startswith("%") else base, int(offset or "0", 0))
    if text.startswith("$") or re.fullmatch(r"[A-Za-z]\w*", text):
        return text
    return _register_or_number(text)


def _register_or_number(text: str) -> Register | Immediate:
    if text.startswith("%") or text == "_":
        return Register(text)
    if text.startswith("0f"):
        return Immediate(int(text[2:], 16))
    return Immediate(int(text.removesuffix("U"), 0))
