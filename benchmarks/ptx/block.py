"""One program of a grid: the registers of its threads, and the memory that they see."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.ptx.arithmetic import TYPES, Array
from benchmarks.ptx.global_memory import GlobalMemory
from benchmarks.ptx.parse import Program, PtxError
from benchmarks.ptx.shared_memory import SharedMemory

Mask = npt.NDArray[np.bool_] | None
"""Which threads take part in an instruction; None is all of them."""

Step = Callable[["Block", Mask], int | None]
"""Does one instruction. Returns the number of the instruction to go on with, if not the next."""


@dataclass
class Block:
    """The state of one program.

    special     %tid.x and so on: [num_threads], or one number for all
    parameters  the bits of the kernel's parameters, by their names in PTX
    registers   by name: [num_threads] each, as unsigned numbers or truth values. Before they are
                written all bits are set: NaN as a float, nowhere as an address
    products    groups of wgmma that nobody has waited for; the last group is still open
    """

    program: Program
    special: Mapping[str, Array]
    parameters: Mapping[str, Array]
    memory: GlobalMemory
    shared: SharedMemory
    registers: dict[str, Array] = field(default_factory=dict)
    products: deque[list[Callable[[], None]]] = field(default_factory=lambda: deque([[]]))

    def __post_init__(self) -> None:
        for prefix, kind, count in self.program.registers:
            values = np.zeros((count, self.program.num_threads), TYPES[kind])
            for number, register in enumerate(np.invert(values)):
                self.registers[f"{prefix}{number}"] = register

    def threads(self, mask: Mask) -> npt.NDArray[np.int64]:
        """The numbers of the threads that take part."""
        return np.arange(self.program.num_threads) if mask is None else np.flatnonzero(mask)

    def put(self, name: str, values: Array, mask: Mask) -> None:
        """Write a register, in the threads of the mask; `_` is none."""
        if name == "_":
            return
        register = self.registers[name]
        target = register if register.dtype == np.bool_ else register.view(values.dtype)
        if mask is None:
            target[...] = values
        else:
            np.copyto(target, values, where=mask)

    def stacked(self, names: Sequence[str]) -> Array:
        """[len(names), num_threads]: several registers, as a tile's fragments lie."""
        return np.stack([self.registers[name] for name in names])

    def unstack(self, names: Sequence[str], values: Array) -> None:
        """Write them back, for all threads."""
        for name, row in zip(names, values, strict=True):
            self.put(name, row, None)

    def finish_products(self, num_pending: int) -> None:
        """Do all but the newest `num_pending` groups of wgmma."""
        while len(self.products) - 1 > num_pending:
            for multiply in self.products.popleft():
                multiply()

    def finish(self) -> None:
        """The program has ended. PtxError: something is under way that nobody waited for."""
        self.shared.finish()
        if any(self.products):
            raise PtxError("the program ended with products under way")
