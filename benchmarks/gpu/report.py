"""A figure and what it stands beside; the table for the book and the JSON file."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.measured import Measured, described, shortened

TIME_UNITS = ("s", "ms", "us")
MOST_CELL_CHARACTERS = 240


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement beside its yardstick.

    measure   what was measured, "decode attention"
    setting   on what, "batch 64, context 4,096"
    unit      of both numbers: "GB/s", "ms", ...
    ours      None: not measured, and `note` or `problem` says why
    beside    the yardstick's name
    theirs    None: not measured
    note      what a reader of the numbers must know
    problem   a promise that is broken; "" if none is
    """

    measure: str
    setting: str
    unit: str
    ours: float | None
    beside: str
    theirs: float | None
    note: str = ""
    problem: str = ""

    @property
    def share(self) -> float | None:
        """Our speed in units of the yardstick's: 2 is twice as fast, for rates and for times."""
        if not self.ours or not self.theirs:
            return None
        if self.unit in TIME_UNITS:
            return self.theirs / self.ours
        return self.ours / self.theirs


def figure_of(
    measure: str,
    setting: str,
    unit: str,
    ours: Measured,
    beside: str,
    theirs: Measured,
    *,
    note: str = "",
    problem: str = "",
) -> Figure:
    """The figure; that ours could not be measured is a problem, that theirs could not is a note."""
    their_error = f"{beside}: {theirs.error}" if theirs.error else ""
    return Figure(
        measure,
        setting,
        unit,
        ours.value,
        beside,
        theirs.value,
        note="; ".join(filter(None, (note, their_error))),
        problem="; ".join(filter(None, (problem, ours.error))),
    )


def _nowhere() -> None:
    """Keep nothing."""


@dataclass(slots=True)
class Report:
    """What one part found. A problem is a broken promise: the part then ends with exit code 1.

    The run may be cut off at any moment, so whatever is found is printed at once, and kept.

    finished  the part came to its end; a file that says otherwise was cut off
    keep      called after each finding
    """

    part: str
    figures: list[Figure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finished: bool = False
    keep: Callable[[], None] = _nowhere

    def add(self, figure: Figure) -> None:
        """Take a figure, and the problem it has."""
        print(row_of(figure), flush=True)
        self.figures.append(figure)
        self.keep()
        if figure.problem:
            self.add_problem(f"{figure.measure}, {figure.setting}: {figure.problem}")

    def add_all(self, figures: Iterable[Figure]) -> None:
        """Take figures as they come."""
        for figure in figures:
            self.add(figure)

    def add_problem(self, problem: str) -> None:
        """Take a problem, once."""
        if problem in self.problems:
            return
        print(f"PROBLEM: {problem}", flush=True)
        self.problems.append(problem)
        self.keep()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An exception ends the block and is a problem: what comes after it is still measured."""
        try:
            yield
        except Exception as error:
            self.add_problem(f"{what} ended with {described(error)}")

    def write(self, path: Path, card: str, seconds: float) -> None:
        """Everything as one JSON object, in place of the file that was there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = [asdict(figure) | {"share": figure.share} for figure in self.figures]
        content = {
            "part": self.part,
            "finished": self.finished,
            "card": card,
            "versions": versions(),
            "seconds": round(seconds, 1),
            "figures": figures,
            "problems": self.problems,
            "notes": self.notes,
        }
        # Whoever is cut off while writing leaves the old file whole.
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(content, indent=2) + "\n")
        new.replace(path)


def versions() -> dict[str, str]:
    """Of Python, CUDA and the packages that the figures depend on."""
    # torch says which build it is ("+cu130"); its package's metadata does not.
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    for package in ("triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def markdown_table(figures: Sequence[Figure]) -> str:
    """One row a figure, numbers to three digits, as the book prints it."""
    head = ["| Measure | Setting | Ours | Beside | Share | Note |", "|---|---|---:|---:|---:|---|"]
    return "\n".join([*head, *map(row_of, figures)])


def row_of(figure: Figure) -> str:
    """The figure's row of the table."""
    problem = f"PROBLEM: {figure.problem}" if figure.problem else ""
    cells = (
        figure.measure,
        figure.setting,
        _number(figure.ours, figure.unit) or "not measured",
        f"{figure.beside} {_number(figure.theirs, figure.unit) or 'not measured'}",
        "" if figure.share is None else f"{figure.share:.2f}",
        _cell("; ".join(filter(None, (problem, figure.note)))),
    )
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Short, in one line, and without the sign that ends a cell."""
    return shortened(" ".join(text.split()), MOST_CELL_CHARACTERS).replace("|", "/")


def _number(value: float | None, unit: str) -> str:
    """1234.5 GB/s -> 1,230 GB/s; 0.01234 ms -> 0.0123 ms; None -> nothing."""
    if value is None:
        return ""
    rounded = float(f"{value:.3g}")
    digits = f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"
    return f"{digits} {unit}".strip()
