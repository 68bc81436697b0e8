"""A conversation on the real model: each turn finds all earlier ones in the cache."""

from itertools import pairwise

import pytest

from minivllm import LLM, SamplingParams

pytestmark = pytest.mark.model

QUESTIONS = ["What is the capital of France?", "And of Italy?", "Which of the two is older?"]


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", num_kv_blocks=256, debug_checks=True)


def test_it_knows_the_capital_of_france(llm):
    (output,) = llm.chat([{"role": "user", "content": QUESTIONS[0]}])
    assert output.text == "The capital of France is Paris."
    assert output.finish_reason == "stop"


def test_a_conversation_hits_its_own_history_decoded_tokens_included(llm):
    messages = []
    known = []  # all tokens of the turns so far whose KV was written
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = llm.encode_chat(messages)
        (output,) = llm.chat(messages, SamplingParams(max_tokens=48))
        assert prompt[: len(known)] == known, "the template changed an earlier turn"
        assert output.num_cached_tokens >= len(known) // 16 * 16
        messages.append({"role": "assistant", "content": output.text})
        known = prompt + output.token_ids[:-1]
    first_prompt = llm.encode_chat(messages[:1])
    assert output.num_cached_tokens > len(first_prompt), "only the first prompt was found"


def test_the_streamed_parts_joined_are_the_whole_and_hold_no_half_character(llm):
    prompt = "Emoji: 🙂🙃😀 Chinese: 你好世界 "
    params = SamplingParams(max_tokens=40, temperature=1.3, seed=3, ignore_eos=True)
    texts = [output.text for output in llm.stream(prompt, params)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
    (whole,) = llm.generate([prompt], params)
    assert texts[-1] == whole.text
    decode = llm.engine.tokenizer.decode
    assert whole.text == decode(whole.token_ids)


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_tell_the_truth(llm):
    params = SamplingParams(max_tokens=30, stop=("of France", "Paris"))
    (output,) = llm.chat([{"role": "user", "content": QUESTIONS[0]}], params)
    assert output.text == "The capital "
    assert output.finish_reason == "stop"
    assert llm.engine.tokenizer.decode(output.token_ids) == "The capital of France"
