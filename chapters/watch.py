"""Check again whenever the reader's file is saved, and show the next failing thing only."""

from collections.abc import Callable, Sequence
from pathlib import Path

SECONDS_BETWEEN_LOOKS = 0.3


def watch(
    files: Sequence[Path], check: Callable[[], bool], wait: Callable[[float], object]
) -> None:
    """Call `check` now, and after each change of one of `files`, until it says True."""
    seen = None
    while True:
        now = [_stamp(path) for path in files]
        if now == seen or None in now:
            wait(SECONDS_BETWEEN_LOOKS)
            continue
        seen = now  # before the check: what is saved meanwhile is checked again
        if check():
            return


def _stamp(path: Path) -> tuple[int, int] | None:
    """Differs after each save; None while an editor has the file away."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
