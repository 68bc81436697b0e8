"""The C files are compiled once, again when anything about them changes, and fail in one line."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.native import library as native
from kernels.native.attention import _Step
from kernels.native.layer import PARTS, _Layer, _Weights
from kernels.native.library import NativeError
from tests import native_checks as checks
from tests.native import needs_native

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "kernels" / "native"

load = native.load.__wrapped__
"""Without the cache: as another process would."""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Put a program called cc, and nothing else, on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(script):
        path = folder / "cc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return put


def refused(match, folder):
    """The library is refused in one line."""
    with pytest.raises(NativeError, match=match) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


# Compiled once.


@needs_native
def test_it_is_compiled_into_an_empty_folder_and_then_only_loaded(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "there yet"
    checks.check_silu_sizes(load(folder))
    (built,) = folder.iterdir()
    assert re.fullmatch(r"kernels-[0-9a-f]{16}\.so", built.name)
    written = built.stat().st_mtime_ns

    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    checks.check_silu_sizes(load(folder))
    assert built.stat().st_mtime_ns == written
    assert list(folder.iterdir()) == [built]


WAIT_THEN_LOAD = """
import sys, time
from pathlib import Path
from kernels.native.library import load
folder, mine, other = map(Path, sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.001)
library = load(folder)
import torch
from kernels.native.ops import NativeOps
assert NativeOps(library).silu_and_mul(torch.ones(1, 16)).shape == (1, 8)
maps = Path("/proc/self/maps")
lines = maps.read_text().splitlines() if maps.exists() else []
print(sorted({line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line}))
"""


@needs_native
def test_two_processes_compile_at_once_and_share_torchs_threads(tmp_path):
    folder, flags = tmp_path / "built", (tmp_path / "first", tmp_path / "second")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WAIT_THEN_LOAD, folder, *order],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in (flags, flags[::-1])
    ]
    printed = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], printed
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    # A second OpenMP library would have threads of its own, which get in the way of torch's.
    assert all(output.count(".so") <= 1 for output, _ in printed), printed


# Compiled again.


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the C files, to be changed."""
    folder = tmp_path / "sources"
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(native, "_FOLDER", folder)
    return folder


@pytest.mark.parametrize("name", ["linear.c", "tile.h", "vectors.h"])
def test_another_source_is_another_file(name, sources, compiler):
    cc = compiler("echo macros")
    before = native._name_of_build(cc)
    assert native._name_of_build(cc) == before
    with (sources / name).open("a") as file:
        file.write("/* more */\n")
    assert native._name_of_build(cc) != before


def test_another_flag_is_another_file(compiler, monkeypatch):
    cc = compiler("echo macros")
    before = native._name_of_build(cc)
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-g"))
    assert native._name_of_build(cc) != before


def test_another_processor_or_compiler_is_another_file(compiler):
    first, second = (
        native._name_of_build(compiler(f"echo '#define __{name}__ 1'"))
        for name in ("AVX2", "AVX512F")
    )
    assert first != second


@pytest.fixture
def one_source(sources, monkeypatch):
    """A C file that is compiled alone, which is soon done."""
    for path in sources.glob("*.c"):
        if path.name != "silu_and_mul.c":
            path.unlink()
    monkeypatch.setattr(native, "_ARGUMENTS", {"silu_and_mul": "pp ii"})
    return sources / "silu_and_mul.c"


@needs_native
def test_a_library_of_another_source_stands_beside_the_first(one_source, tmp_path):
    folder = tmp_path / "built"
    checks.check_silu_sizes(load(folder))
    with one_source.open("a") as file:
        file.write("/* more */\n")
    checks.check_silu_sizes(load(folder))
    assert len(list(folder.iterdir())) == 2


# Not compiled, and why.


def test_no_compiler_is_said_with_the_names_looked_for(compiler, tmp_path):
    refused(r"there is no C compiler \(cc, gcc, clang\) on the PATH", tmp_path)


def test_a_compiler_that_cannot_say_its_macros_is_quoted(compiler, tmp_path):
    compiler("echo 'error: out of luck' >&2; echo more >&2; exit 3")
    refused("cc ended with 3: error: out of luck$", tmp_path / "built")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(compiler, tmp_path):
    compiler('case "$*" in *-dM*) exit 0; esac; echo "error: no" >&2; echo more >&2; exit 1')
    refused("cc ended with 1: error: no$", tmp_path / "built")
    assert not list((tmp_path / "built").iterdir())


def test_a_compiler_that_fails_without_a_word_is_said_to(compiler, tmp_path):
    compiler("exit 4")
    refused("cc ended with 4: no message$", tmp_path / "built")


def test_a_compiler_that_does_not_end_is_given_up(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_SECONDS", 0.2)
    compiler("while :; do :; done")
    refused("cc cannot be run: .*timed out", tmp_path / "built")


def test_a_compiler_that_is_no_program_is_said_to(compiler, tmp_path):
    Path(compiler("")).write_bytes(b"\x7fELF")
    refused("cc cannot be run: ", tmp_path / "built")


def test_a_compiler_that_writes_nothing_is_said_to(compiler, tmp_path):
    compiler("exit 0")
    refused("cannot write .*/built/kernels-", tmp_path / "built")
    assert not list((tmp_path / "built").iterdir())


@needs_native
def test_a_source_that_is_no_c_is_said_to(one_source, tmp_path):
    one_source.write_text("no C\n")
    refused("ended with 1: .*silu_and_mul.c", tmp_path / "built")


def test_a_folder_that_is_a_file_is_said_to(compiler, tmp_path):
    compiler("exit 0")
    (tmp_path / "built").touch()
    refused("cannot write .*/built/kernels-", tmp_path / "built")
    refused("cannot write .*/built/below/kernels-", tmp_path / "built" / "below")


def test_a_folder_that_cannot_be_written_is_said_to(compiler, tmp_path, monkeypatch):
    compiler("exit 0")

    def full(**_):
        raise OSError(28, "No space left on device")

    # Root may write into any folder: so nothing is said with chmod.
    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", full)
    refused("cannot write .*: .*No space left on device", tmp_path / "built")


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\x7fELF" + bytes(100)])
def test_a_library_that_is_garbage_is_said_to(garbage, compiler, tmp_path):
    cc = compiler("echo macros")
    (tmp_path / f"kernels-{native._name_of_build(cc)}.so").write_bytes(garbage)
    refused("the compiled kernels cannot be loaded: .*kernels-", tmp_path)


def test_a_torch_that_brings_no_openmp_is_said_to(compiler, tmp_path, monkeypatch):
    cc = compiler("echo macros")
    (tmp_path / f"kernels-{native._name_of_build(cc)}.so").touch()
    elsewhere = SimpleNamespace(__file__=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(native, "torch", elsewhere)
    refused("torch has brought no OpenMP library", tmp_path)


# What C is told.

_OF_TYPE = {"int": "i", "long": "l", "float": "f"}


def letters_of(parameters):
    """An argument's letter each: const float *rows, int size -> pi."""
    return "".join(
        "p" if "*" in parameter else _OF_TYPE[parameter.split()[-2]]
        for parameter in parameters.split(",")
    )


def test_the_arguments_are_those_of_the_c_text():
    text = "\n".join(path.read_text() for path in KERNELS.glob("*.c"))
    functions = re.findall(r"^(?:void|int) (\w+)\(([^)]*)\) *\{", text, flags=re.MULTILINE)
    assert {name: letters_of(parameters) for name, parameters in functions} == {
        name: letters.replace(" ", "") for name, letters in native._ARGUMENTS.items()
    }


@pytest.mark.parametrize(
    ("struct", "file", "in_python"),
    [("step", "kernels.h", _Step), ("weights", "layer.c", _Weights), ("layer", "layer.c", _Layer)],
)
def test_a_struct_has_the_fields_of_the_c_text(struct, file, in_python):
    text = (KERNELS / file).read_text()
    pattern = rf"^struct {struct} \{{\n(.*?)\n\}};"
    (fields,) = re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL)
    types = {"int": ctypes.c_int, "float": ctypes.c_float, "weights": _Weights}
    in_c = []
    for declared in fields.split(";")[:-1]:
        kind, names = re.match(r"\s*(?:const |struct )*(\w+) (.*)", declared, re.DOTALL).groups()
        in_c += [
            (name.strip(" *"), ctypes.c_void_p if "*" in name else types[kind])
            for name in names.split(",")
        ]
    # What C calls `bundles` are the numbers of Bundles.starts.
    assert in_c == list(in_python._fields_)


def test_the_parts_are_those_that_c_adds_up_the_time_of():
    (parts,) = re.findall(
        r"^enum part \{ (.*) \};$", (KERNELS / "layer.c").read_text(), re.MULTILINE
    )
    in_c = [part.lower().replace("_", " ") for part in parts.split(", ")]
    in_python = [part.replace(",", "") for part in PARTS]
    assert in_c == in_python
