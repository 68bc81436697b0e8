"""The faults museum holds every wrong answer, and names only tests and faults that there are."""

import json
import re
from dataclasses import replace

import pytest

from book import greedy, museum
from book.places import DOCS, FIGURES, ROOT, BookError
from chapters.contents import all_chapters, chapter_named, mutant_named, mutants_of

PAGE = (DOCS / "faults-museum.md").read_text(encoding="utf-8")
KILLERS = json.loads(museum.RECORD.read_text(encoding="utf-8"))
RECORD_ANEW = "python -m book.museum records it anew"

each_chapter = pytest.mark.parametrize("chapter", all_chapters(), ids=lambda each: each.name)


def is_defined(test, folder):
    """True if a test of this name stands in a file of the folder, or in the file itself."""
    files = folder.rglob("test_*.py") if folder.is_dir() else [folder]
    return any(f"def {test}(" in file.read_text(encoding="utf-8") for file in files)


@each_chapter
def test_a_room_holds_every_wrong_answer_once_under_the_promise_it_breaks(chapter):
    room = museum.room(chapter, mutants_of(chapter), KILLERS[chapter.name])
    for mutant in mutants_of(chapter):
        entry = f"    - `{mutant.name}`: "
        assert room.count(entry) == 1, mutant.name
        promises = re.findall(
            r"^    \*\*(\w[\w.]*)\*\* \S", room[: room.index(entry)], re.MULTILINE
        )
        assert promises[-1] == mutant.broken, mutant.name


@each_chapter
def test_the_page_shows_the_room_of(chapter):
    assert f'--8<-- "build/book/museum-{chapter.name[:4]}.md"' in PAGE
    assert f"{{ #room-{chapter.number} }}" in PAGE


@each_chapter
def test_every_wrong_answer_has_a_recorded_killer_that_is_a_test_of_its_chapter(chapter):
    killers = KILLERS[chapter.name]
    assert set(killers) == {mutant.name for mutant in mutants_of(chapter)}, RECORD_ANEW
    folder = ROOT / "chapters" / chapter.name
    gone = [test for test in killers.values() if not is_defined(test, folder)]
    assert gone == [], RECORD_ANEW


def test_the_record_says_what_happens():
    chapter = chapter_named("ch06_prefix_cache")
    names = ("unchained_key", "published_at_allocation", "stale_key_left")
    found = museum.find_killers(chapter, [mutant_named(chapter, name) for name in names])
    assert found == {name: KILLERS[chapter.name][name] for name in names}, RECORD_ANEW


def test_a_wrong_answer_that_dies_for_another_promise_is_an_error():
    chapter = chapter_named("ch03_block_manager")
    mutant = replace(mutant_named(chapter, "take_does_not_count"), broken="I9")
    with pytest.raises(BookError, match=r"no test kills take_does_not_count"):
        museum.find_killers(chapter, [mutant])


def test_a_promise_that_nobody_made_is_an_error():
    with pytest.raises(BookError, match=r"a mutant breaks 'C3\.99', which is no promise"):
        museum.promise(chapter_named("ch03_block_manager"), "C3.99")


def test_signs_that_markdown_would_take_for_its_own_are_shown():
    assert museum.promise(chapter_named("ch06_prefix_cache"), "C6.7").startswith(
        r"match() looks up (num\_tokens - 1) // block\_size blocks"
    )


def test_a_command_on_the_page_names_a_wrong_answer_of_its_chapter():
    commands = re.findall(r"pytest chapters/(\w+)\s+--target=mutant:(\w+)", PAGE)
    assert len(commands) > 15
    for chapter, name in commands:
        mutant_named(chapter_named(chapter), name)


def test_a_test_that_the_page_names_is_there():
    named = re.findall(r"(tests/\w+/\w+\.py)::(\w+)", PAGE)
    assert len(named) > 8
    gone = [f"{file}::{test}" for file, test in named if not is_defined(test, ROOT / file)]
    assert gone == []


def test_the_front_room_holds_as_many_as_the_page_says():
    numbers = re.findall(r"^### (\d+)\. ", PAGE, re.MULTILINE)
    assert numbers == [str(i) for i in range(1, 15)]
    assert "The front room shows fourteen." in PAGE


def test_the_table_of_greedy_answers_says_what_the_page_says_of_it():
    rows = (FIGURES / "museum-greedy.txt").read_text(encoding="utf-8").splitlines()[2:]
    names = [name for names in greedy.FAULTS.values() for name in names]
    assert [row.split()[1] for row in rows] == names, "python -m book.greedy writes it anew"
    assert len(names) == 13
    assert "Thirteen faults, six greedy answers each" in PAGE
    passed = [row for row in rows if row.endswith("6 of 6        6 of 6")]
    assert len(passed) == 5
    assert re.search(r"museum-greedy\.txt\"\n    ```\n\n    Five\. ", PAGE)
