"""A docstring of this project as Markdown.

Our docstrings are written for a terminal: paragraphs, indented blocks whose columns are aligned,
and lists of `name   what it means`. Each becomes what it looks like.
"""

import re
import textwrap

_ENTRY = re.compile(r"^(?P<name>[^\s].*?)(?: {2,}| +$)(?P<meaning>\S.*)?$")


def to_markdown(docstring: str) -> str:
    """Return Markdown for a cleaned docstring (inspect.cleandoc has been at work)."""
    return "\n\n".join(_block(block) for block in _blocks(docstring))


def _blocks(docstring: str) -> list[list[str]]:
    """Paragraphs; indented ones that only a blank line parts stay together."""
    blocks: list[list[str]] = []
    for paragraph in re.split(r"\n\s*\n", docstring.strip("\n")):
        lines = paragraph.splitlines()
        if blocks and _is_indented(blocks[-1]) and _is_indented(lines):
            blocks[-1] += ["", *lines]
        else:
            blocks += _split_at_indent(lines)
    return blocks


def _split_at_indent(lines: list[str]) -> list[list[str]]:
    """A sentence with an indented block right below it is two blocks."""
    if lines[0].startswith("    "):
        return [lines]
    for i, line in enumerate(lines):
        if line.startswith("    ") and _is_indented(lines[i:]) and not _is_table(lines):
            return [lines[:i], lines[i:]]
    return [lines]


def _is_indented(lines: list[str]) -> bool:
    return all(line.startswith("    ") or not line for line in lines)


def _is_table(lines: list[str]) -> bool:
    """Rows of `name   meaning`, with continuation lines that begin under the meaning."""
    if not _ENTRY.match(lines[0]) or lines[0].startswith((" ", "- ", ">>>")):
        return False
    return all(line.startswith("    ") or _ENTRY.match(line) for line in lines)


def _block(lines: list[str]) -> str:
    if lines[0].startswith(">>>"):
        return _fence("pycon", lines)
    if _is_indented(lines):
        return _fence("text", textwrap.dedent("\n".join(lines)).splitlines())
    if lines[0].startswith("- "):
        return "\n".join(_escape(line) for line in lines)
    if _is_table(lines):
        return _table(lines)
    return "\n".join(_escape(line) for line in lines)


def _fence(language: str, lines: list[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _table(lines: list[str]) -> str:
    rows: list[tuple[str, str]] = []
    for line in lines:
        entry = _ENTRY.match(line)
        if entry and not line.startswith("    "):
            rows.append((entry["name"], entry["meaning"] or ""))
        else:
            name, meaning = rows[-1]
            rows[-1] = (name, f"{meaning} {line.strip()}".strip())
    body = [f"| `{name}` | {_escape(meaning).replace('|', '&#124;')} |" for name, meaning in rows]
    return "\n".join(["| name | meaning |", "|---|---|", *body])


def _escape(text: str) -> str:
    """Plain text for Markdown, except what stands in backticks."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        part = parts[i].replace("\\", "\\\\")
        part = re.sub(r"([*_\[\]$])", r"\\\1", part)
        parts[i] = part.replace("&", "&amp;").replace("<", "&lt;")
    return "`".join(parts)
