"""The pool of KV blocks as text: a cell a block, and in it the block's ref count."""

from collections.abc import Iterable

from rich.text import Text

from minivllm.core.kv_cache import KVCache
from minivllm.core.sequence import Sequence

CELLS_PER_LINE = 64
LEGEND = ".  free   c  only cached   1 2 3 ...  ref count, the cache included (+ from 10)"


def pool_picture(kv: KVCache, sequences: Iterable[Sequence] = ()) -> Text:
    """One character a block, in the order of block ids, and a line for each sequence's table.

    A table is told in two parts: blocks that other tables hold too, and the sequence's own.
    """
    picture = Text()
    for block in range(kv.num_blocks):
        if block % CELLS_PER_LINE == 0:
            picture.append(("\n" if block else "") + f"{block:>5}  ", style="dim")
        picture.append(*_cell(kv, block))
    for sequence in sequences:
        shared = _ranges([b for b in sequence.block_table if _num_tables(kv, b) > 1])
        own = _ranges([b for b in sequence.block_table if _num_tables(kv, b) == 1])
        picture.append(f"\n{sequence.name:>7}: shared {shared}; own {own}")
    return picture


def _num_tables(kv: KVCache, block: int) -> int:
    """How many block tables hold the block: all that refer to it but the cache."""
    return kv.blocks.ref_counts[block] - (kv.cache.at(block) is not None)


def _cell(kv: KVCache, block: int) -> tuple[str, str]:
    """The character of a block, and its style."""
    count, num_tables = kv.blocks.ref_counts[block], _num_tables(kv, block)
    if num_tables == 0:
        return ("c", "cyan") if count else (".", "dim")
    return (str(count) if count < 10 else "+"), "bold green" if num_tables > 1 else "yellow"


def _ranges(blocks: list[int]) -> str:
    """Block ids with runs written as first-last.

    >>> _ranges([0, 1, 2, 7, 9, 10]), _ranges([])
    ('0-2, 7, 9-10', 'none')
    """
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], block]
        else:
            runs.append([block])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"
