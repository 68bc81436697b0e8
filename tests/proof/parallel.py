"""Many workloads in several processes, with a progress bar."""

from __future__ import annotations

import multiprocessing

from tqdm import tqdm

from tests.proof.summary import Summary
from tests.proof.workloads import make_workload

CHUNK = 50  # workloads a process plays between two reports

Task = tuple[range, str | None]


def play_chunk(task: Task) -> tuple[Summary, int | None]:
    """Play workloads until one fails; what held, and the seed of the one that failed."""
    seeds, hash_name = task
    summary = Summary()
    for seed in seeds:
        workload = make_workload(seed, hash_name)
        try:
            summary.play([workload])
        except (Exception, KeyboardInterrupt):
            return summary, seed
    return summary, None


def prove(seeds: range, hash_name: str | None, num_jobs: int) -> tuple[Summary, int | None]:
    """Play the workloads of all seeds in `num_jobs` processes; stop at the first failure.

    Returns what held, and the seed of a workload that did not.
    """
    tasks = [(seeds[i : i + CHUNK], hash_name) for i in range(0, len(seeds), CHUNK)]
    total = Summary()
    with (
        # spawn works alike on every system, and inherits no state of this process.
        multiprocessing.get_context("spawn").Pool(num_jobs) as pool,
        tqdm(total=len(seeds), unit=" workloads", smoothing=0, disable=None) as bar,
    ):
        for summary, failed in pool.imap_unordered(play_chunk, tasks):
            total.add(summary)
            bar.update(len(summary.num_steps))
            if failed is not None:
                return total, failed
    return total, None
