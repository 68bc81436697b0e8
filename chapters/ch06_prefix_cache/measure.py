"""How much of their prompts conversations find in the cache, by the size of the pool and its cap.

python -m chapters.ch06_prefix_cache.measure [--mine]

Conversations that begin with the same system prompt, their turns mixed at random. Each turn's
prompt is the whole conversation so far. Up to four requests run at a time.
"""

import argparse
from random import Random
from typing import Any, NamedTuple

from benchmarks.machine import machine
from chapters.ch06_prefix_cache.chapter import CHAPTER
from chapters.measuring import stages_for
from chapters.stages import Stages

BLOCK_SIZE = 16
NUM_CONVERSATIONS, NUM_TURNS = 20, 5
NUM_SYSTEM_TOKENS = 200
QUESTION, ANSWER = (20, 60), (30, 90)
VOCABULARY = 49_152
MAX_RUNNING = 4
POOLS = (96, 192, 384, 768)
SHARES = (0.0, 0.25, 1.0)
DRAWN_POOL, DRAWN_CONVERSATION = 384, 0
BAR = 40


class Turn(NamedTuple):
    """One request: the conversation, its prompt so far, and the answer that will be generated."""

    conversation: int
    prompt: list[int]
    answer: list[int]


class Result(NamedTuple):
    """What a workload came to.

    hit_rate    share of all prompt tokens that were found
    evictions   blocks that the cache has given up
    hits        for each turn of DRAWN_CONVERSATION: blocks found, blocks of the prompt
    """

    hit_rate: float
    evictions: int
    hits: list[tuple[int, int]]


def main() -> None:
    """Print the table, the bars and one conversation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mine", action="store_true", help="let your own cache find them")
    mine = parser.parse_args().mine
    code, turns = stages_for(CHAPTER, mine), workload()
    num_tokens = sum(len(turn.prompt) for turn in turns)
    most = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    print(f"{'your' if mine else 'the reference'} prefix cache, {machine()}")
    print(
        f"{NUM_CONVERSATIONS} conversations of {NUM_TURNS} turns, a system prompt of"
        f" {NUM_SYSTEM_TOKENS} tokens: {num_tokens:,} prompt tokens, the longest sequence {most}\n"
    )
    print("hit rate (and evictions), by the share of the pool that may stay idle")
    print(f"{'blocks':>8}{'tokens':>9}" + "".join(f"{share:>16.0%}" for share in SHARES))
    without_cap = {}
    for num_blocks in POOLS:
        results = [run(code, turns, num_blocks, share) for share in SHARES]
        cells = "".join(f"{each.hit_rate:>8.1%} {f'({each.evictions})':<7}" for each in results)
        print(f"{num_blocks:>8}{num_blocks * BLOCK_SIZE:>9}{cells}".rstrip())
        without_cap[num_blocks] = results[-1]
    print_bars(turns, without_cap)
    print(f"\nconversation {DRAWN_CONVERSATION + 1}, pool of {DRAWN_POOL} blocks, no cap")
    print("#: a block of the prompt that was found   +: one that was computed")
    for i, (num_hits, num_blocks) in enumerate(without_cap[DRAWN_POOL].hits):
        print(f"  turn {i + 1}  {'#' * num_hits}{'+' * (num_blocks - num_hits)}")


def print_bars(turns: list[Turn], without_cap: dict[int, Result]) -> None:
    """The hit rates without a cap, and what the system prompt alone would give."""
    num_tokens = sum(len(turn.prompt) for turn in turns)
    num_shared = NUM_SYSTEM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    bars = {"system prompt alone": (len(turns) - 1) * num_shared / num_tokens}
    bars |= {f"{num_blocks} blocks": each.hit_rate for num_blocks, each in without_cap.items()}
    print("\nno cap")
    for name, rate in bars.items():
        print(f"{name:>20} {'#' * round(rate * BAR):<{BAR}} {rate:.1%}")


def workload() -> list[Turn]:
    """The turns of all conversations in order of arrival, the same every time."""
    random = Random(6)

    def text(shortest: int, longest: int) -> list[int]:
        return [random.randrange(VOCABULARY) for _ in range(random.randint(shortest, longest))]

    system = text(NUM_SYSTEM_TOKENS, NUM_SYSTEM_TOKENS)
    histories = [list(system) for _ in range(NUM_CONVERSATIONS)]
    order = list(range(NUM_CONVERSATIONS)) * NUM_TURNS
    random.shuffle(order)
    turns = []
    for conversation in order:
        history = histories[conversation]
        history += text(*QUESTION)
        answer = text(*ANSWER)
        turns.append(Turn(conversation, list(history), answer))
        history += answer
    return turns


def run(code: Stages, turns: list[Turn], num_blocks: int, max_idle_share: float) -> Result:
    """Let all turns through one pool."""
    pool = code.load(CHAPTER.name).CachingBlockManager(num_blocks, BLOCK_SIZE, max_idle_share)
    make_sequence = code.load("ch01_sequence").Sequence
    running: list[tuple[int, Any]] = []
    num_hit_tokens, drawn = 0, []
    for turn in turns:
        # The next turn of a conversation comes after the answer to the one before.
        while len(running) >= MAX_RUNNING or turn.conversation in [each for each, _ in running]:
            pool.free(running.pop(0)[1])
        sequence = make_sequence("request", turn.prompt)
        num_hits = admit(pool, sequence, running)
        num_hit_tokens += num_hits * BLOCK_SIZE
        if turn.conversation == DRAWN_CONVERSATION:
            drawn.append((num_hits, -(-len(turn.prompt) // BLOCK_SIZE)))
        pool.commit(sequence, sequence.num_tokens)
        for token_id in turn.answer[:-1]:  # the last one ends it before its KV is computed
            sequence.append_token(token_id)
            admit(pool, sequence, running, num_new_tokens=1)
            pool.commit(sequence, sequence.num_tokens)
        running.append((turn.conversation, sequence))
    num_tokens = sum(len(turn.prompt) for turn in turns)
    return Result(num_hit_tokens / num_tokens, pool.evictions, drawn)


def admit(
    pool: Any, sequence: Any, running: list[tuple[int, Any]], num_new_tokens: int | None = None
) -> int:
    """Allocate a new sequence, or more for one that runs; others end early if need be.

    Returns the blocks that it found.
    """
    while True:
        # Looked up again each time: when somebody ends, the cap may evict a block just found.
        hits = pool.match(sequence) if num_new_tokens is None else []
        num_new = num_new_tokens or sequence.num_tokens - len(hits) * BLOCK_SIZE
        if pool.can_allocate(sequence, num_new, hits):
            pool.allocate(sequence, num_new, hits)
            return len(hits)
        pool.free(running.pop(0)[1])


if __name__ == "__main__":
    main()
