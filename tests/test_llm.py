"""LLM: generate, chat and stream around one engine, and how they end before their time."""

import io
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.core.batch import SampledToken
from minivllm.core.invariants import check_between_steps
from minivllm.errors import (
    ConfigError,
    DeviceError,
    DuplicateRequestError,
    InvalidRequestError,
    ModelError,
    RunnerError,
)
from tests.model_free import HistoryRunner, greedy, make_engine, params

PROMPTS = [[1, 2, 3], [4] * 6, list(range(10))]


class ByteTokenizer:
    """A token a byte, so that tokens cut characters; a conversation is its texts joined."""

    fingerprint = "bytes"

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")

    def apply_chat_template(self, messages):
        turns = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return self.encode(turns + "assistant:")


class ScriptRunner(HistoryRunner):
    """Says the script, byte by byte, then ends."""

    def __init__(self, script):
        super().__init__(vocab_size=257, max_model_len=400, eos_token_ids=[256])
        self.script = [*script.encode(), 256]

    def _sample(self, sequence):
        return SampledToken(self.script[len(sequence.token_ids) - sequence.num_prompt_tokens])


def make_llm(runner=None, tokenizer=None, **config):
    return LLM(engine=make_engine(runner, tokenizer, **config))


def speaking(script, **config):
    return make_llm(ScriptRunner(script), ByteTokenizer(), **({"num_kv_blocks": 64} | config))


def assert_idle(llm):
    """Nothing is live, and every block is accounted for."""
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats()["blocks_in_use"] == 0
    check_between_steps(llm.engine.scheduler)


def assert_usable(llm):
    assert_idle(llm)
    outputs = llm.generate(PROMPTS, params())
    assert [output.token_ids for output in outputs] == [greedy(p, 4) for p in PROMPTS]
    assert_idle(llm)


# generate


def test_outputs_come_in_the_order_of_the_prompts():
    llm = make_llm()
    sampling = [params(7), params(1), params(3)]
    outputs = llm.generate(PROMPTS, sampling)
    assert [o.token_ids for o in outputs] == [
        greedy(prompt, p.max_tokens) for prompt, p in zip(PROMPTS, sampling, strict=True)
    ]
    assert all(o.finish_reason == "length" for o in outputs)


def test_more_than_ten_prompts_stay_in_order():
    prompts = [[i] for i in range(12)]
    outputs = make_llm(num_kv_blocks=40).generate(prompts, params(2))
    assert [o.token_ids for o in outputs] == [greedy(p, 2) for p in prompts]


def test_n_outputs_of_each_prompt_stand_together_in_order_of_index():
    outputs = make_llm().generate(PROMPTS[:2], [params(2, n=2), params(2, n=3)])
    assert [o.index for o in outputs] == [0, 1, 0, 1, 2]
    assert [o.num_prompt_tokens for o in outputs] == [3, 3, 6, 6, 6]


def test_without_params_it_is_greedy_with_64_tokens():
    (output,) = make_llm(num_kv_blocks=30).generate([[1, 2]])
    assert output.token_ids == greedy([1, 2], 64)


def test_one_text_is_one_prompt():
    assert [o.text for o in speaking("ok").generate("hi")] == ["ok"]


def test_no_prompts_give_no_outputs():
    assert make_llm().generate([]) == []


def test_raw_text_gets_no_template():
    llm = speaking("ok")
    assert llm.generate(["hé"])[0].num_prompt_tokens == len("hé".encode())


def test_a_second_call_hits_what_the_first_computed():
    llm = make_llm()
    llm.generate(PROMPTS[2:], params())
    assert llm.generate(PROMPTS[2:], params())[0].num_cached_tokens == 8


# What is refused


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([1, 50], "token id 50 is outside the vocabulary of 50"),
        ([-1], "token id -1"),
        ([1] * 200, "prompt has 200 tokens; the model takes 200"),
        ([1] * 70, "prompt has 70 tokens; the pool holds 16 blocks x 4 = 64"),
        (["a"], "must be a list of token ids"),
        ([1.5], "must be a list of token ids"),
        ("\udcff", "not valid Unicode"),
        (7, "it must be a list of token ids"),
    ],
)
def test_a_wrong_prompt_is_refused_before_any_is_added(bad, message):
    llm = make_llm(tokenizer=ByteTokenizer())
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([[1, 2], bad], params())
    assert llm.engine.stats()["steps"] == 0
    assert_usable(llm)


@pytest.mark.parametrize("prompts", [5, None])
def test_prompts_that_are_none_are_named(prompts):
    with pytest.raises(InvalidRequestError, match=f"prompts is {prompts}"):
        make_llm().generate(prompts)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_wrong_sampling_values_leave_the_engine_unharmed(values, message):
    llm = make_llm()
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(PROMPTS, SamplingParams(**values))
    assert_usable(llm)


@pytest.mark.parametrize("num_params", [0, 2, 4])
def test_params_of_another_number_than_the_prompts_are_refused(num_params):
    llm = make_llm()
    with pytest.raises(InvalidRequestError, match=f"{num_params} params for 3 prompts"):
        llm.generate(PROMPTS, [params()] * num_params)
    assert_usable(llm)


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        make_llm().generate(["hi"])


def test_a_stop_string_without_a_tokenizer_is_refused():
    with pytest.raises(InvalidRequestError, match="stop is"):
        make_llm().generate([[1]], params(stop="x"))


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"model": "no such model"}, ModelError, "model is 'no such model'"),
        ({"device": "tpu"}, ConfigError, "device is 'tpu'; it must be one of auto, cpu, cuda"),
        ({"num_kv_blocks": 0}, ConfigError, "num_kv_blocks is 0"),
        ({"block_size": 0}, ConfigError, "block_size is 0"),
    ],
)
def test_a_wrong_config_is_named(config, error, message):
    with pytest.raises(error, match=message):
        LLM(**config)


def test_a_device_that_is_not_there_is_named(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="device is 'cuda'"):
        LLM(device="cuda")


# chat


def test_chat_writes_a_conversation_with_the_template():
    llm = speaking("fine")
    (output,) = llm.chat([{"role": "user", "content": "how?"}])
    assert output.text == "fine"
    assert output.num_prompt_tokens == len("user:how?\nassistant:")


def test_several_conversations_are_answered_in_order():
    llm = speaking("fine")
    conversations = [[{"role": "user", "content": "x" * i}] for i in (1, 5, 3)]
    outputs = llm.chat(conversations, params(9))
    assert [o.num_prompt_tokens for o in outputs] == [17, 21, 19]


def test_a_conversation_continued_hits_its_own_history_with_the_decoded_tokens():
    llm = speaking("a long and friendly answer")
    history = [{"role": "user", "content": "how are you?"}]
    (first,) = llm.chat(history)
    history += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and you?"},
    ]
    (second,) = llm.chat(history)
    known = len("user:how are you?\nassistant:" + first.text)
    assert second.num_cached_tokens == known // 4 * 4 > first.num_prompt_tokens


@pytest.mark.parametrize(
    "conversation",
    [
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        ["hi"],
        [{"role": "user", "content": "x"}, 3],
    ],
)
def test_a_message_of_another_shape_is_refused(conversation):
    with pytest.raises(InvalidRequestError, match=r"message is .*'role': text"):
        speaking("x").chat([conversation])


def test_an_empty_conversation_is_refused():
    with pytest.raises(InvalidRequestError, match="conversation is empty"):
        speaking("x").chat([[]])


# stream


def test_a_stream_gives_each_token_as_it_comes():
    outputs = list(make_llm().stream([1, 2], params(3)))
    assert [o.token_ids for o in outputs] == [greedy([1, 2], n) for n in (1, 2, 3)]
    assert [o.finished for o in outputs] == [False, False, True]


def test_the_parts_of_a_streamed_text_join_to_the_whole_and_never_cut_a_character():
    script = "naïve 咖啡 🙂👍🏽 e\u0301 done"
    texts = [o.text for o in speaking(script).stream("go")]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert not any("\ufffd" in text for text in texts)
    assert texts[-1] == script
    assert len(set(texts)) > 10


def test_a_stop_string_ends_the_text_before_it_and_never_shows():
    texts = [o.text for o in speaking("one END two").stream("go", params(99, stop=" END"))]
    assert texts[-1] == "one"
    assert not any("E" in text for text in texts)


def test_two_streams_side_by_side_each_get_their_own():
    llm = make_llm()
    a, b = llm.stream([1, 2], params(5)), llm.stream([3], params(5))
    pairs = list(zip(a, b, strict=True))
    assert pairs[-1][0].token_ids == greedy([1, 2], 5)
    assert pairs[-1][1].token_ids == greedy([3], 5)
    assert_idle(llm)


def test_generate_while_a_stream_pauses_takes_nothing_from_it():
    llm = make_llm()
    stream = llm.stream([1, 2], params(6))
    next(stream)
    assert llm.generate([[3]], params(9))[0].token_ids == greedy([3], 9)
    rest = list(stream)
    assert [len(o.token_ids) for o in rest] == [2, 3, 4, 5, 6]
    assert rest[-1].token_ids == greedy([1, 2], 6)
    assert_idle(llm)


def test_a_stream_of_n_outputs_tells_them_apart_by_index():
    last = {o.index: o for o in make_llm().stream([1, 2], params(3, n=2))}
    assert last.keys() == {0, 1}
    assert all(o.finished for o in last.values())


def test_a_wrong_prompt_is_refused_when_the_stream_is_made():
    with pytest.raises(InvalidRequestError, match="empty"):
        make_llm().stream([])


def test_a_stream_that_was_not_begun_leaves_nothing_behind():
    llm = make_llm()
    llm.stream([1, 2], params(3)).close()
    assert_idle(llm)


def test_closing_a_stream_aborts_its_request():
    llm = make_llm()
    stream = llm.stream(PROMPTS[2], params(30))
    next(stream)
    assert llm.engine.stats()["blocks_in_use"] > 0
    stream.close()
    assert_usable(llm)


def test_leaving_a_loop_over_a_stream_aborts_its_request():
    llm = make_llm()
    for _ in llm.stream(PROMPTS[2], params(30)):
        break
    assert_usable(llm)


def test_closing_one_stream_leaves_the_other_running():
    llm = make_llm()
    a, b = llm.stream([1, 2], params(9)), llm.stream([3], params(9))
    next(a), next(b)
    a.close()
    assert list(b)[-1].token_ids == greedy([3], 9)
    assert_idle(llm)
    assert llm.other_outputs == {}, "an abandoned output belongs to nobody"


# Beside others in the same engine


def test_a_request_that_was_added_directly_runs_along_and_is_kept():
    llm = make_llm()
    llm.engine.add_request("mine", [7, 7], params(3))
    llm.generate(PROMPTS, params(5))
    output = llm.other_outputs.pop(("mine", 0))
    assert (output.token_ids, output.finish_reason) == (greedy([7, 7], 3), "length")
    assert_usable(llm)


def test_an_id_that_is_taken_is_passed_over():
    llm = make_llm()
    llm.engine.add_request("1", [7, 7], params(9))
    outputs = llm.generate(PROMPTS, params(2))
    assert [o.token_ids for o in outputs] == [greedy(p, 2) for p in PROMPTS]
    assert "1" not in {o.request_id for o in outputs}
    with pytest.raises(DuplicateRequestError, match="'1'"):
        llm.engine.add_request("1", [7], params())


def test_an_output_that_somebody_elses_step_took_is_an_error_and_not_an_endless_loop():
    llm = make_llm()
    stream = llm.stream([1, 2], params(2))
    next(stream)
    llm.engine.step()
    with pytest.raises(RunnerError, match="stepped by somebody else"):
        next(stream)
    assert_usable(llm)


# Ends before their time


def test_a_runner_that_fails_leaves_the_engine_usable():
    llm = make_llm()
    llm.engine.runner.fail_next = ValueError("no memory")
    with pytest.raises(RunnerError, match="no memory"):
        llm.generate(PROMPTS, params())
    assert_usable(llm)


def test_ctrl_c_while_the_model_computes_goes_on_and_leaves_every_block_accounted_for():
    llm = make_llm()
    llm.engine.runner.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, params())
    assert_usable(llm)


def test_ctrl_c_aborts_only_the_requests_of_its_own_call():
    llm = make_llm()
    stream = llm.stream([1, 2], params(6))
    next(stream)
    llm.engine.runner.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3], [4]], params(9))
    assert llm.engine.stats()["num_running"] == 1
    assert list(stream)[-1].token_ids == greedy([1, 2], 6)
    assert_usable(llm)


class CtrlC:
    """Presses Ctrl-C when the package executes its `at`-th line."""

    package = str(Path(minivllm.__file__).parent)

    def __init__(self, at):
        self.at = at
        self.num_lines = 0

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.package):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                os.kill(os.getpid(), signal.SIGINT)
        return self


def interrupted_at(line, llm):
    """How many lines generate executed; Ctrl-C was pressed at one of them."""
    tracer, before = CtrlC(line), sys.gettrace()
    sys.settrace(tracer)
    try:
        llm.generate(PROMPTS, params(2, n=2))
    except KeyboardInterrupt:
        assert_idle(llm)  # at once, not when the traceback is forgotten
    finally:
        sys.settrace(before)
    return tracer.num_lines


def test_ctrl_c_at_any_line_leaves_the_engine_usable():
    num_lines = interrupted_at(0, make_llm(debug_checks=False))
    assert num_lines > 1000
    for line in range(1, num_lines, 17):
        llm = make_llm(debug_checks=False)
        interrupted_at(line, llm)
        assert_usable(llm)


# The progress bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_bar_shows_outputs_and_tokens_per_second(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    make_llm().generate(PROMPTS, params())
    assert "3/3 outputs" in sys.stderr.getvalue()
    assert "tokens/s" in sys.stderr.getvalue()


def test_elsewhere_nothing_is_printed(capfd):
    make_llm().generate(PROMPTS, params())
    assert capfd.readouterr() == ("", "")
