"""The house keeps its floors: a file imports only what stands below it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minivllm"

# From the ground up. A module imports modules of lower floors, or of its own floor if that
# makes no circle (checked separately).
FLOORS = [
    ["errors", "config", "sampling_params"],
    ["core.batch", "core.metrics", "core.block_keys", "core.block_manager"],
    ["core.prefix_cache"],
    ["core.sequence"],
    ["core.trace", "core.in_flight"],
    ["core.kv_cache"],
    ["core.scheduler"],
    ["core.invariants"],
    ["output", "detokenizer", "tokenizer", "interrupts", "fair_lock"],
    ["engine"],
    ["llm"],
    ["stats_report", "pool_picture", "explain"],
    ["demo"],
    ["cli"],
    ["__main__"],
]
"""`model` is the other wing: see MODEL_MAY_IMPORT."""

MODEL_MAY_IMPORT = {"core.batch", "errors", "config", "sampling_params"}
CORE_MAY_IMPORT = {"errors", "config", "sampling_params"}
CORE_MAY_IMPORT_FROM_OUTSIDE = {"xxhash"}


def module_name(path):
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name):
    """Modules a file imports anywhere, functions and type checking included."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full.removeprefix("minivllm.") in FILES and base.startswith("minivllm")
                found.add(full if is_module else base)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def own(modules):
    return {m.removeprefix("minivllm.") for m in modules if m.startswith("minivllm.")}


def floor_of(name):
    for floor, names in enumerate(FLOORS):
        if name in names:
            return floor
    raise AssertionError(f"minivllm/{name} has no floor: give it one in FLOORS")


def is_in(name, wing):
    return name == wing or name.startswith(wing + ".")


@pytest.mark.parametrize("name", [n for n in FILES if is_in(n, "core")])
def test_core_imports_the_standard_library_xxhash_and_what_is_below(name):
    for module in imports_of(name):
        if module.startswith("minivllm"):
            target = module.removeprefix("minivllm.")
            assert is_in(target, "core") or target in CORE_MAY_IMPORT, f"{name} imports {module}"
        else:
            top = module.split(".")[0]
            allowed = sys.stdlib_module_names | CORE_MAY_IMPORT_FROM_OUTSIDE
            assert top in allowed, f"{name} imports {module}"


@pytest.mark.parametrize("name", [n for n in FILES if is_in(n, "model")])
def test_model_knows_of_core_only_the_batch(name):
    for target in own(imports_of(name)):
        assert is_in(target, "model") or target in MODEL_MAY_IMPORT, f"{name} imports {target}"


@pytest.mark.parametrize(
    "name", [n for n in FILES if n not in ("__init__", "core") and not is_in(n, "model")]
)
def test_a_file_imports_only_what_stands_below_it(name):
    for target in own(imports_of(name)):
        if is_in(target, "model"):
            assert floor_of(name) >= floor_of("engine"), f"{name} imports {target}"
        elif not is_in(name, "core") or is_in(target, "core"):
            assert floor_of(target) <= floor_of(name), f"{name} imports {target} from above"


def test_no_import_goes_in_a_circle():
    edges = {name: own(imports_of(name)) & FILES.keys() for name in FILES if name}
    done, path = set(), []

    def visit(name):
        assert name not in path, f"circle: {' -> '.join([*path, name])}"
        if name in done:
            return
        path.append(name)
        for target in edges[name]:
            visit(target)
        path.pop()
        done.add(name)

    for name in edges:
        visit(name)


def test_kernels_import_nothing_of_ours():
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not [n for n in names if n.split(".")[0] == "minivllm"], path


def run_with_blocked(blocked, code):
    """Run code in a fresh Python in which the blocked packages cannot be imported."""
    block = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", block + code],
        cwd=ROOT,
        # In CI nothing may be skipped, and nothing is missing there.
        env={name: value for name, value in os.environ.items() if name != "CI"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_core_and_engine_import_without_torch_and_everything_heavy():
    blocked = ["torch", "triton", "numpy", "transformers", "tokenizers", "safetensors"]
    code = (
        "import minivllm, minivllm.core.scheduler, minivllm.engine\n"
        "from minivllm import LLMEngine, EngineConfig, SamplingParams, RequestOutput\n"
        "from tests.model_free import make_engine, params, run\n"
        "engine = make_engine(); engine.add_request('a', [1, 2], params(2))\n"
        "print(len(run(engine)['a', 0].token_ids))"
    )
    result = run_with_blocked(blocked, code)
    assert (result.stdout.strip(), result.returncode) == ("2", 0), result.stderr


def test_the_cpu_path_imports_without_triton():
    result = run_with_blocked(["triton"], "import minivllm.model.runner, minivllm.llm")
    assert result.returncode == 0, result.stderr


def test_where_there_is_no_triton_every_test_is_found_all_the_same():
    collect = "['tests', '--collect-only', '-q', '--color=no', '-p', 'no:cacheprovider']"
    result = run_with_blocked(
        ["triton"], f"import pytest; raise SystemExit(pytest.main({collect}))"
    )
    assert result.returncode == 0, result.stdout[-2000:]
    assert "the package triton is not installed" in result.stdout


def test_an_unknown_name_is_an_attribute_error():
    import minivllm

    with pytest.raises(AttributeError, match="has no attribute 'LLLM'"):
        _ = minivllm.LLLM


def test_every_public_name_resolves():
    import minivllm

    assert {name: getattr(minivllm, name).__name__ for name in minivllm.__all__} == {
        name: name for name in minivllm.__all__
    }


def count_code_lines(path):
    """Lines that hold code: no blanks, comments or docstrings."""
    source = path.read_text()
    tree = ast.parse(source)
    docs = set()
    for node in ast.walk(tree):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            docs |= set(range(node.lineno, node.end_lineno + 1))
    return sum(
        1
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#") and number not in docs
    )


def test_the_engine_stays_under_3000_lines_of_code():
    total = sum(count_code_lines(path) for path in FILES.values())
    print(f"minivllm has {total} lines of code")
    assert total < 3_000
