"""What a chapter must have, whatever it is about: lines of contract, hints, mutants, a size."""

import ast
import re

import pytest

from chapters.catalog import INVARIANTS
from chapters.contents import all_chapters, mutants_of
from chapters.regions import mutated, regions, stub
from chapters.stages import CHAPTERS, solution_path

CHAPTERS_OF_THE_BOOK = all_chapters()
MUTANTS = [(chapter, mutant) for chapter in CHAPTERS_OF_THE_BOOK for mutant in mutants_of(chapter)]

each_chapter = pytest.mark.parametrize("chapter", CHAPTERS_OF_THE_BOOK, ids=lambda c: c.name)
each_mutant = pytest.mark.parametrize(
    ("chapter", "mutant"), MUTANTS, ids=[f"{c.number}-{m.name}" for c, m in MUTANTS]
)


def contract_of(chapter):
    return [line for task in chapter.tasks for line in task.contract]


def source_of(chapter):
    return solution_path(chapter.name).read_text()


def judges_of(chapter):
    """All that judges a chapter, as text."""
    folder = CHAPTERS / chapter.name
    not_tests = {"solution.py", "chapter.py", "mutants.py", "measure.py", "minivllm_adapter.py"}
    return "\n".join(p.read_text() for p in folder.glob("*.py") if p.name not in not_tests)


def test_the_book_has_eight_chapters_in_order():
    assert [chapter.number for chapter in CHAPTERS_OF_THE_BOOK] == list(range(1, 9))


def test_the_book_has_at_least_sixty_wrong_answers():
    assert len(MUTANTS) >= 60


@each_chapter
def test_a_chapter_is_named_like_its_folder_and_numbers_its_tasks(chapter):
    assert chapter.name.startswith(f"ch{chapter.number:02}_")
    numbers = [task.number for task in chapter.tasks]
    assert numbers == [f"{chapter.number}.{i}" for i in range(1, len(numbers) + 1)]
    assert 2 <= len(numbers) <= 4


@each_chapter
def test_contract_lines_are_numbered_through_the_chapter(chapter):
    lines = contract_of(chapter)
    assert lines == [f"C{chapter.number}.{i}" for i in range(1, len(lines) + 1)]


@each_chapter
def test_every_contract_line_is_checked_by_a_test(chapter):
    unchecked = [line for line in contract_of(chapter) if f'"{line}"' not in judges_of(chapter)]
    assert not unchecked, f"no test names {unchecked}"


@each_chapter
def test_tests_name_only_invariants_and_lines_that_exist(chapter):
    named = set(re.findall(r'"([IC]\d+(?:\.\d+)?)"', judges_of(chapter)))
    known = {*INVARIANTS, *contract_of(chapter)}
    assert named <= known, f"nobody knows {sorted(named - known)}"


@each_chapter
def test_every_test_says_which_task_it_belongs_to(chapter):
    homeless = [
        node.name
        for path in (CHAPTERS / chapter.name).glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any(ast.unparse(each).startswith("task(") for each in node.decorator_list)
    ]
    assert not homeless


@each_chapter
def test_the_tests_stand_in_the_file_named_after_the_idea(chapter):
    files = {path.name for path in (CHAPTERS / chapter.name).glob("test_*.py")}
    assert files - {"test_real_model.py"} == {f"test_{chapter.work_file}"}


@each_chapter
def test_a_task_has_three_hints_that_say_something(chapter):
    for task in chapter.tasks:
        assert len(task.hints) == 3
        assert all(len(hint) > 20 for hint in task.hints), f"a hint of {task.number} is too short"


@each_chapter
def test_a_chapter_takes_two_to_three_hours(chapter):
    assert 120 <= chapter.minutes <= 180


@each_chapter
def test_a_solution_can_be_read_in_one_sitting(chapter):
    source = source_of(chapter)
    lines = [line for line in source.splitlines() if line.strip() and line.strip()[0] != "#"]
    assert len(lines) >= 60, f"{len(lines)} lines, the documentation included"
    nodes = [node for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno")]
    code = {line for node in nodes for line in code_of(node)}
    assert len(code) <= 180, f"{len(code)} lines of code"


def code_of(node):
    """The lines of a node, without documentation."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_text or isinstance(node, ast.Constant) or not isinstance(node, ast.stmt):
        return ()
    if hasattr(node, "body"):
        return range(node.lineno, node.body[0].lineno)
    return range(node.lineno, node.end_lineno + 1)


@each_chapter
def test_a_chapter_names_the_stages_that_its_code_imports(chapter):
    imported = re.findall(r'\bstage\("(\w+)"\)', source_of(chapter))
    missing = set(imported) - set(chapter.needs)
    assert not missing, f"needs does not name {sorted(missing)}"


@each_chapter
def test_the_stub_has_no_region_left_and_all_of_the_documentation(chapter):
    source = source_of(chapter)
    text = stub(source, chapter)
    assert "# task" not in text
    assert "# end of task" not in text
    assert documentation(text) == documentation(source)


def documentation(source):
    """Of the module, its functions and classes, and their methods."""
    module = ast.parse(source)
    outer = [node for node in module.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    classes = [node for node in outer if isinstance(node, ast.ClassDef)]
    inner = [n for c in classes for n in c.body if isinstance(n, ast.FunctionDef)]
    return [ast.get_docstring(node) for node in [module, *outer, *inner]]


@each_chapter
def test_each_task_takes_something_out_of_the_solution(chapter):
    taken = {region.task for region in regions(source_of(chapter))}
    assert taken == {task.number for task in chapter.tasks}


@each_chapter
def test_a_chapter_has_enough_wrong_answers(chapter):
    least = 4 if chapter.number == 8 else 6
    assert len(mutants_of(chapter)) >= least


@each_chapter
def test_wrong_answers_have_names_of_their_own(chapter):
    names = [mutant.name for mutant in mutants_of(chapter)]
    assert sorted(names) == sorted(set(names))


@each_mutant
def test_a_wrong_answer_fits_its_solution_and_breaks_something_known(chapter, mutant):
    assert mutated(source_of(chapter), mutant) != source_of(chapter)
    assert mutant.task in {task.number for task in chapter.tasks}
    assert mutant.broken in {*INVARIANTS, *contract_of(chapter)}
    assert mutant.story.endswith(".")
