"""Named pieces of source files, so that a page shows code by its name and never by a line number.

A page includes `build/book/code/FILE/NAME`, for example

    --8<-- "build/book/code/minivllm/core/scheduler.py/Scheduler.schedule"

FILE is a Python file of the repository. NAME is a function, a class, a method (`Class.method`),
a constant, or `__doc__` for the text of the module's docstring. What pages ask for is found by
reading them; a name that is gone is an error that says which page wants it.
"""

import ast
import re
import textwrap
from pathlib import Path

from book.places import CODE, DOCS, ROOT, BookError, write

_INCLUDE = re.compile(r'--8<--\s+"build/book/code/(?P<file>[^"]+\.py)/(?P<name>[\w.]+)"')


def write_all() -> None:
    """Write each piece that a page includes."""
    for page in sorted(DOCS.rglob("*.md")):
        for include in _INCLUDE.finditer(page.read_text(encoding="utf-8")):
            file, name = include["file"], include["name"]
            try:
                text = extract(ROOT / file, name)
            except BookError as error:
                raise BookError(
                    f"{page.relative_to(ROOT)} includes {file}/{name}: {error}"
                ) from None
            write(CODE / file / name, text)


def extract(path: Path, name: str) -> str:
    """Return the source of `name` in the file, decorators and comments above it included.

    A method comes without the indentation of its class. Raises BookError if the file or the name
    is not there.
    """
    if not path.is_file():
        raise BookError("there is no such file")
    source = path.read_text(encoding="utf-8")
    module = ast.parse(source)
    if name == "__doc__":
        text = ast.get_docstring(module)
        if text is None:
            raise BookError("the file has no docstring")
        return text + "\n"
    node: ast.AST = module
    for part in name.split("."):
        node = _child(node, part)
    first, last = _lines(node, source.splitlines())
    return textwrap.dedent("\n".join(source.splitlines()[first:last])) + "\n"


def _child(parent: ast.AST, name: str) -> ast.AST:
    body: list[ast.stmt] = getattr(parent, "body", [])
    for node in body:
        if name in _names(node):
            return node
    raise BookError(f"there is no {name!r}")


def _names(node: ast.AST) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return [ast.unparse(t) for t in node.targets] if isinstance(node, ast.Assign) else []


def _lines(node: ast.AST, lines: list[str]) -> tuple[int, int]:
    """The half-open range of line indices, with decorators and the comment right above."""
    decorators = getattr(node, "decorator_list", [])
    first = min(n.lineno for n in (node, *decorators)) - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return first, node.end_lineno  # type: ignore[attr-defined]
