"""A figure and what it stands beside; the table for the book and the JSON file."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

TIME_UNITS = ("s", "ms", "us")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement beside its yardstick.

    measure   what was measured, "decode attention"
    setting   on what, "batch 64, context 4,096"
    unit      of both numbers: "GB/s", "ms", ...
    ours      None: not measured, and `note` says why
    beside    the yardstick's name
    theirs    None: not measured
    """

    measure: str
    setting: str
    unit: str
    ours: float | None
    beside: str
    theirs: float | None
    note: str = ""

    @property
    def share(self) -> float | None:
        """Our speed in units of the yardstick's: 2 is twice as fast, for rates and for times."""
        if not self.ours or not self.theirs:
            return None
        if self.unit in TIME_UNITS:
            return self.theirs / self.ours
        return self.ours / self.theirs


@dataclass(slots=True)
class Report:
    """What one part found. A problem is a broken promise: the part then ends with exit code 1."""

    part: str
    figures: list[Figure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def write(self, path: Path, card: str, seconds: float) -> None:
        """Everything as one JSON object."""
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = [asdict(figure) | {"share": figure.share} for figure in self.figures]
        content = {
            "part": self.part,
            "card": card,
            "versions": versions(),
            "seconds": round(seconds, 1),
            "figures": figures,
            "problems": self.problems,
            "notes": self.notes,
        }
        path.write_text(json.dumps(content, indent=2) + "\n")


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
    lines = ["| Measure | Setting | Ours | Beside | Share |", "|---|---|---:|---:|---:|"]
    for figure in figures:
        share = "" if figure.share is None else f"{figure.share:.2f}"
        cells = (
            figure.measure,
            figure.setting,
            _number(figure.ours, figure.unit) or f"not measured: {figure.note}",
            f"{figure.beside} {_number(figure.theirs, figure.unit) or 'not measured'}",
            share,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float | None, unit: str) -> str:
    """1234.5 GB/s -> 1,230 GB/s; 0.01234 ms -> 0.0123 ms; None -> nothing."""
    if value is None:
        return ""
    rounded = float(f"{value:.3g}")
    digits = f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"
    return f"{digits} {unit}"
