"""The commands around a check: what a reader types from the first minute to the last."""

import subprocess
import sys

import pytest

from chapters.contents import all_chapters, chapter_named
from chapters.diff import against_earlier_stages, solution_text
from chapters.stages import CHAPTERS
from chapters.watch import watch
from chapters.workbook import State
from tests.chapters.conftest import CHAPTER_3
from tests.interpreter import needs_triton

CHAPTER = chapter_named(CHAPTER_3)


def done(reader, *tasks):
    """As if a check had said so."""
    for task in tasks or [task.number for task in CHAPTER.tasks]:
        reader.workbook.record(task, State.DONE, reader.workbook.digest(CHAPTER))


def test_start_says_what_to_read_to_write_and_to_check(reader):
    said = reader.types("start 3")
    assert said.code == 0
    for part in ("docs/ch03_block_manager.md", str(reader.file()), "check 3.1", CHAPTER.builds):
        assert part in said.out


def test_start_twice_is_an_error(reader):
    reader.types("start 3")
    said = reader.types("start 3")
    assert said.code == 2
    assert "reset 3" in said.err


def test_status_without_work_says_how_to_begin(reader):
    said = reader.types("status")
    assert said.code == 0
    assert said.out.count("not started") == sum(len(each.tasks) for each in all_chapters())
    assert said.out.rstrip().endswith("next: python -m chapters start 1")


def test_status_tells_done_failing_and_what_changed_since(reader):
    reader.types("start 3")
    done(reader, "3.1")
    reader.workbook.record("3.2", State.FAILING, reader.workbook.digest(CHAPTER))
    lines = {line.split()[0]: line for line in reader.types("status").out.splitlines() if line}
    assert "done" in lines["3.1"]
    assert "failing" in lines["3.2"]
    assert "not started" in lines["3.3"]
    reader.file().write_text("changed")
    lines = {line.split()[0]: line for line in reader.types("status").out.splitlines() if line}
    assert "done, changed since" in lines["3.1"]


def test_hints_come_one_at_a_time_and_stay_known(reader):
    hints = chapter_named(CHAPTER_3).tasks[0].hints
    for number in (1, 2, 3, 3):
        said = reader.types("hint 3.1").out
        assert said.count("hint ") >= number
        for hint in hints[:number]:
            assert " ".join(hint.split())[:40] in " ".join(said.split())
        for hint in hints[number:]:
            assert " ".join(hint.split())[:40] not in " ".join(said.split())
    assert "solution 3 --give-up" in said
    assert "3 of 3" in reader.types("status").out


def test_the_solution_is_shown_after_a_pass_only(reader):
    reader.types("start 3")
    said = reader.types("solution 3")
    assert (said.code, said.out) == (2, "")
    assert "--give-up" in said.err
    done(reader)
    assert reader.types("solution 3").out == solution_text(CHAPTER)


def test_giving_up_shows_the_solution_at_any_time(reader):
    assert reader.types("solution 3 --give-up").out == solution_text(CHAPTER)


def test_the_solution_that_is_shown_has_no_marks_and_is_the_code_of_the_reference():
    text = solution_text(CHAPTER)
    assert "# task" not in text
    assert "# end of task" not in text
    assert "self._free.pop()" in text


def test_diff_shows_the_readers_lines_and_the_solutions(reader):
    reader.types("start 3")
    reader.solves()
    assert "word for word" in reader.types("diff 3").out
    reader.edits("self.ref_counts[block] = 1\n", "self.ref_counts[block] = 2\n")
    said = reader.types("diff 3").out
    assert "-        self.ref_counts[block] = 2" in said
    assert "+        self.ref_counts[block] = 1" in said


def test_diff_of_a_chapter_that_is_not_started_is_an_error(reader):
    assert reader.types("diff 3").code == 2


@pytest.mark.parametrize(
    ("name", "changed", "new"),
    [
        ("ch06_prefix_cache", "--- ch03_block_manager BlockManager.allocate", "new block_keys: "),
        ("ch07_suffix_prefill", "--- ch05_model_runner build_batch", "new suffix_attention: "),
        ("ch07_suffix_prefill", "--- ch02_scheduler Scheduler.schedule", "new ScheduledSequence"),
    ],
)
def test_the_diff_of_a_stage_shows_what_it_reworks_and_what_it_adds(name, changed, new):
    lines = against_earlier_stages(chapter_named(name))
    assert changed in lines
    assert any(line.startswith(new) for line in lines)


@pytest.mark.parametrize("chapter", all_chapters(), ids=lambda chapter: chapter.name)
def test_every_stage_has_something_new(reader, chapter):
    said = reader.types(f"diff {chapter.number} --stage")
    assert said.code == 0
    assert "new " in said.out


def test_reset_asks_and_keeps_the_file(reader, monkeypatch):
    reader.types("start 3")
    reader.file().write_text("mine")
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert reader.types("reset 3").code == 2
    assert reader.file().read_text() == "mine"
    monkeypatch.setattr("builtins.input", lambda question: "y")
    said = reader.types("reset 3")
    assert said.code == 0
    (backup,) = (reader.file().parent / "backups").iterdir()
    assert backup.read_text() == "mine"
    assert str(backup) in said.out
    assert "NotImplementedError" in reader.file().read_text()


def test_reset_without_anybody_to_ask_changes_nothing(reader, monkeypatch):
    def nobody(question):
        raise EOFError

    reader.types("start 3")
    reader.file().write_text("mine")
    monkeypatch.setattr("builtins.input", nobody)
    assert reader.types("reset 3").code == 2
    assert reader.file().read_text() == "mine"
    assert reader.types("reset 3 --yes").code == 0


def test_watch_checks_again_at_each_save_until_nothing_fails(tmp_path):
    file = tmp_path / "work.py"
    file.write_text("1")
    seen = []

    def check():
        seen.append(file.read_text())
        return seen[-1] == "333"

    waits = iter(["22", None, "333"])

    def wait(seconds):
        text = next(waits)
        file.unlink() if text is None else file.write_text(text)

    watch([file], check, wait)
    assert seen == ["1", "22", "333"]


def test_watch_shows_only_the_next_failing_thing_and_ends_when_all_is_done(reader, monkeypatch):
    reader.types("start 3")
    monkeypatch.setattr("chapters.commands.time.sleep", lambda seconds: reader.solves())
    said = reader.types("watch 3")
    assert said.code == 0, said.out
    assert said.out.count("write it in") == 1
    assert "chapter 3 is done" in said.out


def test_the_doctor_looks_at_everything_and_gives_advice(reader):
    said = reader.types("doctor")
    for what in ("python", "torch", "triton", "hypothesis", "model", "workbook"):
        assert what in said.out
    assert "python -m chapters start 1" in said.out
    assert said.code == 0


@needs_triton
def test_the_doctor_names_packages_that_keep_chapter_4_from_its_interpreter(reader, monkeypatch):
    problem = "the interpreter of triton 3.6 does not work with numpy 2.5"
    monkeypatch.setattr("chapters.doctor.why_no_interpreter", lambda: problem)
    said = reader.types("doctor")
    assert problem in " ".join(said.out.split())
    assert said.code == 0


def test_the_doctor_finds_a_file_that_cannot_be_read_and_spoiled_progress(reader):
    reader.types("start 3")
    reader.file().write_text("def broken(:\n")
    (reader.workbook.folder / "progress.json").write_text("{")
    said = reader.types("doctor")
    # A long path may put the end of an advice on the next line.
    words = " ".join(said.out.split())
    assert "line 1: invalid syntax" in words
    assert "delete it" in words
    assert said.code == 1


def test_mine_without_work_is_an_error(reader):
    said = reader.types("run --mine")
    assert said.code == 2
    assert "start 1" in said.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("start 9", "there is no chapter '9'; there are 1, 2, 3"),
        ("start three", "there is no chapter 'three'"),
        ("check 3.9", "there is no task '3.9'; there are 3.1"),
        ("hint 3", "'3' is a chapter; its tasks are 3.1"),
        ("solution 0", "there is no chapter '0'"),
        ("teach 3", "invalid choice: 'teach'"),
        ("hint", "the following arguments are required: N.T"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(reader, line, says):
    said = reader.types(line)
    assert said.code == 2
    assert said.err.startswith("chapters: error: ")
    assert said.err.count("\n") == 1
    assert says in said.err


def test_spoiled_progress_is_one_line(reader):
    reader.types("hint 3.1")
    (reader.workbook.folder / "progress.json").write_text("{")
    said = reader.types("status")
    assert said.code == 2
    assert said.err.count("\n") == 1


def test_commands_start_without_torch_hypothesis_or_pytest():
    code = (
        "import sys, chapters.cli\n"
        "heavy = {'torch', 'transformers', 'triton', 'hypothesis', 'pytest', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=CHAPTERS.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_a_stage_about_decisions_needs_no_torch(number):
    name = next(each.name for each in all_chapters() if each.number == number)
    code = (
        f"import sys; from chapters.stages import Stages; Stages().load({name!r})\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=CHAPTERS.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
