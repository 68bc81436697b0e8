"""Static against continuous batching, drawn and counted, with a model that costs nothing.

python -m chapters.ch02_scheduler.measure [--mine]

Static batching fills all seats, and lets nobody in before the last of them has ended. Continuous
batching fills a seat as soon as it is empty. Both are the same scheduler: static batching only
adds the next requests later.
"""

import argparse
import sys
from random import Random
from typing import Any, NamedTuple

from benchmarks.machine import machine
from chapters.ch02_scheduler.chapter import CHAPTER
from chapters.measuring import stages_for
from chapters.stages import Stages

SEATS = 4
NUM_REQUESTS = 16
BLOCK_SIZE = 4
ROOMY, TIGHT = 100, 14
BUDGET = 64
TOKEN = 1


class Request(NamedTuple):
    """How many tokens come in, and how many go out."""

    num_prompt_tokens: int
    max_tokens: int


class Run(NamedTuple):
    """What a workload came to: a picture, a row a request and a letter a step, and figures."""

    rows: list[str]
    num_steps: int
    num_tokens: int
    num_preemptions: int
    mean_end: float


def main() -> None:
    """Print the three pictures and the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mine", action="store_true", help="let your own scheduler decide")
    mine = parser.parse_args().mine
    code, requests = stages_for(CHAPTER, mine), workload()
    print(f"{'your' if mine else 'the reference'} scheduler, {machine()}")
    print(f"{NUM_REQUESTS} requests that come together, {SEATS} seats, budget {BUDGET} tokens")
    runs = {
        "static": run(code, requests, SEATS, ROOMY),
        "continuous": run(code, requests, NUM_REQUESTS, ROOMY),
        f"continuous, {TIGHT} blocks of {BLOCK_SIZE}": run(code, requests, NUM_REQUESTS, TIGHT),
    }
    print("\n. waits   P prefill   d decode   x preempted")
    for name, each in runs.items():
        print(f"\n{name}\n  prompt+output")
        for request, row in zip(requests, each.rows, strict=True):
            print(f"  {request.num_prompt_tokens:>6}+{request.max_tokens:<6} {row}")
    print(f"\n{'':<27}{'steps':>8}{'idle seats':>14}{'tokens a step':>15}", end="")
    print(f"{'mean end':>10}{'preemptions':>13}")
    for name, each in runs.items():
        print(line(name, each))


def workload() -> list[Request]:
    """Answers of 10 tokens on average: many are short, a few are long."""
    random = Random(0)
    return [
        Request(random.randint(2, 12), 1 + min(29, int(random.expovariate(1 / 9))))
        for _ in range(NUM_REQUESTS)
    ]


def run(stages: Stages, requests: list[Request], group_size: int, num_blocks: int) -> Run:
    """Run all requests; the next group of them comes when the one before has ended."""
    ch01, ch02 = stages.load("ch01_sequence"), stages.load(CHAPTER.name)
    scheduler = ch02.Scheduler(
        ch02.CountingPool(num_blocks, BLOCK_SIZE), BUDGET, SEATS, max_model_len=BUDGET
    )
    sequences = [
        ch01.Sequence(
            f"{i}",
            [TOKEN] * each.num_prompt_tokens,
            ch01.SamplingParams(max_tokens=each.max_tokens),
        )
        for i, each in enumerate(requests)
    ]
    rows = [""] * len(sequences)
    num_added = num_steps = 0
    ends: dict[str, int] = {}
    while len(scheduler.finished) < len(sequences):
        if not scheduler.waiting and not scheduler.running:
            for sequence in sequences[num_added : num_added + group_size]:
                scheduler.add(sequence)
            num_added += group_size
        was_running = list(scheduler.running)
        step = scheduler.schedule()
        if not step.decodes + step.prefills:
            sys.exit(f"step {num_steps + 1} computes nothing, and {len(sequences)} are not done")
        for i, sequence in enumerate(sequences):
            preempted = sequence in was_running and sequence in scheduler.waiting
            rows[i] += letter(sequence, step, preempted)
        scheduler.commit(step, [TOKEN] * len(step.decodes + step.prefills))
        num_steps += 1
        for sequence in scheduler.finished:
            ends.setdefault(sequence.request_id, num_steps)
    num_tokens = sum(sequence.num_output_tokens for sequence in sequences)
    mean_end = sum(ends.values()) / len(ends)
    return Run(
        [row.rstrip() for row in rows], num_steps, num_tokens, scheduler.preemptions, mean_end
    )


def letter(sequence: Any, step: Any, preempted: bool) -> str:
    """What a sequence does in a step."""
    if sequence in step.prefills:
        return "P"
    if sequence in step.decodes:
        return "d"
    if sequence.finish_reason is not None:
        return " "
    return "x" if preempted else "."


def line(name: str, run: Run) -> str:
    """A row of the table. A seat is used when its sequence gains a token."""
    num_seats = run.num_steps * SEATS
    num_idle = num_seats - run.num_tokens
    idle = f"{num_idle} ({num_idle / num_seats:.0%})"
    tokens_a_step = run.num_tokens / run.num_steps
    return (
        f"{name:<27}{run.num_steps:>8}{idle:>14}{tokens_a_step:>15.2f}"
        f"{run.mean_end:>10.1f}{run.num_preemptions:>13}"
    )


if __name__ == "__main__":
    main()
