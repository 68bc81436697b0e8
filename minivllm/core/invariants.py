"""The invariants, checked: what `debug_checks` does in every step, and what tests call.

Each check raises InvariantError with the invariant's id and the numbers that break it. I4 and
I7 speak of contents, so tests with a runner check them; I9 to I12 speak of two moments, so
tests over steps check them.
"""

from collections import Counter

from minivllm.core.batch import ScheduledBatch
from minivllm.core.block_keys import TOKEN_BYTES, name_of
from minivllm.core.block_manager import blocks_for
from minivllm.core.kv_cache import KVCache
from minivllm.core.scheduler import Scheduler
from minivllm.core.sequence import Sequence, SequenceState
from minivllm.errors import MiniVLLMError, ReadOnlyBlockError


class InvariantError(MiniVLLMError, AssertionError):
    """An invariant of the design does not hold: a fault of the engine, not of its user."""


def check_between_steps(scheduler: Scheduler) -> None:
    """Check I1, I2, I5, I10 and the order of the queues. O(pool + tables)."""
    check_pool(scheduler.kv, scheduler.running)
    for sequence in scheduler.running:
        check_table(scheduler.kv, sequence)
    check_queues(scheduler)


def check_pool(kv: KVCache, holders: list[Sequence]) -> None:
    """I1: free, cached-idle and in use make up the pool. I2: every count is right.

    I7: no block is cached without its parents, or a chain could be entered in its middle.
    """
    counts = Counter(block for sequence in holders for block in sequence.block_table)
    blocks, width = range(kv.num_blocks), kv.block_size * TOKEN_BYTES
    cached = {block: content for block in blocks if (content := kv.cache.at(block)) is not None}
    names = {name_of(kv.cache.hash_at(block)) for block in cached}
    for block, count in enumerate(kv.blocks.ref_counts):
        held = counts[block] + (block in cached)
        _require(count == held, "I2", "block {} counts {}, is held {} times", block, count, held)
    for block, content in cached.items():
        has_parent = content[:-width] in names or content.startswith(b"(")
        _require(has_parent, "I7", "block {} is cached, the block before it is not", block)
    idle, listed = sorted(cached.keys() - counts.keys()), sorted(kv.cache.lru_order())
    _require(listed == idle, "I1", "listed as idle: {}, idle: {}", listed, idle)
    free, listed = sorted({*blocks} - cached.keys() - counts.keys()), sorted(kv.blocks.free_order())
    _require(listed == free, "I1", "listed as free: {}, free: {}", listed, free)


def check_table(kv: KVCache, sequence: Sequence) -> None:
    """I5, and that its head is what the cache holds: each cached block behind its parent."""
    name, table = sequence.name, sequence.block_table
    expected = blocks_for(sequence.num_computed_tokens, kv.block_size)
    _require(len(table) == expected, "I5", "{} has {} blocks, needs {}", name, len(table), expected)
    _require(len(set(table)) == len(table), "I2", "{} holds a block twice: {}", name, table)
    published = table[: sequence.num_published_blocks]
    for block, content in zip(published, sequence.keys.contents, strict=False):
        is_same = kv.cache.at(block) == content
        _require(is_same, "I7", "{}: block {} is not what was published", name, block)


def check_queues(scheduler: Scheduler) -> None:
    """I10: each sequence is in the one queue its state names; queues are in order of arrival."""
    for state in SequenceState:
        for sequence in getattr(scheduler, state.value):
            is_right = sequence.state is state
            _require(is_right, "I10", "{} is in the queue {}", sequence.name, state.value)
    for queue in (scheduler.waiting, scheduler.running):
        arrivals = [sequence.arrival for sequence in queue]
        _require(arrivals == sorted(set(arrivals)), "I10", "arrivals out of order: {}", arrivals)


def check_batch(kv: KVCache, batch: ScheduledBatch) -> None:
    """I3: no position of the step lies in a published block. I8: each computes something."""
    for sequence in batch.sequences:
        name = sequence.request_id
        _require(sequence.start < sequence.end, "I8", "{} computes nothing", name)
        first, last = sequence.start // kv.block_size, (sequence.end - 1) // kv.block_size
        for block in sequence.block_table[first : last + 1]:
            if kv.cache.at(block) is not None:
                raise ReadOnlyBlockError(
                    f"{name} would write [{sequence.start}, {sequence.end}) into block {block},"
                    " which is published (I3)"
                )


def _require(holds: bool, invariant: str, message: str, *values: object) -> None:
    # Thousands of checks a step hold: words are made only for one that does not.
    if not holds:
        raise InvariantError(f"{invariant}: {message.format(*values)}")
