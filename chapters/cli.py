"""The command line of the book: start a chapter, check it, see what is next.

Whatever a person can get wrong ends as one line on stderr and exit code 2; a check that fails
ends with 1. Ctrl-C ends with 130, silently.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from chapters import commands
from chapters.contents import UnknownTaskError
from chapters.workbook import WorkbookError

REFUSED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at its end, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (commands.UsageError, UnknownTaskError, WorkbookError, OSError) as error:
        return _refuse(str(error))
    return code


def _refuse(message: str) -> int:
    print("chapters: error:", " ".join(message.split()), file=sys.stderr)
    return REFUSED


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        sys.exit(_refuse(f"{message} (see {self.prog} --help)"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m chapters",
        description="Build a small vLLM in eight chapters. Begin with: python -m chapters start 1",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, meaning: str) -> Any:
        run: Callable[[Any], int] = getattr(commands, name)
        added = subparsers.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    def chapter_command(name: str, meaning: str) -> Any:
        added = command(name, meaning)
        added.add_argument("chapter", metavar="N", help="the chapter's number")
        return added

    def accept_mine(added: Any) -> None:
        meaning = "take other chapters from your workbook, too, where you have them"
        added.add_argument("--mine", action="store_true", help=meaning)

    one_or_task = {"metavar": "N[.T]", "help": "a chapter, or one of its tasks: 3 or 3.2"}
    command("status", "show how far you are, and what is next")
    chapter_command("start", "begin a chapter: write its file, with gaps for you")
    check = command("check", "run a chapter's tests on your file")
    check.add_argument("what", nargs="?", **one_or_task)
    check.add_argument("--model", action="store_true", help="run the tests with the real model")
    watch = command("watch", "check again whenever you save your file")
    watch.add_argument("what", **one_or_task)
    hint = command("hint", "show the next hint of a task: three, one at a time")
    hint.add_argument("task", metavar="N.T", help="the task: 3.2")
    solution = chapter_command("solution", "show the reference, once your chapter is done")
    solution.add_argument("--give-up", action="store_true", help="show it all the same")
    diff = chapter_command("diff", "compare your file with the reference")
    what_changed = "instead: what this chapter changes in, or adds to, the chapters before it"
    diff.add_argument("--stage", action="store_true", help=what_changed)
    reset = chapter_command("reset", "begin a chapter anew; your file is kept")
    reset.add_argument("--yes", action="store_true", help="do not ask")
    run = command("run", "let the chapters' engine answer with the real model")
    run.add_argument("--prompt", metavar="TEXT", action="append", help="may be repeated")
    run.add_argument("--max-tokens", metavar="N", type=int, default=32, help="at most (32)")
    through = {"type": int, "choices": (5, 7), "default": 7}
    run.add_argument("--through", **through, help="the engine of chapters 1 to 5, or 1 to 7 (7)")
    for added in (check, watch, run):
        accept_mine(added)
    command("doctor", "look at your machine: what is missing, and what to do about it")
    prove = command("prove", "prove the exercises: stubs fail, solutions pass, mutants die")
    prove.add_argument("chapters", nargs="*", metavar="N", help="these chapters (all)")
    return parser
