"""The long proof: python -m tests.proof [--workloads N] [--seed N] [--jobs N]."""

from __future__ import annotations

import argparse
import os
import sys

from tests.proof.parallel import prove
from tests.proof.report import failure_of, report
from tests.proof.workloads import HASHES, make_workload


def replay(seed: int, hash_name: str | None) -> int:
    """Play one workload alone, and tell its story if it fails."""
    workload = make_workload(seed, hash_name)
    player, error = failure_of(workload)
    if error is None:
        print(f"workload {seed} holds: {player.num_requests} requests, {player.num_steps} steps")
        return 0
    print(report(workload))
    return 1


def main(arguments: list[str] | None = None) -> int:
    """0 if every workload held, and they met every situation there is; else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--workloads", type=int, default=100_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first workload")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes")
    parser.add_argument("--hash", choices=list(HASHES), help="for all; default: drawn for each")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play this workload alone")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return replay(options.replay, options.hash)
    if options.workloads < 1 or options.jobs < 1:
        parser.error("--workloads and --jobs must be 1 or more")
    seeds = range(options.seed, options.seed + options.workloads)
    summary, failed = prove(seeds, options.hash, options.jobs)
    if failed is not None:
        print(report(make_workload(failed, options.hash)))
        return 1
    print(summary.table())
    problems = summary.problems()
    for problem in problems:
        print(f"not enough to prove anything: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
