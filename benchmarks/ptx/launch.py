"""In the place of a launch on a GPU: a kernel is compiled for one, and its PTX is run here.

On tensors on the CPU, as for an H100:

    with PtxMachine(90).launching():
        attention(query, key_cache, value_cache, batch)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kernel_table import compile_for
from benchmarks.launches import launches_replaced
from benchmarks.ptx.arithmetic import Array
from benchmarks.ptx.block import Block
from benchmarks.ptx.code import Code
from benchmarks.ptx.global_memory import GlobalMemory
from benchmarks.ptx.parse import Program, parse
from benchmarks.ptx.shared_memory import SharedMemory

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Where a launcher asks what the device can do.
ASK_FOR_CAPABILITY = ("attention", "paged_attention", "split_attention")


class Compiled(NamedTuple):
    """A kernel for one set of types and constants, and the bytes of shared memory it asks for."""

    code: Code
    num_shared_bytes: int


@dataclass
class Launched:
    """What a launch did, all of its programs together.

    executed                      how often each instruction of the program was executed
    bytes_moved, bytes_touched    see GlobalMemory
    wavefronts, least_wavefronts  of shared memory, see SharedMemory
    """

    kernel: str
    grid: tuple[int, ...]
    program: Program
    executed: npt.NDArray[np.int64]
    bytes_moved: int = 0
    bytes_touched: int = 0
    wavefronts: int = 0
    least_wavefronts: int = 0


class PtxMachine:
    """Compiles for GPUs of one compute capability, 80 or 90 say, and runs what came out.

    change    if given, gets each kernel's PTX and returns what is run in its place
    launches  what was launched since launching() was entered, the oldest first

    Each kernel is compiled once a machine; Triton's own cache may lie in a throw-away folder.
    """

    def __init__(self, capability: int, change: Callable[[str], str] | None = None) -> None:
        self.capability = capability
        self._change = change
        self.launches: list[Launched] = []
        self._compiled: dict[object, Compiled] = {}

    @contextmanager
    def launching(self) -> Iterator[PtxMachine]:
        """Within it each launch of a Triton kernel runs here, with tensors on the CPU."""

        def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
            settings = {name: named.pop(name) for name in [*named] if name not in kernel.arg_names}
            values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
            self.launches.append(self._launch(kernel, values, grid, settings))

        self.launches.clear()
        with ExitStack() as stack:
            stack.enter_context(launches_replaced(run))
            for module in ASK_FOR_CAPABILITY:
                name = f"kernels.{module}.capability"
                stack.enter_context(mock.patch(name, return_value=self.capability))
            yield self

    def _launch(
        self, kernel: Any, values: dict[str, Any], grid: Sequence[int], settings: dict[str, Any]
    ) -> Launched:
        """Run all programs of a grid, one after the other."""
        constants = _constants(kernel, values)
        passed = {name: value for name, value in values.items() if name not in constants}
        code, num_shared_bytes = self._compile(kernel, passed, constants, settings)
        tensors = {k: value for k, value in values.items() if isinstance(value, torch.Tensor)}
        memory = GlobalMemory(tensors)
        in_order = [passed[name] for name in kernel.arg_names if name in passed]
        parameters = _parameters(code.program, in_order)
        never = np.zeros(len(code.program.instructions), np.int64)
        done = Launched(kernel.__name__, tuple(grid), code.program, never)
        sizes = (*grid, 1, 1)[:3]
        for at in itertools.product(*map(range, sizes)):
            special = _special(code.program.num_threads, at, sizes)
            shared = SharedMemory(num_shared_bytes)
            done.executed += code.run(Block(code.program, special, parameters, memory, shared))
            done.wavefronts += shared.wavefronts
            done.least_wavefronts += shared.least_wavefronts
        done.bytes_moved, done.bytes_touched = memory.bytes_moved, memory.bytes_touched
        return done

    def _compile(
        self,
        kernel: Any,
        passed: dict[str, Any],
        constants: dict[str, Any],
        settings: dict[str, Any],
    ) -> Compiled:
        signature = {
            name: _type_of(passed[name]) if name in passed else "constexpr"
            for name in kernel.arg_names
        }
        aligned = _aligned(kernel, passed)
        key = (kernel, *signature.items(), *constants.items(), aligned, *settings.items())
        if key not in self._compiled:
            target = f"sm_{self.capability}"
            compiled = compile_for(target, kernel, signature, constants, aligned, settings)
            ptx = compiled.asm["ptx"]
            program = parse(self._change(ptx) if self._change else ptx)
            self._compiled[key] = Compiled(Code(program), compiled.metadata.shared)
        return self._compiled[key]


def _constants(kernel: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """What Triton compiles in: parameters that are marked so, and whole numbers that are 1."""
    found = {}
    for parameter in kernel.params:
        value = values[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or is_one:
            found[parameter.name] = value
    return found


def _aligned(kernel: Any, passed: Mapping[str, Any]) -> tuple[int, ...]:
    """Which parameters are multiples of 16, addresses too: Triton compiles for that."""
    return tuple(
        index
        for index, parameter in enumerate(kernel.params)
        if parameter.name in passed
        and not parameter.do_not_specialize
        and _is_multiple_of_16(passed[parameter.name])
    )


def _is_multiple_of_16(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(number, int) and number % 16 == 0


def _type_of(value: Any) -> str:
    """Triton's name for an argument's type."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _parameters(program: Program, passed: Sequence[Any]) -> dict[str, Array]:
    """The bits of all parameters. The last two are Triton's, and our kernels do not use them."""
    found: dict[str, Array] = {}
    for index, kind in enumerate(program.parameters):
        value = passed[index] if index < len(passed) else 0
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        size = int(kind[1:]) // 8
        bits = np.array(number, f"f{size}" if kind[0] == "f" else f"i{size}")
        found[f"{program.name}_param_{index}"] = bits.view(f"u{size}")
    return found


def _special(num_threads: int, at: Sequence[int], sizes: Sequence[int]) -> dict[str, Array]:
    """The registers that say which thread of which program this is."""
    found: dict[str, Array] = {"%tid.x": np.arange(num_threads, dtype=np.uint32)}
    for axis, number, size in zip("xyz", at, sizes, strict=True):
        found[f"%ctaid.{axis}"] = np.array(number, np.uint32)
        found[f"%nctaid.{axis}"] = np.array(size, np.uint32)
    return found
