"""The tests of chapters 1, 2, 3, 4 and 6 on the finished engine: the two cannot disagree."""

import pytest

from chapters.checking import run_jobs
from chapters.contents import all_chapters, find_chapter
from chapters.results import FAILED, PASSED, SKIPPED, Job
from chapters.targets import MINIVLLM, has_adapter
from tests.interpreter import needs_interpreter

WITH_ADAPTER = [chapter for chapter in all_chapters() if has_adapter(chapter.name)]


def test_the_chapters_that_the_engine_can_answer_have_an_adapter():
    names = {chapter.name for chapter in WITH_ADAPTER}
    assert {find_chapter(number).name for number in "12346"} <= names


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(each, id=each.name, marks=needs_interpreter if each.number == 4 else ())
        for each in WITH_ADAPTER
    ],
)
def test_the_finished_engine_passes_a_chapters_tests(chapter, workbook):
    results = run_jobs(chapter, [Job(MINIVLLM)], workbook)
    failed = {
        each.test: each.reason or each.failure.values for each in results if each.outcome == FAILED
    }
    assert not failed
    assert any(each.outcome == PASSED for each in results)
    left_out = [(each.test, each.reason) for each in results if each.outcome == SKIPPED]
    for test, reason in left_out:
        assert "not for minivllm: " in reason, f"{test} is left out without a reason: {reason}"
        print(f"{chapter.name}: {test} is left out: {reason}")
