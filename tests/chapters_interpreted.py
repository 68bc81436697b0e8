"""Run by test_chapters_assembled.py with TRITON_INTERPRET=1, in a process of its own."""

from chapters.engine import Limits, with_chapter_4_kernels, with_reference_attention
from chapters.model import random_network
from chapters.stages import Stages

PROMPTS = [[3, 50, 7, 7, 19], [80], [12, 13, 14, 15, 16, 17, 18, 19, 20]]


def generate(make_engine):
    stages = Stages()
    limits = Limits(num_blocks=12, block_size=4, max_num_batched_tokens=64, max_model_len=32)
    engine = make_engine(stages, random_network(), limits)
    params = stages.load("ch01_sequence").SamplingParams(max_tokens=4)
    sequences = [engine.add(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    engine.run()
    return [sequence.token_ids for sequence in sequences]


def test_an_engine_with_the_kernels_generates_what_one_with_their_reference_does():
    assert generate(with_chapter_4_kernels) == generate(with_reference_attention)
