"""What a chapter is made of: tasks with numbered contract lines, hints, and named wrong answers."""

from collections.abc import Mapping
from dataclasses import dataclass

INVARIANTS = {
    "I1": "conservation: every block is exactly one of free, cached and idle, in use",
    "I2": "ref counts: a block's count is the number of tables that hold it, + 1 if the cache does;"
    " it is free exactly at 0",
    "I3": "read-only: no slot of a published block is ever written",
    "I4": "content: position p of a sequence reads KV computed from exactly its tokens 0..p under"
    " its own key fields",
    "I5": "tables: after a step, len(block_table) = ceil(num_computed_tokens / block_size)",
    "I6": "publish after write: a key is findable only once all of its block's KV is written",
    "I7": "exact match: a hit needs the same tokens, the same parent chain and the same key fields,"
    " even if the hash function collides",
    "I8": "work: a scheduled sequence computes at least one token; a lookup matches at most"
    " num_tokens - 1",
    "I9": "refusal is free: a refused allocation changes nothing",
    "I10": "nothing lost: each request is in exactly one of waiting, running, finished",
    "I11": "progress: each step computes something, finishes something, or raises an error",
    "I12": "fairness: a decoding sequence gains a token every step, or is preempted",
}


@dataclass(frozen=True, eq=False)
class Task:
    """One thing to write.

    number     chapter.task, "3.2"
    title      a few words, as they stand in the stub's message
    contract   contract line -> what it promises in one sentence: {"C3.4": "take() ..."}
    hints      three, to be read one at a time: a question, a pointer, almost code
    """

    number: str
    title: str
    contract: Mapping[str, str]
    hints: tuple[str, str, str]


@dataclass(frozen=True, eq=False)
class Chapter:
    """One stage of the book.

    number, name   3 and "ch03_block_manager"; the name is the folder's
    title          "Block manager"
    minutes        what a reader should plan
    builds         what they have afterwards, in one sentence
    needs          names of the stages that its code imports
    tasks          two to four
    observed       classes of the stage whose calls a failing test tells as its operations; the
                   first is the root: making a new one begins a new story
    """

    number: int
    name: str
    title: str
    minutes: int
    builds: str
    needs: tuple[str, ...]
    tasks: tuple[Task, ...]
    observed: tuple[str, ...] = ()

    @property
    def work_file(self) -> str:
        """The name of the reader's file: the idea, without the number."""
        return self.name.split("_", 1)[1] + ".py"

    @property
    def page(self) -> str:
        """Its page in docs/."""
        return f"{self.name}.md"


@dataclass(frozen=True)
class Mutant:
    """A named wrong answer: the solution with a small change.

    name      what it does wrong, as an identifier: "release_clamps_at_zero"
    task      number of the task whose tests must catch it
    broken    the id that the failure must name: an invariant "I2" or a contract line "C3.2"
    story     one sentence: what goes wrong in practice
    changes   (text of solution.py, text to put there); each must occur exactly once
    """

    name: str
    task: str
    broken: str
    story: str
    changes: tuple[tuple[str, str], ...]
