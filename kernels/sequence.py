"""What the kernels' callers hand over for each sequence of a step; any such object will do."""

from typing import Protocol


class StepSequence(Protocol):
    """A sequence that computes the positions [start, end) now."""

    @property
    def token_ids(self) -> list[int]:
        """All tokens known so far."""

    @property
    def start(self) -> int:
        """The first position to compute."""

    @property
    def end(self) -> int:
        """The position behind the last one."""

    @property
    def block_table(self) -> list[int]:
        """Physical block of each logical block."""
