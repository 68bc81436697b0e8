"""Cache on or off, alone or in a batch, whole or in chunks: the same logits, to the last bit.

What the kernels in C promise of a row, the engine keeps for an answer. Of tokens alone one could
not be so sure: where two logits are nearly equal, a difference in the last bit shows, elsewhere it
hides.
"""

import random

import pytest
import torch

from minivllm.model.loader import resolve_model
from minivllm.tokenizer import Tokenizer
from tests import texts
from tests.alignment import SITUATIONS, AloneOracle, RecordingEngine
from tests.native import needs_native
from tests.tiny_models import VARIANTS, VOCAB_SIZE, save_model

pytestmark = needs_native

LENGTHS = {"a": 21, "b": 37, "c": 64, "d": 90, "e": 33, "f": 150}
by_name = pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request, tmp_path_factory):
    """(folder, prompts, oracle) of one architecture."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder)
    draw = random.Random(request.param)
    prompts = {
        name: [draw.randrange(VOCAB_SIZE) for _ in range(length)]
        for name, length in LENGTHS.items()
    }
    return folder, prompts, AloneOracle(folder)


@pytest.fixture(scope="module")
def real():
    """(folder, prompts, oracle) of the default model."""
    folder = resolve_model("smollm2-135m")
    encode = Tokenizer(folder).encode
    prompts = {
        name: encode(text)[:length]
        for name, text, length in [
            ("story", texts.REPAIR_CAFE + texts.LIGHTHOUSE, 300),
            ("code", texts.CODE, 100),
            ("numbers", texts.NUMBERS, 64),
            ("visitor", texts.SYSTEM_PROMPT + texts.QUESTIONS[0], 600),
            ("question", "The capital of France is", 600),
            ("other scripts", texts.OTHER_SCRIPTS, 600),
        ]
    }
    return folder, prompts, AloneOracle(folder)


@by_name
def test_a_tiny_model_gives_the_same_bits_when(tiny, situation):
    folder, prompts, oracle = tiny
    situation(folder, prompts, oracle, 24)


@pytest.mark.model
@by_name
def test_the_default_model_gives_the_same_bits_when(real, situation):
    folder, prompts, oracle = real
    situation(folder, prompts, oracle, 24)


def test_another_block_size_or_number_of_threads_changes_no_bit(tiny):
    folder, prompts, oracle = tiny
    threads = torch.get_num_threads()
    for block_size, num_threads in ((8, 1), (64, 2), (24, 3)):
        torch.set_num_threads(num_threads)
        try:
            RecordingEngine(folder, block_size=block_size).check(prompts, oracle, 8)
        finally:
            torch.set_num_threads(threads)


def test_a_changed_bit_would_be_seen(tiny):
    """The comparison itself: one logit moved to its neighbour among the float32 numbers."""
    folder, prompts, oracle = tiny
    prompt = {"a": prompts["a"]}
    token_ids = RecordingEngine(folder).run(prompt, 8)["a"].token_ids
    logits = oracle.logits(prompts["a"], token_ids)
    kept = logits[-1, 0].clone()
    logits[-1, 0] = torch.nextafter(kept, torch.tensor(torch.inf))
    try:
        with pytest.raises(AssertionError):
            RecordingEngine(folder).check(prompt, oracle, 8)
    finally:
        logits[-1, 0] = kept
