"""What tests of the harness share: a workbook of their own, and a reader at work in it."""

from dataclasses import dataclass

import pytest

from chapters.cli import main
from chapters.contents import chapter_named
from chapters.diff import solution_text
from chapters.workbook import VARIABLE, Workbook

CHAPTER_3 = "ch03_block_manager"


@dataclass
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


class Reader:
    """Somebody who types commands and edits files."""

    def __init__(self, workbook, capsys):
        self.workbook = workbook
        self._capsys = capsys

    def types(self, line):
        """`python -m chapters LINE`."""
        self._capsys.readouterr()
        try:
            code = main(line.split())
        except SystemExit as exit_:
            code = exit_.code
        captured = self._capsys.readouterr()
        return Said(code, captured.out, captured.err)

    def file(self, name=CHAPTER_3):
        return self.workbook.file(chapter_named(name))

    def solves(self, name=CHAPTER_3):
        """Their file becomes the solution."""
        self.file(name).write_text(solution_text(chapter_named(name)))

    def edits(self, old, new, name=CHAPTER_3):
        text = self.file(name).read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        self.file(name).write_text(text.replace(old, new))


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    """An empty workbook, that commands and checks find."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "workbook"))
    return Workbook(tmp_path / "workbook")


@pytest.fixture
def reader(workbook, capsys):
    return Reader(workbook, capsys)
