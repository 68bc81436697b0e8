"""Chapter 5 with the real model, a step of its own: `python -m chapters check 5 --model`."""

import pytest

from chapters.engine import Limits, with_reference_attention
from chapters.testing import task
from minivllm.config import DEFAULT_MODEL
from minivllm.model.download import cache_folder

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        not (cache_folder() / DEFAULT_MODEL).is_dir(),
        reason="the model is not here: python -m minivllm download",
    ),
]

PROMPTS = ["The capital of France is", "One, two, three,"]
NUM_TOKENS = 4


def texts(make_engine, stages, prompts, limits):
    """How the assembled engine continues prompts that run together, greedily, and how much of
    each it found cached."""
    from chapters.model import load_network

    network = load_network()
    engine = make_engine(stages, network, limits)
    params = stages.load("ch01_sequence").SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    sequences = [
        engine.add(str(i), network.tokenizer.encode(prompt), params)
        for i, prompt in enumerate(prompts)
    ]
    cached = {}
    while engine.has_unfinished:
        for sequence, start, _ in engine.step():
            cached.setdefault(sequence.request_id, start)
    return [
        (network.tokenizer.decode(sequence.token_ids[sequence.num_prompt_tokens :]), start)
        for sequence, start in zip(sequences, cached.values(), strict=True)
    ]


def finished_engine_continues(prompts):
    """The same by the finished engine."""
    from minivllm import LLM, SamplingParams

    llm = LLM(num_kv_blocks=64)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.text for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def right():
    return finished_engine_continues(PROMPTS)


@task("5.4", "I4")
def test_your_engine_continues_texts_as_the_finished_one_does(stages, right):
    found = texts(with_reference_attention, stages, PROMPTS, Limits(num_blocks=32))
    for prompt, (text, _), wanted in zip(PROMPTS, found, right, strict=True):
        assert text == wanted, f"{prompt!r} goes on {text!r}; the finished engine says {wanted!r}"
