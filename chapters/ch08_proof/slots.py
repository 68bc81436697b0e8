"""Given: what stands in the slots of a pool, and what a refusal must leave alone."""

from collections.abc import Callable
from typing import Any


class Slots:
    """What stands in each slot of a pool: the context its KV was computed from, or None."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.contents: list[Any] = [None] * (pool.num_blocks * pool.block_size)

    @staticmethod
    def context(sequence: Any, position: int) -> Any:
        """All that the KV at `position` depends on."""
        return sequence.key_fields, tuple(sequence.token_ids[: position + 1])

    def of_block(self, block: int) -> list[Any]:
        """The contents of one block."""
        size = self.pool.block_size
        return self.contents[block * size : (block + 1) * size]

    def write(self, sequence: Any, start: int, end: int) -> None:
        """Compute the positions [start, end) into the blocks of its table."""
        for position in range(start, end):
            block = sequence.block_table[position // self.pool.block_size]
            assert self.pool.ref_counts[block] == 1, f"I3: wrote to block {block}, which is shared"
            slot = block * self.pool.block_size + position % self.pool.block_size
            self.contents[slot] = self.context(sequence, position)

    def check_read(self, sequence: Any, end: int) -> None:
        """I4: positions [0, end) hold what was computed from exactly these tokens."""
        for position in range(end):
            block = sequence.block_table[position // self.pool.block_size]
            found = self.of_block(block)[position % self.pool.block_size]
            assert found == self.context(sequence, position), (
                f"I4: {sequence.request_id} reads {found} at position {position}"
            )


def state(pool: Any, sequences: list[Any]) -> Any:
    """Everything that a refused allocation or a lookup must leave alone (I9)."""
    tables = [(list(s.block_table), s.num_computed_tokens) for s in sequences]
    idle = list(getattr(pool, "idle", ()))
    return list(pool.ref_counts), pool.free_order(), idle, tables


def refused(error: type[Exception], action: Callable[[], object], look: Callable[[], Any]) -> bool:
    """True if `action` raises `error`. What `look` shows must then be as before (I9)."""
    before = look()
    try:
        action()
    except error:
        assert look() == before, f"I9: a refusal changed {before} to {look()}"
        return True
    return False
