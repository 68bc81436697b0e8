r"""A Markdown extension: `$...$` and `$$...$$` become MathML while the site is built.

Browsers draw MathML themselves, so a page needs no script, no font and no request for it, and
reads the same from a file. Inline: no blank inside the dollars, `$n$` and not `$ n $`. A display
formula stands in a paragraph of its own between `$$`. Several aligned lines: one formula each.
"""

import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

_DISPLAY = r"(?<!\\)\$\$\s*(?P<formula>[^$]+?)\s*\$\$"
_INLINE = r"(?<![\\$\w])\$(?P<formula>[^\s$](?:[^$\n]*[^\s$])?)\$(?![\w$])"


def to_mathml(formula: str, display: str) -> str:
    r"""Return a <math> element. Raises ValueError for what would be drawn wrong.

    `display` is "block" or "inline".
    """
    mathml: str = convert(formula, display=display)
    try:
        ElementTree.fromstring(mathml)  # what the converter does not know, it may write as it is
    except ElementTree.ParseError as error:
        raise ValueError(f"this formula cannot be drawn: {formula!r}: {error}") from error
    if unknown := re.search(r"<m[ion]>(\\\w+)</m[ion]>", mathml):
        raise ValueError(f"this formula uses {unknown[1]}, which is not known: {formula!r}")
    return mathml


class _Formula(InlineProcessor):  # type: ignore[misc] # markdown has no types
    def __init__(self, pattern: str, md: Markdown, display: str) -> None:
        super().__init__(pattern, md)
        self._display = display

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        """Stash the formula as finished HTML, safe from all that follows."""
        mathml = to_mathml(m["formula"], self._display)
        if self._display == "block":
            mathml = f'<span class="formula">{mathml}</span>'
        return self.md.htmlStash.store(mathml), m.start(0), m.end(0)


class MathsExtension(Extension):  # type: ignore[misc] # markdown has no types
    """Registers both patterns before emphasis, so that `_` and `*` in a formula stay."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Behind code (190), before escapes (180) and all else."""
        md.inlinePatterns.register(_Formula(_DISPLAY, md, "block"), "display-maths", 189)
        md.inlinePatterns.register(_Formula(_INLINE, md, "inline"), "inline-maths", 188)


def makeExtension(**settings: Any) -> MathsExtension:
    """Called by Markdown by this name."""
    return MathsExtension(**settings)
