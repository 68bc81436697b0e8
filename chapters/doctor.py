"""What a reader's machine has, what it lacks, and what to do about each."""

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from chapters.contents import all_chapters
from chapters.workbook import VARIABLE, Workbook, WorkbookError, shown
from kernels.available import why_no_interpreter

NEEDED = ("torch", "numpy", "xxhash", "rich", "pytest", "hypothesis")
SETUP = "make setup"


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    found    what there is
    advice   what to do, if anything
    stops    True if chapters cannot be done before that
    """

    what: str
    found: str
    advice: str = ""
    stops: bool = False


def findings(workbook: Workbook) -> Iterator[Finding]:
    """Everything looked at, one by one. Fast: nothing large is imported."""
    yield _python()
    for package in NEEDED:
        yield _package(package)
    yield _triton()
    yield _interpreter()
    yield _model()
    yield _workbook(workbook)
    for chapter in all_chapters():
        if workbook.has(chapter):
            path = workbook.file(chapter)
            yield _compiles(shown(path), lambda path=path: path.read_text())  # type: ignore[misc]


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()}, {os.cpu_count()} cores"
    return Finding("python", f"{found} ({sys.executable})")


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "missing", f"{SETUP}, then use .venv/bin/python", stops=True)


def _triton() -> Finding:
    try:
        return Finding("triton", version("triton"), _advice_on_the_interpreter())
    except PackageNotFoundError:
        if platform.system() == "Linux":
            return Finding("triton", "missing", f"{SETUP}: chapter 4 needs it")
        return Finding(
            "triton", "missing", "it exists for Linux only: chapter 4 cannot be checked here"
        )


def _advice_on_the_interpreter() -> str:
    problem = why_no_interpreter()
    return f"chapter 4 cannot be checked here: {problem}" if problem else ""


def _interpreter() -> Finding:
    value = os.environ.get("TRITON_INTERPRET")
    if value == "0":
        return Finding(
            "TRITON_INTERPRET", "0", "chapter 4 will want a GPU; unset it to use the interpreter"
        )
    return Finding("TRITON_INTERPRET", value or "not set: chapter 4's check sets it")


def _model() -> Finding:
    if find_spec("minivllm") is None:
        return Finding("model", "minivllm is not installed", SETUP)
    from minivllm.model.download import SMOLLM2_135M, cache_folder

    folder = cache_folder() / SMOLLM2_135M.name
    if folder.is_dir():
        return Finding("model", str(folder))
    return Finding(
        "model", "not here", "python -m minivllm download (chapters 5 and 7 end with it)"
    )


def _workbook(workbook: Workbook) -> Finding:
    named = f" (from {VARIABLE})" if os.environ.get(VARIABLE) else ""
    started = [str(each.number) for each in all_chapters() if workbook.has(each)]
    found = f"{shown(workbook.folder)}{named}: " + (
        f"started: {', '.join(started)}" if started else "nothing started"
    )
    parent = workbook.folder if workbook.folder.exists() else workbook.folder.parent
    if not os.access(parent, os.W_OK):
        return Finding("workbook", found, f"{parent} cannot be written; set {VARIABLE}", stops=True)
    try:
        workbook.hints_seen("")
    except WorkbookError as error:
        return Finding("workbook", found, str(error), stops=True)
    if not started:
        return Finding("workbook", found, "python -m chapters start 1")
    return Finding("workbook", found)


def _compiles(name: str, read: Callable[[], str]) -> Finding:
    try:
        compile(read(), name, "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        return Finding(name, f"{where}{getattr(error, 'msg', error)}", "mend this line first")
    return Finding(name, "can be read")
