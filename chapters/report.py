"""How a failing check looks, on a terminal and in pytest's output.

Its head is the chapter, the task and the test's sentence; then the broken id and its text, the
values, the shortest way there, the pool at that moment, and what to do next.
"""

from collections.abc import Iterable, Iterator
from io import StringIO

from rich.console import Console
from rich.text import Text

from chapters.catalog import Chapter
from chapters.contents import find_task
from chapters.failure import Failure


def failure_lines(chapter: Chapter, failure: Failure, trace: str = "") -> Iterator[Text]:
    """The report, line by line. `trace` is the file that the player opens, if it was written."""
    _, task = find_task(failure.task)
    head = f"{chapter.name[:4]} {chapter.title.lower()} ."
    if failure.unreadable:
        yield Text(f"{head} your file cannot be read", style="bold red")
        yield from _indented(failure.values, "", 5)
        yield Text("  next       mend this line, then check again", style="cyan")
        return
    yield Text.assemble((f"{head} task {task.number} {task.title}", "bold"), f" . {failure.test}")
    if failure.unwritten:
        yield from _indented(failure.values, "yellow", 5)
    else:
        yield Text(f"  {failure.broken} {failure.text}", style="bold red")
        yield from _indented(failure.values, "", 5)
        yield from _block("in your code", failure.place)
        yield from _block("smallest example", failure.example)
        yield from _block("shortest way there", failure.operations)
        yield from _block("the state then", failure.picture)
        yield Text(f"  test       {failure.test_place}", style="dim")
    follow_up = f"  next       python -m chapters hint {task.number}"
    if trace:
        follow_up += f"      trace: {trace} (open it in the player)"
    yield Text(follow_up, style="cyan")


def _block(title: str, lines: Iterable[str]) -> Iterator[Text]:
    found = list(lines)
    if found:
        yield Text(f"  {title}", style="dim")
        yield from _indented(found, "", 5)


def _indented(lines: Iterable[str], style: str, by: int) -> Iterator[Text]:
    for line in lines:
        text = Text(" " * by + line, style=style)
        text.highlight_regex(r"<-- .*", "bold red")
        yield text


def plain_report(chapter: Chapter, failure: Failure) -> str:
    """The report without colour."""
    out = StringIO()
    console = Console(file=out, width=1000, color_system=None)
    for line in failure_lines(chapter, failure):
        console.print(line, soft_wrap=True)
    return out.getvalue().rstrip()
