"""Whether Triton kernels can run here: compiled on a GPU, or in Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NO_TRITON = "the package triton is not installed"
INTERPRET = "TRITON_INTERPRET"
OLDEST = 80
"""The compute capability of the A100, from which on tiles are chosen."""

FENCED = (3, 7, 1)
"""The first release of Triton that puts a fence between a copy to shared memory and the tensor
cores that read there. By its pull request 10537, and by tests/kernels/test_kernels_as_compiled.py.
"""


def why_no_triton(device: torch.device) -> str | None:
    """The first thing that kernels lack on this device; None: they can run.

    What they can run in spite of is logged as a warning, see doubt_about. Triton is not imported,
    so the variable that chooses the interpreter can still be set.
    """
    if importlib.util.find_spec("triton") is None:
        return NO_TRITON
    if device.type == "cuda":
        return _why_not_on(device)
    if os.environ.get(INTERPRET) == "1":
        return why_no_interpreter()
    return (
        f"it needs a CUDA GPU and the device is {device}"
        f" ({INTERPRET}=1 in the environment runs it on a CPU, slowly)"
    )


def why_no_interpreter() -> str | None:
    """What keeps the interpreter from running kernels, were it chosen; None: nothing does.

    Triton 3.6 turns the bounds of a loop, arrays of one element, into numbers, which numpy 2.4
    and newer refuse; Triton 3.7 takes the element. A kernel on a GPU is not concerned.
    """
    if importlib.util.find_spec("triton") is None:
        return NO_TRITON
    triton, numpy = _release("triton"), _release("numpy")
    if triton and numpy and triton < (3, 7) and numpy >= (2, 4):
        return (
            f"the interpreter of triton {_dotted(triton[:2])} does not work with numpy"
            f" {_dotted(numpy[:2])}: install triton 3.7 or newer, or numpy below 2.4"
        )
    return None


def _why_not_on(gpu: torch.device) -> str | None:
    # Older ones compile, but use no tensor cores, and the tiles of a prompt spill or do not fit.
    from kernels.launch import capability

    found = capability(gpu)
    if doubt := doubt_about(found, _release("triton")):
        logging.getLogger(__name__).warning(doubt)
    if found >= OLDEST:
        return None
    return (
        f"it needs a GPU of compute capability {_capability(OLDEST)} or newer"
        f" and this one has {_capability(found)}"
    )


def doubt_about(capability: int, triton: tuple[int, ...] | None) -> str | None:
    """What may be wrong with kernels that this release compiles for a GPU; None: nothing is known.

    From Hopper on, tensor cores read a prompt's keys from shared memory by themselves, along
    another way than threads. (An RTX 5090, capability 120, has no such products.)
    """
    if triton is None or triton >= FENCED or not 90 <= capability < 120:
        return None
    return (
        f"triton {_dotted(triton)} leaves out a fence between the copy of a prompt's keys and the"
        f" products that read them, on this GPU: they may read too early. No wrong value of these"
        f" kernels is known; triton {_dotted(FENCED)} or newer has the fence"
    )


def _capability(number: int) -> str:
    """8.0 for 80, as NVIDIA writes it."""
    return f"{number // 10}.{number % 10}"


def _release(package: str) -> tuple[int, ...] | None:
    """(3, 6, 0) for 3.6.0+cu130; None where the package is installed under another name."""
    try:
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version(package))
    except PackageNotFoundError:
        return None
    return tuple(int(number or 0) for number in found.groups()) if found else None


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
