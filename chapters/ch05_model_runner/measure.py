"""The real model answers through the engine of chapters 1 to 5; how fast, alone and in a batch.

python -m chapters.ch05_model_runner.measure [--mine]
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from datetime import date
from time import perf_counter
from typing import Any

import torch

from chapters.contents import all_chapters
from chapters.engine import Limits, ask, with_reference_attention
from chapters.model import load_network
from chapters.stages import Stages
from chapters.workbook import open_workbook

QUESTION = "What is the capital of France?"
PROMPT = "In the spring the keeper of the lighthouse wrote a letter:"
BATCH_SIZES = (1, 2, 4, 8)
NUM_STEPS = 9


def main() -> None:
    """Print an answer and the table."""
    stages, whose = parse_arguments(__doc__)
    print(f"{whose}, {machine()}, {date.today()}\n")
    for answer in ask(stages, [QUESTION], make_engine=with_reference_attention):
        print(f"{answer}\n")
    print(f"decoding, {NUM_STEPS - 1} steps after the prefill, contexts of about 20 tokens")
    for line in table(stages):
        print(line, flush=True)


def parse_arguments(description: str | None) -> tuple[Stages, str]:
    """The stages to measure, and in words whose they are."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mine", action="store_true", help="your code, wherever you have it")
    if not parser.parse_args().mine:
        return Stages(), "the reference's code"
    workbook = open_workbook()
    mine = [chapter for chapter in all_chapters() if workbook.has(chapter)]
    if not mine:
        sys.exit("you have not started a chapter: python -m chapters start 1")
    numbers = ", ".join(str(chapter.number) for chapter in mine)
    files = {chapter.name: workbook.file(chapter) for chapter in mine}
    return Stages(files), f"your code of chapters {numbers}, else the reference's"


def machine() -> str:
    """Where this runs."""
    system = f"{platform.machine()} {platform.system()}"
    return f"{system}, {os.cpu_count()} cores, torch threads: {torch.get_num_threads()}"


def table(stages: Stages) -> Iterator[str]:
    """One line a batch size."""
    network = load_network()
    assert network.tokenizer is not None
    prompt = network.tokenizer.encode(PROMPT)
    yield "sequences   ms a step   tokens a second"
    for size in BATCH_SIZES:
        seconds = seconds_a_step(stages, network, prompt, size)
        yield f"{size:>9}{1000 * seconds:>12.0f}{size / seconds:>18.1f}"


def seconds_a_step(stages: Stages, network: Any, prompt: list[int], size: int) -> float:
    """The mean of all decode steps with so many sequences."""
    params = stages.load("ch01_sequence").SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True)
    engine = with_reference_attention(stages, network, Limits(num_blocks=64))
    for i in range(size):
        engine.add(str(i), prompt, params)
    engine.step()  # the prefills
    begin = perf_counter()
    engine.run()
    return (perf_counter() - begin) / (NUM_STEPS - 1)


if __name__ == "__main__":
    main()
