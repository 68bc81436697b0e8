"""The build: quick, strict, and nothing missing goes unnoticed."""

import subprocess
import sys

import pytest

from book import code, reference, tooltips, traces
from book.places import ROOT, BookError

pytestmark = pytest.mark.site


def build_page(folder, text):
    """Build a site of one page with the book's own settings; return the process."""
    docs = folder / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(text)
    config = folder / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: {docs}\nsite_dir: {folder}/site\n"
        "nav:\n  - Home: index.md\n"
    )
    # The theme's icons are looked for, and `book.maths` is imported, from the repository.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_whole_site_builds_strictly_in_under_a_minute(site):
    assert (site.folder / "index.html").exists()
    assert site.seconds < 60


def test_a_page_without_a_fault_builds(tmp_path, site):
    done = build_page(tmp_path, '# Home\n\n[here](#home) $n$\n\n--8<-- "docs/figures/engine.svg"\n')
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("fault", "text"),
    {
        "a link to a page that is not there": "[there](gone.md)",
        "a link to an anchor that is not there": "[there](#gone)",
        "an image that is not there": "![a picture](gone.svg)",
        "an included file that is not there": '--8<-- "minivllm/gone.py"',
        "an included section that is not there": '--8<-- "minivllm/config.py:gone"',
        "a formula that cannot be drawn": r"$\begin{aligned}a &= b\\ c&=d\end{aligned}$",
    }.items(),
)
def test_the_build_fails_on(tmp_path, site, fault, text):
    done = build_page(tmp_path, f"# Home\n\n{text}\n")
    assert done.returncode != 0, f"{fault} was built without a complaint"


def test_a_page_that_wants_code_which_is_gone_is_named(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text('--8<-- "build/book/code/minivllm/config.py/Gone.method"\n')
    monkeypatch.setattr(code, "DOCS", tmp_path)
    monkeypatch.setattr(code, "ROOT", tmp_path)
    (tmp_path / "minivllm").mkdir()
    (tmp_path / "minivllm/config.py").write_text("class Here:\n    pass\n")
    with pytest.raises(BookError, match=r"page\.md includes minivllm/config\.py/Gone\.method"):
        code.write_all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LIMIT", "# why 3\nLIMIT = 3\n"),
        ("double", "@cache\ndef double(x):\n    return 2 * x\n"),
        ("Box.open", "def open(self):\n    return 1\n"),
        ("__doc__", "Says it.\n"),
    ],
)
def test_code_is_taken_by_its_name(tmp_path, name, expected):
    source = tmp_path / "a.py"
    source.write_text(
        '"""Says it."""\n\n# why 3\nLIMIT = 3\n\n\n@cache\ndef double(x):\n    return 2 * x\n\n\n'
        "class Box:\n    def open(self):\n        return 1\n"
    )
    assert code.extract(source, name) == expected


def test_every_public_class_and_function_stands_in_the_reference(site):
    """Each module of the engine and the kernels is on exactly one page."""
    pages = list(reference.pages().values())
    listed = [module for page in pages for module in page.modules]
    files = [
        path
        for folder in ("minivllm", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py", "demo.py")
    ]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    assert sorted(listed) == sorted(modules)


def test_a_scenario_that_no_longer_shows_its_event_is_an_error(monkeypatch):
    calm = traces.SCENARIOS["one-request"]._replace(shows=("preempt",))
    monkeypatch.setitem(traces.SCENARIOS, "one-request", calm)
    with pytest.raises(BookError, match="scenario one-request: no preempt occurred"):
        traces.record("one-request")


def test_tooltips_are_first_sentences_without_marks():
    assert tooltips.tooltips()["LRU"] == (
        "Least recently used: of all idle blocks, the one that nobody has used for the longest"
        " time is evicted first."
    )
