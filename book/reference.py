"""The API reference: a page a folder, made from signatures and docstrings, without importing.

Anchors are dotted names, e.g. `reference/core.md#minivllm.core.scheduler.Scheduler.schedule`, so
a page can link to a function and the build notices when it is renamed.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from book.docstrings import to_markdown
from book.places import REFERENCE, ROOT, write


class Page(NamedTuple):
    """One page: its title, what it says first, and the modules on it in reading order."""

    title: str
    intro: str
    modules: tuple[str, ...]


def _modules(
    folder: str, first: tuple[str, ...] = (), leave: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The modules of a folder, some first, the others by name."""
    names = sorted(path.stem for path in (ROOT / folder).glob("*.py"))
    rest = [name for name in names if name not in (*first, *leave, "__init__", "__main__")]
    return tuple(f"{folder.replace('/', '.')}.{name}" for name in (*first, *rest))


def pages() -> dict[str, Page]:
    """File name -> page."""
    return {
        "index.md": Page(
            "What you call",
            "From the top: `LLM`, the engine, what goes in and out, and every error."
            " The pages beside this one show the two wings below it, and the kernels.\n\n"
            "Everything here is taken from the docstrings when the site is built.",
            _modules(
                "minivllm",
                ("llm", "engine", "config", "sampling_params", "output", "errors", "explain"),
                ("demo",),
            ),
        ),
        "core.md": Page(
            "minivllm.core: decides",
            "Who runs, which blocks they get, what is shared and what is evicted. Standard library"
            " and xxhash only.",
            _modules(
                "minivllm/core",
                ("sequence", "batch", "scheduler", "kv_cache", "prefix_cache", "block_keys"),
            ),
        ),
        "model.md": Page(
            "minivllm.model: computes",
            "From a scheduled batch to tokens: layers, attention through block tables, the sampler,"
            " and the loader of model folders.",
            _modules(
                "minivllm/model", ("runner", "decoder", "layer", "attention", "sampler", "rope")
            ),
        ),
        "kernels.md": Page(
            "kernels",
            "Triton kernels for a GPU, kernels in C for a CPU, and their plain torch references.",
            _modules(
                "kernels",
                (
                    "reference",
                    "store_kv",
                    "paged_attention",
                    "split_attention",
                    "gathered_attention",
                ),
            )
            + _modules("kernels/native", ("layer", "attention", "linear", "ops", "library")),
        ),
    }


def write_all() -> None:
    """Write every page, and drop pages that no longer exist."""
    wanted = pages()
    for old in REFERENCE.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, page in wanted.items():
        parts = [f"# {page.title}", page.intro]
        for module in page.modules:
            parts += _module(module, ROOT / f"{module.replace('.', '/')}.py")
        write(REFERENCE / name, "\n\n".join(parts) + "\n")


def _module(name: str, path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield f"## {name} {{ #{name} }}"
    yield from _docstring(tree, below="##")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield from _class(name, node)
        elif isinstance(node, ast.FunctionDef) and _is_public(node.name):
            yield from _function(name, node, "###")


def _class(module: str, node: ast.ClassDef) -> Iterator[str]:
    name = f"{module}.{node.name}"
    yield f"### {node.name} {{ #{name} }}"
    yield _fence(_class_signature(node))
    yield from _docstring(node, below="###")
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and _is_public(child.name):
            yield from _function(name, child, "####")


def _function(owner: str, node: ast.FunctionDef, heading: str) -> Iterator[str]:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    is_property = any(d == "property" or d.endswith("cached_property") for d in decorators)
    yield f"{heading} {node.name} {{ #{owner}.{node.name} }}"
    yield _fence(_property_signature(node) if is_property else _signature(node))
    yield from _docstring(node, below=heading)


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef, below: str) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text:
        yield to_markdown(inspect.cleandoc(text))


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _class_signature(node: ast.ClassDef) -> str:
    """`class Name(Bases)`, and how it is made if its constructor says so."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return f"{head}\n\n{_signature(child, name=node.name, drop_self=True)}"
    fields = [ast.unparse(child) for child in node.body if isinstance(child, ast.AnnAssign)]
    return head + ("".join(f"\n    {field}" for field in fields if not field.startswith("_")))


def _property_signature(node: ast.FunctionDef) -> str:
    returns = f": {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}{returns}"


def _signature(node: ast.FunctionDef, name: str = "", drop_self: bool = False) -> str:
    """The call, on one line if it fits and a parameter a line if not."""
    arguments = ast.parse(ast.unparse(node)).body[0].args  # type: ignore[attr-defined]
    parameters = _parameters(arguments)
    is_method = bool(parameters) and parameters[0] in ("self", "cls")
    if drop_self or is_method:
        parameters = parameters[1:]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    line = f"{name or node.name}({', '.join(parameters)}){returns}"
    if len(line) <= 88:
        return line
    rows = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name or node.name}(\n{rows}){returns}"


def _parameters(arguments: ast.arguments) -> list[str]:
    """Each parameter as it is written, with the markers `/` and `*`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    shown = [_parameter(a, d) for a, d in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        shown.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        shown.append(f"*{_parameter(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown.append(_parameter(argument, default))
    if arguments.kwarg:
        shown.append(f"**{_parameter(arguments.kwarg, None)}")
    return shown


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    shown = argument.arg
    if argument.annotation:
        shown += f": {ast.unparse(argument.annotation)}"
    if default is not None:
        shown += f"{' = ' if argument.annotation else '='}{ast.unparse(default)}"
    return shown
