"""`pytest chapters/ch03_block_manager`, as somebody types it who knows pytest."""

import os
import subprocess
import sys

import pytest

from chapters.contents import chapter_named
from chapters.diff import solution_text
from chapters.stages import CHAPTERS
from chapters.workbook import VARIABLE
from tests.chapters.conftest import CHAPTER_3

CHAPTER = chapter_named(CHAPTER_3)


# With one of these set, pytest's summary repeats whole messages; a reader's terminal has neither.
CI_VARIABLES = ("CI", "BUILD_NUMBER")


@pytest.fixture
def types_pytest(workbook):
    at_home = {name: value for name, value in os.environ.items() if name not in CI_VARIABLES}

    def types(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=CHAPTERS.parent,
            env=at_home | {VARIABLE: str(workbook.folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return types


def test_without_any_work_it_says_how_to_begin(types_pytest):
    done = types_pytest("chapters/ch03_block_manager", "chapters/ch01_sequence")
    assert done.returncode == 4
    assert "you have not started chapters 1, 3; first: python -m chapters start 1" in done.stderr


def test_it_checks_the_readers_work(types_pytest, workbook):
    path = workbook.start(CHAPTER)
    path.write_text(solution_text(CHAPTER))
    done = types_pytest("chapters/ch03_block_manager", "-k", "slot")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_failure_says_what_it_means(types_pytest, workbook):
    path = workbook.start(CHAPTER)
    path.write_text(solution_text(CHAPTER).replace("position % self.block_size", "0"))
    done = types_pytest("chapters/ch03_block_manager", "-m", "task_3_3", "-x")
    assert done.returncode == 1
    assert "what this means" in done.stdout
    assert "ch03 block manager . task 3.3" in done.stdout


def test_a_chapter_that_is_not_started_is_left_out_visibly(types_pytest, workbook):
    workbook.start(CHAPTER)
    done = types_pytest("chapters/ch03_block_manager", "chapters/ch01_sequence", "-rs")
    assert "not started: python -m chapters start 1" in done.stdout
    assert " failed" in done.stdout


def test_a_syntax_error_is_shown_once(types_pytest, workbook):
    workbook.start(CHAPTER).write_text("def broken(:\n")
    done = types_pytest("chapters/ch03_block_manager")
    assert done.stdout.count("def broken(:") == 1
    assert "block_manager.py, line 1" in done.stdout


@pytest.mark.parametrize("selection", [("-m", "task_3_3"), ("-k", "task_3_3")])
def test_a_task_is_selected_by_its_marker(types_pytest, selection):
    done = types_pytest(
        "chapters/ch03_block_manager", "--target=solution", "--collect-only", *selection
    )
    assert done.returncode == 0, done.stdout
    assert "test_a_slot_is_found_through_the_table" in done.stdout
    assert "test_a_released_block_is_free_and_handed_out_next" not in done.stdout


def test_nothing_selected_is_an_error(types_pytest):
    done = types_pytest("chapters/ch03_block_manager", "--target=solution", "-k", "no_such_test")
    assert done.returncode == 5


@pytest.mark.parametrize("target", ["stub", "mutant:count_clamped_at_zero"])
def test_a_target_that_is_wrong_fails(types_pytest, target):
    done = types_pytest("chapters/ch03_block_manager", f"--target={target}", "-x", "-m", "task_3_1")
    assert done.returncode == 1
    assert "1 failed" in done.stdout


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("wrok", "there is no target 'wrok'; there are work, solution"),
        ("mutant:nobody", "ch03_block_manager has no mutant 'nobody'"),
    ],
)
def test_a_target_that_is_not_is_an_error(types_pytest, target, says):
    done = types_pytest("chapters/ch03_block_manager", f"--target={target}")
    assert done.returncode == 4
    assert says in done.stderr
