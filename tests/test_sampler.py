"""The sampler against transformers' processors, and against what "reproducible" has to mean."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minivllm.core.batch import ScheduledSequence
from minivllm.errors import RunnerError
from minivllm.model import sampler as sampler_module
from minivllm.model.sampler import Sampler, uniform
from minivllm.sampling_params import SamplingParams

EOS = 1
FIXED = [1.0, 3.0, 2.0, -1.0, 0.5, 2.5, 0.0, -2.0]


def scheduled(num_prompt=3, token_ids=(4, 2, 4), index=0, request_id="r", **params):
    """A sequence that computes its newest token, with the given sampling parameters."""
    params.setdefault("max_tokens", 1_000)
    params.setdefault("seed", 0)
    return ScheduledSequence(
        request_id=request_id,
        token_ids=list(token_ids),
        start=len(token_ids) - 1,
        end=len(token_ids),
        block_table=[],
        params=SamplingParams(**params),
        index=index,
        num_prompt_tokens=num_prompt,
    )


def sample_one(logits, sequence, eos_token_ids=(EOS,)):
    return Sampler().sample(torch.as_tensor(logits)[None], [sequence], eos_token_ids)[0]


def processors_of(params, num_prompt):
    """What transformers' generate would apply for these parameters, in its order."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.min_tokens:
        steps.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, [EOS]))
    steps.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps


def drawn_at(shares, logits, sequence):
    """The tokens that are drawn when the random number is each of `shares`: one row each."""
    rows = [replace(sequence, params=replace(sequence.params, seed=i)) for i in range(len(shares))]
    logits = torch.as_tensor(logits).expand(len(rows), -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "uniform", lambda seed, position: shares[seed])
        return [token_id for token_id, _ in Sampler().sample(logits, rows, [EOS])]


def edges_of(probabilities):
    """The running sums below which each token with a probability is drawn."""
    running, edges = 0.0, []
    for token_id, probability in enumerate(probabilities):
        if probability > 0:
            edges.append((token_id, running, running + probability))
            running += probability
    return edges


logit_values = st.one_of(
    st.floats(-8, 8, width=32),
    st.sampled_from([0.0, 1.0, 2.0, -math.inf]),  # ties, and tokens that cannot come
)
logit_rows = st.lists(logit_values, min_size=2, max_size=24).filter(
    lambda row: sum(math.isfinite(x) for i, x in enumerate(row) if i != EOS) > 0
)
sampling_choices = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.2, 3),
        "top_k": st.one_of(st.just(0), st.integers(1, 30)),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
        "repetition_penalty": st.one_of(st.just(1.0), st.floats(0.5, 2)),
        "min_tokens": st.integers(0, 3),
    }
)


# The distribution


@settings(deadline=None, max_examples=150)
@given(row=logit_rows, choices=sampling_choices, data=st.data())
def test_every_token_is_drawn_on_exactly_its_share_of_transformers_distribution(row, choices, data):
    vocab = len(row)
    token_ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=6))
    num_prompt = data.draw(st.integers(1, len(token_ids)))
    sequence = scheduled(num_prompt, token_ids, **choices)
    logits = torch.tensor(row)
    expected = processors_of(sequence.params, num_prompt)(
        torch.tensor([token_ids]), logits[None].clone()
    )
    probabilities = expected[0].double().softmax(-1).tolist()
    assume_away_from_the_cutting_edges(sequence, num_prompt, logits)
    # Float32 scores come before our softmax and theirs: two parts in a million of slack.
    shares, expected_ids = [], []
    for token_id, low, high in edges_of(probabilities):
        if high - low > 1e-5:
            shares += [low + 2e-6, (low + high) / 2, high - 2e-6]
            expected_ids += [token_id] * 3
    assert drawn_at(shares, logits, sequence) == expected_ids


def assume_away_from_the_cutting_edges(sequence, num_prompt, logits):
    """Leave out rows where float32's rounding, or the order of equal tokens, decides who stays."""
    params = sequence.params
    steps = processors_of(params, num_prompt)
    scores = logits[None].clone()
    for step in steps:
        probabilities = scores[0].softmax(-1)
        if isinstance(step, TopPLogitsWarper):
            dropped = probabilities.sort().values.cumsum(-1)
            assume((dropped - (1 - params.top_p)).abs().min() > 1e-6)
            last = probabilities[step(None, scores)[0].isfinite()].min()
            assume(((probabilities - last).abs() < 1e-7).sum() == 1)
        if isinstance(step, MinPLogitsWarper) and params.min_p < 1:
            assume((probabilities - params.min_p * probabilities.max()).abs().min() > 1e-6)
        if isinstance(step, TopKLogitsWarper):
            finite = scores[0][scores[0].isfinite()].unique()
            assume(finite.numel() < 2 or finite.diff().min() > 1e-5)
        scores = step(torch.tensor([sequence.token_ids]), scores)


def survivors(logits, **params):
    """The tokens that a fine comb of random numbers draws."""
    shares = [i / 400 for i in range(400)]
    return set(drawn_at(shares, logits, scheduled(temperature=1.0, **params)))


def test_the_steps_keep_the_tokens_that_transformers_keep_even_on_ties():
    logits = torch.tensor([2.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0, 0.0, 2.0, 1.0])
    none = torch.zeros(1, 1, dtype=torch.long)
    for warper, params in [
        (TopKLogitsWarper(2), {"top_k": 2}),
        (TopKLogitsWarper(5), {"top_k": 5}),
        (TopPLogitsWarper(0.3), {"top_p": 0.3}),
        (TopPLogitsWarper(0.8), {"top_p": 0.8}),
        (MinPLogitsWarper(0.3), {"min_p": 0.3}),
        (MinPLogitsWarper(1.0), {"min_p": 1.0}),
    ]:
        kept = warper(none, logits[None].clone())[0].isfinite().nonzero().flatten().tolist()
        assert survivors(logits, **params) == set(kept), params


def test_top_k_keeps_every_token_that_equals_the_kth():
    assert survivors([3.0, 1.0, 2.0, 2.0, 2.0], top_k=2) == {0, 2, 3, 4}


def test_top_p_is_applied_to_what_top_k_has_left():
    # Alone, top_p 0.6 of eight equal tokens keeps five; of the four that top_k leaves, three.
    logits = [1.0, 1.0, 1.0, 1.0, 0.99, 0.99, 0.99, 0.99]
    assert len(survivors(logits, top_p=0.6)) == 5
    assert len(survivors(logits, top_k=4, top_p=0.6)) == 3


def test_top_p_keeps_as_many_of_equal_tokens_as_transformers_and_those_of_the_highest_ids():
    # Half of four or 32 equal tokens is reached exactly: no third, no 17th one is needed.
    for num_equal, top_p in [(3, 0.55), (4, 0.5), (17, 0.55), (32, 0.5), (40, 0.55)]:
        logits = torch.zeros(num_equal)
        theirs = TopPLogitsWarper(top_p)(None, logits[None])[0].isfinite().sum()
        assert survivors(logits, top_p=top_p) == set(range(num_equal - theirs, num_equal))


def test_a_tiny_top_p_keeps_the_best_token():
    assert survivors(FIXED, top_p=1e-30) == {1}


def test_temperature_comes_before_min_p():
    # exp(-1.5) = 0.22 is above 0.1, exp(-1.5 / 0.5) = 0.05 is not.
    assert drawn_at([0.99], [1.5, 0.0], scheduled(temperature=1.0, min_p=0.1)) == [1]
    assert drawn_at([0.99], [1.5, 0.0], scheduled(temperature=0.5, min_p=0.1)) == [0]


def test_parameters_that_are_off_or_too_large_change_nothing():
    plain = [sample_one(FIXED, scheduled(temperature=1.0, seed=s)).token_id for s in range(64)]
    for off in ({"top_k": 8}, {"top_k": 10**30}, {"top_p": 1.0}, {"min_p": 0.0}, {"top_k": 0}):
        drawn = [
            sample_one(FIXED, scheduled(temperature=1.0, seed=s, **off)).token_id for s in range(64)
        ]
        assert drawn == plain, off
    assert len(set(plain)) > 3


def test_frequencies_follow_the_distribution():
    num_draws = 4_000
    logits = torch.tensor(FIXED).expand(num_draws, -1)
    sequences = [scheduled(temperature=1.3, seed=seed) for seed in range(num_draws)]
    drawn = Counter(token for token, _ in Sampler().sample(logits, sequences, [EOS]))
    expected = (torch.tensor(FIXED) / 1.3).softmax(-1).tolist()
    chi_square = sum(
        (drawn[token] - num_draws * p) ** 2 / (num_draws * p) for token, p in enumerate(expected)
    )
    # 7 degrees of freedom: above 24.3 one time in a thousand. The seeds are fixed.
    assert chi_square < 24.3


def test_frequencies_over_positions_of_one_seed_follow_the_distribution_too():
    num_draws = 4_000
    logits = torch.zeros(num_draws, 10)
    sequences = [scheduled(3, [0] * n, temperature=1.0, seed=7) for n in range(1, num_draws + 1)]
    drawn = Counter(token for token, _ in Sampler().sample(logits, sequences, [EOS]))
    chi_square = sum((drawn[token] - 400) ** 2 / 400 for token in range(10))
    assert chi_square < 27.9  # 9 degrees of freedom, one time in a thousand


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_draws_the_best_token(temperature):
    large = [100 * logit for logit in FIXED]
    for seed in range(20):
        assert sample_one(large, scheduled(temperature=temperature, seed=seed)).token_id == 1


def test_a_huge_temperature_draws_evenly_but_never_an_impossible_token():
    logits = [5.0, -math.inf, 0.0, -5.0]
    drawn = {
        sample_one(logits, scheduled(temperature=1e300, seed=seed)).token_id for seed in range(80)
    }
    assert drawn == {0, 2, 3}


def test_a_token_of_probability_zero_is_not_drawn_at_either_end():
    logits = [-math.inf, 1.0, -math.inf, 1.0, -math.inf]
    assert drawn_at([0.0, 0.5, 1 - 2**-53], logits, scheduled(temperature=1.0)) == [1, 3, 3]


# Reproducibility


@pytest.mark.parametrize(
    ("seed", "index", "first_position", "expected"),
    [
        (0, 0, 1, [1, 0, 6, 1, 1, 1, 5, 1, 6, 1, 5, 2]),
        (0, 1, 1, [1, 2, 6, 1, 2, 2, 1, 1, 5, 2, 2, 5]),
        (1, 0, 1, [1, 2, 6, 1, 2, 2, 1, 1, 5, 2, 2, 5]),
        (42, 0, 1000, [5, 1, 1, 1, 0, 6, 2, 5, 2, 5, 5, 5]),
        (2**63 - 1, 0, 7, [1, 5, 5, 3, 1, 5, 1, 1, 1, 5, 5, 0]),
        (2**63 - 1, 3, 7, [1, 6, 5, 1, 1, 5, 2, 1, 2, 1, 1, 1]),
    ],
)
def test_a_seed_draws_the_same_tokens_in_every_version(seed, index, first_position, expected):
    drawn = [
        sample_one(
            FIXED, scheduled(1, [0] * position, temperature=1.5, seed=seed, index=index)
        ).token_id
        for position in range(first_position, first_position + 12)
    ]
    assert drawn == expected


def test_random_numbers_are_those_that_splitmix64_was_published_with():
    # Its first three outputs from state 0, which seed 0 is mixed into.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [uniform(0, position) for position in range(3)] == [
        (bits >> 11) / 2**53 for bits in published
    ]


@given(seed=st.integers(0, 2**63), position=st.integers(0, 10**7))
def test_a_random_number_is_at_least_0_and_below_1(seed, position):
    assert 0 <= uniform(seed, position) < 1


def test_output_i_of_seed_s_draws_what_output_0_of_seed_s_plus_i_draws():
    drawn = set()
    for index in range(30):
        branch = sample_one(FIXED, scheduled(temperature=5.0, seed=11, index=index))
        alone = sample_one(FIXED, scheduled(temperature=5.0, seed=11 + index))
        assert branch == alone
        drawn.add(branch)
    assert len(drawn) > 4


batch_rows = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 40, 1000]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "min_tokens": st.integers(0, 2),
        "seed": st.integers(0, 2**63 - 1),
        "logprobs": st.sampled_from([None, 0, 2, 7]),
    }
)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(batch_rows, min_size=1, max_size=6),
    vocab=st.sampled_from([5, 37, 1003]),
    noise=st.integers(0, 2**32),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_row_has_the_same_result_alone_and_in_any_batch(rows, vocab, noise, coarse, dtype):
    generator = torch.Generator().manual_seed(noise)
    logits = torch.randn(len(rows), vocab, generator=generator) * 3
    logits = (logits.round() if coarse else logits).to(dtype)
    sequences = [
        scheduled(2, [row % vocab, 3, 4], index=row, **params) for row, params in enumerate(rows)
    ]
    together = Sampler().sample(logits, sequences, [EOS])
    alone = [sample_one(row, seq) for row, seq in zip(logits, sequences, strict=True)]
    backwards = Sampler().sample(logits.flip(0), sequences[::-1], [EOS])
    assert together == alone == backwards[::-1]


def test_a_row_of_a_real_vocabulary_has_the_same_result_alone_and_in_a_batch():
    logits = torch.randn(9, 49_153, generator=torch.Generator().manual_seed(3))
    choices = [{}, {"top_p": 0.95}, {"top_k": 50, "min_p": 0.02}]
    sequences = [
        scheduled(temperature=1.0, seed=row, logprobs=4, **choices[row % 3]) for row in range(9)
    ]
    together = Sampler().sample(logits, sequences, [EOS])
    alone = [sample_one(row, seq) for row, seq in zip(logits, sequences, strict=True)]
    assert together == alone


# Greedy, penalties, min_tokens


@settings(deadline=None)
@given(row=logit_rows, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_greedy_takes_the_lowest_id_of_the_largest_logits(row, dtype):
    rounded = torch.tensor(row).to(dtype)
    expected = rounded.tolist().index(max(rounded.tolist()))
    assert sample_one(rounded, scheduled(top_k=2, top_p=0.5, min_p=0.5)).token_id == expected


@settings(deadline=None)
@given(row=logit_rows, penalty=st.floats(0.25, 4), data=st.data())
def test_greedy_with_a_repetition_penalty_is_the_argmax_of_transformers(row, penalty, data):
    token_ids = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=6))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([token_ids]), torch.tensor([row])
    )
    sequence = scheduled(1, token_ids, repetition_penalty=penalty)
    assert sample_one(row, sequence).token_id == expected.argmax().item()


def test_the_repetition_penalty_counts_prompt_and_output_once_each():
    # 3.0 / 1.25 = 2.4 loses to 2.5; a penalty for each occurrence would bring it below 2.0.
    row = [2.0, 3.0, 2.5]
    for token_ids, expected in (([1, 0, 0], 2), ([0, 0, 1], 2), ([2, 0, 0], 1), ([1, 1, 2], 1)):
        sequence = scheduled(1, token_ids, repetition_penalty=1.25)
        assert sample_one(row, sequence).token_id == expected, token_ids


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e38, 1e300])
def test_an_extreme_repetition_penalty_does_not_break_the_batch(penalty):
    row = [0.0, 30.0, -25.0, 10.0]
    sequence = scheduled(1, [0, 1, 2], repetition_penalty=penalty)
    assert sample_one(row, sequence).token_id == (1 if penalty < 1 else 3)


@pytest.mark.parametrize(
    ("num_output", "expected"), [(0, 2), (1, 2), (2, 1)], ids=["none", "one", "enough"]
)
def test_before_min_tokens_no_eos_is_chosen(num_output, expected):
    sequence = scheduled(3, [0] * (3 + num_output), min_tokens=2)
    assert sample_one([0.0, 9.0, 5.0], sequence).token_id == expected


def test_before_min_tokens_every_eos_and_stop_token_is_forbidden():
    row = [0.0, 9.0, 8.0, 7.0, 6.0]
    waiting = {"min_tokens": 2, "stop_token_ids": (3, 10**12)}
    assert sample_one(row, scheduled(**waiting), [1, 2, 5]).token_id == 4
    assert sample_one(row, scheduled(**waiting, ignore_eos=True), [1, 2, 5]).token_id == 1
    both = {"min_tokens": 2, "stop_token_ids": (1,), "ignore_eos": True}
    assert sample_one(row, scheduled(**both), [1]).token_id == 2
    drawn = {
        sample_one(row, scheduled(temperature=9.0, seed=s, **waiting), [1, 2]).token_id
        for s in range(60)
    }
    assert drawn == {0, 4}


def test_the_logits_are_not_changed():
    logits = torch.tensor([FIXED] * 3)
    sequences = [
        scheduled(temperature=0.5, top_k=2, repetition_penalty=2.0, min_tokens=2, logprobs=1),
        scheduled(),
        scheduled(temperature=1.0, top_p=0.5, min_p=0.3),
    ]
    Sampler().sample(logits, sequences, [EOS])
    assert logits.tolist() == [FIXED] * 3


def test_greedy_rows_are_never_sorted_or_drawn(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a greedy row needs one argmax only")

    for name in ("sort", "topk", "softmax", "log_softmax", "cumsum", "clone"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    sequences = [scheduled(top_k=3, top_p=0.5, min_p=0.1)] * 2
    assert [t for t, _ in Sampler().sample(torch.tensor([FIXED] * 2), sequences, [EOS])] == [1, 1]
    with pytest.raises(AssertionError, match="one argmax"):
        sample_one(FIXED, scheduled(temperature=1.0))


# Log-probabilities


@settings(deadline=None)
@given(row=logit_rows, num_best=st.integers(0, 30), seed=st.integers(0, 99))
def test_logprobs_are_those_of_the_raw_distribution_best_first(row, num_best, seed):
    sequence = scheduled(
        temperature=2.0, repetition_penalty=1.5, min_tokens=1, seed=seed, logprobs=num_best,
        token_ids=[0, 1, 0],
    )  # fmt: skip
    token_id, logprobs = sample_one(row, sequence)
    expected = torch.tensor(row).log_softmax(-1).tolist()
    ranking = sorted(range(len(row)), key=lambda i: (-expected[i], i))
    wanted = ranking[:num_best]
    assert list(logprobs) == (wanted if token_id in wanted else [*wanted, token_id])
    assert list(logprobs.values()) == pytest.approx([expected[i] for i in logprobs], abs=1e-6)


def test_a_chosen_token_that_is_not_among_the_best_stands_last(monkeypatch):
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, position: 1 - 2**-53)
    token_id, logprobs = sample_one(FIXED, scheduled(temperature=1.0, logprobs=2))
    assert token_id == 7
    assert list(logprobs) == [1, 5, 7]


def test_num_best_0_gives_the_chosen_token_only_and_none_gives_nothing():
    assert list(sample_one(FIXED, scheduled(logprobs=0)).logprobs) == [1]
    assert sample_one(FIXED, scheduled(logprobs=None)).logprobs is None


def test_equally_likely_tokens_are_listed_by_id():
    assert list(sample_one([0.0, 1.0, 1.0, 1.0, 1.0], scheduled(logprobs=2)).logprobs) == [1, 2]


@pytest.mark.parametrize("num_best", [0, 3, 50])
def test_prompt_logprobs_give_each_known_token_and_the_best_in_its_place(num_best):
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    next_token_ids = [0, 39, 7, 7, 12, int(logits[5].argmax())]
    found = Sampler().prompt_logprobs(logits, next_token_ids, num_best)
    expected = torch.log_softmax(logits.float(), -1)
    assert len(found) == 6
    for row, token_id, logprobs in zip(expected, next_token_ids, found, strict=True):
        best = row.sort(descending=True, stable=True).indices[:num_best].tolist()
        assert list(logprobs) == (best if token_id in best else [*best, token_id])
        assert list(logprobs.values()) == pytest.approx(row[list(logprobs)].tolist(), abs=1e-6)


def test_no_rows_give_no_tokens():
    assert Sampler().sample(torch.empty(0, 8), [], [EOS]) == []
    assert Sampler().prompt_logprobs(torch.empty(0, 8), [], 3) == []


# What cannot be sampled


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row",
    [[math.nan] * 3, [0.0, math.nan, 1.0], [-math.inf] * 3, [0.0, math.inf, 1.0]],
    ids=["all NaN", "one NaN", "all -inf", "one +inf"],
)
def test_a_row_without_a_largest_finite_logit_is_an_error_that_names_the_request(row, temperature):
    sequences = [scheduled(), scheduled(request_id="broken", temperature=temperature)]
    with pytest.raises(RunnerError, match=r"'broken', position 3.*largest logit is (nan|-?inf)"):
        Sampler().sample(torch.tensor([[0.0, 1.0, 2.0], row]), sequences, [EOS])


def test_min_tokens_that_forbids_every_token_is_an_error():
    with pytest.raises(RunnerError, match="min_tokens"):
        sample_one([0.0, 1.0], scheduled(min_tokens=1, stop_token_ids=(0, 1)))


def test_logits_of_another_number_of_rows_are_an_error():
    with pytest.raises(RunnerError, match=r"\[2, 8\] for 1 sequences"):
        Sampler().sample(torch.tensor([FIXED] * 2), [scheduled()], [EOS])


def test_a_random_row_without_a_seed_is_an_error():
    with pytest.raises(RunnerError, match="no seed"):
        sample_one(FIXED, scheduled(temperature=1.0, seed=None))
