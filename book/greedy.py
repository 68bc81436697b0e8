"""How many wrong answers of the chapters a comparison of greedy outputs would find.

    python -m book.greedy     writes docs/figures/museum-greedy.txt (some minutes, the real model)

Six questions behind one system prompt, asked one after another, so that five of them find its
beginning cached. The engine is the chapters' own, with one planted fault; what it says is compared
with what it says without.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from book.places import FIGURES, write
from chapters.contents import find_chapter
from chapters.engine import INSTRUCTIONS, Limits, time_request, with_suffix_attention
from chapters.stages import Stages
from chapters.targets import MUTANT, make_stages
from chapters.workbook import open_workbook

COUNTRIES = ("France", "Italy", "Japan", "Egypt", "Peru", "Norway")
MAX_TOKENS = 16
FAULTS = {
    "6": (
        "unchained_key",
        "published_at_allocation",
        "partial_block_published",
        "share_is_not_counted",
        "cache_is_not_counted",
        "hits_behind_the_new_blocks",
        "head_released_first",
    ),
    "7": (
        "suffix_positions_from_0",
        "suffix_slots_from_0",
        "attention_cannot_see_the_prefix",
        "suffix_without_a_mask",
        "scores_not_scaled",
        "hits_not_given_to_allocate",
    ),
}


def answers(stages: Stages, network: Any) -> list[list[int]]:
    """The token ids that an engine of these stages says to each question, greedily."""
    engine = with_suffix_attention(
        stages, network, Limits(num_blocks=64, eos_token_ids=network.eos_token_ids)
    )
    params = stages.load("ch01_sequence").SamplingParams(max_tokens=MAX_TOKENS)
    said = []
    for country in COUNTRIES:
        question = f"What is the capital of {country}?"
        prompt = network.tokenizer.apply_chat_template(
            [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
        )
        timed = time_request(engine, country, prompt, params)
        said.append(timed.sequence.token_ids[len(prompt) :])
    return said


def table(network: Any, scratch: Path) -> Iterator[str]:
    """One line for each fault: how many first tokens, and how many answers, are right."""
    right = answers(Stages(), network)
    yield f"{'chapter':>7}  {'planted':<34}{'first token right':>18}{'answer right':>14}"
    for number, names in FAULTS.items():
        chapter = find_chapter(number)
        for name in names:
            stages = make_stages(MUTANT + name, chapter, open_workbook(), scratch)
            yield f"{number:>7}  {name:<34}" + _compared(stages, network, right)


def _compared(stages: Stages, network: Any, right: list[list[int]]) -> str:
    try:
        said = answers(stages, network)
    except Exception as error:  # whatever a fault leads to is what this table is about
        return f"{type(error).__name__:>18}"
    pairs = list(zip(said, right, strict=True))
    first = sum(ours[0] == theirs[0] for ours, theirs in pairs)
    whole = sum(ours == theirs for ours, theirs in pairs)
    return f"{f'{first} of {len(right)}':>18}{f'{whole} of {len(right)}':>14}"


def main() -> int:
    """Write the table, and show it as it grows."""
    from chapters.model import load_network  # torch and the model: slow to load

    lines = [machine()]
    with tempfile.TemporaryDirectory() as scratch:
        for line in table(load_network(), Path(scratch)):
            print(line, flush=True)
            lines.append(line)
    write(FIGURES / "museum-greedy.txt", "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
