"""A line chart as a small SVG file: colours that can be read on white and on black."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from typing import NamedTuple

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 36, 48
_LABEL = 24  # a label's width and the gap to the next
_COLOURS = ("#3f87d9", "#d9772b", "#2f9e6e", "#b0559e")
_GREY = "#808890"


class Line(NamedTuple):
    """One line of a chart: a name, and y for each x of the chart."""

    name: str
    ys: Sequence[float]


def line_chart(
    title: str,
    x_name: str,
    y_name: str,
    xs: Sequence[float],
    lines: Sequence[Line],
    *,
    x_labels: Sequence[str],
    logarithmic: bool = False,
) -> str:
    """The SVG text. y begins at 0; x is spaced by value, or by its logarithm.

    x_labels   what stands below each x, where there is room
    """
    places = [log10(x) for x in xs] if logarithmic else list(xs)
    top = _round_up(max(max(line.ys) for line in lines))
    x_of = _scale(min(places), max(places), _LEFT, _WIDTH - _RIGHT)
    y_of = _scale(0, top, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' font-family="sans-serif" font-size="12" fill="{_GREY}">',
        f"<title>{escape(title)}</title>",
        _text(_LEFT, 18, title, "start"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_name),
        _text(_LEFT - 8, _TOP - 8, y_name, "end"),
    ]
    for part in range(5):
        y = top * part / 4
        parts.append(
            f'<path d="M{_LEFT} {y_of(y):.1f}H{_WIDTH - _RIGHT}" stroke="{_GREY}"'
            ' stroke-opacity="0.35"/>'
        )
        parts.append(_text(_LEFT - 8, y_of(y) + 4, f"{y:g}", "end"))
    end = 0.0
    for place, label in zip(places, x_labels, strict=True):
        if x_of(place) - end < _LABEL:
            continue  # it would touch the one before it; its point is drawn all the same
        end = x_of(place)
        parts.append(_text(end, _HEIGHT - _BOTTOM + 18, label))
    for i, line in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        points = [(x_of(place), y_of(y)) for place, y in zip(places, line.ys, strict=True)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(_text(_WIDTH - _RIGHT + 14, _TOP + 8 + 18 * i, line.name, "start", colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    return _Scale(low, (end - start) / ((high - low) or 1), start)


class _Scale(NamedTuple):
    low: float
    factor: float
    start: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * self.factor


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 4, 5, 8, 10 times a power of ten.

    >>> _round_up(0.37), _round_up(61), _round_up(0)
    (0.4, 80.0, 1.0)
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 1.0
    while power > value:
        power /= 10
    return next(step * power for step in (1, 2, 2.5, 4, 5, 8, 10) if step * power >= value - 1e-12)


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = _GREY) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {place} text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
