"""Every block of code on a page is included from a file, or runs here and prints what it shows."""

import ast
import doctest
import importlib.util
import re
import shlex
import textwrap
from typing import NamedTuple

import pytest

from book import figures, traces
from book.places import DOCS, FIGURES, REFERENCE, ROOT
from minivllm.cli import _parser
from tests.interpreter import needs_interpreter

PAGES = sorted(page for page in DOCS.rglob("*.md") if REFERENCE not in page.parents)
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*)(?P<rest>.*)$")
INCLUDE = re.compile(r'^;?--8<-- "[^"]+"$')
SHELL_COMMANDS = {"xcode-select", "wsl", "sudo", "make", "python", "pip", "nvidia-smi"}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str

    def __str__(self):
        return f"docs/{self.page}:{self.line} ({self.language}):\n{self.code}"


def blocks_of(page):
    """The outermost fenced blocks; what a longer fence shows is text."""
    found, open_fence = [], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if open_fence is None and fence:
            open_fence, start, lines = fence, number, []
        elif (
            open_fence and fence and fence["ticks"] == open_fence["ticks"] and not fence["language"]
        ):
            code = textwrap.dedent("\n".join(lines)) + "\n"
            language = "markup" if len(open_fence["ticks"]) > 3 else open_fence["language"]
            found.append(Block(str(page.relative_to(DOCS)), start, language, code))
            open_fence = None
        elif open_fence:
            lines.append(line)
    assert open_fence is None, f"{page}: the block of line {start} is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks_in(*languages):
    return [pytest.param(b, id=f"{b.page}:{b.line}") for b in BLOCKS if b.language in languages]


def test_a_block_has_a_language_that_is_checked_here():
    known = {"python", "c", "text", "pycon", "sh", "markup"}
    strange = [str(block) for block in BLOCKS if block.language not in known]
    assert not strange, "\n".join(strange)


@pytest.mark.parametrize("block", blocks_in("python", "c", "text"))
def test_a_block_holds_includes_and_nothing_else(block):
    lines = [line for line in block.code.splitlines() if line.strip()]
    assert lines, str(block)
    assert all(INCLUDE.match(line) for line in lines), str(block)


def sessions():
    """The pages with sessions; chapter 4's run kernels."""
    for page in sorted({block.page for block in BLOCKS if block.language == "pycon"}):
        marks = needs_interpreter if page.startswith("ch04") else ()
        yield pytest.param(page, id=page, marks=marks)


@pytest.mark.parametrize("page", list(sessions()))
def test_a_session_prints_what_the_page_shows(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    traces.write_all()
    session = "\n".join(b.code for b in BLOCKS if (b.page, b.language) == (page, "pycon"))
    examples = doctest.DocTestParser().get_doctest(session, {}, page, page, 0)
    shown = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    result = runner.run(examples, out=shown.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(shown)


def commands_of(block):
    """(command words, without variables before them) for each line; a backslash continues one."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


@pytest.mark.parametrize("block", blocks_in("sh"))
def test_a_command_exists(block):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command, *arguments in commands_of(block):
        assert command in SHELL_COMMANDS, str(block)
        if command == "make":
            wanted = [word for word in arguments if "=" not in word]
            assert set(wanted) <= targets, str(block)
        elif command == "python":
            check_module(arguments, block)


def check_module(arguments, block):
    """`-m module ...`: the module is there, and minivllm's own parser takes the rest."""
    flag, module, *rest = arguments
    assert flag == "-m", str(block)
    assert importlib.util.find_spec(module), str(block)
    if module == "minivllm":
        assert _parser().parse_args(rest), str(block)


def message_texts():
    """All string constants of engine and kernels; of an f-string what is not a value."""
    texts = [(ROOT / "Makefile").read_text()]
    for path in (*(ROOT / "minivllm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(p.value if isinstance(p, ast.Constant) else "" for p in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


MESSAGES = re.findall(r"^### `(.+)`$", (DOCS / "before-you-start.md").read_text(), re.MULTILINE)


def test_the_troubleshooting_names_messages():
    assert len(MESSAGES) >= 8


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_in_the_troubleshooting_is_one_that_the_engine_gives(message):
    assert any(message in text for text in message_texts())


@pytest.mark.parametrize("name", figures.ALL)
def test_a_committed_figure_is_what_its_command_draws(name):
    assert (FIGURES / f"{name}.svg").read_text() == figures.ALL[name]()


@pytest.mark.parametrize("name", figures.ALL)
def test_a_figure_names_the_machine_and_the_date(name):
    made = (FIGURES / f"{name}.made").read_text()
    assert re.search(r"make figures</code>: .+ cores, .+, \d{4}-\d\d-\d\d\.$", made.strip())


def test_the_home_pages_numbers_are_those_of_the_engine():
    home = (DOCS / "index.md").read_text()
    for is_cached in (False, True):
        count = figures.prompt_tokens_computed(is_cached)
        assert f"{count:,}" in home, f"the engine computes {count:,}"


@pytest.mark.parametrize("drawing", sorted(FIGURES.glob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_says_in_words_what_it_shows(drawing):
    text = drawing.read_text()
    assert 'role="img"' in text
    assert len(re.search(r"<title[^>]*>(.*?)</title>", text, re.DOTALL)[1]) > 20


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_no_figure_is_still_to_be_filled_in(page):
    """The README promised tests of "about TIME minutes" for a while."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"\b(?:TIME|TODO|TBD|FIXME|XXX|PEERS)\b", text)
