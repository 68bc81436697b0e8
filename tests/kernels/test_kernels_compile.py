"""The kernels compile for real GPUs, though none is here: see benchmarks/kernel_table.py."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.kernel_table import (
    COLUMNS,
    PAGED,
    SELECTIONS,
    SHARED_LIMITS,
    Row,
    all_cases,
    default_cases,
    late_loads_of,
    pairwise_cases,
    programs_side_by_side,
)
from benchmarks.markdown import table
from kernels.launch import shared_memory
from tests.interpreter import ROOT, needs_triton


def compile_selection(selection, tmp_path):
    """The rows of the table, compiled in a process where triton compiles and not interprets."""
    report = tmp_path / "rows.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    command = [sys.executable, "-m", "benchmarks.kernel_table", "--select", selection]
    child = subprocess.run(
        [*command, "--jobs", "2", "--json", str(report)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return json.loads(report.read_text())


def lines(rows):
    return "\n".join(str(row) for row in rows)


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize("selection", ["defaults", "widest"])
def test_what_models_run_compiles_spills_nothing_and_fits_its_target(selection, tmp_path):
    rows = compile_selection(selection, tmp_path)
    assert len(rows) == len(SELECTIONS[selection]())
    wrong = [
        row
        for row in rows
        if row["problem"]
        or row["spilled_bytes"]
        or not row["registers"]
        or row["shared_bytes"] > SHARED_LIMITS[row["target"]]
    ]
    assert not wrong, lines(wrong)
    # All is asked for before the first result is written, or it is waited for piece by piece.
    late = [row for row in rows if row["late_loads"]]
    assert not late, lines(late)
    for row in rows:
        if row["kernel"] in PAGED:
            # A prompt on Hopper multiplies from shared memory. What is copied while products are
            # computed is block ids, of 4 bytes, and keys and values, 16 bytes at a time.
            from_memory = "prefill" in row["kernel"] and row["target"] == "sm_90"
            assert row["products"] == ("wgmma" if from_memory else "mma"), row
            assert row["copies"] == "4 16", row
            assert row["programs"] >= 1, row


@pytest.mark.kernels
@needs_triton
def test_a_pairwise_selection_of_all_combinations_compiles_and_fits(tmp_path):
    rows = compile_selection("pairwise", tmp_path)
    wrong = [row for row in rows if row["problem"] or not row["registers"]]
    assert len(rows) == len(pairwise_cases())
    assert not wrong, lines(wrong)


@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [(80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (103, 227), (120, 99)],
)
def test_the_shared_memory_of_a_program_is_that_of_nvidias_table(capability, kilobytes):
    assert shared_memory(capability) == kilobytes * 1024


@pytest.mark.parametrize(
    ("launch", "programs", "limit"),
    [
        (("sm_90", 114, 4, 38_144), 4, "registers: 120 x 32 a warp, 4 x 4 warps"),
        (("sm_90", 80, 4, 38_144), 5, "shared memory: 228 KB / 38.25 KB"),
        (("sm_89", 113, 4, 38_144), 2, "shared memory: 100 KB / 38.25 KB"),
        (("sm_80", 255, 8, 1024), 1, "registers: 256 x 32 a warp, 4 x 2 warps"),
        (("sm_80", 32, 8, 0), 8, "64 warps"),
        (("sm_120", 32, 8, 0), 6, "48 warps"),
        (("sm_80", 16, 1, 0), 32, "32 programs"),
        (("sm_120", 16, 1, 0), 24, "24 programs"),
    ],
    ids=str,
)
def test_how_many_programs_fit_one_multiprocessor(launch, programs, limit):
    assert programs_side_by_side(*launch) == programs, limit


def test_loads_behind_a_store_are_counted():
    early = "ld.global.b32 %r1; ld.global.v4.b32 {%r2}; st.global.b32 [%rd1], %r1;"
    assert late_loads_of(early) == 0
    assert late_loads_of(early + " ld.global.b32 %r3; ld.shared.b32 %r4;") == 1
    assert late_loads_of("ld.global.b32 %r1;") == 0


def test_the_defaults_are_those_most_models_run():
    defaults = default_cases()
    assert {case.target for case in defaults} == {"sm_80", "sm_89", "sm_90", "sm_120"}
    assert {case.kernel for case in defaults} == {case.kernel for case in all_cases()}
    assert {case.head_dim for case in defaults} == {64, 128}
    assert {case.dtype for case in defaults} == {"bf16"}
    assert {case.block_size for case in defaults} == {0, 16}  # 0: the kernel knows no blocks


def test_any_two_values_of_the_combinations_meet_in_the_pairwise_selection():
    def pairs(cases):
        return {
            (i, case[i], j, case[j])
            for case in cases
            if case.target != "gfx942"
            for i in range(len(case))
            for j in range(i)
        }

    assert pairs(pairwise_cases()) == pairs(all_cases())
    assert len(pairwise_cases()) < 80


def test_what_is_the_same_in_all_rows_stands_once_above_the_table():
    row = Row("split", "sm_90", "bf16", 64, 16, "16x64 4w 5s", 62, 0, 37_376, 6, "mma", "4 16")
    lines = table(
        [row, replace(row, target="sm_80", registers=70, programs=4)], COLUMNS
    ).splitlines()
    assert lines == [
        "kernel split, dtype bf16, head 64, block 16, tile 16x64 4w 5s, spilled B 0,"
        " shared B 37376, products mma, copies B 4 16",
        "",
        "| target | registers | programs |",
        "|---|---:|---:|",
        "| sm_90 | 62 | 6 |",
        "| sm_80 | 70 | 4 |",
    ]


def test_a_row_without_a_result_has_every_column_and_says_why():
    row = Row("split", "gfx942", "bf16", 64, 16, problem="two\nlines")
    lines = table([row], COLUMNS).splitlines()
    assert {line.count("|") for line in lines} == {14}
    assert lines[-1] == "| split | gfx942 | bf16 | 64 | 16 |  |  |  |  |  |  |  | two lines |"
