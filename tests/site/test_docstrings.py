"""Docstrings become what they look like in a terminal."""

import pytest

from book.docstrings import to_markdown
from book.letters import tokens


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("One line.", "One line."),
        ("Two\nlines.", "Two\nlines."),
        ("Of `a_b` and a_*.", "Of `a_b` and a\\_\\*."),
        ("x < y & z", "x &lt; y &amp; z"),
        ("For example:\n\n    step   1\n\n    step   2", None),
        ("- one\n- two", "- one\n- two"),
        (">>> 1 + 1\n2", "```pycon\n>>> 1 + 1\n2\n```"),
    ],
)
def test_a_docstring_becomes(docstring, markdown):
    indented = "For example:\n\n```text\nstep   1\n\nstep   2\n```"
    assert to_markdown(docstring) == (markdown or indented)


def test_rows_of_name_and_meaning_become_a_table():
    docstring = "size       tokens in\n           a block\nshare, of  what may stay"
    assert to_markdown(docstring) == (
        "| name | meaning |\n|---|---|\n"
        "| `size` | tokens in a block |\n| `share, of` | what may stay |"
    )


def test_the_alphabet_is_26_tokens():
    assert tokens("A BZ") == [0, 1, 25]
