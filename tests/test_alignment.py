"""Token for token and logit for logit equal to transformers, on the real model, in float32."""

import pytest
import torch

from minivllm.model.loader import resolve_model
from minivllm.tokenizer import Tokenizer
from tests import texts
from tests.alignment import SITUATIONS, Oracle, RecordingEngine

pytestmark = pytest.mark.model

NUM_TOKENS = 64
NUM_SITUATION_TOKENS = 32


@pytest.fixture(scope="module")
def folder():
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def oracle(folder):
    from transformers import AutoModelForCausalLM

    return Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


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


SITUATION_PROMPTS = ["story[:100]", "lighthouse", "code", "numbers", "visitor 0", "other scripts"]


@pytest.fixture(scope="module")
def situation_prompts(prompts):
    return {name: prompts[name] for name in SITUATION_PROMPTS}


def test_20_prompts_agree_one_by_one(folder, oracle, prompts):
    engine = RecordingEngine(folder, enable_prefix_caching=False)
    for name, prompt in prompts.items():
        engine.check({name: prompt}, oracle, NUM_TOKENS)


def test_20_prompts_agree_in_one_batch(folder, oracle, prompts):
    engine = RecordingEngine(folder)
    engine.check(prompts, oracle, NUM_TOKENS)
    assert engine.engine.stats()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_6_prompts_agree_when(folder, oracle, situation_prompts, situation):
    situation(folder, situation_prompts, oracle, NUM_SITUATION_TOKENS)


def test_transformers_own_generate_agrees(folder, oracle, situation_prompts):
    outputs = RecordingEngine(folder).run(situation_prompts, NUM_SITUATION_TOKENS)
    for name, prompt in situation_prompts.items():
        assert outputs[name].token_ids == oracle.generate(prompt, NUM_SITUATION_TOKENS), name
