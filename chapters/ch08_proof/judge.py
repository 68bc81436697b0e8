"""Which wrong answers a test lets live."""

from collections.abc import Callable
from pathlib import Path

from chapters.catalog import Mutant
from chapters.contents import find_task, mutants_of
from chapters.regions import mutated
from chapters.stages import Stages, solution_path

# What no test of results can tell from the reference, and why.
EXCUSED = {
    ("3.1", "oldest_free_block_first"): "any order of the free list is right, only not as fast",
    ("3.1", "free_list_is_searched"): "its results are right; it is slow",
    ("3.2", "head_released_first"): "harmless as long as there is no cache",
}

ENOUGH = 3


def survivors(test: Callable[[Stages], None], task: str, scratch: Path) -> list[Mutant]:
    """The wrong answers to one task on which `test` does not raise: the first ENOUGH of them.

    A stub that is not written yet is no catch: NotImplementedError goes through.
    """
    alive: list[Mutant] = []
    chapter, _ = find_task(task)
    source = solution_path(chapter.name).read_text()
    for mutant in mutants_of(chapter):
        if mutant.task != task or (task, mutant.name) in EXCUSED or len(alive) == ENOUGH:
            continue
        file = scratch / f"{mutant.name}.py"
        file.write_text(mutated(source, mutant))
        stages = Stages({chapter.name: file})
        try:
            test(stages)
        except NotImplementedError:
            raise
        except Exception:
            continue
        finally:
            stages.forget()
        alive.append(mutant)
    return alive


def told(alive: list[Mutant]) -> str:
    """The survivors for a person, one a line."""
    first = f"{len(alive)} wrong answers pass your test" if len(alive) > 1 else "one passes"
    more = " (there may be more)" if len(alive) == ENOUGH else ""
    return f"{first}{more}:" + "".join(f"\n  {each.name}: {each.story}" for each in alive)
