"""Every claim about every task of the book, one test each: see chapters/prove.py."""

import pytest

from chapters.contents import all_chapters
from chapters.prove import SOLUTION, claims, prove

# The first test waits for the proof of all chapters that are asked for.
pytestmark = pytest.mark.timeout(1800)

MOST_SECONDS = 10

CLAIMS = [claim for chapter in all_chapters() for claim in claims(chapter)]


@pytest.fixture(scope="module")
def verdicts(request):
    """On the chapters that are asked for here, two at a time."""
    asked = {item.callspec.params["chapter"] for item in request.session.items if is_here(item)}
    chapters = sorted(asked, key=lambda chapter: chapter.number)
    return {
        chapter: {each.claim.name: each for each in found} for chapter, found in prove(chapters)
    }


def is_here(item):
    return item.path.name == "test_exercises_proved.py"


@pytest.mark.parametrize(
    ("chapter", "name"),
    [(claim.chapter, claim.name) for claim in CLAIMS],
    ids=[claim.name.replace(" ", "-") for claim in CLAIMS],
)
def test_what_the_book_claims_of_its_tasks_holds(verdicts, chapter, name):
    verdict = verdicts[chapter][name]
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.holds, verdict.fault
    assert verdict.num_tests > 0


@pytest.mark.parametrize("chapter", all_chapters(), ids=lambda chapter: chapter.name)
def test_a_chapters_check_takes_less_than_ten_seconds(verdicts, chapter):
    found = [each for each in verdicts[chapter].values() if each.claim.column == SOLUTION]
    seconds = sum(verdict.seconds for verdict in found)
    assert seconds < MOST_SECONDS, f"the tests of {chapter.name} compute for {seconds:.1f} s"
