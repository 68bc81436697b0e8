"""How far the kernels are from torch in float64, by context length and dtype.

python -m chapters.ch04_paged_attention.measure [--mine]
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING, Any

from chapters.ch04_paged_attention.chapter import CHAPTER
from chapters.stages import Stages
from chapters.workbook import open_workbook
from kernels.available import why_no_triton

if TYPE_CHECKING:
    from chapters.ch04_paged_attention.traps import Batch

CONTEXTS = (1, 15, 16, 17, 64, 130)
DTYPES = ("float32", "float16", "bfloat16")
BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 3, 1, 64


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mine", action="store_true", help="measure your own kernels")
    mine = parser.parse_args().mine
    import torch

    # Read when triton is imported, so set before; 0 runs the kernels on a GPU.
    interpreted = os.environ.setdefault("TRITON_INTERPRET", "1") == "1"
    if problem := why_no_triton(torch.device("cpu" if interpreted else "cuda")):
        sys.exit(f"nothing of chapter 4 can be measured here: {problem}")
    kernels = load(mine)
    print(f"{'your' if mine else 'the reference'} kernels, {machine()}, {date.today()}")
    print(f"{HEADS} heads, {KV_HEADS} KV head, head size {HEAD_DIM}, block size {BLOCK_SIZE};")
    print("largest difference from torch in float64, and in brackets torch's own in that dtype\n")
    for line in table(kernels):
        print(line, flush=True)


def load(mine: bool) -> Any:
    """The reference stage, or the reader's."""
    workbook = open_workbook()
    if not mine:
        return Stages().load(CHAPTER.name)
    if not workbook.has(CHAPTER):
        sys.exit(f"you have not started it: python -m chapters start {CHAPTER.number}")
    return Stages({CHAPTER.name: workbook.file(CHAPTER)}).load(CHAPTER.name)


def machine() -> str:
    """Where this runs."""
    import torch

    if os.environ["TRITON_INTERPRET"] != "1":
        return str(torch.cuda.get_device_name())
    return (
        f"Triton's interpreter on {platform.machine()} {platform.system()}, {os.cpu_count()} cores"
    )


def table(kernels: Any) -> Iterator[str]:
    """One line a context: the newest token as a decode, and the whole prompt as a prefill."""
    yield "context  kernel   " + "".join(f"{dtype:>22}" for dtype in DTYPES) + "   seconds"
    for context in CONTEXTS:
        for kernel, start in (("decode", context - 1), ("prefill", 0)):
            begun = time.perf_counter()
            cells = [cell(kernels, kernel, batch(start, context, dtype)) for dtype in DTYPES]
            seconds = time.perf_counter() - begun
            yield f"{context:>7}  {kernel:<9}" + "".join(cells) + f"{seconds:>10.2f}"


def batch(start: int, context: int, dtype: str) -> "Batch":
    """One sequence that computes [start, context), in blocks of a random order."""
    import torch

    from chapters.ch04_paged_attention.traps import Batch

    num_blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1
    return Batch(
        (tuple(order.tolist()),),
        ((start, context),),
        BLOCK_SIZE,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=getattr(torch, dtype),
    )


def cell(kernels: Any, kernel: str, batch: "Batch") -> str:
    """The kernel's largest error, and torch's."""
    from chapters.ch04_paged_attention import reference
    from chapters.ch04_paged_attention.traps import run_decode, run_prefill

    query, caches = batch.query(), batch.caches()
    run = run_decode if kernel == "decode" else run_prefill
    expected = batch.expected(query, caches)
    in_torch = reference.paged_prefill(query, *caches, **batch.tensors())
    errors = [
        (output.double() - expected).abs().max().item()
        for output in (run(kernels, batch, query, caches), in_torch)
    ]
    return f"{errors[0]:>12.1e} ({errors[1]:.1e})"


if __name__ == "__main__":
    main()
