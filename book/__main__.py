"""`python -m book` writes what the pages need and nobody should write by hand.

    docs/generated/traces/   runs of the real engine, for the block-table player    (traces.py)
    docs/generated/          the schema the player checks a trace by                 (traces.py)
    docs/reference/          the API reference, from docstrings                      (reference.py)
    build/book/code/         named functions and classes that pages include          (code.py)
    build/book/tooltips.md   the glossary's terms as tooltips                        (tooltips.py)
    build/book/diffs/        what a chapter changes in the chapters before it        (diffs.py)
    build/book/museum-*.md   the wrong answers of the chapters                       (museum.py)

`make book` and `make serve` run it first. None of it is committed. How a page uses these things
stands in docs/contributing.md.
"""

import sys

from book import code, diffs, museum, reference, tooltips, traces
from book.places import BookError


def main() -> int:
    """Write everything; on a mistake of a page, say which and return 1."""
    try:
        traces.write_all()
        reference.write_all()
        code.write_all()
        tooltips.write_all()
        diffs.write_all()
        museum.write_all()
    except BookError as error:
        print(f"python -m book: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
