"""From an exception in a test to what a reader sees."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.contents import chapter_named
from chapters.explain import explain, sentence, text_of
from chapters.report import plain_report
from chapters.results import FAILED, Result, read_results, result_line
from chapters.stages import StageImportError, Stages
from chapters.testing import Broken

CHAPTER = chapter_named("ch03_block_manager")


def failure_of(function, files=(), recorder=None):
    """What is made of the exception that `function` raises, in a test of task 3.1 and line I2."""
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        function()
    return explain(
        raised.value,
        test_name="test_a_block_is_free",
        task="3.1",
        broken="I2",
        files=files,
        test_file=Path(__file__),
        recorder=recorder,
    )


def raising(error):
    def function():
        raise error

    return function


def test_a_tests_name_is_a_sentence():
    assert sentence("test_a_block_is_free") == "a block is free"
    assert sentence("test_a_block_is_free[4-True]") == "a block is free (4-True)"


def test_an_assertion_with_words_says_only_these():
    def function():
        assert 1 == 2, "expected 2, got 1"

    failure = failure_of(function)
    assert (failure.broken, failure.text) == ("I2", text_of("I2"))
    assert failure.values == ("expected 2, got 1",)


def test_an_assertion_without_words_says_what_pytest_found():
    def function():
        assert sum([1]) == 2

    assert failure_of(function).values[0] == "assert 1 == 2"


def test_broken_names_its_own_line():
    failure = failure_of(raising(Broken("C3.4", "block 1 counts 0")))
    assert (failure.broken, failure.values) == ("C3.4", ("block 1 counts 0",))
    assert failure.text == text_of("C3.4") != ""


def test_a_raises_that_did_not_raise_speaks_for_itself():
    def function():
        with pytest.raises(ValueError, match="never"):
            pass

    assert failure_of(function).values[0].startswith("DID NOT RAISE")


def test_a_stub_is_unwritten_even_inside_another_error():
    def function():
        try:
            raise NotImplementedError("Task 3.1 take: see docs")
        except NotImplementedError as error:
            raise RuntimeError("in a kernel") from error

    assert failure_of(function).unwritten == "Task 3.1 take: see docs"


def test_an_error_of_ones_own_is_not_a_stub():
    failure = failure_of(raising(NotImplementedError("later")))
    assert failure.unwritten is None
    assert failure.values == ("NotImplementedError: later",)


def test_the_place_is_the_last_line_of_the_readers_file(tmp_path):
    file = tmp_path / "block_manager.py"
    file.write_text("def inner():\n    return [][1]\n\n\ndef outer():\n    return inner()\n")
    module = Stages({CHAPTER.name: file}).load(CHAPTER.name)
    failure = failure_of(module.outer, files=[file])
    assert failure.place == ("block_manager.py, line 2, in inner", "return [][1]")


def test_the_tests_own_line_is_told():
    failure = failure_of(raising(AssertionError("x")))
    assert failure.test_place.startswith("tests/chapters/test_failure_report.py, line ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = (\n", ["SyntaxError: '(' was never closed", "line 1", "x = ("]),
        ("import nothing_of_this_name\n", ["ModuleNotFoundError: No module", "line 1"]),
        ("a = 1\nb = a.c\n", ["AttributeError: 'int' object has no", "line 2", "b = a.c"]),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_with_its_line(tmp_path, text, says):
    file = tmp_path / "block_manager.py"
    file.write_text(text)
    stages = Stages({CHAPTER.name: file})
    failure = failure_of(lambda: stages.load(CHAPTER.name), files=[file])
    assert failure.unreadable
    told = "\n".join(failure.values)
    for part in says:
        assert part in told


def test_of_a_broken_stage_inside_another_the_broken_one_is_told(tmp_path):
    file = tmp_path / "block_manager.py"
    file.write_text("1 / 0\n")
    stages = Stages({CHAPTER.name: file})
    with pytest.raises(StageImportError):
        stages.load("ch06_prefix_cache")
    failure = failure_of(lambda: stages.load("ch06_prefix_cache"), files=[file])
    assert failure.values[:2] == ("ZeroDivisionError: division by zero", "block_manager.py, line 1")


def test_a_state_that_cannot_be_told_does_not_hide_the_failure():
    class Recorder:
        @property
        def story(self):
            return self

        def stop(self):
            pass

        @property
        def operations(self):
            raise KeyError("anything")

    failure = failure_of(raising(AssertionError("expected 1")), recorder=Recorder())
    assert failure.values == ("expected 1",)
    assert failure.picture == ("cannot be shown: KeyError: 'anything'",)


def test_the_report_has_its_parts_in_order():
    failure = failure_of(raising(Broken("C3.4", "block 1 counts 0")))
    lines = plain_report(CHAPTER, failure).splitlines()
    assert lines[0].startswith("ch03 block manager . task 3.1 ")
    assert lines[0].endswith(" . a block is free")
    assert lines[1].startswith("  C3.4 ")
    assert lines[2] == "     block 1 counts 0"
    assert lines[-1] == "  next       python -m chapters hint 3.1"


def test_hypothesis_tells_its_smallest_example_without_the_fixtures():
    @settings(database=None, derandomize=True)
    @given(number=st.integers(0, 99))
    def test_x(stage, number):
        assert number < 7

    failure = failure_of(lambda: test_x(stage=object()))
    assert failure.example == ("number=7,",)


def test_a_failure_crosses_to_another_process_unchanged(tmp_path):
    failure = failure_of(raising(Broken("C3.4", "block 1 counts 0")))
    result = Result(0, "test_x", "3.1", FAILED, 0.1, "", failure)
    file = tmp_path / "results.jsonl"
    file.write_text(result_line(result) + "\n")
    assert read_results(file) == [result]
