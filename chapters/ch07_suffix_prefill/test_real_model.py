"""Chapter 7 with the real model, a step of its own: `python -m chapters check 7 --model`."""

import pytest

from chapters.ch05_model_runner import test_real_model
from chapters.ch05_model_runner.test_real_model import finished_engine_continues, texts
from chapters.engine import Limits, with_suffix_attention
from chapters.testing import task

pytestmark = test_real_model.pytestmark

GUIDE = (
    "Here is what a visitor to the museum of clocks should know. It is open from ten to five, and"
    " on Thursdays to eight. Children pay nothing. The church clock strikes at noon. "
)
PROMPTS = [GUIDE + "On Thursdays the museum is", GUIDE + "A child has to pay"]


@pytest.fixture(scope="module")
def right():
    return finished_engine_continues(PROMPTS)


@task("7.3", "I4")
def test_your_engine_continues_texts_with_one_beginning_as_the_finished_one_does(stages, right):
    found = texts(with_suffix_attention, stages, PROMPTS, Limits(num_blocks=32))
    (_, first_cached), (_, second_cached) = found
    assert first_cached == 0, f"the first text finds {first_cached} tokens cached, expected none"
    assert second_cached >= 32, f"the texts begin alike, {second_cached} tokens were found cached"
    for prompt, (text, _), wanted in zip(PROMPTS, found, right, strict=True):
        said = f"{prompt[-30:]!r} goes on {text!r}; the finished engine says {wanted!r}"
        assert text == wanted, said
