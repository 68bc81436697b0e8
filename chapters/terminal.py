"""Text on the terminal, coloured if it is one."""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text


def console() -> Console:
    """As wide as the terminal; where there is none, as wide as the lines."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def show(thing: object) -> None:
    """Anything that rich can draw."""
    console().print(thing)


def say(line: str, style: str = "") -> None:
    """One line, in rich's style."""
    console().print(Text(line, style=style), soft_wrap=True)


def show_code(text: str) -> None:
    """Python, coloured on a terminal."""
    if sys.stdout.isatty():
        show(Syntax(text, "python", background_color="default"))
    else:
        print(text, end="")


def show_diff(lines: Iterable[str]) -> None:
    """A unified diff."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        say(line, styles.get(line[:1], ""))
