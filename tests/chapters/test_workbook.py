"""A reader's folder: started, checked, reset, and never written to otherwise."""

from datetime import datetime

import pytest

from chapters.contents import chapter_named
from chapters.regions import stub
from chapters.stages import CHAPTERS, solution_path
from chapters.workbook import VARIABLE, State, WorkbookError, open_workbook

CHAPTER = chapter_named("ch03_block_manager")
NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_without_a_word_the_workbook_stands_in_the_repository():
    assert open_workbook({}).folder == CHAPTERS.parent / "workbook"


def test_the_environment_names_another_folder(tmp_path):
    assert open_workbook({VARIABLE: str(tmp_path)}).folder == tmp_path


def test_start_writes_the_stub(workbook):
    path = workbook.start(CHAPTER)
    assert path.name == "block_manager.py"
    assert path.read_text() == stub(solution_path(CHAPTER.name).read_text(), CHAPTER)


def test_start_does_not_touch_a_file_that_is_there(workbook):
    path = workbook.start(CHAPTER)
    path.write_text("mine")
    with pytest.raises(WorkbookError, match="reset 3"):
        workbook.start(CHAPTER)
    assert path.read_text() == "mine"


def test_reset_keeps_the_file_and_forgets_what_checks_said(workbook):
    path = workbook.start(CHAPTER)
    path.write_text("mine")
    workbook.record("3.1", State.DONE, workbook.digest(CHAPTER))
    backup = workbook.reset(CHAPTER, NOW)
    assert backup.read_text() == "mine"
    assert "20260102-030405" in backup.name
    assert path.read_text() == stub(solution_path(CHAPTER.name).read_text(), CHAPTER)
    assert workbook.state(CHAPTER, "3.1") is State.NOT_STARTED


def test_two_resets_keep_two_files(workbook):
    workbook.start(CHAPTER)
    first = workbook.reset(CHAPTER, NOW)
    second = workbook.reset(CHAPTER, NOW.replace(second=6))
    assert first != second
    assert first.exists()
    assert second.exists()


def test_a_task_is_as_its_last_check_said(workbook):
    workbook.start(CHAPTER)
    assert workbook.state(CHAPTER, "3.1") is State.NOT_STARTED
    for state in (State.FAILING, State.DONE):
        workbook.record("3.1", state, workbook.digest(CHAPTER))
        assert workbook.state(CHAPTER, "3.1") is state


def test_a_check_is_out_of_date_once_the_file_changes(workbook):
    path = workbook.start(CHAPTER)
    workbook.record("3.1", State.DONE, workbook.digest(CHAPTER))
    assert workbook.is_checked(CHAPTER, "3.1")
    path.write_text(path.read_text() + "# more\n")
    assert not workbook.is_checked(CHAPTER, "3.1")
    assert workbook.state(CHAPTER, "3.1") is State.DONE


def test_a_chapter_is_done_when_all_its_tasks_passed_in_the_file_as_it_is(workbook):
    workbook.start(CHAPTER)
    digest = workbook.digest(CHAPTER)
    for task in CHAPTER.tasks:
        assert not workbook.is_done(CHAPTER)
        workbook.record(task.number, State.DONE, digest)
    assert workbook.is_done(CHAPTER)
    workbook.record("3.2", State.DONE, "of another file")
    assert not workbook.is_done(CHAPTER)


def test_hints_seen_are_remembered(workbook):
    assert workbook.hints_seen("3.1") == 0
    workbook.saw_hints("3.1", 2)
    assert workbook.hints_seen("3.1") == 2
    assert workbook.hints_seen("3.2") == 0


def test_a_trace_goes_when_there_is_none_any_longer(workbook):
    path = workbook.keep_trace("3.1", ("{}", "{}"))
    assert path.read_text() == "{}\n{}\n"
    workbook.keep_trace("3.1", ())
    assert not path.exists()


@pytest.mark.parametrize("text", ["{", "[1, 2]", ""])
def test_spoiled_progress_is_an_error_that_says_what_to_do(workbook, text):
    workbook.saw_hints("3.1", 1)
    (workbook.folder / "progress.json").write_text(text)
    with pytest.raises(WorkbookError, match=r"progress\.json cannot be read .* delete it"):
        workbook.hints_seen("3.1")
