"""Log-probabilities of outputs and prompts, from a tiny model through the whole engine."""

import pytest
import torch

from minivllm import EngineConfig, LLMEngine, SamplingParams
from tests.model_free import run
from tests.tiny_models import save_model

PROMPT = [int(i * 37 % 97) for i in range(41)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_model("llama", folder)


def make_engine(folder, **config):
    settings = {"num_kv_blocks": 64, "block_size": 4, "debug_checks": True} | config
    return LLMEngine(EngineConfig(model=str(folder), device="cpu", **settings))


@torch.inference_mode()
def true_logprobs(model, token_ids):
    """[len(token_ids), vocab]: row p is the distribution of the token at position p + 1."""
    return model(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)


def check_row(row, truth, token_id, num_best):
    best = truth.topk(num_best)
    assert set(row) == {*best.indices.tolist(), token_id}
    assert row == pytest.approx({t: float(truth[t]) for t in row}, abs=1e-4)
    assert list(row.values())[:num_best] == sorted(row.values(), reverse=True)[:num_best]


def request(engine, name, prompt=PROMPT, **values):
    engine.add_request(name, prompt, SamplingParams(ignore_eos=True, max_tokens=5, **values))


def test_each_generated_token_has_its_row(tiny):
    folder, model = tiny
    engine = make_engine(folder)
    request(engine, "a", logprobs=3)
    output = run(engine)["a", 0]
    truth = true_logprobs(model, PROMPT + output.token_ids)
    assert len(output.logprobs) == 5
    for i, (token_id, row) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        check_row(row, truth[len(PROMPT) - 1 + i], token_id, 3)


def test_rows_grow_with_the_tokens_also_through_preemption(tiny):
    folder, _ = tiny
    engine = make_engine(folder, num_kv_blocks=12)
    request(engine, "a", logprobs=1)
    engine.add_request("b", PROMPT[:3], SamplingParams(ignore_eos=True, max_tokens=20, logprobs=1))
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert len(output.logprobs) == len(output.token_ids)
            assert all(t in row for t, row in zip(output.token_ids, output.logprobs, strict=True))
    assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_a_prompt_has_a_row_for_each_token_but_the_first(tiny, chunk):
    folder, model = tiny
    engine = make_engine(folder, max_prefill_chunk=chunk)
    request(engine, "a", prompt_logprobs=2)
    rows = run(engine)["a", 0].prompt_logprobs
    truth = true_logprobs(model, PROMPT)
    assert rows[0] is None
    assert len(rows) == len(PROMPT)
    for p in range(1, len(PROMPT)):
        check_row(rows[p], truth[p - 1], PROMPT[p], 2)


def test_a_repeated_prompt_has_full_rows_and_fills_the_cache_without_reading_it(tiny):
    folder, _ = tiny
    engine = make_engine(folder)
    for name in ("first", "again"):
        request(engine, name, prompt_logprobs=1)
        output = run(engine)[name, 0]
        assert len(output.prompt_logprobs) == len(PROMPT)
        assert None not in output.prompt_logprobs[1:]
        assert output.num_cached_tokens == 0
    request(engine, "reads")
    assert run(engine)["reads", 0].num_cached_tokens == 40


def test_all_outputs_of_a_request_carry_the_prompts_rows(tiny):
    folder, _ = tiny
    engine = make_engine(folder)
    request(engine, "a", prompt_logprobs=1, n=3)
    rows = [output.prompt_logprobs for output in run(engine).values()]
    assert None not in rows[0][1:]
    assert rows == [rows[0]] * 3


def test_an_output_that_was_returned_keeps_its_rows_while_the_sequence_grows(tiny):
    folder, _ = tiny
    engine = make_engine(folder)
    request(engine, "a", logprobs=1)
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    last = seen[-1].logprobs
    assert len(seen) > 1
    assert [output.logprobs for output in seen] == [last[:n] for n in range(1, len(seen) + 1)]


def test_an_aborted_prompt_has_the_rows_it_came_to(tiny):
    folder, _ = tiny
    engine = make_engine(folder, max_prefill_chunk=7)
    request(engine, "a", prompt_logprobs=1)
    engine.step()
    engine.abort("a")
    (output,) = engine.step()
    rows = output.prompt_logprobs
    assert [row is None for row in rows] == [True] + [False] * 7 + [True] * (len(PROMPT) - 8)


def test_a_prompt_of_one_token_has_no_row_to_give(tiny):
    folder, _ = tiny
    engine = make_engine(folder)
    request(engine, "a", prompt=[5], prompt_logprobs=1)
    assert run(engine)["a", 0].prompt_logprobs == [None]


def test_nothing_is_given_that_was_not_asked_for(tiny):
    folder, _ = tiny
    engine = make_engine(folder)
    request(engine, "a")
    output = run(engine)["a", 0]
    assert (output.logprobs, output.prompt_logprobs) == (None, None)


def test_a_seed_gives_the_same_tokens_in_any_batch_with_and_without_the_cache(tiny):
    folder, _ = tiny
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    found = []
    for caching in (True, False):
        engine = make_engine(folder, enable_prefix_caching=caching)
        for i in range(3):
            engine.add_request(str(i), PROMPT, params)
        engine.add_request("other", PROMPT[3:9], SamplingParams(temperature=0.7, max_tokens=9))
        finished = run(engine)
        found += [finished[str(i), 0].token_ids for i in range(3)]
    engine = make_engine(folder)
    engine.add_request("alone", PROMPT, params)
    found.append(run(engine)["alone", 0].token_ids)
    assert found == [found[0]] * 7
    assert len(set(found[0])) > 3


def test_output_i_of_seed_s_is_output_0_of_seed_s_plus_i(tiny):
    folder, _ = tiny
    engine = make_engine(folder)
    values = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    engine.add_request("n", PROMPT, SamplingParams(seed=5, n=3, **values))
    for i in range(3):
        engine.add_request(f"{i}", PROMPT, SamplingParams(seed=5 + i, **values))
    finished = run(engine)
    branches = [finished["n", i].token_ids for i in range(3)]
    assert branches == [finished[f"{i}", 0].token_ids for i in range(3)]
    assert branches[0] != branches[1]
