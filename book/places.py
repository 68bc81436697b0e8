"""Where the book's parts lie. What is in GENERATED, REFERENCE and SNIPPETS is written anew."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
GENERATED = DOCS / "generated"  # scripts and traces that the site serves
REFERENCE = DOCS / "reference"  # pages made from docstrings
SNIPPETS = ROOT / "build" / "book"  # text that pages include; no pages of their own
CODE = SNIPPETS / "code"  # named pieces of source files


class BookError(Exception):
    """A page asks for something that is not there; the message says which page and what."""


def write(path: Path, text: str) -> None:
    """Write `text`, unless the file says it already: live reload must not see a change then."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
