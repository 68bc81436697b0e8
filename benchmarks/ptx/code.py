"""A kernel that is ready to run: its instructions as functions, and the loop that calls them.

On a GPU each warp goes at its own pace. Here all threads of a program do the same instruction at
once, which is one of the orders that are allowed; shared_memory.py refuses what would come out
differently in another. A branch that some threads take and others do not cannot be followed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.ptx.block import Block, Mask
from benchmarks.ptx.parse import Instruction, Program, PtxError
from benchmarks.ptx.steps import step_of


class Code:
    """The functions of a program's instructions. Raises PtxError for one that is not known."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._steps = [step_of(each, program) for each in program.instructions]

    def run(self, block: Block) -> npt.NDArray[np.int64]:
        """Run one program to its end; returns how often each instruction was executed.

        Raises PtxError, with the instruction and the line of Python that it comes from, for what a
        GPU would end the launch for, and for what it might compute wrongly.
        """
        instructions = self.program.instructions
        executed = np.zeros(len(instructions), np.int64)
        at = 0
        try:
            with np.errstate(all="ignore"):
                while at < len(instructions):
                    executed[at] += 1
                    mask, is_done = self._mask(instructions[at], block)
                    goes_on = self._steps[at](block, mask) if is_done else None
                    at = at + 1 if goes_on is None else goes_on
                block.finish()
        except PtxError as error:
            last = instructions[min(at, len(instructions) - 1)]
            place = f"{self.program.name}, {last.source}: {last.text}"
            raise PtxError(f"{place}\n{error}") from None
        return executed

    def _mask(self, instruction: Instruction, block: Block) -> tuple[Mask, bool]:
        """Who takes part, and whether anybody does."""
        if instruction.predicate is None:
            return None, True
        name, wanted = instruction.predicate
        mask = block.registers[name] == wanted
        return (None, True) if mask.all() else (mask, bool(mask.any()))
