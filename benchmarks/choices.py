"""Choices of a prefix cache, counted on one chat without a model: tokens found, blocks kept.

    python -m benchmarks.choices

Sixteen conversations on one system prompt of 200 tokens, six turns each, in a pool that holds all
of it unless a table says otherwise. Everything is counted, nothing is timed: any machine prints
the same. docs/choices.md shows these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.conversations import Chat, ChatShape
from minivllm import EngineConfig, LLMEngine, SamplingParams
from minivllm.core.batch import SampledToken, ScheduledBatch

SHAPE = ChatShape(conversations=16, turns=6, system_tokens=200, user_tokens=37, answer_tokens=61)
BLOCK_SIZES = (1, 4, 16, 64)
POOL_PERCENTS = (25, 50, 100)
SEATS = 4

CACHEABLE: dict[str, Callable[[list[int]], int | None]] = {
    "all": lambda prompt: None,
    "prompts": len,
    "system prompt": lambda prompt: SHAPE.system_tokens,
}
"""How many leading tokens of a request may be cached, by its prompt; None is all, output too."""


class CountingRunner:
    """Implements the Runner protocol without a model: each token is the one after the last."""

    vocab_size = 50_000
    max_model_len = 4_096
    eos_token_ids: Sequence[int] = ()

    def kv_bytes_per_block(self, block_size: int) -> int:
        """One byte a position: nothing is stored."""
        return block_size

    def init_kv(self, num_blocks: int, block_size: int) -> None:
        """Nothing to make."""

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        """Count on for each sequence whose newest token is computed."""
        return [
            SampledToken((sequence.token_ids[-1] + 1) % self.vocab_size)
            for sequence in batch.sequences
            if sequence.samples
        ]


@dataclass(frozen=True)
class Counts:
    """What one replay of the chat came to.

    prompt_tokens     tokens of all prompts
    found_tokens      those among them that need not be computed
    blocks_looked_up  whole blocks of all prompts: a key is made, and searched, for each
    evicted_blocks    blocks that the cache gave up
    """

    prompt_tokens: int
    found_tokens: int
    blocks_looked_up: int
    evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found."""
        return self.found_tokens / self.prompt_tokens


def replay(block_size: int, pool_percent: int = 100, cacheable: str = "all") -> Counts:
    """Run the chat through the engine.

    pool_percent   of the blocks that all text fills, and a block a seat for what is growing
    cacheable      a name in CACHEABLE
    """
    num_blocks = SHAPE.blocks_needed(block_size) * pool_percent // 100 + SEATS
    config = EngineConfig(block_size=block_size, num_kv_blocks=num_blocks, max_num_seqs=SEATS)
    engine = LLMEngine(config, CountingRunner())
    chat = Chat(SHAPE, CountingRunner.vocab_size)
    params = SamplingParams(max_tokens=SHAPE.answer_tokens)
    blocks_looked_up = 0
    for turn in range(SHAPE.turns):
        for name, prompt in enumerate(chat.prompts(turn)):
            num_tokens = CACHEABLE[cacheable](prompt)
            engine.add_request(str(name), prompt, params, cacheable_tokens=num_tokens)
            blocks_looked_up += len(prompt) // block_size
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    chat.answer(int(output.request_id), output.token_ids)
    stats = engine.stats()
    return Counts(
        int(stats["prefix_query_tokens"]),
        int(stats["prefix_hit_tokens"]),
        blocks_looked_up,
        int(stats["evicted_blocks"]),
    )


def replay_whole_texts() -> Counts:
    """The same chat where an entry is all that one request computed, and is found whole or not."""
    chat, runner = Chat(SHAPE, CountingRunner.vocab_size), CountingRunner
    cached: set[tuple[int, ...]] = set()
    num_tokens = num_found = 0
    for turn in range(SHAPE.turns):
        for name, prompt in enumerate(chat.prompts(turn)):
            num_tokens += len(prompt)
            lengths = {len(entry) for entry in cached if len(entry) < len(prompt)}
            num_found += max((n for n in lengths if tuple(prompt[:n]) in cached), default=0)
            first = prompt[-1] + 1
            answer = [(first + i) % runner.vocab_size for i in range(SHAPE.answer_tokens)]
            cached.add((*prompt, *answer[:-1]))  # the last token's KV is never computed
            chat.answer(name, answer)
    return Counts(num_tokens, num_found, SHAPE.conversations * SHAPE.turns, 0)


def granularity_table() -> Iterator[str]:
    """What is found, and how many keys it takes, by what one entry holds."""
    yield f"{'an entry holds':<16}{'found':>10}{'of all':>9}{'keys':>10}"
    rows = [(f"{size} token{'s' * (size > 1)}", replay(size)) for size in BLOCK_SIZES]
    for name, counts in [*rows, ("a whole text", replay_whole_texts())]:
        found, keys = counts.found_tokens, counts.blocks_looked_up
        yield f"{name:<16}{found:>10,}{counts.hit_rate:>9.1%}{keys:>10,}"


def cacheable_table() -> Iterator[str]:
    """All that is computed, prompts only, the system prompt only, by the size of the pool."""
    yield f"{'pool':>5}   {'cacheable':<14}{'of all':>8}{'evicted':>9}"
    for percent in POOL_PERCENTS:
        for name in CACHEABLE:
            counts = replay(16, percent, name)
            yield f"{percent:>4}%   {name:<14}{counts.hit_rate:>8.1%}{counts.evicted_blocks:>9,}"


def main() -> int:
    """Print both tables."""
    for table in (granularity_table(), cacheable_table()):
        print("\n".join(table) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
