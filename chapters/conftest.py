"""How pytest runs a chapter's tests: on whose code, with which limits, and what a failure shows."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from chapters.catalog import Chapter
from chapters.contents import all_chapters, chapter_named, mutants_of
from chapters.explain import explain
from chapters.failure import Failure
from chapters.jobs import TARGET
from chapters.limits import SECONDS_A_TEST, at_most
from chapters.observe import Recorder
from chapters.report import plain_report
from chapters.stages import CHAPTERS, Stages
from chapters.targets import MINIVLLM, MUTANT, WORK, UnknownTargetError, check_target, has_adapter
from chapters.targets import make_stages as make
from chapters.workbook import open_workbook

settings.register_profile(
    "chapters",
    derandomize=True,  # the same examples for everybody, today and tomorrow
    database=None,
    deadline=None,
    print_blob=False,
    report_multiple_bugs=False,
    # Not explain: it runs a failing test many times more, and tells what few readers want.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    max_examples=60,
    stateful_step_count=30,
    # The code under test is made once for a test, not once for an example.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("chapters")

STAGES = pytest.StashKey[Stages | None]()
UNREADABLE = pytest.StashKey[str]()
RECORDER = pytest.StashKey[Recorder | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of a chapter's tests."""
    group = parser.getgroup("chapters")
    group.addoption(
        "--target",
        default=WORK,
        metavar="WHOSE",
        help="whose code to test: work (yours), solution, stub, minivllm, mutant:NAME",
    )
    group.addoption(
        "--mine", action="store_true", help="take earlier chapters from your workbook, too"
    )
    meaning = f"stop a test that computes for longer ({SECONDS_A_TEST:g})"
    group.addoption("--seconds-a-test", type=float, default=SECONDS_A_TEST, help=meaning)


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    config.addinivalue_line("markers", "task(number, *broken): the task that a test belongs to")
    config.addinivalue_line("markers", "stage_only(reason): does not apply to the finished engine")
    for chapter in all_chapters():
        for task in chapter.tasks:
            meaning = f"chapter {chapter.number}, task {task.number}, {task.title}"
            config.addinivalue_line("markers", f"{_marker(task.number)}: {meaning}")
    config.stash[TARGET] = config.getoption("--target")
    try:
        check_target(config.stash[TARGET])
    except UnknownTargetError as error:
        raise pytest.UsageError(str(error)) from error


# Which tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its task, so that `-m task_3_1` works, and leave out what cannot be."""
    ours = [item for item in items if item.get_closest_marker("task")]
    for item in ours:
        item.add_marker(_marker(task_of(item)))
    target = config.stash[TARGET]
    if target == WORK:
        _leave_out_unstarted(ours)
    elif target == MINIVLLM:
        _leave_out_stage_only(ours)
    elif target.startswith(MUTANT):
        _leave_out_without_mutant(ours, target.removeprefix(MUTANT))


def _leave_out_unstarted(items: list[pytest.Item]) -> None:
    workbook = open_workbook()
    selected = {chapter_of(item) for item in items}
    unstarted = {chapter for chapter in selected if not workbook.has(chapter)}
    advice = {each: f"python -m chapters start {each.number}" for each in unstarted}
    if unstarted and unstarted == selected:
        first, *others = sorted(unstarted, key=lambda chapter: chapter.number)
        names = ", ".join(str(each.number) for each in (first, *others))
        raise pytest.UsageError(
            f"you have not started chapter{'s' if others else ''} {names}; first: {advice[first]}"
            f" (the reference's code: --target=solution)"
        )
    for item in items:
        if (chapter := chapter_of(item)) in unstarted:
            item.add_marker(pytest.mark.skip(f"not started: {advice[chapter]}"))


def _leave_out_without_mutant(items: list[pytest.Item], name: str) -> None:
    selected = {chapter_of(item) for item in items}
    having = {each for each in selected if name in (mutant.name for mutant in mutants_of(each))}
    if selected and not having:
        raise pytest.UsageError(
            "; ".join(f"{each.name} has no mutant {name!r}" for each in selected)
        )
    for item in items:
        if chapter_of(item) not in having:
            item.add_marker(pytest.mark.skip(f"this chapter has no mutant {name!r}"))


def _leave_out_stage_only(items: list[pytest.Item]) -> None:
    for item in items:
        chapter, marker = chapter_of(item), item.get_closest_marker("stage_only")
        if not has_adapter(chapter.name):
            item.add_marker(pytest.mark.skip(f"{chapter.name} has no adapter of minivllm"))
        elif marker:
            item.add_marker(pytest.mark.skip(f"not for minivllm: {marker.args[0]}"))


def _marker(task: str) -> str:
    return "task_" + task.replace(".", "_")


def task_of(item: pytest.Item) -> str:
    """The number of the task that a test belongs to."""
    marker = item.get_closest_marker("task")
    assert marker is not None, f"{item.nodeid} says of no task that it is its test"
    number: str = marker.args[0]
    return number


def chapter_of(item: pytest.Item) -> Chapter:
    """The chapter that a test stands in."""
    return chapter_named(item.path.relative_to(CHAPTERS).parts[0])


# On whose code


@pytest.fixture
def stages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stages]:
    """The chapters' code, this one's from whoever is being tested."""
    request.node.stash[STAGES] = request.node.stash[RECORDER] = None
    made = make(
        request.config.stash[TARGET],
        chapter_of(request.node),
        open_workbook(),
        tmp_path_factory.getbasetemp(),
        request.config.getoption("--mine"),
    )
    request.node.stash[STAGES] = made
    yield made
    made.forget()


@pytest.fixture
def stage(request: pytest.FixtureRequest, stages: Stages) -> Any:
    """The code under test, freshly loaded; the calls of its observed classes are recorded."""
    chapter = chapter_of(request.node)
    module = stages.load(chapter.name)
    if request.config.stash[TARGET] != MINIVLLM:
        recorder = request.node.stash[RECORDER] = Recorder()
        recorder.observe(module, chapter.observed)
    return module


# With which limits


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Loading the code under test runs it, too."""
    with at_most(item.config.getoption("--seconds-a-test")):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """No endless loops."""
    with at_most(item.config.getoption("--seconds-a-test")):
        return (yield)


# What a failure shows


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say which invariant or contract line is broken, how it came to that, and draw the pool."""
    report = yield
    if report.failed and call.excinfo and item.get_closest_marker("task"):
        failure = _failure(item, call.excinfo.value)
        report.user_properties.append(("failure", failure))
        text = plain_report(chapter_of(item), failure)
        if failure.unreadable:
            # Once is enough: every test says so.
            is_first = item.config.stash.setdefault(UNREADABLE, item.nodeid) == item.nodeid
            report.longrepr = text if is_first else text.splitlines()[0]
        elif failure.unwritten or failure.endless:
            report.longrepr = text  # the traceback would say nothing more
        else:
            report.sections.append(("what this means", text))
    return report


def _failure(item: pytest.Item, error: BaseException) -> Failure:
    marker = item.get_closest_marker("task")
    assert marker is not None
    stages = item.stash.get(STAGES, None)
    return explain(
        error,
        test_name=item.name,
        task=marker.args[0],
        broken=marker.args[1] if len(marker.args) > 1 else "",
        files=stages.given_files if stages else (),
        test_file=item.path,
        recorder=item.stash.get(RECORDER, None),
    )
