"""The pool at the moment of a failure: what each block holds, and who holds the block."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from minivllm.core.kv_cache import KVCache
from minivllm.core.sequence import Sequence


def picture(
    kv: KVCache, sequences: Iterable[Sequence], content: Callable[[int], str], error: str
) -> str:
    """A line a block in use, then the free list and the order of eviction.

    content   what the slots of a block hold, in words
    error     its message; blocks that it names are marked

        pool   b0 [1 2 3 4]  ref 2  cache, r1
               b1 [3 . . .]  ref 1  r1           <-- I4
               free b3 b2   evicted next none
    """
    marked = {int(block) for block in re.findall(r"\bblock (\d+)", error)}
    found = re.match(r"(I\d+|section 6)", error)
    holders: dict[int, list[str]] = {}
    for block in range(kv.num_blocks):
        if kv.cache.at(block) is not None:
            holders[block] = ["cache"]
    for sequence in sequences:
        for block in sequence.block_table:
            holders.setdefault(block, []).append(sequence.name)
    rows = [
        (f"b{block} {content(block)}", f"ref {kv.blocks.ref_counts[block]}", block)
        for block in range(kv.num_blocks)
        if kv.blocks.ref_counts[block] or block in holders or block in marked
    ]
    width = max((len(text) for text, _, _ in rows), default=0)
    lines = []
    for text, count, block in rows:
        mark = f"   <-- {found.group() if found else ''}" if block in marked else ""
        lines.append(f"{text:<{width}}  {count}  {', '.join(holders.get(block, ['nobody']))}{mark}")
    free, idle = kv.blocks.free_order(), kv.cache.lru_order()
    lines.append(f"free {_names(free)}   evicted next {_names(idle)}")
    return "\n".join(
        ("  pool   " if i == 0 else "         ") + line for i, line in enumerate(lines)
    )


def _names(blocks: Iterable[int]) -> str:
    return " ".join(f"b{block}" for block in blocks) or "none"
