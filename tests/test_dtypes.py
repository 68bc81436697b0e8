"""bfloat16 and float16 on a CPU, against transformers in the same dtype.

The rule is that of RecordingEngine.check_half_precision.
"""

import random

import pytest

from minivllm.model.loader import resolve_model
from minivllm.tokenizer import Tokenizer
from tests import texts
from tests.alignment import RecordingEngine
from tests.tiny_models import VOCAB_SIZE, save_model

NUM_TOKENS = 24


def check_dtype(folder, dtype, prompts):
    """Run all prompts in one batch; returns how many of the tokens the gap decides."""
    engine = RecordingEngine(folder, dtype=dtype)
    decided = engine.check_half_precision(prompts, folder, dtype, NUM_TOKENS)
    return decided, NUM_TOKENS * len(prompts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["llama3-rope", "qwen2", "qwen3"])
def test_a_tiny_model_agrees_as_far_as_its_dtype_reaches(tmp_path, variant, dtype):
    save_model(variant, tmp_path)
    rng = random.Random(variant)
    prompts = {
        str(length): [rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 16, 45)
    }
    decided, total = check_dtype(tmp_path, dtype, prompts)
    assert decided > total / 40, "the rule says nothing about these tokens"


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_real_model_agrees_as_far_as_its_dtype_reaches(dtype):
    folder = resolve_model("smollm2-135m")
    encode = Tokenizer(folder).encode
    prompts = {
        "lighthouse": encode(texts.LIGHTHOUSE),
        "code": encode(texts.CODE),
        "visitor": encode(texts.SYSTEM_PROMPT + texts.QUESTIONS[0]),
    }
    decided, total = check_dtype(folder, dtype, prompts)
    assert decided > total / 4, "the rule says nothing about most tokens"
