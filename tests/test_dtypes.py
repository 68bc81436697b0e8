"""bfloat16 and float16 on a CPU, against transformers in the same dtype.

Two right programs round differently, so tokens may differ where the two best logits lie closer
together than rounding reaches. The rule: measure transformers' own error in the dtype, its
largest distance from its float32 logits on the same tokens. Our error must stay within twice
that, and our token must be transformers' wherever the gap between its two best logits exceeds
the error.
"""

import random

import pytest
import torch

from minivllm.model.loader import resolve_model
from minivllm.tokenizer import Tokenizer
from tests import texts
from tests.alignment import Oracle, RecordingEngine
from tests.tiny_models import VOCAB_SIZE, save_model

NUM_TOKENS = 24


def check_dtype(folder, dtype, prompts):
    """Run all prompts in one batch; returns how many of the tokens the gap decides."""
    from transformers import AutoModelForCausalLM

    engine = RecordingEngine(folder, dtype=dtype)
    outputs = engine.run(prompts, NUM_TOKENS)
    load = AutoModelForCausalLM.from_pretrained
    same = Oracle(load(folder, dtype=getattr(torch, dtype)))
    exact = Oracle(load(folder, dtype=torch.float32))
    rows = []
    for name, prompt in prompts.items():
        tokens = outputs[name].token_ids
        theirs, true = same.logits(prompt, tokens), exact.logits(prompt, tokens)
        rows.append((torch.tensor(tokens), engine.logits(name, NUM_TOKENS), theirs, true))
    tokens, ours, theirs, true = (torch.cat(part) for part in zip(*rows, strict=True))
    their_error = (theirs - true).abs().max()
    our_error = (ours - true).abs().max()
    assert their_error > 0, "the dtype made no difference: it was not used"
    assert our_error <= 2 * their_error
    best = theirs.topk(2).values
    is_decided = best[:, 0] - best[:, 1] > their_error
    assert torch.equal(tokens[is_decided], theirs.argmax(dim=-1)[is_decided])
    assert engine.engine.runner._kv[0].keys.dtype == getattr(torch, dtype)
    return int(is_decided.sum()), len(tokens)


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
