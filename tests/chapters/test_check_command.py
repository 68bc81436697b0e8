"""`python -m chapters check` on a reader's file, in every state that it can be in.

Chapter 3 stands for all. `run` is what a check runs: another process, with pytest in it.
"""

import json
import subprocess
from pathlib import Path

import pytest

from chapters.checking import CheckError, run_jobs
from chapters.contents import chapter_named
from chapters.regions import stub_message
from chapters.results import BEGUN, FAILED, PASSED, Job, Result, result_line
from chapters.workbook import State
from tests.chapters.conftest import CHAPTER_3

CHAPTER = chapter_named(CHAPTER_3)

# What a reader might write for a first try: the count is clamped at 0.
CLAMPED = (
    'raise BlockError(f"I2: block {block} is free already, it was released twice")',
    "return 0",
)


def test_without_any_work_it_says_how_to_begin(reader):
    said = reader.types("check")
    assert said.code == 2
    assert said.err == (
        "chapters: error: you have not started a chapter: python -m chapters start 1\n"
    )


def test_a_chapter_that_is_not_started_says_how_to_start_it(reader):
    said = reader.types("check 3.2")
    assert (said.code, said.out) == (2, "")
    assert "you have not started chapter 3: python -m chapters start 3" in said.err


def test_an_untouched_task_is_not_written_yet(reader):
    reader.types("start 3")
    said = reader.types("check 3.1")
    assert said.code == 1
    assert "not written yet" in said.out
    assert stub_message("3.1") in said.out
    assert reader.workbook.state(CHAPTER, "3.1") is State.NOT_STARTED


def test_the_solution_is_done_and_the_next_chapter_is_named(reader):
    reader.types("start 3")
    reader.solves()
    said = reader.types("check 3")
    assert said.code == 0, said.out
    assert said.out.count(" done ") == len(CHAPTER.tasks)
    assert "chapter 3 is done" in said.out
    assert "python -m chapters start 4" in said.out
    assert reader.workbook.is_done(CHAPTER)


def test_one_task_done_leads_to_the_next_one(reader):
    reader.types("start 3")
    reader.solves()
    said = reader.types("check 3.3")
    assert said.code == 0, said.out
    assert "next: task 3.1" in said.out
    assert reader.workbook.state(CHAPTER, "3.2") is State.NOT_STARTED


def test_a_wrong_answer_is_told_with_its_line_values_operations_and_picture(reader):
    reader.types("start 3")
    reader.solves()
    reader.edits(*CLAMPED)
    said = reader.types("check 3.1")
    assert said.code == 1
    for part in (
        "ch03 block manager . task 3.1",
        "  C3.4 ",
        "expected BlockError, got the result 0",
        "shortest way there",
        "BlockManager(num_blocks=",
        "1 take()   -> 0",
        "release(0)   -> 0",
        "free       0 1 2",
        "next       python -m chapters hint 3.1",
        "traces/3.1.jsonl",
    ):
        assert part in said.out, f"{part!r} is not in\n{said.out}"
    assert reader.workbook.state(CHAPTER, "3.1") is State.FAILING


def test_a_wrong_answer_leaves_a_trace_and_a_right_one_takes_it_away(reader):
    reader.types("start 3")
    reader.solves()
    reader.edits(*CLAMPED)
    reader.types("check 3.1")
    trace = reader.workbook.folder / "traces" / "3.1.jsonl"
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert lines[0]["format"] == "minivllm-trace-1"
    reader.solves()
    reader.types("check 3.1")
    assert not trace.exists()


def test_a_syntax_error_is_shown_with_its_line(reader):
    reader.types("start 3")
    reader.solves()
    reader.edits("        return block\n", "        return block)\n")
    said = reader.types("check 3")
    assert said.code == 1
    assert "your file cannot be read" in said.out
    assert "SyntaxError: unmatched ')'" in said.out
    assert "block_manager.py, line " in said.out
    assert "        return block)\n" in said.out
    assert said.out.splitlines()[-2].endswith("^")


def test_a_missing_import_is_shown_with_its_line(reader):
    reader.types("start 3")
    reader.edits("from typing import Any", "from typing import Amy")
    said = reader.types("check 3.1")
    assert said.code == 1
    assert "ImportError: cannot import name 'Amy' from 'typing'" in said.out
    assert "from typing import Amy" in said.out


def test_a_chapter_that_cannot_be_read_does_not_stop_the_others(reader):
    reader.types("start 1")
    reader.types("start 3")
    reader.solves("ch01_sequence")
    reader.file().write_text("def broken(:\n")
    said = reader.types("check")
    assert said.code == 1
    assert "chapter 1 is done" in said.out
    assert "block_manager.py, line 1" in said.out


def test_an_exception_is_shown_where_it_was_raised(reader):
    reader.types("start 3")
    reader.solves()
    reader.edits("block = self._free.pop()", "block = self._free[99]")
    said = reader.types("check 3.1")
    assert "IndexError: list index out of range" in said.out
    assert "in take" in said.out
    assert "block = self._free[99]" in said.out


def test_an_endless_loop_is_stopped_and_the_other_tasks_still_run(workbook):
    path = workbook.start(CHAPTER)
    text = path.read_text()
    marker = 'raise NotImplementedError(\n            "Task 3.1 '
    head, tail = text.split(marker, 1)
    path.write_text(head + "while True:\n            pass\n        " + marker + tail)
    results = run_jobs(CHAPTER, [Job("work")], workbook, seconds_a_test=0.5)
    first = next(result for result in results if result.task == "3.1")
    assert first.outcome == FAILED
    assert first.failure.endless
    assert "endless loop" in first.failure.values[0]
    assert first.failure.place[0].startswith("block_manager.py, line ")
    assert sum(result.task == "3.1" for result in results) == 1, "its other tests would hang, too"
    assert {result.task for result in results} == {"3.1", "3.2", "3.3"}


def test_a_check_that_hangs_is_told_with_the_test_it_hung_in(workbook, monkeypatch):
    def hang(arguments, **options):
        out = Path(arguments[arguments.index("--results") + 1])
        out.write_text(result_line(Result(0, "test_that_hangs", "3.1", BEGUN)) + "\n")
        raise subprocess.TimeoutExpired(arguments, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    (result,) = run_jobs(CHAPTER, [Job("work", "3.1")], workbook, seconds=20)
    assert (result.test, result.outcome) == ("test_that_hangs", FAILED)
    assert result.reason == "still running when the check was stopped after 20 seconds"


def test_a_process_that_dies_is_told_with_the_test_it_died_in(workbook):
    path = workbook.start(CHAPTER)
    path.write_text("import os\nos._exit(7)\n" + path.read_text())
    (result,) = run_jobs(CHAPTER, [Job("work", "3.1")], workbook)
    assert result.outcome == FAILED
    assert result.test.startswith("test_")
    assert result.reason == "the process ended in this test, with code 7"


def test_nothing_selected_is_an_error(workbook):
    workbook.start(CHAPTER)
    with pytest.raises(CheckError, match="deselected"):
        run_jobs(CHAPTER, [Job("work")], workbook, with_model=True)


def test_a_chapter_without_tests_of_the_real_model_says_so(reader):
    reader.types("start 3")
    said = reader.types("check 3 --model")
    assert said.code == 2
    assert "nothing was checked" in said.err


def test_mine_takes_earlier_chapters_from_the_workbook(workbook):
    workbook.start(chapter_named("ch01_sequence")).write_text("raise RuntimeError('theirs')\n")
    workbook.start(CHAPTER)
    for mine in (False, True):
        results = run_jobs(CHAPTER, [Job("work", "3.3")], workbook, mine=mine)
        is_used = any("RuntimeError: theirs" in str(result.failure) for result in results)
        assert is_used == mine


def test_many_jobs_share_one_process_and_do_not_mix(workbook):
    jobs = [Job("solution", "3.3"), Job("stub", "3.3", stop=True), Job("solution", "3.3")]
    results = run_jobs(CHAPTER, jobs, workbook)
    outcomes = [{each.outcome for each in results if each.job == number} for number in range(3)]
    assert outcomes == [{PASSED}, {FAILED}, {PASSED}]
