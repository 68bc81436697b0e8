"""The command line: `python -m benchmarks.gpu PART`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.gpu.report import Report, markdown_table

PARTS = ("tests", "align", "bench", "tune")
NEEDED = {
    "tests": ("triton", "pytest", "hypothesis"),
    "align": ("triton", "transformers", "safetensors", "xxhash"),
    "bench": ("triton", "transformers", "safetensors", "xxhash"),
    "tune": ("triton",),
}
CANNOT_RUN = 2


def missing_here(part: str) -> str | None:
    """The first thing this machine lacks for the part; None: it can run."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU on this machine"
    for package in NEEDED[part]:
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    return None


def run_part(part: str, device: torch.device, report: Report) -> None:
    """Run it; what it needs is imported only now."""
    if part == "tests":
        from benchmarks.gpu.launched_tests import run_launched_tests

        run_launched_tests(report)
    elif part == "align":
        from benchmarks.gpu.align import align

        align(device, report)
    elif part == "tune":
        from benchmarks.gpu.tune import tune

        tune(device, report)
    else:
        from benchmarks.gpu.bench import bench

        bench(device, report)


def run_and_keep(part: str, out: Path) -> Report:
    """Run the part; its file is there from the start, and new with each finding."""
    report, card, started = Report(part), torch.cuda.get_device_name(), time.monotonic()

    def write() -> None:
        report.write(out, card, time.monotonic() - started)

    def keep() -> None:
        with suppress(OSError):  # the disk is full, say: no reason to stop measuring
            write()

    write()  # where nothing can be written nothing need be measured
    report.keep = keep
    try:
        with report.attempt(part):
            run_part(part, torch.device("cuda"), report)
        report.finished = True
    finally:
        print_report(report, card)
        write()
    return report


def print_report(report: Report, card: str) -> None:
    """The table, then notes and problems."""
    print(f"\n{card}\n\n{markdown_table(report.figures)}\n")
    for line in (*report.notes, *(f"PROBLEM: {problem}" for problem in report.problems)):
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all promises hold; 1: a problem, printed; 2: this machine cannot run the part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, help="JSON file (default build/gpu-PART.json)")
    options = parser.parse_args(arguments)
    missing = missing_here(options.part)
    if missing:
        print(f"benchmarks.gpu {options.part}: {missing}", file=sys.stderr)
        return CANNOT_RUN
    os.environ["HF_HUB_OFFLINE"] = "1"
    out = options.out or Path("build", f"gpu-{options.part}.json")
    report = run_and_keep(options.part, out)
    print(f"figures: {out}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
