"""Known faults of lookups: what may be found, by whom, and when.

On the KV cache alone, or on the whole engine where outputs count. Block size 16 and cap 1.0.
"""

import pytest
import torch

from minivllm import SamplingParams
from minivllm.errors import EngineBusyError
from tests.alignment import ATOL, RTOL, RecordingEngine
from tests.known_faults.on_engine import alone, make_engine
from tests.known_faults.on_kv_cache import Pool
from tests.known_faults.texts import COMMON, text
from tests.model_free import params, run


def test_prompt_logprobs_have_all_their_rows_although_the_prefix_is_cached(tiny):
    """Known fault 2: cached positions are not computed, so their rows were missing.

    Who asks for prompt logprobs fills the cache for others, but does not read it.
    """
    recording = RecordingEngine(tiny.folder)
    common = [i * 37 % 97 for i in range(48)]
    prompts = {name: common + [3 + i] * (7 - i) for i, name in enumerate("ABC")}
    plain = {"max_tokens": 2, "ignore_eos": True}
    wants = {"A": {"prompt_logprobs": 1}, "B": {}, "C": {"prompt_logprobs": 1}}
    outputs = {}
    for name, prompt in prompts.items():
        recording.engine.add_request(name, prompt, SamplingParams(**plain, **wants[name]))
        outputs[name] = run(recording.engine)[name, 0]
    assert [outputs[name].num_cached_tokens for name in "ABC"] == [0, 48, 0]
    for name in "AC":
        rows = outputs[name].prompt_logprobs
        assert len(rows) == len(prompts[name])
        assert rows[0] is None
        truth = tiny.oracle.logits(prompts[name][:1], prompts[name][1:]).log_softmax(dim=-1)
        for position, token_id in enumerate(prompts[name][1:], start=1):
            expected = float(truth[position - 1, token_id])
            assert rows[position][token_id] == pytest.approx(expected, abs=ATOL), position
    assert outputs["B"].prompt_logprobs is None
    for name, output in outputs.items():
        expected = tiny.oracle.logits(prompts[name], output.token_ids)
        assert output.token_ids == expected.argmax(dim=-1).tolist()
        torch.testing.assert_close(recording.logits(name, 2), expected, atol=ATOL, rtol=RTOL)


class Tokenizer:
    """As much of a tokenizer as a key needs."""

    def __init__(self, fingerprint):
        self.fingerprint = fingerprint

    def decode(self, token_ids):
        return ""


def key_fields(*, tokenizer=None, weights_version="", **request):
    """The key fields that an engine of this configuration gives to such a request."""
    tokenizer = None if tokenizer is None else Tokenizer(tokenizer)
    engine = make_engine(10, tokenizer=tokenizer, weights_version=weights_version)
    engine.add_request("a", COMMON, params(), **request)
    return engine.scheduler.waiting[0].policy.key_fields


def test_a_prefix_is_found_under_its_own_salt_only():
    """Known fault 5: the salt was left out of the key, so tenants saw each other's prefixes."""
    pool = Pool(10)
    pool.finish(pool.prefill(COMMON + text(1, 7), key_fields=key_fields(cache_salt="a")))
    prompt = COMMON + text(2, 5)
    assert pool.lookup(prompt, key_fields=key_fields(cache_salt="a")) == 48
    assert pool.lookup(prompt, key_fields=key_fields(cache_salt="b")) == 0
    assert pool.lookup(prompt, key_fields=key_fields()) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"key_fields": (("adapter", "a"),)}, {"key_fields": (("adapter", "b"),)}),
        ({"key_fields": (("adapter", "a"),)}, {}),
        ({"weights_version": "1"}, {"weights_version": "2"}),
        ({"tokenizer": "1"}, {"tokenizer": "2"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {"key_fields": (("adapter", "a"),)}),
        ({"cache_salt": "a"}, {"key_fields": (("salt", "a"),)}),
        ({"weights_version": "a"}, {"tokenizer": "a"}),
    ],
    ids=[
        "another adapter",
        "no adapter",
        "another weights version",
        "another tokenizer",
        "another salt",
        "an adapter named like a salt",
        "a field that calls itself salt",
        "a tokenizer named like a weights version",
    ],
)
def test_the_same_tokens_are_not_found_under(one, other):
    """Known fault 21: the key left out something that changes the KV, or mixed up two fields."""
    pool = Pool(10)
    own, foreign = key_fields(**one), key_fields(**other)
    pool.finish(pool.prefill(COMMON + text(1, 7), key_fields=own))
    assert pool.lookup([*COMMON, 9], key_fields=foreign) == 0
    assert pool.lookup([*COMMON, 9], key_fields=own) == 48
    pool.finish(pool.prefill(COMMON + text(1, 7), key_fields=foreign))
    assert pool.lookup([*COMMON, 9], key_fields=foreign) == 48
    assert pool.usable == 10


def test_a_prompt_of_whole_blocks_leaves_a_token_to_compute_the_second_time():
    """Known fault 14: a prompt that was cached whole left nothing to compute, so no logits.

    prompt               may hit                 hits   computes
    3 blocks = 48        (48 - 1) // 16 = 2        32   [32, 48)
    3 blocks + 1 = 49    (49 - 1) // 16 = 3        48   [48, 49)
    """
    pool = Pool(10)
    first = pool.prefill(COMMON)
    assert first.num_cached_tokens == 0
    assert pool.num_published(first) == 3
    table = list(first.block_table)
    pool.finish(first)
    second = pool.prefill(COMMON)
    assert second.num_cached_tokens == 32
    assert second.block_table == table, "one key, one block: its own third block was released"
    pool.finish(second)
    third = pool.prefill([*COMMON, 9])
    assert third.num_cached_tokens == 48


def test_a_prompt_of_whole_blocks_gives_the_same_output_the_second_time():
    """Known fault 14, through the engine: same output, and the extended prompt hits more."""
    engine = make_engine(10)
    outputs = []
    for prompt in (COMMON, COMMON, [*COMMON, 9]):
        engine.add_request("a", prompt, params(4))
        outputs.append(run(engine)["a", 0])
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 48]
    assert outputs[0].token_ids == outputs[1].token_ids == alone(COMMON, 4)
    assert outputs[2].token_ids == alone([*COMMON, 9], 4)


@pytest.mark.parametrize("num_cached", [0, 16])
def test_what_was_allocated_and_dropped_before_its_forward_pass_is_not_found(num_cached):
    """Known fault 17: keys were published when blocks were allocated, not when they were written.

    Also behind a hit: the 16 tokens cached before are found, the other 32 are not.
    """
    pool = Pool(10)
    if num_cached:
        pool.finish(pool.prefill(COMMON[:16]))
    dropped = pool.sequence(COMMON + text(1, 7))
    assert pool.allocate(dropped)
    assert pool.usable == 6
    assert pool.lookup(COMMON + text(1, 7)) == num_cached
    pool.finish(dropped)
    assert pool.lookup(COMMON + text(1, 7)) == num_cached
    assert not pool.kv.match(pool.sequence(COMMON + text(1, 7))).in_flight, "nobody computes it"
    assert pool.usable == 10


def test_an_evicted_prefix_whose_blocks_hold_other_text_now_is_not_found():
    """Known fault 20: an evicted block kept its key, and the old prompt found the new text.

    Also by a sequence that waited, and had found the prefix while it was there.
    """
    pool = Pool(4)
    old = pool.prefill(COMMON)
    old_blocks = set(old.block_table)
    pool.finish(old)
    waiting = pool.sequence([*COMMON, 9])
    assert pool.cached_tokens(waiting) == 48
    new = pool.prefill(text(1, 64))
    assert set(new.block_table) > old_blocks, "refilled"
    assert pool.lookup([*COMMON, 9]) == 0
    assert pool.cached_tokens(waiting) == 0
    pool.finish(new)
    assert pool.lookup([*COMMON, 9]) == 0
    assert pool.cached_tokens(waiting) == 0
    assert pool.lookup([*text(1, 64), 9]) == 64


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "running"])
def test_weights_are_not_changed_while_a_sequence_lives(num_steps):
    """Known fault 22: a live sequence went on with old KV under new weights."""
    engine = make_engine(20)
    engine.add_request("cached", COMMON, params(2))
    run(engine)
    engine.add_request("live", COMMON + text(1, 20), params(4))
    for _ in range(num_steps):
        engine.step()
    before = engine.stats()
    with pytest.raises(EngineBusyError, match="1 requests are live"):
        engine.load_weights("second")
    assert engine.stats() == before
    assert engine.runner.weights == "first"
    output = run(engine)["live", 0]
    assert output.num_cached_tokens == 48
    assert output.token_ids == alone(COMMON + text(1, 20), 4)


def test_after_a_change_of_weights_everything_misses():
    """Known fault 22: what the old weights had computed was found under the new ones."""
    engine, fresh = make_engine(20), make_engine(20)
    prompts = [COMMON, text(1, 68), text(2, 90)]

    def generate(engine):
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params(3))
        return [output for _, output in sorted(run(engine).items())]

    generate(engine)
    assert [output.num_cached_tokens for output in generate(engine)] == [32, 64, 80]
    engine.load_weights("second")
    assert engine.stats()["blocks_free"] == 20
    outputs = generate(engine)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    fresh.load_weights("second")
    expected = [output.token_ids for output in generate(fresh)]
    assert [output.token_ids for output in outputs] == expected
    assert expected != [alone(prompt, 3) for prompt in prompts], "other weights, other tokens"
