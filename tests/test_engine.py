"""The engine's promises, one fact a test, with a runner that has no model."""

import pytest

from minivllm import EngineConfig, LLMEngine, SamplingParams
from minivllm.core.batch import SampledToken
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineBusyError,
    InvalidRequestError,
    MiniVLLMError,
    RunnerError,
    UnknownRequestError,
)
from tests.model_free import HistoryRunner, greedy, make_engine, params, run

PREFIX = list(range(12))


def generate(engine, prompts, sampling=None, **options):
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, sampling or params(), **options)
    finished = run(engine)
    return [finished[str(i), 0] for i in range(len(prompts))]


# Batching


def test_a_batch_gives_each_request_what_it_would_get_alone():
    prompts = [[1], [2] * 5, list(range(20)), PREFIX]
    outputs = generate(make_engine(max_num_batched_tokens=7), prompts)
    assert [o.token_ids for o in outputs] == [greedy(p, 4) for p in prompts]


def test_a_request_may_join_while_others_decode():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(6))
    engine.step()
    engine.add_request("b", [4, 5, 6], params(2))
    finished = run(engine)
    assert finished["a", 0].token_ids == greedy([1, 2, 3], 6)
    assert finished["b", 0].token_ids == greedy([4, 5, 6], 2)


def test_decodes_are_charged_before_prefills_and_prefills_before_waiting():
    engine = make_engine(max_num_batched_tokens=6)
    engine.add_request("long", list(range(9)), params())
    engine.step()  # [0, 6)
    engine.add_request("late", [40, 41, 42, 43], params())
    engine.step()
    assert engine.runner.batches[-1][0][:4] == ("long", 0, 6, 9)
    assert engine.runner.batches[-1][1][:4] == ("late", 0, 0, 3)
    engine.step()
    assert [(r[0], r[2], r[3]) for r in engine.runner.batches[-1]] == [
        ("long", 9, 10),
        ("late", 3, 4),
    ]


@pytest.mark.parametrize(("seats", "budget", "running"), [(2, 100, 2), (5, 3, 3)])
def test_running_sequences_never_exceed_seats_or_budget(seats, budget, running):
    engine = make_engine(max_num_seqs=seats, max_num_batched_tokens=budget, num_kv_blocks=64)
    for i in range(6):
        engine.add_request(str(i), [i], params(20))
    engine.step()
    engine.step()
    assert engine.stats()["num_running"] == running
    assert engine.stats()["num_waiting"] == 6 - running


def test_a_prefill_chunk_is_capped():
    engine = make_engine(max_prefill_chunk=3)
    engine.add_request("a", list(range(8)), params(1))
    run(engine)
    assert [batch[0][2:4] for batch in engine.runner.batches] == [(0, 3), (3, 6), (6, 8)]


# Preemption


def test_the_newest_is_preempted_keeps_its_tokens_and_ends_right():
    engine = make_engine(num_kv_blocks=4, enable_prefix_caching=False)
    engine.add_request("old", [1] * 7, params(8))
    engine.add_request("new", [2] * 7, params(8))
    finished = run(engine)
    assert engine.stats()["preemptions"] > 0
    assert finished["old", 0].token_ids == greedy([1] * 7, 8)
    assert finished["new", 0].token_ids == greedy([2] * 7, 8)
    olds = [row for batch in engine.runner.batches for row in batch if row[0] == "old"]
    assert [row[2] for row in olds] == [0, *range(7, 14)], "the old one was never interrupted"


def test_a_preempted_sequence_finds_its_own_blocks_again():
    engine = make_engine(num_kv_blocks=5)
    engine.add_request("old", [1] * 7, params(8))
    engine.add_request("new", [2] * 7, params(8))
    run(engine)
    stats = engine.stats()
    assert stats["preemptions"] == 1
    assert stats["resumed_query_tokens"] > 0
    assert stats["resumed_hit_tokens"] == 4
    assert stats["prefix_query_tokens"] == 14, "a return is not a second first lookup"


def test_a_return_from_preemption_does_not_change_the_cached_tokens_reported():
    engine = make_engine(num_kv_blocks=5)
    engine.add_request("old", [1] * 7, params(8))
    engine.add_request("new", [2] * 7, params(8))
    assert run(engine)["new", 0].num_cached_tokens == 0


def test_nobody_is_admitted_in_a_step_that_preempted():
    engine = make_engine(num_kv_blocks=4, enable_prefix_caching=False)
    engine.add_request("old", [1] * 7, params(8))
    engine.add_request("new", [2] * 7, params(8))
    while engine.stats()["preemptions"] == 0:
        engine.add_request(f"tiny{len(engine.runner.batches)}", [3], params(1))
        waiting = engine.stats()["num_waiting"]
        engine.step()
    assert engine.stats()["num_waiting"] == waiting + 1


def test_a_sequence_that_outgrows_the_pool_alone_ends_with_an_error_and_others_go_on():
    engine = make_engine(num_kv_blocks=2)
    engine.add_request("big", [1] * 6, params(20))
    engine.add_request("small", [2], params(2))
    finished = run(engine)
    big = finished["big", 0]
    assert big.finish_reason == "error"
    assert big.token_ids == greedy([1] * 6, 3)
    assert "9 tokens" in big.error
    assert "2 blocks x 4 = 8" in big.error
    assert finished["small", 0].token_ids == greedy([2], 2)


# Prefix cache


def test_the_second_time_only_the_suffix_is_computed():
    engine = make_engine()
    generate(engine, [[*PREFIX, 30]])
    computed = engine.runner.num_computed
    (output,) = generate(engine, [[*PREFIX, 31, 32]], params(1))
    assert output.num_cached_tokens == 12
    assert engine.runner.num_computed - computed == 2
    assert output.token_ids == greedy([*PREFIX, 31, 32], 1)


def test_a_prompt_of_whole_blocks_recomputes_its_last_block():
    engine = make_engine()
    first, second = (generate(engine, [PREFIX])[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.token_ids == second.token_ids


def test_the_next_turn_hits_its_own_history_decoded_tokens_included():
    engine = make_engine()
    (turn,) = generate(engine, [PREFIX], params(6))
    history = PREFIX + turn.token_ids  # 18 tokens, the last one's KV is not written
    (next_turn,) = generate(engine, [[*history, 7, 7]])
    assert next_turn.num_cached_tokens == 16


def test_many_requests_with_one_new_prefix_compute_it_once():
    engine = make_engine(num_kv_blocks=64)
    outputs = generate(engine, [[*PREFIX, 20 + i] for i in range(6)], params(1))
    assert [o.num_cached_tokens for o in outputs] == [0] + [12] * 5
    assert engine.runner.num_computed == 13 + 5
    assert len(engine.runner.batches) == 2


def test_a_chunked_leader_is_waited_for_until_its_prefix_is_whole():
    engine = make_engine(max_num_batched_tokens=8, max_prefill_chunk=4)
    outputs = generate(engine, [[*PREFIX, 1], [*PREFIX, 2]], params(1))
    assert [o.num_cached_tokens for o in outputs] == [0, 12]
    assert engine.runner.num_computed == 14


def test_requests_behind_one_that_waits_for_its_prefix_may_go():
    engine = make_engine()
    engine.add_request("leader", [*PREFIX, 1], params())
    engine.add_request("follower", [*PREFIX, 2], params())
    engine.add_request("other", [44, 45], params())
    engine.step()
    assert [row[0] for row in engine.runner.batches[0]] == ["leader", "other"]
    engine.step()
    assert {row[0] for row in engine.runner.batches[1]} == {"leader", "other", "follower"}


@pytest.mark.parametrize("how", ["abort", "may not write", "cacheable_tokens"])
def test_a_leader_that_will_not_publish_is_not_waited_for(how):
    engine = make_engine(max_prefill_chunk=4)
    options = {"may not write": {"cache_write": False}, "cacheable_tokens": {"cacheable_tokens": 3}}
    engine.add_request("leader", [*PREFIX, 1], params(), **options.get(how, {}))
    engine.add_request("follower", [*PREFIX, 2], params())
    if how == "abort":
        engine.step()
        engine.abort("leader")
    engine.step()
    assert "follower" in {row[0] for row in engine.runner.batches[-1]}
    assert run(engine)["follower", 0].token_ids == greedy([*PREFIX, 2], 4)


def test_when_one_of_two_leaders_is_aborted_the_other_is_waited_for():
    engine = make_engine(num_kv_blocks=32, max_prefill_chunk=4)
    engine.add_request("first", [*PREFIX, 1], params())
    engine.add_request("second", [*PREFIX, 2], params(), cache_read=False)
    engine.step()
    engine.abort("first")
    engine.add_request("follower", [*PREFIX, 3], params(1))
    finished = run(engine)
    assert finished["follower", 0].num_cached_tokens == 12


def test_eviction_makes_room_for_new_prompts():
    engine = make_engine(num_kv_blocks=4)
    for start in range(0, 40, 10):
        generate(engine, [list(range(start, start + 9))], params(1))
    stats = engine.stats()
    assert stats["evicted_blocks"] == 5
    assert stats["blocks_in_use"] == 0


def test_with_the_cache_off_nothing_is_cached_and_the_tokens_are_the_same():
    on, off = make_engine(), make_engine(enable_prefix_caching=False)
    prompts = [[*PREFIX, i] for i in range(3)]
    assert [o.token_ids for o in generate(on, prompts)] == [
        o.token_ids for o in generate(off, prompts)
    ]
    assert off.stats()["blocks_free"] == 16
    assert off.stats()["prefix_query_tokens"] == 0
    assert on.stats()["prefix_hit_tokens"] == 24


def test_another_salt_or_field_shares_nothing_and_the_same_one_does():
    engine = make_engine(num_kv_blocks=64)

    def cached(name, **options):
        engine.add_request(name, [*PREFIX, 1], params(1), **options)
        return run(engine)[name, 0].num_cached_tokens

    assert cached("none") == 0
    assert cached("salt a", cache_salt="a") == 0
    assert cached("salt b", cache_salt="b") == 0
    assert cached("salt a again", cache_salt="a") == 12
    assert cached("adapter", key_fields=(("adapter", "x"),)) == 0
    assert cached("adapter again", key_fields=(("adapter", "x"),)) == 12
    assert cached("none again") == 12
    assert cached("does not read", cache_read=False) == 0


def test_a_salt_is_not_mistaken_for_a_field_of_the_same_value():
    engine = make_engine(num_kv_blocks=64)
    engine.add_request("a", [*PREFIX, 1], params(1), cache_salt="x")
    engine.add_request("b", [*PREFIX, 1], params(1), key_fields=(("salt", "x"),))
    assert [o.num_cached_tokens for o in run(engine).values()] == [0, 0]


def test_reset_works_between_requests_and_not_during():
    engine = make_engine()
    engine.add_request("a", PREFIX, params())
    engine.step()
    assert engine.reset_prefix_cache() is False
    run(engine)
    assert engine.reset_prefix_cache() is True
    assert generate(engine, [PREFIX])[0].num_cached_tokens == 0


def test_new_weights_make_everything_cached_miss():
    engine = make_engine()
    generate(engine, [[*PREFIX, 1]])
    engine.load_weights("second")
    (output,) = generate(engine, [[*PREFIX, 1]])
    assert output.num_cached_tokens == 0
    assert engine.runner.weights == "second"


def test_weights_do_not_change_under_a_live_request():
    engine = make_engine()
    engine.add_request("a", PREFIX, params())
    engine.step()
    with pytest.raises(EngineBusyError, match="1 requests are live"):
        engine.load_weights("second")
    assert engine.runner.weights == "first"
    assert run(engine)["a", 0].token_ids == greedy(PREFIX, 4)


# Several outputs


def test_n_outputs_compute_the_prompt_once():
    engine = make_engine(num_kv_blocks=64)
    engine.add_request("a", [*PREFIX, 1], params(3, n=4))
    finished = run(engine)
    assert sorted(finished) == [("a", i) for i in range(4)]
    assert engine.stats()["prompt_tokens_computed"] == 13 + 3
    assert engine.stats()["prefix_query_tokens"] == 13, "the prefix is counted once"


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_each_further_output_recomputes_at_most_a_block(num_tokens):
    engine = make_engine(num_kv_blocks=64)
    engine.add_request("a", list(range(num_tokens)), params(1, n=3))
    run(engine)
    recomputed = engine.stats()["prompt_tokens_computed"] - num_tokens
    assert recomputed <= 2 * 4


def test_each_output_draws_with_its_own_index():
    engine = make_engine()
    seen = []
    execute = engine.runner.execute

    def note(batch):
        seen.extend((s.index, s.params.seed) for s in batch.sequences)
        return execute(batch)

    engine.runner.execute = note
    engine.add_request("a", [1, 2], params(1, n=3, seed=7, temperature=1.0))
    run(engine)
    assert sorted(set(seen)) == [(0, 7), (1, 7), (2, 7)]


def test_without_a_seed_one_is_drawn_once_for_the_whole_request():
    engine = make_engine()
    engine.add_request("a", [1, 2], params(3, temperature=1.0))
    seeds = {s.params.seed for s in engine.scheduler.waiting}
    engine.step()
    seeds |= {s.params.seed for s in engine.scheduler.running}
    assert len(seeds) == 1
    assert None not in seeds


def test_abort_ends_all_outputs_of_a_request_and_frees_every_block():
    engine = make_engine()
    engine.add_request("a", PREFIX, params(50, n=3))
    engine.add_request("b", [9], params(2))
    engine.step()
    engine.abort("a")
    finished = run(engine)
    assert [finished["a", i].finish_reason for i in range(3)] == ["abort"] * 3
    assert finished["b", 0].finish_reason == "length"
    assert engine.stats()["blocks_in_use"] == 0


def test_an_aborted_output_is_returned_once_with_what_it_had():
    engine = make_engine()
    engine.add_request("a", PREFIX, params(50))
    engine.step()
    engine.step()
    engine.abort("a")
    assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert (output.finish_reason, output.token_ids) == ("abort", greedy(PREFIX, 2))
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_aborting_an_unknown_request_is_a_named_error():
    with pytest.raises(UnknownRequestError, match="no live request has the id 'x'"):
        make_engine().abort("x")


# Stopping


class Script(HistoryRunner):
    """Chooses the tokens it is told to, whatever the prompt."""

    def __init__(self, tokens, **values):
        super().__init__(**values)
        self.tokens = tokens

    def _sample(self, sequence):
        num_output = sequence.num_tokens - sequence.num_prompt_tokens
        return SampledToken(self.tokens[num_output % len(self.tokens)])


@pytest.mark.parametrize(
    ("values", "tokens", "reason"),
    [
        ({}, [5, 6, 2], "stop"),
        ({"ignore_eos": True, "max_tokens": 5}, [5, 6, 2, 3, 5], "length"),
        ({"stop_token_ids": (6,)}, [5, 6], "stop"),
        ({"ignore_eos": True, "stop_token_ids": (3,)}, [5, 6, 2, 3], "stop"),
        ({"max_tokens": 3}, [5, 6, 2], "stop"),
        ({"max_tokens": 2}, [5, 6], "length"),
        ({"min_tokens": 4, "max_tokens": 9}, [5, 6, 2, 3], "stop"),
        ({"min_tokens": 3, "max_tokens": 9}, [5, 6, 2], "stop"),
    ],
)
def test_an_output_ends_for_the_right_reason(values, tokens, reason):
    engine = make_engine(Script([5, 6, 2, 3], eos_token_ids=(2, 3)))
    engine.add_request("a", [1], SamplingParams(**({"max_tokens": 20} | values)))
    output = run(engine)["a", 0]
    assert (output.token_ids, output.finish_reason) == (tokens, reason)


def test_an_output_ends_where_the_models_length_ends():
    engine = make_engine(HistoryRunner(max_model_len=8))
    engine.add_request("a", [1] * 5, params(20))
    output = run(engine)["a", 0]
    assert (len(output.token_ids), output.finish_reason) == (3, "length")


def test_an_output_that_was_returned_keeps_its_tokens_while_the_sequence_grows():
    engine = make_engine()
    engine.add_request("a", PREFIX, params(6))
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    expected = greedy(PREFIX, 6)
    assert [output.token_ids for output in seen] == [expected[:n] for n in range(1, 7)]
    assert [output.num_tokens for output in seen] == [len(PREFIX) + n for n in range(1, 7)]
    seen[2].token_ids.append(99)
    assert seen[2].token_ids == expected[:3], "the list that was read belongs to its reader"


def test_a_step_copies_no_tokens():
    # Copied in each step, an output of n tokens would cost n * n / 2 copies.
    engine = make_engine()
    engine.add_request("a", PREFIX, params(3))
    (first,) = engine.step()
    (second,) = engine.step()
    assert first.known_token_ids is second.known_token_ids
    assert "known_token_ids" not in repr(first)


# Failures of the runner


@pytest.mark.parametrize("error", [ValueError("out of memory"), RunnerError("out of memory")])
def test_a_failed_step_is_undone_and_tried_again(error):
    engine = make_engine()
    engine.add_request("a", PREFIX, params())
    engine.add_request("b", [40, 41], params())
    engine.runner.fail_next = error
    with pytest.raises(RunnerError, match="out of memory"):
        engine.step()
    assert engine.stats()["blocks_in_use"] == 0
    assert engine.stats()["steps"] == 0
    finished = run(engine)
    assert finished["a", 0].token_ids == greedy(PREFIX, 4)
    assert finished["b", 0].token_ids == greedy([40, 41], 4)


def test_a_failed_step_publishes_nothing():
    engine = make_engine()
    engine.add_request("a", [*PREFIX, 1], params())
    engine.runner.fail_next = ValueError("no")
    with pytest.raises(RunnerError):
        engine.step()
    engine.abort("a")
    (output,) = engine.step()
    assert output.finish_reason == "abort"
    assert generate(engine, [[*PREFIX, 1]])[0].num_cached_tokens == 0


def test_an_interrupt_leaves_every_block_accounted_for():
    engine = make_engine()
    engine.add_request("a", PREFIX, params())
    engine.step()
    engine.runner.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert run(engine)["a", 0].token_ids == greedy(PREFIX, 4)


@pytest.mark.parametrize(
    ("sampled", "message"),
    [([], "0 tokens for 1"), ([1, 1], "2 tokens for 1"), ([50], "token 50"), ([-1], "token -1")],
)
def test_a_runner_that_answers_wrongly_is_named_and_changes_nothing(sampled, message):
    engine = make_engine()
    engine.add_request("a", PREFIX, params())
    right = engine.runner.execute
    engine.runner.execute = lambda batch: [SampledToken(t) for t in sampled]
    with pytest.raises(RunnerError, match=message):
        engine.step()
    engine.runner.execute = right
    assert run(engine)["a", 0].token_ids == greedy(PREFIX, 4)


def test_an_aborted_output_is_not_lost_when_the_next_step_fails():
    engine = make_engine()
    engine.add_request("a", PREFIX, params())
    engine.add_request("b", [9], params())
    engine.step()
    engine.abort("a")
    engine.runner.fail_next = ValueError("no")
    with pytest.raises(RunnerError):
        engine.step()
    assert run(engine)["a", 0].finish_reason == "abort"


# Bad input


@pytest.mark.parametrize(
    ("prompt", "values", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 50], {}, "token id 50 is outside the vocabulary of 50 tokens"),
        ([-1], {}, "token id -1"),
        (["a"], {}, "must be a list of token ids"),
        ("text", {}, "must be a list of token ids"),
        (5, {}, "must be a list of token ids"),
        ([1] * 200, {}, "prompt has 200 tokens; the model takes 200"),
        (
            [1] * 66,
            {},
            r"prompt has 66 tokens; the pool holds 16 blocks x 4 = 64: raise num_kv_blocks to at"
            r" least 17 or shorten the prompt",
        ),
        ([1], {"stop": ("x",)}, "no tokenizer"),
        ([1], {"stop_token_ids": (50,)}, "stop_token_ids: token id 50"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_leaves_the_engine_alone(prompt, values, message):
    engine = make_engine()
    engine.add_request("good", PREFIX, params())
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request("bad", prompt, params(**values))
    assert list(run(engine)) == [("good", 0)]


def test_a_key_field_of_a_wrong_type_is_refused_and_leaves_the_engine_alone():
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=r"key field 1.5 is a float"):
        engine.add_request("bad", PREFIX, params(), key_fields=(("adapter", 1.5),))
    assert not engine.has_unfinished_requests()
    assert generate(engine, [PREFIX])[0].token_ids == greedy(PREFIX, 4)


def test_the_longest_prompt_that_fits_is_taken():
    engine = make_engine()
    (output,) = generate(engine, [[1] * 64], params(1))
    assert output.token_ids == greedy([1] * 64, 1)


def test_a_request_id_may_be_used_again_only_after_its_return():
    engine = make_engine()
    engine.add_request("a", [1], params(1))
    with pytest.raises(DuplicateRequestError, match="'a' is in use"):
        engine.add_request("a", [2], params(1))
    run(engine)
    engine.add_request("a", [2], params(1))
    assert run(engine)["a", 0].token_ids == greedy([2], 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 65),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("ignore_eos", "yes"),
        ("seed", -1),
        ("n", 0),
        ("logprobs", -1),
        ("prompt_logprobs", 1.0),
    ],
)
def test_a_bad_sampling_value_is_named_with_what_is_allowed(name, value):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value)
    assert "must be" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("attention_backend", "flash"),
        ("block_size", 0),
        ("block_size", 1.5),
        ("num_kv_blocks", 0),
        ("kv_cache_bytes", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -3),
        ("max_model_len", 0),
        ("max_prefill_chunk", 0),
        ("prefix_cache_max_share", 1.5),
        ("prefix_cache_max_share", -0.1),
    ],
)
def test_a_bad_config_value_is_named_with_what_is_allowed(name, value):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{name: value})
    assert str(error.value).startswith(f"{name} is {value!r}; it must be ")


def test_the_pools_size_comes_from_one_place():
    with pytest.raises(ConfigError, match="give one of the two"):
        EngineConfig(num_kv_blocks=5, kv_cache_bytes=1000)
    engine = LLMEngine(EngineConfig(block_size=4, kv_cache_bytes=2_000), HistoryRunner())
    assert engine.stats()["blocks_free"] == 5
    with pytest.raises(ConfigError, match="a pool of 0 blocks; one block of 4 tokens takes 400"):
        LLMEngine(EngineConfig(block_size=4, kv_cache_bytes=399), HistoryRunner())


def test_a_length_beyond_the_models_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 300; the model takes at most 200"):
        make_engine(max_model_len=300)


def test_every_error_of_ours_has_one_root():
    for error in (ConfigError, InvalidRequestError, RunnerError, UnknownRequestError):
        assert issubclass(error, MiniVLLMError)


# Numbers


def test_the_stats_are_the_ones_named_in_the_design():
    assert sorted(make_engine().stats()) == sorted(
        [
            "steps",
            "num_waiting",
            "num_running",
            "preemptions",
            "prompt_tokens_computed",
            "generated_tokens",
            "prefix_query_tokens",
            "prefix_hit_tokens",
            "prefix_hit_rate",
            "resumed_query_tokens",
            "resumed_hit_tokens",
            "mean_cached_prefix_tokens",
            "evicted_blocks",
            "blocks_free",
            "blocks_cached_idle",
            "blocks_in_use",
            "kv_bytes_cached_idle",
            "kv_bytes_in_use",
            "lookup_seconds",
            "publish_seconds",
        ]
    )


def test_the_stats_of_a_small_run_are_right():
    engine = make_engine()
    generate(engine, [[*PREFIX, 1]], params(2))
    generate(engine, [[*PREFIX, 2]], params(2))
    stats = engine.stats()
    assert stats["steps"] == 4
    assert stats["generated_tokens"] == 4
    assert stats["prompt_tokens_computed"] == 13 + 1
    assert stats["prefix_query_tokens"] == 26
    assert stats["prefix_hit_tokens"] == 12
    assert stats["prefix_hit_rate"] == pytest.approx(12 / 26)
    assert stats["mean_cached_prefix_tokens"] == 6
    assert stats["blocks_cached_idle"] == 3
    assert stats["kv_bytes_cached_idle"] == 3 * 400
    assert stats["lookup_seconds"] > 0
    assert stats["publish_seconds"] > 0


def test_the_stats_are_right_under_preemption_abort_and_refusal():
    engine = make_engine(num_kv_blocks=4, enable_prefix_caching=False)
    engine.add_request("old", [1] * 7, params(8))
    engine.add_request("new", [2] * 7, params(8))
    with pytest.raises(InvalidRequestError):
        engine.add_request("refused", [1] * 99, params())
    run(engine)
    recomputed = engine.runner.num_computed - 2 * 14
    stats = engine.stats()
    assert recomputed > 0
    assert stats["generated_tokens"] == 16
    assert stats["prompt_tokens_computed"] == 14 + 7 * stats["preemptions"]
    engine.add_request("gone", [3] * 5, params(8))
    engine.step()
    engine.abort("gone")
    run(engine)
    assert engine.stats()["generated_tokens"] == 17
    assert engine.stats()["blocks_in_use"] == 0


def test_the_first_tokens_time_is_kept():
    engine = make_engine()
    engine.add_request("a", PREFIX, params(3))
    times = [engine.step()[0].time_to_first_token for _ in range(3)]
    assert times[0] > 0
    assert times == [times[0]] * 3


def test_budget_given_back_by_a_preemption_is_used_in_the_same_step():
    # Block size 5, four blocks, budget 4. In the fifth step c decodes first and takes the last
    # free block; b, which needs one, preempts c and has its budget of 1 again: 4, not 3.
    engine = make_engine(
        block_size=5, num_kv_blocks=4, max_num_batched_tokens=4, max_num_seqs=3, max_prefill_chunk=8
    )
    engine.add_request("a", [3, 1, 1, 1, 2, 1, 2], params(1))
    engine.add_request("b", [3, 1, 1, 1, 2, 1, 1, 2, 1, 2, 2, 3, 3], params(12))
    engine.add_request("c", [1, 3, 1, 1], params(8))
    for _ in range(5):
        engine.step()
    assert engine.stats()["preemptions"] == 1
    assert [(name, start, end) for name, _, start, end, _ in engine.runner.batches[-1]] == [
        ("b", 9, 13)
    ]
