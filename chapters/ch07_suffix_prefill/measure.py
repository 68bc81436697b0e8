"""Time to first token with the real model, cold against warm, through chapters 1 to 7.

python -m chapters.ch07_suffix_prefill.measure [--mine]

Two people ask one assistant. Their prompts begin with the same instructions, and each goes on
with a question. The first one computes the instructions, the second finds them cached.
"""

import json
from collections.abc import Iterator
from datetime import date
from importlib.resources import files
from typing import Any

from chapters.ch05_model_runner.measure import machine, parse_arguments
from chapters.engine import Limits, Timed, time_request, with_suffix_attention
from chapters.model import load_network
from chapters.stages import Stages

PREFIX_LENGTHS = (100, 300, 1000)
QUESTIONS = ("May I bring my bicycle on a Sunday?", "What do I have to pay for a new battery?")


def main() -> None:
    """Print the table."""
    stages, whose = parse_arguments(__doc__)
    print(f"{whose}, {machine()}, {date.today()}")
    print("time to first token; the second person's prompt has the same instructions\n")
    for line in table(stages):
        print(line, flush=True)


def table(stages: Stages) -> Iterator[str]:
    """One line a length of the instructions."""
    network = load_network()
    assert network.tokenizer is not None
    encode = network.tokenizer.encode
    instructions = encode(copper_kettle())
    questions = [encode(f"\n\nVisitor: {question}\nAssistant:") for question in QUESTIONS]
    yield "instructions   first: computed        second: cached, computed        first / second"
    # A first request pays for memory that is touched and weights that are read for the first time.
    both(stages, network, instructions[:32], questions)
    for length in PREFIX_LENGTHS:
        cold, warm = both(stages, network, instructions[:length], questions)
        ratio = cold.first_token_seconds / warm.first_token_seconds
        yield (
            f"{length:>12}{computed(cold):>10}{cold.first_token_seconds:>10.2f} s"
            f"{warm.num_cached_tokens:>12}{computed(warm):>11}"
            f"{warm.first_token_seconds:>10.2f} s{ratio:>15.1f}"
        )


def both(
    stages: Stages, network: Any, instructions: list[int], questions: list[list[int]]
) -> list[Timed]:
    """Each question behind the instructions, one after another, in an engine of their own."""
    engine = with_suffix_attention(stages, network, Limits(num_blocks=128))
    params = stages.load("ch01_sequence").SamplingParams(max_tokens=1)
    return [
        time_request(engine, str(i), instructions + question, params)
        for i, question in enumerate(questions)
    ]


def computed(timed: Timed) -> int:
    """Tokens of the prompt that had to be computed."""
    return int(timed.sequence.num_prompt_tokens) - timed.num_cached_tokens


def copper_kettle() -> str:
    """What the demo's assistant must know, about 900 tokens, and the same once more."""
    script = json.loads((files("minivllm") / "demo.json").read_text(encoding="utf-8"))
    return "\n".join(script["system_prompt"] * 2)


if __name__ == "__main__":
    main()
