"""Stubs and mutants are made from the solution's text."""

import pytest

from chapters.catalog import Chapter, Mutant, Task
from chapters.contents import chapter_named
from chapters.regions import Region, RegionError, mutated, regions, stub, stub_message

SOURCE = """\
def double(x):
    # task 1.1
    y = 2 * x
    return y
    # end of task
"""


def chapter_with(*tasks):
    made = tuple(Task(number, "a title", {}, ("", "", "")) for number in tasks)
    return Chapter(1, "ch01_sequence", "Title", 120, "builds", (), made)


def test_a_region_is_the_lines_between_its_marks():
    assert regions(SOURCE) == [Region("1.1", 1, 5, "    ")]


def test_a_stub_says_which_task_is_missing_and_where_to_read():
    namespace = {}
    exec(stub(SOURCE, chapter_with("1.1")), namespace)
    with pytest.raises(NotImplementedError) as raised:
        namespace["double"](3)
    assert str(raised.value) == stub_message("1.1")
    assert stub_message("1.1").startswith("Task 1.1 ")
    assert stub_message("1.1").endswith(": see docs/ch01_sequence.md")


def test_a_task_that_is_solved_stays_in_the_stub():
    namespace = {}
    exec(stub(SOURCE, chapter_with("1.1"), solved=["1.1"]), namespace)
    assert namespace["double"](3) == 6


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("# task 1.1\n# task 1.2\n# end of task\n", "line 2: task 1.1 is still open"),
        ("# end of task\n", "line 1: no task is open"),
        ("# task 1.1\n", "line 1: task 1.1 has no end"),
        ("if 1:\n    # task 1.1\n    pass\n# end of task\n", "line 4: indented otherwise"),
    ],
)
def test_marks_that_do_not_fit_are_an_error_with_its_line(source, says):
    with pytest.raises(RegionError, match=says):
        regions(source)


def test_a_task_without_a_region_is_an_error():
    with pytest.raises(RegionError, match=r"1\.2"):
        stub(SOURCE, chapter_with("1.1", "1.2"))


def mutant(*changes):
    return Mutant("a_fault", "1.1", "I1", "It goes wrong.", changes)


def test_a_mutant_is_the_solution_with_its_changes():
    text = mutated(SOURCE, mutant(("2 * x", "3 * x"), ("return y", "return -y")))
    assert text == SOURCE.replace("2 * x", "3 * x").replace("return y", "return -y")


@pytest.mark.parametrize(("old", "count"), [("4 * x", 0), ("y", 2)])
def test_a_change_that_does_not_fit_exactly_once_is_an_error(old, count):
    with pytest.raises(RegionError, match=f"a_fault: '.*' stands {count} times"):
        mutated(SOURCE, mutant((old, "z")))


def test_a_mutant_that_is_no_python_is_an_error():
    with pytest.raises(SyntaxError):
        mutated(SOURCE, mutant(("2 * x", "2 *")))


def test_every_stub_of_the_book_names_its_page():
    chapter = chapter_named("ch03_block_manager")
    assert stub_message("3.1").endswith(f"see docs/{chapter.page}")
