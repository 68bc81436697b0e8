"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.peers import settings
from benchmarks.peers.contestant import Answer, Job
from benchmarks.peers.contestants import start, vllm_variables
from benchmarks.peers.environment import check_environment, ensure_environment
from benchmarks.peers.errors import PeerError
from benchmarks.peers.figures import compare
from benchmarks.peers.host import measure_host
from benchmarks.peers.protocol import Worker
from benchmarks.peers.report import Report
from benchmarks.peers.rounds import Seat, take_turns
from benchmarks.peers.works import OURS, VLLM, VLLM_ONE_PROCESS, WORKS, Work
from minivllm.errors import ModelError
from minivllm.model.download import ensure_default_model

HOST = "host"
ROWS = (*(work.name for work in WORKS), HOST)


def main() -> int:
    """Print the table: 0, or 1 if the figures are doubtful, 2 if there are none."""
    arguments = _parse()
    try:
        report = _measure(arguments)
    except (PeerError, ModelError) as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if report is None:
        return 0
    print(report.as_text())
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    return int(bool(report.problems))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers",
        description="Side by side with vLLM's CPU build and with transformers.",
    )
    parser.add_argument(
        "rows", nargs="*", metavar="row", help=f"which ones; all, if none: {', '.join(ROWS)}"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="pairs of runs a row (default 5); ten times as many for host",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parser.add_argument(
        "--environment",
        type=Path,
        metavar="FOLDER",
        help="a virtual environment that has vLLM already, instead of making one in .peers/",
    )
    parser.add_argument(
        "--prepare-only", action="store_true", help="install what is missing, and measure nothing"
    )
    arguments = parser.parse_args()
    unknown = [row for row in arguments.rows if row not in ROWS]
    if unknown:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; it must be 1 or more")
    return arguments


def _measure(arguments: argparse.Namespace) -> Report | None:
    """Prepare what the rows need, and measure them. None if that was only to prepare."""
    rows = arguments.rows or ROWS
    works = [work for work in WORKS if work.name in rows]
    names = list(dict.fromkeys([OURS, *(peer for work in works for peer in work.peers)]))
    vllm_python = None
    if arguments.prepare_only or HOST in rows or {VLLM, VLLM_ONE_PROCESS} & {*names}:
        vllm_python = check_environment(arguments.environment or ensure_environment())
    model = ensure_default_model()
    if arguments.prepare_only:
        return None
    report = Report(machine(), _settings(), arguments.rounds, load=[_load()])
    try:
        if works:
            with ExitStack() as stack:
                workers = {
                    name: stack.enter_context(start(name, model, vllm_python)) for name in names
                }
                _compare_all(works, workers, _vocab_size(model), report)
        if HOST in rows and vllm_python is not None:
            report.host = measure_host(vllm_python, arguments.rounds, _tell)
    except PeerError as error:
        report.failure = str(error)
    report.load.append(_load())
    return report


def _compare_all(
    works: Sequence[Work], workers: Mapping[str, Worker], vocab_size: int, report: Report
) -> None:
    """Row after row. A contestant that gives up ends it; the rows before stay in the report."""
    report.settings["versions"] = {name: each.hello["versions"] for name, each in workers.items()}
    seats = {name: _seat(worker) for name, worker in workers.items()}
    for worker in workers.values():
        worker.rest()
    for work in works:
        pairs = take_turns(work, seats, report.num_rounds, vocab_size, _tell)
        report.comparisons += [compare(work, peer, each) for peer, each in pairs.items()]
        report.idle = {name: each.idle_share for name, each in workers.items()}


def _seat(worker: Worker) -> Seat:
    def ask(job: Job) -> Answer:
        return Answer(**worker.ask(asdict(job)))

    return Seat(ask, worker.rest)


def _settings() -> dict[str, Any]:
    return {
        "cores": settings.cores(),
        "dtype": "float32",
        "max_model_len": settings.MAX_MODEL_LEN,
        "max_num_seqs": settings.MAX_NUM_SEQS,
        "max_num_batched_tokens": settings.MAX_NUM_BATCHED_TOKENS,
        "kv_cache_gib": settings.KV_CACHE_GIB,
        "environment": settings.inherited() | settings.variables() | vllm_variables(),
    }


def _vocab_size(model: Path) -> int:
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size


def _load() -> float:
    return os.getloadavg()[0]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # A time limit from outside ends the contestants too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
