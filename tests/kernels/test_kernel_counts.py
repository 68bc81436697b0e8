"""What can be counted of the kernels' speed without a GPU: see benchmarks/kernel_counts.py."""

import os
import subprocess
import sys

import pytest

from benchmarks import kernel_counts
from benchmarks.kernel_counts import Asked, products_of
from benchmarks.ptx.parse import Instruction
from kernels.launch import Tile
from tests.interpreter import ROOT, needs_compiler, needs_triton

# What an H200's memory brings: 4.8 TB a second, for 132 multiprocessors at 1.83 GHz. Data sheet.
BYTES_A_CYCLE = 4.8e12 / 132 / 1.83e9


def instruction(text):
    name = text.partition(" ")[0]
    return Instruction(tuple(name.split(".")), (), None, "", text)


@pytest.mark.parametrize(
    ("text", "products"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {};", 2 * 16 * 8 * 16),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {};", 2 * 16 * 128 * 16),
        ("wgmma.wait_group.sync.aligned 0;", 0),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {};", 0),
    ],
)
def test_the_products_of_a_warp_are_counted(text, products):
    assert products_of(instruction(text)) == products


@pytest.fixture(scope="module")
def counted():
    """By kernel and target."""
    rows = kernel_counts.count([*kernel_counts.WORKS], ["sm_80", "sm_90"], Asked(128))
    return {(row.kernel, row.target): row for row in rows}


@pytest.mark.kernels
@needs_compiler
@needs_triton
def test_a_decode_reads_each_key_once_and_leaves_the_rest_of_the_cycles_to_memory(counted):
    for kernel in ("decode", "split"):
        for target in ("sm_80", "sm_90"):
            row = counted[kernel, target]
            keys_and_values = 2 * 2048 * 128 * 2
            assert keys_and_values < row.distinct < 1.01 * keys_and_values
            assert row.moved < 1.01 * row.distinct
            assert row.distinct / row.cycles > 2 * BYTES_A_CYCLE


@pytest.mark.kernels
@needs_compiler
@needs_triton
def test_no_two_threads_wait_for_one_bank(counted):
    for (kernel, target), row in counted.items():
        assert row.turns == row.least_turns, (kernel, target)


@pytest.mark.kernels
@needs_compiler
@needs_triton
def test_no_product_is_computed_twice(counted):
    """Of a tile, all rows with all keys that one of them sees, a few more to fill a step."""
    rows = {"decode": (16, [2048]), "split": (16, [2048])}
    # Two rows a token: the first tile of 128 rows ends behind 64 of 512 tokens.
    rows["prefill"] = (128, [1536 + 64 * tile for tile in range(1, 9)])
    rows["split_prefill"] = (64, [1984 + 32, 1984 + 64])
    for kernel, (num_rows, num_keys) in rows.items():
        needed = sum(2 * 2 * 128 * num_rows * keys for keys in num_keys)
        for target in ("sm_80", "sm_90"):
            assert needed <= counted[kernel, target].products <= 1.02 * needed, (kernel, target)


@pytest.mark.kernels
@needs_compiler
@needs_triton
def test_kernels_of_rows_move_what_they_must(counted):
    hidden, heads = 4 * 1024 * 2, 4 * 128 * 2  # of four tokens; of each head
    must = {
        "rms_norm": 2 * hidden + 1024 * 2,  # in, out, and the weight once
        "add_rms_norm": 4 * hidden + 1024 * 2,
        "silu_and_mul": 9 * hidden,
        "store_kv": 4 * 8 * heads,
        "rotary_store_kv": (2 * 16 + 4 * 8) * heads,
    }
    for kernel, num_bytes in must.items():
        row = counted[kernel, "sm_90"]
        assert num_bytes <= row.distinct <= num_bytes + 4096, kernel
        assert row.moved <= 1.5 * row.distinct, kernel


@pytest.mark.kernels
@needs_compiler
@needs_triton
def test_without_wgmma_the_banks_are_no_slower_than_the_products_at_head_size_64(counted):
    (own,) = kernel_counts.count(["prefill"], ["sm_80"], Asked(64))
    (other,) = kernel_counts.count(["prefill"], ["sm_80"], Asked(64, Tile(128, 64, 8, 5)))
    assert own.turns < own.products / 2048 < other.turns


@pytest.mark.kernels
@needs_compiler
@needs_triton
def test_instructions_leave_time_for_all_products_of_a_prompt(counted):
    # Tensor cores do 2,048 a cycle on an A100 and 4,096 on an H100, by NVIDIA's data sheets.
    assert counted["prefill", "sm_80"].products / counted["prefill", "sm_80"].cycles > 2048
    assert counted["prefill", "sm_90"].products / counted["prefill", "sm_90"].cycles > 4096


@pytest.mark.kernels
@needs_compiler
@needs_triton
def test_parts_are_merged_without_a_barrier(counted):
    for target in ("sm_80", "sm_90"):
        assert counted["merge", target].barriers == 0
        assert counted["merge", target].turns == 0


@pytest.mark.kernels
@needs_compiler
@needs_triton
def test_one_row_stands_for_one_launch(counted):
    assert counted["split", "sm_90"].num_programs == 4
    assert counted["prefill", "sm_90"].num_programs == 512 * 2 // 128 + 1
    assert counted["decode", "sm_90"].num_programs == 1


@pytest.mark.kernels
@needs_triton
def test_the_command_prints_a_table_even_where_kernels_are_interpreted():
    command = ["-m", "benchmarks.kernel_counts", "--kernel", "store_kv", "--target", "sm_80"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "| store_kv | sm_80 | its own |" in done.stdout


def test_a_tile_is_for_attention_only(capsys):
    with pytest.raises(SystemExit):
        kernel_counts.main(["--kernel", "rms_norm", "--tile", "64,32,4,5"])
    assert "--tile is for decode, prefill, split, split_prefill" in capsys.readouterr().err
