"""How much of the memory holds KV: one stretch for each sequence against blocks of 16.

python -m chapters.ch03_block_manager.measure [--mine]

The same requests, the same scheduler (chapter 2's) and the same memory, three pools. What is
counted is counted in the steps in which somebody waits: then memory is what is short.
"""

import argparse
from random import Random
from typing import Any, NamedTuple

from benchmarks.machine import machine
from chapters.ch03_block_manager.chapter import CHAPTER
from chapters.ch03_block_manager.contiguous import ContiguousPool
from chapters.measuring import stages_for
from chapters.stages import Stages

BLOCK_SIZE = 16
NUM_SLOTS = 4096
MAX_MODEL_LEN = 512
NUM_REQUESTS = 300
SHORTEST, LONGEST = 5, 240
DRAWN_STEP = 100
A_ROW = 64
TOKEN = 1
COLUMNS = "{:<34}{:>7}{:>11}{:>10}{:>10}{:>10}{:>8}"


class Run(NamedTuple):
    """What the workload came to with one pool; the means are over steps in which one waits.

    num_steps   until the last request has ended
    preempted   times a running sequence had to give way and begin anew
    running     sequences that run at a time
    holds_kv    share of the memory that holds KV
    reserved    share that belongs to a sequence, but is empty
    free        share that belongs to nobody
    drawn       the memory in step DRAWN_STEP, a character for each BLOCK_SIZE slots
    """

    num_steps: int
    preempted: int
    running: float
    holds_kv: float
    reserved: float
    free: float
    drawn: str


def main() -> None:
    """Print the table and the three pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mine", action="store_true", help="let your own pool hand out the blocks")
    mine = parser.parse_args().mine
    code = stages_for(CHAPTER, mine)
    print(f"{'your' if mine else 'the reference'} pool, {machine()}")
    print(
        f"{NUM_REQUESTS} requests that come together, each of {2 * SHORTEST} to {2 * LONGEST}"
        f" tokens; memory for {NUM_SLOTS} tokens\n"
    )
    paged = code.load(CHAPTER.name).BlockManager(NUM_SLOTS // BLOCK_SIZE, BLOCK_SIZE)
    runs = {
        f"one stretch of {MAX_MODEL_LEN} slots": run(
            code, ContiguousPool(NUM_SLOTS, lambda sequence: MAX_MODEL_LEN)
        ),
        "one stretch, its length foreseen": run(code, ContiguousPool(NUM_SLOTS, final_length)),
        f"blocks of {BLOCK_SIZE}": run(code, paged),
    }
    print(COLUMNS.format("", "steps", "preempted", "running", "holds KV", "reserved", "free"))
    for name, each in runs.items():
        shares = [f"{share:.1%}" for share in (each.holds_kv, each.reserved, each.free)]
        print(COLUMNS.format(name, *each[:2], f"{each.running:.1f}", *shares))
    print(f"\nthe memory in step {DRAWN_STEP}, {BLOCK_SIZE} slots a character")
    print("a letter: holds KV of one sequence   -: reserved, empty   .: free")
    for name, each in runs.items():
        print(f"\n  {name}")
        for start in range(0, len(each.drawn), A_ROW):
            print(f"    {each.drawn[start : start + A_ROW]}")


def final_length(sequence: Any) -> int:
    """What no real engine knows: how long the sequence will be. The last token needs no slot."""
    return int(sequence.num_prompt_tokens + sequence.params.max_tokens - 1)


def workload(code: Stages) -> list[Any]:
    """Many short requests and some long ones, the same every time."""
    random = Random(3)
    ch01 = code.load("ch01_sequence")
    sequences = []
    for i in range(NUM_REQUESTS):
        num_prompt_tokens = min(LONGEST, SHORTEST + int(random.expovariate(1 / 60)))
        max_tokens = min(LONGEST, SHORTEST + int(random.expovariate(1 / 80)))
        params = ch01.SamplingParams(max_tokens=max_tokens)
        sequences.append(ch01.Sequence(f"r{i}", [TOKEN] * num_prompt_tokens, params))
    return sequences


def run(code: Stages, pool: Any) -> Run:
    """Let all requests through the scheduler with this pool."""
    scheduler = code.load("ch02_scheduler").Scheduler(
        pool, MAX_MODEL_LEN, max_num_seqs=256, max_model_len=MAX_MODEL_LEN
    )
    for sequence in workload(code):
        scheduler.add(sequence)
    num_steps, samples, drawn = 0, [], ""
    while scheduler.waiting or scheduler.running:
        step = scheduler.schedule()
        num_steps += 1
        if num_steps == DRAWN_STEP:
            drawn = drawing(pool, scheduler.running)
        if scheduler.waiting:
            samples.append(sample(pool, scheduler.running))
        scheduler.commit(step, [TOKEN] * len(step.decodes + step.prefills))
    running, held, reserved, free = (
        sum(each) / len(samples) for each in zip(*samples, strict=True)
    )
    return Run(num_steps, scheduler.preemptions, running, held, reserved, free, drawn)


def sample(pool: Any, running: list[Any]) -> tuple[float, float, float, float]:
    """Sequences that run, and the shares of the memory that hold KV, are reserved, are free."""
    held = sum(sequence.num_tokens for sequence in running) / NUM_SLOTS
    taken = sum(len(slots_of(pool, sequence)) for sequence in running) / NUM_SLOTS
    return len(running), held, taken - held, 1 - taken


def slots_of(pool: Any, sequence: Any) -> list[int]:
    """The slots that belong to a sequence, position by position."""
    if isinstance(pool, ContiguousPool):
        return list(range(*pool.stretches[sequence]))
    slots: list[int] = pool.slot_mapping(sequence, 0, len(sequence.block_table) * BLOCK_SIZE)
    return slots


def drawing(pool: Any, running: list[Any]) -> str:
    """The memory, a character for each BLOCK_SIZE slots: a letter if any of them holds KV."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    slots = ["."] * NUM_SLOTS
    for i, sequence in enumerate(running):
        for position, slot in enumerate(slots_of(pool, sequence)):
            is_held = position < sequence.num_tokens
            slots[slot] = letters[i % len(letters)] if is_held else "-"
    pieces = [slots[start : start + BLOCK_SIZE] for start in range(0, NUM_SLOTS, BLOCK_SIZE)]
    return "".join(next((c for c in piece if c.isalpha()), piece[-1]) for piece in pieces)


if __name__ == "__main__":
    main()
