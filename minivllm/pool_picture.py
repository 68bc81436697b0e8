"""The pool of KV blocks as text: a cell a block, and in it the block's ref count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.core.kv_cache import KVCache
from minivllm.core.sequence import Sequence

if TYPE_CHECKING:
    from rich.text import Text

CELLS_PER_LINE = 64
LEGEND = ".  free    c  only the cache holds it    1 2 3 ...  so many hold it (+ from 10 on)"


def pool_picture(kv: KVCache) -> Text:
    """One character a block, in the order of block ids; blocks in several tables stand out."""
    from rich.text import Text

    picture = Text()
    for block in range(kv.num_blocks):
        if block % CELLS_PER_LINE == 0:
            picture.append(f"{'' if block == 0 else chr(10)}{block:>5}  ", style="dim")
        picture.append(*_cell(kv, block))
    return picture


def _cell(kv: KVCache, block: int) -> tuple[str, str]:
    """The character of a block, and its style."""
    count = kv.blocks.ref_counts[block]
    is_cached = kv.cache.at(block) is not None
    num_tables = count - is_cached
    if count == 0:
        return ".", "dim"
    if num_tables == 0:
        return "c", "cyan"
    return (str(count) if count < 10 else "+"), "bold green" if num_tables > 1 else "yellow"


def table_picture(kv: KVCache, sequence: Sequence) -> str:
    """A block table in two parts: blocks that others hold too, and the sequence's own.

    >>> _ranges([0, 1, 2, 7, 9, 10])
    '0-2, 7, 9-10'
    """
    shared: list[int] = []
    own: list[int] = []
    for block in sequence.block_table:
        num_others = kv.blocks.ref_counts[block] - (kv.cache.at(block) is not None) - 1
        (shared if num_others else own).append(block)
    return f"shared {_ranges(shared) or 'none'}; own {_ranges(own) or 'none'}"


def _ranges(blocks: list[int]) -> str:
    """Block ids with runs written as first-last."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], block]
        else:
            runs.append([block])
    return ", ".join("-".join(map(str, run)) for run in runs)
