"""Compile the kernels for GPUs that need not be here, and print what each compilation costs.

    python -m benchmarks.kernel_table                      every combination
    python -m benchmarks.kernel_table --select defaults    what most models run
    python -m benchmarks.kernel_table --kernel decode split --head 128     some of them
    python -m benchmarks.kernel_table --kernel prefill --tile 64,32,8,5
                                                           another tile: see kernels.launch.Tile
    python -m benchmarks.kernel_table --json FILE          also as JSON, for a test to read

Registers and spilled bytes come from `ptxas -v` (on AMD: from the assembler's own counts),
shared memory from the compiler. Spilled bytes are registers that did not fit and go through
memory on each use; shared memory over the target's limit is a kernel that cannot start.

Of NVIDIA's targets also: how many programs one multiprocessor has room for, side by side; which
instruction multiplies tiles (none: no product, or one of exact float32); and the sizes, in bytes,
of the copies to shared memory that run while the program computes (16 is the largest there is).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.markdown import Column, table
from kernels.launch import Tile, shared_memory

DTYPES = ("bf16", "fp16", "fp32")
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
# An A100, an RTX 4090, an H100, an RTX 5090; and an MI300, whose programs have 64 KB.
CUDA_TARGETS = ("sm_80", "sm_89", "sm_90", "sm_120")
SHARED_LIMITS = {target: shared_memory(int(target[3:])) for target in CUDA_TARGETS}
SHARED_LIMITS["gfx942"] = 64 * 1024
TARGETS = tuple(SHARED_LIMITS)
# The kernels that read blocks, and those that only know rows.
PAGED = ("prefill", "decode", "split", "split_prefill")
NORMED_ROTARY = "normed_rotary_store_kv"
"""rotary_store_kv for a model that normalises its heads first."""
PLAIN = (
    "merge",
    "store_kv",
    "rotary_store_kv",
    NORMED_ROTARY,
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
)

# Shapes of a model around a head size: 8 KV heads of 4 query heads each.
NUM_KV_HEADS = 8
GROUP_SIZE = 4
NUM_SPLITS = 16


class Case(NamedTuple):
    """One compilation. Plain kernels know no blocks; their block_size is 0."""

    kernel: str
    target: str
    dtype: str
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class Row:
    """What came of one case; `problem` says why nothing did.

    All of them are in the JSON; the printed table leaves out late_loads, which are to be 0.
    """

    kernel: str
    target: str
    dtype: str
    head_dim: int
    block_size: int
    tile: str = ""
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    programs: int = 0
    products: str = ""
    copies: str = ""
    late_loads: int = 0
    seconds: float = 0.0
    problem: str = ""


class Launch(NamedTuple):
    """What a launcher would pass: the kernel, its compile-time constants, warps and stages."""

    kernel: Any
    constants: dict[str, int]
    num_warps: int
    num_stages: int
    tile: str


def launch_of(case: Case, tile: Tile | None = None) -> Launch:
    """The launch of a case, from the same pure functions the launchers ask.

    `tile`, if it is given, is tried in the place of the attention kernels' own.
    """
    from kernels.launch import next_power_of_two, padded_head_dim

    row = NUM_KV_HEADS * GROUP_SIZE * case.head_dim
    row_of_kv = NUM_KV_HEADS * case.head_dim
    block_d = padded_head_dim(case.head_dim)
    if case.kernel in PAGED:
        return _launch_of_attention(case, tile)
    if case.kernel == "merge":
        from kernels.split_attention import merge_splits_kernel, merge_warps

        constants = {"HEAD_DIM": case.head_dim, "NUM_SPLITS": NUM_SPLITS, "BLOCK_D": block_d}
        warps = merge_warps(NUM_SPLITS, case.head_dim)
        return Launch(merge_splits_kernel, constants, warps, 3, "")
    if case.kernel == "store_kv":
        from kernels.store_kv import store_kv_kernel, store_kv_warps

        constants = {"ROW": row_of_kv, "BLOCK_ROW": next_power_of_two(row_of_kv)}
        return Launch(store_kv_kernel, constants, store_kv_warps(row_of_kv), 3, "")
    if case.kernel in ("rotary_store_kv", NORMED_ROTARY):
        from kernels.rotary import rotary_store_kv_kernel, rotary_warps

        constants = {
            "NORMED": case.kernel == NORMED_ROTARY,
            "HEAD_DIM": case.head_dim,
            "BLOCK_GROUP": GROUP_SIZE,
            "BLOCK_HALF": block_d // 2,
        }
        warps = rotary_warps(case.head_dim, GROUP_SIZE)
        return Launch(rotary_store_kv_kernel, constants, warps, 3, "")
    if case.kernel == "silu_and_mul":
        from kernels.silu_and_mul import BLOCK, silu_and_mul_kernel, silu_warps

        return Launch(silu_and_mul_kernel, {"BLOCK": BLOCK}, silu_warps(BLOCK), 3, "")
    from kernels.rms_norm import add_rms_norm_kernel, rms_norm_kernel, rms_norm_warps

    kernel = rms_norm_kernel if case.kernel == "rms_norm" else add_rms_norm_kernel
    constants = {"SIZE": row, "BLOCK": next_power_of_two(row)}
    return Launch(kernel, constants, rms_norm_warps(row), 3, "")


def _launch_of_attention(case: Case, tile: Tile | None) -> Launch:
    import torch

    from kernels.launch import padded_head_dim
    from kernels.paged_attention import attention_tile, paged_attention_kernel
    from kernels.split_attention import split_attention_kernel, split_tile

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]
    is_prompt = case.kernel in ("prefill", "split_prefill")
    num_rows = 4096 if is_prompt else GROUP_SIZE
    # AMD has no number of its own in the launchers; it is shown what an A100 would get.
    capability = int(case.target[3:]) if case.target.startswith("sm_") else 80
    choose = split_tile if case.kernel.startswith("split") else attention_tile
    tile = tile or choose(case.head_dim, dtype, num_rows, capability)
    constants = {
        "SINGLES": not is_prompt,
        "HEAD_DIM": case.head_dim,
        "BLOCK_SIZE": case.block_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded_head_dim(case.head_dim),
    }
    kernel = paged_attention_kernel
    if case.kernel.startswith("split"):
        kernel = split_attention_kernel
        constants["NUM_SPLITS"] = NUM_SPLITS
    return Launch(kernel, constants, tile.num_warps, tile.num_stages, str(tile))


INT32_POINTERS = {"block_tables", "query_starts", "context_lens", "positions", "slots"}
FLOAT32_POINTERS = {"partial_outputs", "partial_sums", "cos_table", "sin_table"}
FLOATS = {"scale", "epsilon"}
STRIDES = {"query_stride", "key_stride", "value_stride", "hidden_stride", "stride", "size"}
COUNTS = {"num_sequences", "max_blocks", "num_kv_heads", "group_size"}


def type_of(name: str, dtype: str, constants: dict[str, int]) -> str:
    """The compiler's type for a kernel's argument, known by its name."""
    if name in constants:
        return "constexpr"
    if name in FLOATS:
        return "fp32"
    if name in STRIDES | COUNTS:
        return "i32"
    if name in INT32_POINTERS:
        return "*i32"
    return "*fp32" if name in FLOAT32_POINTERS else f"*{dtype}"


def compile_for(
    target: str,
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Iterable[int],
    options: Mapping[str, Any],
) -> Any:
    """What Triton makes of a kernel for a GPU that need not be here: see its asm and metadata.

    signature  the type of each argument, by name; "constexpr" for those in `constants`
    aligned    the numbers of the arguments that are multiples of 16
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=kernel,
        signature=dict(signature),
        constexprs=dict(constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    is_amd = target.startswith("gfx")
    gpu = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", int(target[3:]), 32)
    return triton.compile(source, target=gpu, options=dict(options))


def compile_case(case: Case, tile: Tile | None = None) -> Row:
    """Compile one case for its target; needs no GPU. What cannot be compiled says so in its row."""
    launch = launch_of(case, tile)
    names = launch.kernel.arg_names
    signature = {name: type_of(name, case.dtype, launch.constants) for name in names}
    # A launch would find pointers and strides to be multiples of 16, and compile for that.
    aligned = [
        index
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in STRIDES
    ]
    is_amd = case.target.startswith("gfx")
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    start = time.perf_counter()
    try:
        # With TRITON_DUMP_PTXAS_LOG the compiler prints what ptxas said of this very build.
        with contextlib.redirect_stdout(io.StringIO()) as log:
            compiled = compile_for(
                case.target, launch.kernel, signature, launch.constants, aligned, options
            )
    except Exception as error:  # whatever the compiler throws is this row's result
        reason = str(error.__cause__ or error).strip().splitlines()[-1][:200]
        return Row(*case, tile=launch.tile, problem=f"{type(error).__name__}: {reason}")
    seconds = time.perf_counter() - start
    shared = compiled.metadata.shared
    limit = SHARED_LIMITS[case.target]
    row = Row(
        *case,
        tile=launch.tile,
        shared_bytes=shared,
        seconds=round(seconds, 2),
        problem="" if shared <= limit else f"needs {shared} B shared memory of {limit}",
    )
    if is_amd:
        registers, spilled = count_amd(compiled.asm["amdgcn"])
        return replace(row, registers=registers, spilled_bytes=spilled)
    registers, spilled = count_nvidia(log.getvalue())
    ptx = compiled.asm["ptx"]
    return replace(
        row,
        registers=registers,
        spilled_bytes=spilled,
        programs=programs_side_by_side(case.target, registers, launch.num_warps, shared),
        products=products_of(ptx),
        copies=copies_of(ptx),
        late_loads=late_loads_of(ptx),
    )


def count_nvidia(log: str) -> tuple[int, int]:
    """(registers a thread, spilled bytes) from the log of `ptxas -v`."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    return max(map(int, registers)), sum(map(int, spills))


def count_amd(assembly: str) -> tuple[int, int]:
    """(vector registers a thread, spilled bytes) from the metadata of the assembly."""
    registers = re.findall(r"\.vgpr_count:\s*(\d+)", assembly)
    spills = re.findall(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    return max(map(int, registers)), 4 * sum(map(int, spills))


def programs_side_by_side(target: str, registers: int, num_warps: int, shared_bytes: int) -> int:
    """How many programs fit one multiprocessor: while one waits for memory, another computes.

    A multiprocessor is four parts of 16,384 registers, and a warp takes them in pieces of 256;
    each program takes 1 KB of shared memory more than it asks for. There are at most 64 warps in
    half as many programs, or 48 where the multiprocessor is a smaller one.
    By NVIDIA's CUDA C++ Programming Guide and its occupancy calculator.
    """
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = 4 * (16_384 // of_a_warp) // num_warps
    by_shared_memory = (SHARED_LIMITS[target] + 1024) // (shared_bytes + 1024)
    most_warps = 64 if target in ("sm_80", "sm_90") else 48
    return min(by_registers, by_shared_memory, most_warps // max(num_warps, 2))


def products_of(ptx: str) -> str:
    """The instruction that multiplies tiles, "wgmma" (from shared memory) or "mma"; or nothing."""
    names = {"wgmma.mma_async": "wgmma", "mma.sync": "mma"}
    return " ".join(name for instruction, name in names.items() if instruction in ptx)


def late_loads_of(ptx: str) -> int:
    """Reads of memory behind the first write. No compiler moves them before it, so each waits."""
    return ptx.partition("st.global")[2].count("ld.global")


def copies_of(ptx: str) -> str:
    """The bytes of the copies that run beside the arithmetic, each size once: "4 16"."""
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?0x([0-9a-f]+)", ptx)
    return " ".join(map(str, sorted({int(size, 16) for size in sizes})))


def all_cases() -> list[Case]:
    """Every combination the kernels promise."""
    paged = itertools.product(PAGED, TARGETS, DTYPES, HEAD_DIMS, BLOCK_SIZES)
    plain = itertools.product(PLAIN, TARGETS, DTYPES, HEAD_DIMS, (0,))
    return [Case(*case) for case in (*paged, *plain)]


def default_cases() -> list[Case]:
    """bf16, head sizes 64 and 128, block size 16, on the CUDA targets."""
    return [
        case
        for case in all_cases()
        if case.dtype == "bf16"
        and case.head_dim in (64, 128)
        and case.block_size in (0, 16)
        and case.target != "gfx942"
    ]


def widest_cases() -> list[Case]:
    """bf16, head size 256, block size 16: the most that a program keeps, by kernel and target."""
    return [Case(kernel, target, "bf16", 256, 16) for kernel in PAGED for target in CUDA_TARGETS]


def pairwise_cases() -> list[Case]:
    """A few CUDA cases in which any two values that can meet do meet: most faults need no third.

    Greedy: take the case that shows most pairs not yet seen, until all are seen. Shuffled
    first, so that equals do not all come from the first target and dtype.
    """

    def pairs(case: Case) -> set[tuple[object, ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    left = [case for case in all_cases() if case.target != "gfx942"]
    random.Random(0).shuffle(left)
    unseen = set().union(*map(pairs, left))
    chosen = []
    while unseen:
        best = max(left, key=lambda case: len(pairs(case) & unseen))
        chosen.append(best)
        unseen -= pairs(best)
    return chosen


SELECTIONS = {
    "all": all_cases,
    "defaults": default_cases,
    "widest": widest_cases,
    "pairwise": pairwise_cases,
}


def compile_all(cases: Sequence[Case], jobs: int, tile: Tile | None = None) -> Iterator[Row]:
    """Rows in the order of the cases, from `jobs` processes with one throw-away cache."""
    with tempfile.TemporaryDirectory() as cache:
        # Read when triton is imported, which only the workers do.
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ["TRITON_DUMP_PTXAS_LOG"] = os.environ["TRITON_ALWAYS_COMPILE"] = "1"
        os.environ.pop("TRITON_INTERPRET", None)
        with ProcessPoolExecutor(jobs) as pool:
            yield from pool.map(partial(compile_case, tile=tile), cases)


COLUMNS = (
    Column("kernel", False, lambda row: row.kernel),
    Column("target", False, lambda row: row.target),
    Column("dtype", False, lambda row: row.dtype),
    Column("head", True, lambda row: row.head_dim),
    Column("block", True, lambda row: row.block_size or ""),
    Column("tile", False, lambda row: row.tile),
    Column("registers", True, lambda row: row.registers or ""),
    Column("spilled B", True, lambda row: row.spilled_bytes if row.registers else ""),
    Column("shared B", True, lambda row: row.shared_bytes if row.registers else ""),
    Column("programs", True, lambda row: row.programs or ""),
    Column("products", False, lambda row: row.products),
    Column("copies B", False, lambda row: row.copies),
    Column("", False, lambda row: row.problem),
)


def tile_of(text: str) -> Tile:
    """Tile(128, 64, 8, 5) for "128,64,8,5"."""
    try:
        block_m, block_n, num_warps, num_stages = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not four numbers: query rows, keys a step, warps, stages"
        ) from None
    return Tile(block_m, block_n, num_warps, num_stages)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the selection and print its table; exit code 2 where triton is not installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--select", choices=[*SELECTIONS], default="all")
    parser.add_argument(
        "--kernel", nargs="+", choices=(*PAGED, *PLAIN), default=(*PAGED, *PLAIN), help="only these"
    )
    parser.add_argument("--head", type=int, choices=HEAD_DIMS, help="only this head size")
    parser.add_argument("--tile", type=tile_of, metavar="M,N,WARPS,STAGES", help="for attention")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed (it exists for Linux only): nothing to compile")
        return 2
    cases = [
        case
        for case in SELECTIONS[options.select]()
        if case.kernel in options.kernel and options.head in (None, case.head_dim)
    ]
    print(f"triton {version('triton')}\n")
    start = time.perf_counter()
    rows = []
    for row in compile_all(cases, options.jobs, options.tile):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"\r{len(rows)} of {len(cases)}", end="", file=sys.stderr, flush=True)
    print(table(rows, COLUMNS))
    print(f"\n{len(rows)} compilations in {time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
