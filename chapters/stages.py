"""Which file a stage's code comes from: the one resolver through which stages see each other.

A chapter's code says `ch01 = stage("ch01_sequence")` and gets a module. By default that is the
reference, `chapters/ch01_sequence/solution.py`, so any chapter can be done without the ones
before it. A check of one's own work may name other files: a reader's, a mutant's, a stub's.

Each Stages object loads a file once, under a name of its own, so two of them never mix: a test
can hold the reference and a mutant side by side.
"""

import importlib.util
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType

CHAPTERS = Path(__file__).resolve().parent

_numbers = count(1)


class UnknownStageError(LookupError):
    """There is no chapter of this name."""


class StageImportError(ImportError):
    """A file of a stage cannot be imported: a syntax error, a missing name, an exception."""


def solution_path(name: str) -> Path:
    """The reference solution of a stage. Raises UnknownStageError."""
    path = CHAPTERS / name / "solution.py"
    if not path.is_file():
        known = ", ".join(sorted(p.parent.name for p in CHAPTERS.glob("ch*/solution.py")))
        raise UnknownStageError(f"there is no stage {name!r}; there are {known}")
    return path


class Stages:
    """Stage name -> module; `files` names those that do not come from the reference."""

    def __init__(self, files: Mapping[str, Path] | None = None) -> None:
        self._files = dict(files or {})
        self._modules: dict[str, ModuleType] = {}

    def path(self, name: str) -> Path:
        """The file that `name` comes from."""
        return self._files.get(name) or solution_path(name)

    @property
    def given_files(self) -> tuple[Path, ...]:
        """Those that do not come from the reference."""
        return tuple(self._files.values())

    def forget(self) -> None:
        """Python need not know the loaded modules any longer; those who have them, may keep on."""
        for module in self._modules.values():
            sys.modules.pop(getattr(module, "__name__", ""), None)

    def load(self, name: str) -> ModuleType:
        """The module of stage `name`, loaded once. Raises StageImportError with the cause."""
        if name not in self._modules:
            self._modules[name] = self._import(name)
        return self._modules[name]

    def _import(self, name: str) -> ModuleType:
        path = self.path(name)
        spec = importlib.util.spec_from_file_location(f"{name}__{next(_numbers)}", path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        # Python's own recipe for importing a file: dataclasses look their module up there.
        sys.modules[spec.name] = module
        token = _current.set(self)
        try:
            exec(_compiled(path.read_text(), str(path)), module.__dict__)
        except Exception as error:
            del sys.modules[spec.name]
            raise StageImportError(f"{path.name} of {name} cannot be imported: {error}") from error
        finally:
            _current.reset(token)
        return module


@lru_cache(maxsize=64)
def _compiled(source: str, path: str) -> CodeType:
    """The code of a file. Python's own cache would miss a second change in the same second."""
    return compile(source, path, "exec", dont_inherit=True)


_current: ContextVar[Stages | None] = ContextVar("stages", default=None)


def stage(name: str) -> ModuleType:
    """The stage `name`, for the code of another stage, at its top level.

    It comes from the same Stages object that is loading the caller; code that nobody loads that
    way, a notebook for instance, gets the reference.
    """
    return (_current.get() or Stages()).load(name)
