"""Known faults at the limits: what cannot fit, when an output ends, the smallest and the largest.

On the whole engine; block size 16 and cap 1.0 unless a test says otherwise.
"""

import pytest
import torch

from minivllm import SamplingParams
from minivllm.errors import InvalidRequestError
from tests.alignment import ATOL, RTOL, RecordingEngine
from tests.known_faults.on_engine import ScriptedRunner, alone, make_engine
from tests.known_faults.texts import text
from tests.model_free import params, run

MAX_MODEL_LEN = 8


def test_a_prompt_larger_than_the_pool_is_refused_by_name_and_others_go_on():
    """Known fault 8: a prompt that can never fit was queued, and everybody waited behind it."""
    engine = make_engine(4)
    engine.add_request("before", text(1, 20), params(3))
    with pytest.raises(
        InvalidRequestError,
        match=r"prompt has 256 tokens; the pool holds 4 blocks x 16 = 64: raise num_kv_blocks to"
        r" at least 16 or shorten the prompt",
    ):
        engine.add_request("too long", text(0, 16 * 16), params(3))
    engine.add_request("after", text(2, 20), params(3))
    finished = run(engine)
    assert {name for name, _ in finished} == {"before", "after"}
    assert finished["before", 0].token_ids == alone(text(1, 20), 3)
    assert finished["after", 0].token_ids == alone(text(2, 20), 3)


@pytest.mark.parametrize("order", [("big", "small"), ("small", "big")], ids=" then ".join)
def test_a_sequence_that_outgrows_the_whole_pool_alone_ends_with_an_error(order):
    """Known fault 8, while decoding: it preempted itself, resumed, preempted itself, for ever.

    4 blocks hold 64 positions. 60 + 5 tokens are known when position 64 finds no block.
    """
    engine = make_engine(4)
    requests = {"big": (text(0, 60), params(100)), "small": (text(1, 10), params(3))}
    for name in order:
        engine.add_request(name, *requests[name])
    finished = run(engine)
    big, small = finished["big", 0], finished["small", 0]
    assert big.finish_reason == "error"
    assert "grown to 65 tokens; the pool holds 4 blocks x 16 = 64" in big.error
    assert big.token_ids == alone(text(0, 60), 5)
    assert (small.finish_reason, small.token_ids) == ("length", alone(text(1, 10), 3))
    assert engine.stats()["steps"] <= 5 + 3, "nobody went round in circles"
    assert engine.stats()["blocks_in_use"] == 0


@pytest.mark.parametrize(
    ("script", "values", "token_ids", "reason"),
    [
        ([10, 42, 12], {"stop_token_ids": (42,)}, [10, 42], "stop"),
        ([10, 11, 12], {"max_tokens": 2}, [10, 11], "length"),
    ],
    ids=["stop id", "max_tokens"],
)
def test_an_output_ends_with_its_last_token_in_it_and_no_further_one(
    script, values, token_ids, reason
):
    """Known fault 13: the stop token was cut off, or one token too many was generated."""
    engine = make_engine(10, ScriptedRunner(script))
    engine.add_request("a", text(0, 20), SamplingParams(**values))
    output = run(engine)["a", 0]
    assert (output.token_ids, output.finish_reason) == (token_ids, reason)
    assert engine.stats()["generated_tokens"] == 2


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "num_output_tokens"),
    [(1, 1, 1), (1, 7, 7), (7, 1, 1), (4, 4, 4), (4, 64, 4)],
    ids=[
        "one token in, one out",
        "one token in, exactly max_model_len",
        "longest prompt, one token out",
        "exactly max_model_len",
        "max_tokens beyond max_model_len",
    ],
)
def test_the_smallest_and_the_largest_request_get_all_their_tokens(
    tiny, num_prompt_tokens, max_tokens, num_output_tokens
):
    """Known fault 24: temperature 0 was refused, max_tokens 1 gave 2, or the last token was missed.

    max_model_len is 8; temperature 0 is the largest logit of a real model.
    """
    recording = RecordingEngine(tiny.folder, max_model_len=MAX_MODEL_LEN, num_kv_blocks=4)
    prompt = [i * 37 % 97 for i in range(num_prompt_tokens)]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    recording.engine.add_request("a", prompt, sampling)
    output = run(recording.engine)["a", 0]
    assert len(output.token_ids) == num_output_tokens
    assert output.finish_reason == "length"
    assert output.token_ids == tiny.oracle.generate(prompt, num_output_tokens)
    expected = tiny.oracle.logits(prompt, output.token_ids)
    found = recording.logits("a", num_output_tokens)
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=RTOL)


def test_a_prompt_of_exactly_max_model_len_is_refused_because_it_leaves_no_room_for_a_token(tiny):
    """Known fault 24: such a prompt was taken, and wrote a position the model does not have."""
    engine = RecordingEngine(tiny.folder, max_model_len=MAX_MODEL_LEN, num_kv_blocks=4).engine
    with pytest.raises(
        InvalidRequestError,
        match=r"prompt has 8 tokens; the model takes 8, prompt and output together: shorten the"
        r" prompt to at most 7",
    ):
        engine.add_request("a", [1] * MAX_MODEL_LEN)
    assert not engine.has_unfinished_requests()
