"""Memory that remembers what each slot was computed from: KV without a model.

The KV of position p depends on the tokens 0..p and on the key fields. So that is what a slot
holds here, and what a block holds can be compared exactly, in a test without any tensor.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from chapters.testing import Broken


class Prefix(NamedTuple):
    """What one slot is computed from: all tokens up to its position, and the key fields."""

    token_ids: tuple[int, ...]
    key_fields: tuple[Any, ...]


class Memory:
    """The slots of a pool's blocks."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self._slots: dict[int, Prefix] = {}

    def clear(self, block: int) -> None:
        """Handed out: nothing of its earlier content may be read."""
        for slot in self._slots_of(block):
            self._slots.pop(slot, None)

    def write(self, sequence: Any, start: int, end: int) -> None:
        """Compute the positions [start, end). I3: only blocks that nobody else can read."""
        for position in range(start, end):
            block = sequence.block_table[position // self.pool.block_size]
            if self.pool.cached_at(block) is not None or self.pool.ref_counts[block] != 1:
                raise Broken(
                    "I3",
                    f"{sequence.request_id} writes position {position} into block {block}, which"
                    f" is published or has other holders: it counts {self.pool.ref_counts[block]}",
                )
            self._slots[self._slot(sequence, position)] = self._prefix(sequence, position)

    def check(self, sequences: Iterable[Any]) -> None:
        """I4: what each sequence reads. I6: what the cache would give to the next one."""
        for sequence in sequences:
            for position in range(sequence.num_computed_tokens):
                self._check_position(sequence, position)
        for cached in self.pool.cached.values():
            self._check_cached(cached)

    def prefix_in(self, block: int) -> Prefix:
        """What the last slot of a full block was computed from: its whole prefix."""
        return self._slots[self._slots_of(block)[-1]]

    def _check_position(self, sequence: Any, position: int) -> None:
        slot = self._slot(sequence, position)
        expected, found = self._prefix(sequence, position), self._slots.get(slot)
        if found != expected:
            raise Broken(
                "I4",
                f"{sequence.request_id} {_words(expected)} reads position {position} from slot"
                f" {slot}, which {f'was computed from {_words(found)}' if found else 'is empty'}",
            )

    def _check_cached(self, cached: Any) -> None:
        contents = [self._slots.get(slot) for slot in self._slots_of(cached.block)]
        last = contents[-1]
        if last is None or None in contents:
            written = sum(content is not None for content in contents)
            raise Broken(
                "I6",
                f"block {cached.block} is published, but {written} of its"
                f" {self.pool.block_size} slots are written",
            )
        before = last.token_ids[: -self.pool.block_size]
        parent = self.prefix_in(cached.parent.block) if cached.parent else Prefix((), ())
        if parent.token_ids != before:
            raise Broken(
                "I7",
                f"block {cached.block} was computed from {_words(last)}, but the cached block"
                f" before it from {_words(parent)}",
            )

    def _slots_of(self, block: int) -> range:
        size = self.pool.block_size
        return range(block * size, (block + 1) * size)

    def _slot(self, sequence: Any, position: int) -> int:
        index, offset = divmod(position, self.pool.block_size)
        return int(self._slots_of(sequence.block_table[index])[offset])

    def _prefix(self, sequence: Any, position: int) -> Prefix:
        return Prefix(tuple(sequence.token_ids[: position + 1]), sequence.key_fields)


def _words(content: Prefix) -> str:
    fields = f" under {content.key_fields}" if content.key_fields else ""
    return f"[{' '.join(map(str, content.token_ids))}]{fields}"
