"""A reader's folder: their files, how far each task is, and how many hints they have seen.

    workbook/ch03_block_manager/block_manager.py   theirs; nothing but start and reset writes it
    workbook/ch03_block_manager/backups/           what it was before a reset
    workbook/progress.json                         what the last check of each task said
    workbook/traces/3.1.jsonl                      what happened in the last failing check

The environment variable MINIVLLM_WORKBOOK names another folder.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from chapters.catalog import Chapter
from chapters.regions import stub
from chapters.stages import CHAPTERS, solution_path

VARIABLE = "MINIVLLM_WORKBOOK"


class State(Enum):
    """How far a task is."""

    NOT_STARTED = "not started"
    FAILING = "failing"
    DONE = "done"


class WorkbookError(Exception):
    """The workbook is not as it must be for this; the message says what to do."""


class Workbook:
    """The files in `folder`, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # The reader's files

    def file(self, chapter: Chapter) -> Path:
        """Where the reader's code of a chapter is, or would be."""
        return self.folder / chapter.name / chapter.work_file

    def has(self, chapter: Chapter) -> bool:
        """True if the chapter is started."""
        return self.file(chapter).is_file()

    def start(self, chapter: Chapter) -> Path:
        """Write the stub, and say where. Raises WorkbookError if there is a file already."""
        path = self.file(chapter)
        if path.exists():
            raise WorkbookError(
                f"{shown(path)} is there already; to begin anew: python -m chapters reset"
                f" {chapter.number}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stub(solution_path(chapter.name).read_text(), chapter))
        return path

    def reset(self, chapter: Chapter, now: datetime) -> Path:
        """Put the stub back; the file that was there is the returned backup."""
        path = self.file(chapter)
        backup = path.parent / "backups" / f"{path.stem}-{now:%Y%m%d-%H%M%S-%f}.py"
        backup.parent.mkdir(exist_ok=True)
        path.rename(backup)
        self.start(chapter)
        progress = self._read()
        for task in chapter.tasks:
            progress["tasks"].pop(task.number, None)
        self._write(progress)
        return backup

    def is_untouched(self, chapter: Chapter) -> bool:
        """True if the file is the stub as `start` wrote it."""
        return self.file(chapter).read_text() == stub(
            solution_path(chapter.name).read_text(), chapter
        )

    # How far each task is

    def state(self, chapter: Chapter, task: str) -> State:
        """What the last check of a task said."""
        entry = self._read()["tasks"].get(task)
        if entry is None or not self.has(chapter):
            return State.NOT_STARTED
        return State(entry["state"])

    def is_checked(self, chapter: Chapter, task: str) -> bool:
        """True if the task was checked, and the file has not changed since."""
        entry = self._read()["tasks"].get(task)
        return entry is not None and self.has(chapter) and entry["file"] == self.digest(chapter)

    def is_done(self, chapter: Chapter) -> bool:
        """True if all of its tasks passed, in the file as it is now."""
        return all(
            self.state(chapter, task.number) is State.DONE and self.is_checked(chapter, task.number)
            for task in chapter.tasks
        )

    def digest(self, chapter: Chapter) -> str:
        """What the file holds now, for a later comparison."""
        return hashlib.sha256(self.file(chapter).read_bytes()).hexdigest()

    def record(self, task: str, state: State, digest: str) -> None:
        """A check of the file with this digest has said so."""
        progress = self._read()
        progress["tasks"][task] = {"state": state.value, "file": digest}
        self._write(progress)

    # Hints and traces

    def hints_seen(self, task: str) -> int:
        """How many hints of a task were shown."""
        return int(self._read()["hints"].get(task, 0))

    def saw_hints(self, task: str, count: int) -> None:
        """So many hints of a task have been shown now."""
        progress = self._read()
        progress["hints"][task] = count
        self._write(progress)

    def keep_trace(self, task: str, lines: tuple[str, ...]) -> Path | None:
        """Keep the trace of a failing check, and say where; no lines take an old one away."""
        path = self.folder / "traces" / f"{task}.jsonl"
        if not lines:
            path.unlink(missing_ok=True)
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        return path

    @property
    def _progress_file(self) -> Path:
        return self.folder / "progress.json"

    def _read(self) -> dict[str, dict[str, Any]]:
        empty: dict[str, dict[str, Any]] = {"tasks": {}, "hints": {}}
        if not self._progress_file.is_file():
            return empty
        try:
            read: dict[str, dict[str, Any]] = json.loads(self._progress_file.read_text())
            return empty | read
        except (ValueError, TypeError) as error:
            raise WorkbookError(
                f"{shown(self._progress_file)} cannot be read ({error}); delete it: only what"
                " status knows is lost, never your code"
            ) from error

    def _write(self, progress: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: a check that is interrupted must not spoil what status knows.
        new = self._progress_file.with_suffix(".new")
        new.write_text(json.dumps(progress, indent=1, sort_keys=True) + "\n")
        new.replace(self._progress_file)


def open_workbook(environment: Mapping[str, str] = os.environ) -> Workbook:
    """The workbook in the repository's root, or the one that the environment names."""
    return Workbook(Path(environment.get(VARIABLE) or CHAPTERS.parent / "workbook").resolve())


def shown(path: Path) -> str:
    """A path for a person: from the current directory, if it lies below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
