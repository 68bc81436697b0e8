"""What a chapter changes in the chapters before it, as pages include it: a diff a function.

build/book/diffs/ch07_suffix_prefill/build_batch.md
"""

from book.places import SNIPPETS, write
from chapters.catalog import Chapter
from chapters.contents import all_chapters
from chapters.diff import against_earlier_stages


def write_all() -> None:
    """Write the diff of every function or method that a stage has anew."""
    for chapter in all_chapters():
        for name, lines in diffs(chapter).items():
            text = "\n".join(["```diff", *lines, "```"]) + "\n"
            write(SNIPPETS / "diffs" / chapter.name / f"{name}.md", text)


def diffs(chapter: Chapter) -> dict[str, list[str]]:
    """The lines of each diff, by the name the definition has in this stage."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in against_earlier_stages(chapter):
        if line.startswith("--- "):
            lines = [line]
        elif line.startswith("new "):
            lines = []  # new definitions have no diff
        else:
            lines.append(line)
        if line.startswith("+++ "):
            found[line.split()[-1]] = lines
    return {name: _trimmed(lines) for name, lines in found.items()}


def _trimmed(lines: list[str]) -> list[str]:
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines
