"""The C files of this folder, compiled once for this processor and loaded.

They are compiled where they run, as triton's kernels are: so the compiler may use every instruction
that the processor has, and nothing built for another machine is ever run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: the compiler must not add up a sum in another order for another number of rows.
# -fno-math-errno: a square root is one instruction, not a call that may set errno.
# -nodefaultlibs: the process has a C library, and OpenMP, see _share_threads_with_torch.
_FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno"),
    *("-fopenmp", "-fPIC", "-shared", "-nodefaultlibs", "-Wno-psabi"),
)
_SECONDS = 120

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_long, "f": ctypes.c_float}
_ARGUMENTS = {
    "layer_attend": "pp ppp pp pp pp",
    "layer_finish": "p ppp p i p",
    "linear": "pppp iii",
    "gated_linear": "pppp iii",
    "attend": "ppppp",
    "rotary_store_kv": "ppppp pp ppp lll iiii",
    "rms_norm": "ppp f iii l",
    "add_rms_norm": "ppppp f ii",
    "silu_and_mul": "pp ii",
}
"""What each function of the C files takes, a letter an argument."""


class NativeError(RuntimeError):
    """The C files cannot be compiled or loaded here; the message says what is missing."""


@functools.cache
def load(folder: Path) -> ctypes.CDLL:
    """The library; compiled into `folder` if it is not there yet. Raises NativeError."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NativeError(f"there is no C compiler ({', '.join(_COMPILERS)}) on the PATH")
    path = folder / f"kernels-{_name_of_build(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    _share_threads_with_torch()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"the compiled kernels cannot be loaded: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = [_TYPES[letter] for letter in arguments.replace(" ", "")]
    return library


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.[ch]"))


def _name_of_build(compiler: str) -> str:
    """A digest of all that decides what comes out: sources, compiler, flags, processor.

    What -march=native stands for is told by the macros it defines.
    """
    macros = _run(compiler, "-march=native", "-fopenmp", "-dM", "-E", "-x", "c", os.devnull)
    parts = [" ".join(_FLAGS).encode(), macros, *(path.read_bytes() for path in _sources())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    sources = [str(source) for source in _sources() if source.suffix == ".c"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may compile at once: each puts a whole file in place.
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch, path.name)
            _run(compiler, *_FLAGS, "-o", str(built), *sources)
            built.replace(path)
    except OSError as error:
        raise NativeError(f"cannot write {path}: {error}") from error


def _run(*command: str) -> bytes:
    """What the command prints. Raises NativeError with its first error."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NativeError(f"{command[0]} ended with {done.returncode}: {first}")
    return done.stdout


def _share_threads_with_torch() -> None:
    """Let the kernels find the OpenMP library that torch has brought and loaded.

    With another one they would have threads of their own, which would get in the way of torch's.
    """
    folder = Path(torch.__file__).parent / "lib"
    found = [*sorted(folder.glob("libgomp*.so*")), *sorted(folder.glob("libiomp5*.so*"))]
    if not found:
        raise NativeError("torch has brought no OpenMP library for gcc (libgomp or libiomp5)")
    ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
