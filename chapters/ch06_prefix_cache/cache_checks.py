"""What must hold of a pool with a prefix cache after every operation, told in numbers."""

from collections.abc import Iterable
from typing import Any

from chapters.ch03_block_manager import pool_checks
from chapters.testing import Broken


def check_cache(pool: Any, sequences: Iterable[Any]) -> None:
    """I2 and I1, with the cache as one more holder of a block; and chains without gaps (I7)."""
    tables = pool_checks.holders_of(sequences)
    holders = {block: list(names) for block, names in tables.items()}
    for cached in pool.cached.values():
        if "the cache" in holders.setdefault(cached.block, []):
            raise Broken("I7", f"two keys find block {cached.block}: one of them is stale")
        holders[cached.block].append("the cache")
    pool_checks.check_counts(pool, holders)
    for block in range(pool.num_blocks):
        at = pool.cached_at(block)
        if (at is not None) != ("the cache" in holders.get(block, [])):
            raise Broken("I7", f"cached_at({block}) is {at!r}; its holders: {holders.get(block)}")
    idle = sorted(block for block, names in holders.items() if names == ["the cache"])
    if sorted(pool.idle) != idle:
        raise Broken("I1", f"only the cache holds {idle}, but idle is {list(pool.idle)}")
    for cached in pool.cached.values():
        parent = cached.parent
        if parent is not None and pool.cached_at(parent.block) is not parent:
            raise Broken(
                "I7", f"block {cached.block} is cached, block {parent.block} before it is not"
            )


def state_of(pool: Any, sequences: Iterable[Any]) -> dict[str, Any]:
    """Chapter 3's, and what the cache holds."""
    return pool_checks.state_of(pool, sequences) | {
        "the LRU order": list(pool.idle),
        "the blocks that keys find": sorted(cached.block for cached in pool.cached.values()),
    }
