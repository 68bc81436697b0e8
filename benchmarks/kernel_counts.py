"""What the kernels do when they run, counted without a GPU: their PTX is executed on a CPU.

    python -m benchmarks.kernel_counts                    bfloat16, head size 128
    python -m benchmarks.kernel_counts --head 64 --target sm_90 --kernel decode prefill
    python -m benchmarks.kernel_counts --kernel prefill --tile 128,64,8,5 128,32,4,5
                                                          other tiles: see kernels.launch.Tile

Each kernel runs on a small piece of work, see WORKS, in the machine of benchmarks/ptx. A count is
no time. But so many instructions take about so many cycles, and what is read twice is paid for:

    instructions    of all warps of all programs, as PTX has them; a card's own are about as many
    barriers        of a program, at which its warps wait for each other
    moved KB        what was read and written, in sectors of 32 bytes
    distinct        the same, each sector once
    turns           of the banks of shared memory, one a cycle; and how many at least, if threads
                    met at one. What wgmma reads for itself is not in it
    B/cycle         distinct bytes, on one multiprocessor, if each of its four schedulers starts an
                    instruction in every cycle: much faster no kernel can be
    ops/cycle       multiplications and additions in products of tiles, likewise
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from math import prod
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.kernel_table import PAGED, tile_of
from benchmarks.markdown import Column, table
from benchmarks.ptx.launch import Launched, PtxMachine
from benchmarks.ptx.parse import Instruction
from kernels.available import INTERPRET, NO_TRITON
from kernels.batch import PagedBatch
from kernels.launch import Tile
from kernels.layer_parts import HeadNorms

TARGETS = ("sm_80", "sm_90", "sm_120")
DTYPE = torch.bfloat16
NUM_SCHEDULERS = 4
"""Of a multiprocessor; each starts at most one instruction a cycle. CUDA C++ Programming Guide."""

BLOCK_SIZE = 16
GROUP_SIZE = 2  # query heads of a KV head: Qwen3-0.6B's
NUM_TOKENS = 4  # for kernels that take one token as the other
NUM_HEADS, NUM_KV_HEADS, HIDDEN, INNER = 16, 8, 1024, 3072  # Qwen3-0.6B's


class Asked(NamedTuple):
    """What a work is done for: a head size, and maybe another tile of attention."""

    head_dim: int
    tile: Tile | None = None


def attend(start: int, end: int, num_splits: int, asked: Asked) -> None:
    """One sequence computes [start, end) with one KV head; blocks lie in a drawn order."""
    from kernels.paged_attention import paged_attention
    from kernels.split_attention import split_attention

    num_blocks = -(-end // BLOCK_SIZE)
    tables = [torch.randperm(num_blocks).tolist()]
    batch = PagedBatch.from_host(
        tables, [(start, end)], num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    query = torch.randn(end - start, GROUP_SIZE, asked.head_dim).to(DTYPE)
    shape = (num_blocks, BLOCK_SIZE, 1, asked.head_dim)
    key, value = (torch.randn(shape).to(DTYPE) for _ in range(2))
    if num_splits == 1:
        paged_attention(query, key, value, batch, tile=asked.tile)
    else:
        split_attention(query, key, value, batch, num_splits=num_splits, tile=asked.tile)


def store(rotates: bool, norms: bool, asked: Asked) -> None:
    """The keys and values of NUM_TOKENS sequences go to their slots."""
    from kernels.rotary import rotary_store_kv
    from kernels.store_kv import store_kv

    tables = [[block] for block in range(NUM_TOKENS)]
    batch = PagedBatch.from_host(
        tables, [(3, 4)] * NUM_TOKENS, num_blocks=NUM_TOKENS, block_size=BLOCK_SIZE
    )
    shape = (NUM_TOKENS, BLOCK_SIZE, NUM_KV_HEADS, asked.head_dim)
    keys, values = torch.zeros(shape).to(DTYPE), torch.zeros(shape).to(DTYPE)
    heads = torch.randn(NUM_TOKENS, NUM_HEADS + 2 * NUM_KV_HEADS, asked.head_dim).to(DTYPE)
    sizes = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    query, key, value = torch.split(heads, sizes, dim=1)
    if not rotates:
        store_kv(key, value, keys, values, batch)
        return
    cos, sin = (torch.randn(BLOCK_SIZE, asked.head_dim // 2) for _ in range(2))
    weights = [torch.randn(asked.head_dim).to(DTYPE) for _ in range(2)]
    of_heads = HeadNorms(weights[0], weights[1], 1e-6) if norms else None
    rotary_store_kv(query, key, value, cos, sin, keys, values, batch, norms=of_heads)


def normalise(adds: bool) -> None:
    """Rows of a model, with and without a residual."""
    from kernels.rms_norm import add_rms_norm, rms_norm

    hidden, residual = (torch.randn(NUM_TOKENS, HIDDEN).to(DTYPE) for _ in range(2))
    weight = torch.randn(HIDDEN).to(DTYPE)
    if adds:
        add_rms_norm(hidden, residual, weight, 1e-6)
    else:
        rms_norm(hidden, weight, 1e-6)


def gate() -> None:
    """Rows of gate and up."""
    from kernels.silu_and_mul import silu_and_mul

    silu_and_mul(torch.randn(NUM_TOKENS, 2 * INNER).to(DTYPE))


WORKS: dict[str, Callable[[Asked], None]] = {
    "decode": lambda asked: attend(2047, 2048, 1, asked),
    "prefill": lambda asked: attend(1536, 2048, 1, asked),
    "split": lambda asked: attend(2047, 2048, 4, asked),
    "split_prefill": lambda asked: attend(1984, 2048, 4, asked),
    "store_kv": lambda asked: store(False, False, asked),
    "rotary_store_kv": lambda asked: store(True, False, asked),
    "normed_rotary_store_kv": lambda asked: store(True, True, asked),
    "rms_norm": lambda asked: normalise(False),
    "add_rms_norm": lambda asked: normalise(True),
    "silu_and_mul": lambda asked: gate(),
}


MERGE = "merge_splits_kernel"


class Counts(NamedTuple):
    """What one launch did; see above."""

    kernel: str
    target: str
    tile: str
    num_programs: int
    instructions: int
    barriers: int
    moved: int
    distinct: int
    turns: int
    least_turns: int
    products: int

    @property
    def cycles(self) -> float:
        """About so many, on one multiprocessor that does nothing else."""
        return self.instructions / NUM_SCHEDULERS


def counts_of(work: str, target: str, tile: Tile | None, launched: Launched) -> Counts:
    """The sums of a launch over its programs and warps."""
    num_programs, num_warps = prod(launched.grid), launched.program.num_threads // 32
    pairs = list(zip(launched.program.instructions, launched.executed.tolist(), strict=True))
    barriers = sum(count for each, count in pairs if each.opcode[:2] == ("bar", "sync"))
    return Counts(
        kernel="merge" if launched.kernel == MERGE else work,
        target=target,
        tile="its own" if tile is None else str(tile),
        num_programs=num_programs,
        instructions=num_warps * sum(count for _, count in pairs),
        barriers=round(barriers / num_programs),
        moved=launched.bytes_moved,
        distinct=launched.bytes_touched,
        turns=launched.wavefronts,
        least_turns=launched.least_wavefronts,
        products=num_warps * sum(count * products_of(each) for each, count in pairs),
    )


def products_of(instruction: Instruction) -> int:
    """Multiplications and additions of a warp in one instruction for tensor cores."""
    shape = re.search(r"\.m(\d+)n(\d+)k(\d+)\.", instruction.text)
    if shape is None or instruction.opcode[0] not in ("mma", "wgmma"):
        return 0
    num_warps = 4 if instruction.opcode[0] == "wgmma" else 1
    return 2 * prod(map(int, shape.groups())) // num_warps


def count(works: Sequence[str], targets: Sequence[str], asked: Asked) -> list[Counts]:
    """One entry a launch and target."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for work in works:
            for target in targets:
                torch.manual_seed(0)
                machine = PtxMachine(int(target.removeprefix("sm_")))
                with mock.patch.dict("os.environ", TRITON_CACHE_DIR=cache), machine.launching():
                    WORKS[work](asked)
                found += [
                    counts_of(work, target, asked.tile, each)
                    for each in machine.launches
                    if asked.tile is None or each.kernel != MERGE  # which has no tile
                ]
    return found


def _turns(row: Counts) -> str:
    if row.turns == row.least_turns:
        return f"{row.turns:,}" if row.turns else ""
    return f"{row.turns:,}, least {row.least_turns:,}"


COLUMNS = (
    Column("kernel", False, lambda row: row.kernel),
    Column("target", False, lambda row: row.target),
    Column("tile", False, lambda row: row.tile),
    Column("instructions", True, lambda row: f"{row.instructions:,}"),
    Column("barriers", True, lambda row: row.barriers or ""),
    Column("moved KB", True, lambda row: f"{row.moved / 1024:,.0f}"),
    Column("distinct", True, lambda row: f"{row.distinct / 1024:,.0f}"),
    Column("turns", True, _turns),
    Column("B/cycle", True, lambda row: f"{row.distinct / row.cycles:.0f}"),
    Column(
        "ops/cycle", True, lambda row: f"{row.products / row.cycles:,.0f}" if row.products else ""
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit code 2 where Triton cannot compile."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernel_counts")
    parser.add_argument("--kernel", nargs="+", choices=WORKS, default=[*WORKS], help="only these")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=TARGETS, help="only these")
    parser.add_argument("--head", type=int, default=128, help="head size (default 128)")
    parser.add_argument(
        "--tile", nargs="+", type=tile_of, default=[None], metavar="M,N,WARPS,STAGES",
        help="for attention",
    )  # fmt: skip
    asked = parser.parse_args(arguments)
    if asked.tile != [None] and not set(PAGED).issuperset(asked.kernel):
        parser.error(f"--tile is for {', '.join(sorted(PAGED))}: name some with --kernel")
    if importlib.util.find_spec("triton") is None:
        print(f"{NO_TRITON} (it exists for Linux only): nothing to count")
        return 2
    os.environ.pop(INTERPRET, None)  # read when the first kernel is imported, further down
    rows = [
        row
        for tile in asked.tile
        for row in count(asked.kernel, asked.target, Asked(asked.head, tile))
    ]
    print(f"triton {version('triton')}, bfloat16, head size {asked.head}\n")
    print(table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
