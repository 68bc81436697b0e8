"""The glossary's terms as tooltips: one source, docs/glossary.md, for both.

A term's tooltip is the first sentence of its definition. Only terms that a reader could stumble
over get one: abbreviations and terms of several words, not `block`, which stands in every line.
"""

import re

from book.places import DOCS, SNIPPETS, BookError, write

_ENTRY = re.compile(r"^### (?P<terms>.+)\n\n(?P<definition>(?:.+\n?)+)", re.MULTILINE)


def write_all() -> None:
    """Write build/book/tooltips.md, which is appended to every page."""
    lines = [f"*[{term}]: {text}" for term, text in sorted(tooltips().items())]
    write(SNIPPETS / "tooltips.md", "\n".join(lines) + "\n")


def tooltips() -> dict[str, str]:
    """Term -> first sentence of its definition, as plain text."""
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    found = {}
    for entry in _ENTRY.finditer(text):
        sentence = _plain(_first_sentence(entry["definition"]))
        for term in _plain(entry["terms"]).split(", "):
            if " " in term or term.isupper():
                found[term] = sentence
    if not found:
        raise BookError("docs/glossary.md: no term with a definition was found")
    return found


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.?!])\s", " ".join(text.split()), maxsplit=1)[0]


def _plain(text: str) -> str:
    """Without emphasis, code marks, links and attributes."""
    text = re.sub(r"\{[^}]*\}", "", text)
    return re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text).replace("`", "").replace("*", "").strip()
