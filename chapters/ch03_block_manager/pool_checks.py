"""What must hold of a pool of blocks after every operation, checked and told in numbers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from chapters.testing import Broken


def holders_of(sequences: Iterable[Any]) -> dict[int, list[str]]:
    """Block -> the requests whose tables hold it, each as often as it stands there."""
    holders: dict[int, list[str]] = {}
    for sequence in sequences:
        for block in sequence.block_table:
            holders.setdefault(block, []).append(sequence.request_id)
    return holders


def check_counts(pool: Any, holders: Mapping[int, list[str]]) -> None:
    """I2: each block counts its holders. I1: those without any are on the free list, once."""
    for block in sorted(holders.keys() - set(range(pool.num_blocks))):
        raise Broken("I1", f"{holders[block]} hold block {block}; the pool has {pool.num_blocks}")
    for block, count in enumerate(pool.ref_counts):
        names = holders.get(block, [])
        if count != len(names):
            raise Broken(
                "I2", f"block {block} counts {count}, but it has {len(names)} holders {names}"
            )
    free = pool.free_order()
    expected = [block for block in range(pool.num_blocks) if not holders.get(block)]
    if sorted(free) != expected:
        raise Broken("I1", f"the free list is {free}, but nobody holds {expected}")


def check_tables(sequences: Iterable[Any], block_size: int) -> None:
    """I5: between two steps a table is as long as what is computed, and no longer."""
    for sequence in sequences:
        computed, table = sequence.num_computed_tokens, sequence.block_table
        expected = -(-computed // block_size)
        if len(table) != expected:
            raise Broken(
                "I5",
                f"{sequence.request_id} has {computed} positions computed, block size"
                f" {block_size}: expected {expected} blocks, its table is {table}",
            )


def state_of(pool: Any, sequences: Iterable[Any]) -> dict[str, Any]:
    """A copy of everything that a refused call or a lookup must leave as it is."""
    state: dict[str, Any] = {
        "the ref counts": list(pool.ref_counts),
        "the free list": pool.free_order(),
    }
    for sequence in sequences:
        name = sequence.request_id
        state[f"{name}'s table"] = list(sequence.block_table)
        state[f"{name}'s computed positions"] = sequence.num_computed_tokens
    return state


def check_unchanged(
    before: Mapping[str, Any], after: Mapping[str, Any], what: str, broken: str = "I9"
) -> None:
    """I9 by default: `what` has happened between these two states and should show in neither."""
    for name, value in before.items():
        if after[name] != value:
            raise Broken(broken, f"{what} changed {name}: {value} before, {after[name]} after")


def must_raise(error: type[Exception], call: Callable[[], object], broken: str, what: str) -> None:
    """Call it; Broken if no `error` comes. `what` says what should have been refused."""
    try:
        result = call()
    except error:
        return
    raise Broken(broken, f"{what}: expected {error.__name__}, got the result {result!r}")
