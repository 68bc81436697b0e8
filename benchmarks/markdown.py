"""Rows of figures as a table in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a table: its head, whether it holds numbers, and a row's value in it."""

    head: str
    is_number: bool
    value: Callable[[Any], object]


def table(rows: Sequence[object], columns: Sequence[Column]) -> str:
    """The rows, one a line. What is the same in all of them stands once, above."""
    shown, common = [], []
    for column in columns:
        values = {column.value(row) for row in rows}
        if len(rows) < 2 or len(values) > 1:
            shown.append(column)
        elif value := str(values.pop()):
            common.append(f"{column.head} {value}".strip())
    lines = [", ".join(common), ""] if common else []
    lines.append(_line(column.head for column in shown))
    lines.append(f"|{'|'.join('---:' if column.is_number else '---' for column in shown)}|")
    lines += [_line(column.value(row) for column in shown) for row in rows]
    return "\n".join(lines)


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("\n", " ") for cell in cells) + " |"
