"""Token for token and logit for logit equal to transformers, on tiny random models."""

import random

import pytest

from tests.alignment import (
    SITUATIONS,
    RecordingEngine,
    pairs,
    transformers_greedy,
    whole_blocks,
)
from tests.tiny_models import VARIANTS, VOCAB_SIZE, save_model

NUM_TOKENS = 24
LENGTHS = {"a": 21, "b": 37, "c": 64, "d": 90, "e": 33, "f": 50}


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request, tmp_path_factory):
    """(folder, prompts, what transformers generates for all prompts and their variations)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, folder)
    rng = random.Random(request.param)
    prompts = {
        name: [rng.randrange(VOCAB_SIZE) for _ in range(length)] for name, length in LENGTHS.items()
    }
    every = prompts | whole_blocks(prompts) | pairs(prompts)
    expected = {
        name: transformers_greedy(model, prompt, NUM_TOKENS) for name, prompt in every.items()
    }
    return folder, prompts, expected


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_a_tiny_model_agrees_when(tiny, situation):
    folder, prompts, expected = tiny
    situation(folder, prompts, expected, NUM_TOKENS)


def test_a_tiny_model_agrees_alone_and_in_a_batch(tiny):
    folder, prompts, expected = tiny
    RecordingEngine(folder).check(prompts, expected, NUM_TOKENS)
    engine = RecordingEngine(folder)
    for name, prompt in prompts.items():
        engine.check({name: prompt}, expected, NUM_TOKENS)
