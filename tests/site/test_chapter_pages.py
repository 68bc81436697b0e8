"""A chapter's page and its chapter.py say the same."""

import pytest

from book.places import ROOT
from chapters.contents import all_chapters

DOCS = ROOT / "docs"


@pytest.mark.parametrize("chapter", all_chapters(), ids=lambda chapter: chapter.name)
def test_a_page_shows_its_contract_and_hints_word_for_word(chapter):
    text = (DOCS / chapter.page).read_text(encoding="utf-8").replace("`", "")
    page = " ".join(text.split())
    wanted = [words for task in chapter.tasks for words in (*task.contract.values(), *task.hints)]
    missing = [words for words in wanted if " ".join(words.replace("`", "").split()) not in page]
    assert not missing, "\n".join(missing)
