"""Two pieces of code side by side: a reader's and the solution, a stage and what it reworks."""

import ast
import difflib
from collections.abc import Iterator

from chapters.catalog import Chapter
from chapters.regions import stub
from chapters.stages import solution_path
from chapters.workbook import Workbook

Definition = ast.FunctionDef | ast.ClassDef


def solution_text(chapter: Chapter) -> str:
    """The reference as one would write it: without the marks of its tasks."""
    tasks = [task.number for task in chapter.tasks]
    return stub(solution_path(chapter.name).read_text(), chapter, solved=tasks)


def against_solution(chapter: Chapter, workbook: Workbook) -> list[str]:
    """A unified diff, line by line: `-` is the reader's, `+` the solution's."""
    path = workbook.file(chapter)
    return _diff(path.read_text(), solution_text(chapter), f"your {path.name}", "the solution")


def against_earlier_stages(chapter: Chapter) -> list[str]:
    """What this stage changes in the stages that it builds on, and what it adds to them.

    A function that an earlier stage has too, or a method that a class overrides, is shown as a
    diff; everything else that is public by its first line of documentation.
    """
    earlier = {name: _Source(_text(name)) for name in chapter.needs}
    mine = _Source(solution_text(chapter))
    lines: list[str] = []
    for name, definition in mine.definitions.items():
        if isinstance(definition, ast.ClassDef):
            lines += _class_lines(chapter, mine, definition, earlier)
        else:
            lines += _function_lines(chapter, mine, name, earlier)
    return lines


class _Source:
    """The top-level functions and classes of a text, and the methods as "Class.method"."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.definitions: dict[str, Definition] = {}
        self.methods: dict[str, dict[str, Definition]] = {}
        for node in ast.parse(text).body:
            if isinstance(node, Definition):
                self.definitions[node.name] = node
            if isinstance(node, ast.ClassDef):
                inside = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                self.methods[node.name] = {each.name: each for each in inside}

    def code(self, definition: Definition) -> str:
        """Its lines, as far to the left as they go."""
        lines = self._text.splitlines()[definition.lineno - 1 : definition.end_lineno]
        return "\n".join(line[definition.col_offset :] for line in lines)


def _text(name: str) -> str:
    return solution_path(name).read_text().replace("# end of task\n", "")


def _function_lines(
    chapter: Chapter, mine: _Source, name: str, earlier: dict[str, _Source]
) -> Iterator[str]:
    for stage, source in earlier.items():
        if name in source.definitions:
            yield from _changed(chapter, mine, name, mine.definitions[name], stage, source, name)
            return
    yield from _new(name, mine.definitions[name])


def _class_lines(
    chapter: Chapter, mine: _Source, definition: ast.ClassDef, earlier: dict[str, _Source]
) -> Iterator[str]:
    base = _base(definition, earlier)
    yield from _new(definition.name, definition)
    if base is None:
        return
    stage, name = base
    for method, code in mine.methods[definition.name].items():
        if method in earlier[stage].methods[name]:
            theirs = f"{name}.{method}"
            full = f"{definition.name}.{method}"
            yield from _changed(chapter, mine, full, code, stage, earlier[stage], theirs)
        else:
            yield from _new(f"{definition.name}.{method}", code)


def _base(definition: ast.ClassDef, earlier: dict[str, _Source]) -> tuple[str, str] | None:
    """The earlier stage and class that it builds on: `ch03.BlockManager`."""
    for base in definition.bases:
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            for stage, source in earlier.items():
                if stage.startswith(base.value.id) and base.attr in source.methods:
                    return stage, base.attr
    return None


def _changed(
    chapter: Chapter,
    mine: _Source,
    name: str,
    code: Definition,
    stage: str,
    source: _Source,
    theirs: str,
) -> Iterator[str]:
    owner, _, method = theirs.partition(".")
    old = source.methods[owner][method] if method else source.definitions[owner]
    yield from _diff(
        source.code(old), mine.code(code), f"{stage} {theirs}", f"{chapter.name} {name}"
    )


def _new(name: str, definition: Definition) -> Iterator[str]:
    if name.rpartition(".")[2].startswith("_"):
        return
    summary = (ast.get_docstring(definition) or "").partition("\n")[0]
    yield f"new {name}: {summary}"


def _diff(old: str, new: str, old_name: str, new_name: str) -> list[str]:
    return list(
        difflib.unified_diff(_unmarked(old), _unmarked(new), old_name, new_name, lineterm="", n=3)
    )


def _unmarked(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.strip().startswith("# task ")]
