"""Token for token and logit for logit equal to transformers, on the real model, in float32."""

import pytest
import torch
from minivllm.tokenizer import Tokenizer

from minivllm.model.loader import resolve_model
from tests import texts
from tests.alignment import (
    SITUATIONS,
    RecordingEngine,
    pairs,
    transformers_greedy,
    whole_blocks,
)

pytestmark = pytest.mark.model

NUM_TOKENS = 64
NUM_SITUATION_TOKENS = 32


@pytest.fixture(scope="module")
def folder():
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def oracle(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(folder):
    """20 prompts of 1 to 600 tokens."""
    encode = Tokenizer(folder).encode
    story = encode(texts.REPAIR_CAFE + texts.LIGHTHOUSE + texts.CODE + texts.NUMBERS)
    found = {f"story[:{n}]": story[:n] for n in (1, 2, 15, 16, 17, 64, 100, 257, 450, 600)}
    found["a question"] = encode("The capital of France is")
    found["lighthouse"] = encode(texts.LIGHTHOUSE)
    found["code"] = encode(texts.CODE)
    found["numbers"] = encode(texts.NUMBERS)
    found["other scripts"] = encode(texts.OTHER_SCRIPTS)
    for i, question in enumerate(texts.QUESTIONS):
        found[f"visitor {i}"] = encode(texts.SYSTEM_PROMPT + question)
    found["one word often"] = encode("again " * 40)
    assert len(found) == 20
    assert {len(p) for p in found.values()} >= {1, 600}
    return found


@pytest.fixture(scope="module")
def expected(oracle, prompts):
    return {name: transformers_greedy(oracle, p, NUM_TOKENS) for name, p in prompts.items()}


SITUATION_PROMPTS = ["story[:100]", "lighthouse", "code", "numbers", "visitor 0", "other scripts"]


@pytest.fixture(scope="module")
def situation_prompts(prompts):
    return {name: prompts[name] for name in SITUATION_PROMPTS}


@pytest.fixture(scope="module")
def expected_in_situations(oracle, situation_prompts, expected):
    others = whole_blocks(situation_prompts) | pairs(situation_prompts)
    return expected | {
        name: transformers_greedy(oracle, p, NUM_SITUATION_TOKENS) for name, p in others.items()
    }


def test_20_prompts_agree_one_by_one(folder, prompts, expected):
    engine = RecordingEngine(folder, enable_prefix_caching=False)
    for name, prompt in prompts.items():
        engine.check({name: prompt}, expected, NUM_TOKENS)


def test_20_prompts_agree_in_one_batch(folder, prompts, expected):
    engine = RecordingEngine(folder)
    engine.check(prompts, expected, NUM_TOKENS)
    assert engine.engine.stats()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_6_prompts_agree_when(folder, situation_prompts, expected_in_situations, situation):
    situation(folder, situation_prompts, expected_in_situations, NUM_SITUATION_TOKENS)
