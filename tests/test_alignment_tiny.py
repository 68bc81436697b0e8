"""Token for token and logit for logit equal to transformers, on tiny random models."""

import random

import pytest

from tests.alignment import SITUATIONS, Oracle, RecordingEngine
from tests.tiny_models import VARIANTS, VOCAB_SIZE, save_model

NUM_TOKENS = 24
LENGTHS = {"a": 21, "b": 37, "c": 64, "d": 90, "e": 33, "f": 50}


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request, tmp_path_factory):
    """(folder, prompts, oracle) of one architecture."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = Oracle(save_model(request.param, folder))
    rng = random.Random(request.param)
    prompts = {
        name: [rng.randrange(VOCAB_SIZE) for _ in range(length)] for name, length in LENGTHS.items()
    }
    return folder, prompts, oracle


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_a_tiny_model_agrees_when(tiny, situation):
    folder, prompts, oracle = tiny
    situation(folder, prompts, oracle, NUM_TOKENS)


def test_a_tiny_model_agrees_alone_and_in_a_batch(tiny):
    folder, prompts, oracle = tiny
    RecordingEngine(folder).check(prompts, oracle, NUM_TOKENS)
    engine = RecordingEngine(folder)
    for name, prompt in prompts.items():
        engine.check({name: prompt}, oracle, NUM_TOKENS)


def test_transformers_own_generate_agrees(tiny):
    folder, prompts, oracle = tiny
    outputs = RecordingEngine(folder).run(prompts, NUM_TOKENS)
    for name, prompt in prompts.items():
        assert outputs[name].token_ids == oracle.generate(prompt, NUM_TOKENS)
