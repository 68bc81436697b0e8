"""Chapter 5's tests: the batch, the rows that give logits, the sampler, the runner."""

import math
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from chapters.ch05_model_runner.history import HistoryModel, first_difference, next_token
from chapters.testing import Broken, task

BLOCK_SIZE = 4


# 5.1 a step as tensors


def example(stage, stages):
    """The step at the top of the solution: A decodes with table [0, 1], B is new with [3, 2]."""
    ch01 = stages.load("ch01_sequence")
    pool = stages.load("ch03_block_manager").BlockManager(num_blocks=4, block_size=BLOCK_SIZE)
    a = ch01.Sequence("A", [10, 11, 12, 13, 14, 15])
    a.run()
    pool.allocate(a, 6)
    pool.commit(a, 6)
    a.append_token(16)
    # Two that come and go, so that B's blocks are not in order.
    c, d = ch01.Sequence("C", [1]), ch01.Sequence("D", [1])
    for each in (c, d):
        pool.allocate(each, 1)
    for each in (c, d):
        pool.free(each)
    b = ch01.Sequence("B", [20, 21, 22, 23, 24])
    b.run()
    pool.allocate(a, 1)
    pool.allocate(b, 5)
    assert (a.block_table, b.block_table) == ([0, 1], [3, 2])
    step = stages.load("ch02_scheduler").Step(decodes=[a], prefills=[b])
    return stage.build_batch(step, pool)


@task("5.1", "C5.1")
def test_the_rows_are_the_newest_token_of_a_decode_and_all_tokens_of_a_prefill(stage, stages):
    found = example(stage, stages).token_ids.tolist()
    expected = [16, 20, 21, 22, 23, 24]
    assert found == expected, f"token_ids: expected {expected}, got {found}"


@task("5.1", "C5.2")
def test_a_position_counts_from_the_start_of_its_sequence(stage, stages):
    found = example(stage, stages).positions.tolist()
    expected = [6, 0, 1, 2, 3, 4]
    assert found == expected, f"positions: expected {expected}, got {found}"


@task("5.1", "C5.3")
def test_a_row_is_written_to_the_slot_of_its_position(stage, stages):
    found = example(stage, stages).slot_mapping.tolist()
    expected = [6, 12, 13, 14, 15, 8]
    assert found == expected, f"slot_mapping: expected {expected}, got {found}"


@task("5.1", "C5.4")
def test_query_starts_say_where_each_sequence_begins_and_the_last_one_ends(stage, stages):
    found = example(stage, stages).query_starts.tolist()
    assert found == [0, 1, 6], f"query_starts: expected [0, 1, 6], got {found}"


@task("5.1", "C5.5")
def test_a_decode_sees_what_is_cached_and_itself(stage, stages):
    found = example(stage, stages).context_lens.tolist()
    wrong = f"context_lens: A decodes position 6 and sees the keys 0 .. 6: [7, 5], got {found}"
    assert found == [7, 5], wrong


@task("5.1", "C5.6")
def test_block_tables_stand_in_the_order_of_the_rows(stage, stages):
    found = example(stage, stages).block_tables.tolist()
    assert found == [[0, 1], [3, 2]], f"block_tables: expected [[0, 1], [3, 2]], got {found}"


@st.composite
def steps(draw):
    """(is it decoding, number of tokens) of each sequence; at least one, at most five."""
    each = st.tuples(st.booleans(), st.integers(1, 11))
    found = draw(st.lists(each, min_size=1, max_size=5))
    return [(decodes and n > 1, n) for decodes, n in found]


def make_step(stages, wanted):
    """A Step of such sequences, their pool, and the sequences in the order of the rows."""
    ch01, ch02, ch03 = map(stages.load, ("ch01_sequence", "ch02_scheduler", "ch03_block_manager"))
    pool = ch03.BlockManager(num_blocks=20, block_size=BLOCK_SIZE)
    step = ch02.Step([], [])
    for i, (decodes, num_tokens) in enumerate(wanted):
        tokens = [100 * i + position for position in range(num_tokens)]
        sequence = ch01.Sequence("ABCDE"[i], tokens[: num_tokens - decodes])
        sequence.run()
        pool.allocate(sequence, sequence.num_tokens)
        if decodes:
            pool.commit(sequence, sequence.num_tokens)
            sequence.append_token(tokens[-1])
        (step.decodes if decodes else step.prefills).append(sequence)
    for sequence in step.decodes:
        pool.allocate(sequence, 1)
    return step, pool, step.decodes + step.prefills


@task("5.1", "C5.1")
@given(steps())
def test_any_step_gives_each_row_its_token_position_slot_and_context(stage, stages, wanted):
    step, pool, sequences = make_step(stages, wanted)
    batch = stage.build_batch(step, pool)
    starts = [s.num_tokens - 1 if s in step.decodes else 0 for s in sequences]
    rows = [
        (s, p)
        for s, start in zip(sequences, starts, strict=True)
        for p in range(start, s.num_tokens)
    ]
    ends = [sum(s in sequences[: i + 1] for s, _ in rows) for i in range(len(sequences))]
    expected = {
        "token_ids": ("C5.1", [s.token_ids[p] for s, p in rows]),
        "positions": ("C5.2", [p for _, p in rows]),
        "slot_mapping": (
            "C5.3",
            [s.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in rows],
        ),
        "query_starts": ("C5.4", [0, *ends]),
        "context_lens": ("C5.5", [s.num_tokens for s in sequences]),
    }
    who = ", ".join(
        f"{s.request_id} {'decodes' if s in step.decodes else 'prefills'} {s.num_tokens} tokens"
        for s in sequences
    )
    for field, (broken, right) in expected.items():
        found = getattr(batch, field).tolist()
        if found != right:
            raise Broken(broken, f"{who}: {field} must be {right}, it is {found}")
    for s, line in zip(sequences, batch.block_tables.tolist(), strict=True):
        if line[: len(s.block_table)] != s.block_table:
            raise Broken("C5.6", f"{who}: {s.request_id}'s table is {s.block_table}, not {line}")


@task("5.1", "I4")
def test_over_a_whole_run_every_row_reads_its_own_tokens(stage, stages):
    """Three requests through chapter 2's scheduler, with a model that tells what it has read."""
    ch01, ch02, ch03 = map(stages.load, ("ch01_sequence", "ch02_scheduler", "ch03_block_manager"))
    pool = ch03.BlockManager(num_blocks=7, block_size=BLOCK_SIZE)
    scheduler = ch02.Scheduler(pool, max_num_batched_tokens=20, max_model_len=20)
    model = HistoryModel(pool.num_blocks, BLOCK_SIZE)
    for name, num_tokens in [("A", 6), ("B", 4), ("C", 9)]:
        tokens = [ord(name) + position for position in range(num_tokens)]
        scheduler.add(ch01.Sequence(name, tokens, ch01.SamplingParams(max_tokens=6)))
    for _ in range(60):
        if not (scheduler.waiting or scheduler.running):
            break
        step = scheduler.schedule()
        sequences = step.decodes + step.prefills
        if not sequences:
            continue
        model.hidden(stage.build_batch(step, pool))
        row = 0
        for sequence in sequences:
            first = sequence.num_tokens - 1 if sequence in step.decodes else 0
            for position in range(first, sequence.num_tokens):
                tokens = sequence.token_ids[: position + 1]
                wrong = first_difference(sequence.request_id, tokens, model.reads[row])
                assert wrong is None, wrong
                row += 1
        scheduler.commit(step, [next_token(s.token_ids) for s in sequences])
    assert scheduler.preemptions > 0, "this run is meant to preempt somebody"
    assert len(scheduler.finished) == 3


# 5.2 the rows that give logits


class RowModel:
    """A model that says which row was asked for: row r has the hidden state [r, 10 r]."""

    def __init__(self):
        self.asked = []

    def hidden(self, batch):
        rows = torch.arange(len(batch.token_ids), dtype=torch.float32)
        return torch.stack([rows, 10 * rows], dim=1)

    def logits(self, hidden):
        self.asked.append(hidden[:, 0].tolist())
        return hidden.sum(dim=1, keepdim=True) * torch.tensor([1.0, 2.0, 3.0])


def batch_of(stage, num_rows):
    """A batch of prefills with so many rows each, in blocks of their own."""
    starts = [0]
    for n in num_rows:
        starts.append(starts[-1] + n)
    return stage.make_batch(
        token_ids=range(starts[-1]),
        positions=[position for n in num_rows for position in range(n)],
        slot_mapping=[16 * i + position for i, n in enumerate(num_rows) for position in range(n)],
        query_starts=starts,
        context_lens=num_rows,
        block_tables=[[i] for i in range(len(num_rows))],
    )


@task("5.2", "C5.7")
def test_the_last_row_of_each_sequence_is_the_one_before_the_next_begins(stage):
    found = stage.last_rows(batch_of(stage, [1, 5, 3])).tolist()
    wrong = f"query_starts [0, 1, 6, 9]: the last rows are [0, 5, 8], got {found}"
    assert found == [0, 5, 8], wrong


@task("5.2", "C5.8")
def test_each_sequence_gets_the_scores_of_its_last_row(stage):
    found = stage.next_logits(RowModel(), batch_of(stage, [2, 4])).tolist()
    expected = [[11.0, 22.0, 33.0], [55.0, 110.0, 165.0]]
    assert found == expected, f"the scores of rows 1 and 5 are {expected}, got {found}"


@task("5.2", "C5.9")
def test_the_head_is_asked_once_and_for_the_last_rows_only(stage):
    model = RowModel()
    stage.next_logits(model, batch_of(stage, [300, 2, 1]))
    num_rows = [len(rows) for rows in model.asked]
    assert model.asked == [[299.0, 301.0, 302.0]], (
        f"303 rows are computed, 3 give logits: expected one call for rows [299, 301, 302],"
        f" got {len(num_rows)} of {num_rows} rows"
    )


# 5.3 choose a token

SHARES = [0.05, 0.5, 0.15, 0.3]


def params(temperature=1.0, top_k=0, top_p=1.0, seed=0):
    return SimpleNamespace(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def logits_of(shares):
    """Logits whose softmax is `shares`."""
    return torch.tensor([math.log(share) for share in shares])


def rounded(tensor):
    return [round(float(value), 4) for value in tensor]


def kept(stage, shares, own):
    """Ids of the tokens that may be drawn."""
    found = stage.probabilities(logits_of(shares), own)
    return [i for i, share in enumerate(found.tolist()) if share > 0]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@task("5.3", "C5.10")
def test_temperature_0_takes_the_largest_logit_and_the_lowest_id_on_a_tie(stage):
    # Nearly equal scores: whoever draws would sooner or later take another one.
    logits = torch.tensor([1.0, 1.2, 0.9, 1.2])
    found = {stage.sample(logits, params(temperature=0), generator(seed)) for seed in range(40)}
    wrong = f"logits 1.0, 1.2, 0.9, 1.2: token 1 every time, got {sorted(found)}"
    assert found == {1}, wrong


@task("5.3", "C5.10")
def test_temperature_0_draws_nothing(stage):
    own = generator()
    before = own.get_state()
    stage.sample(logits_of(SHARES), params(temperature=0), own)
    assert torch.equal(own.get_state(), before), "the generator has moved: a number was drawn"


@task("5.3", "C5.11")
def test_the_temperature_divides_the_logits(stage):
    # Shares to the power 1 / temperature, scaled to sum to 1: squares at 0.5.
    found = rounded(stage.probabilities(logits_of([0.6, 0.3, 0.1]), params(temperature=0.5)))
    expected = [0.7826, 0.1957, 0.0217]
    assert found == expected, (
        f"softmax 0.6, 0.3, 0.1 at temperature 0.5: expected {expected}, got {found}"
    )


@task("5.3", "C5.11")
def test_a_tiny_temperature_is_nearly_greedy_and_no_overflow(stage):
    logits = torch.tensor([60.0, 90.0, -30.0])
    found = rounded(stage.probabilities(logits, params(temperature=1e-6)))
    assert found == [0.0, 1.0, 0.0], f"expected all on token 1, got {found}"


@task("5.3", "C5.11")
def test_the_logits_are_not_changed(stage):
    logits = logits_of(SHARES)
    stage.probabilities(logits, params(temperature=0.5, top_k=2, top_p=0.5))
    assert torch.equal(logits, logits_of(SHARES)), f"they have become {rounded(logits)}"


@task("5.3", "C5.12")
def test_top_k_keeps_exactly_k(stage):
    for top_k, expected in [(1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3])]:
        found = kept(stage, SHARES, params(top_k=top_k))
        assert found == expected, f"shares {SHARES}, top_k = {top_k}: {expected}, kept {found}"


@task("5.3", "C5.12")
def test_top_k_of_equally_likely_tokens_keeps_the_lower_ids(stage):
    found = kept(stage, [0.2, 0.2, 0.2, 0.2, 0.2], params(top_k=2))
    assert found == [0, 1], f"five tokens of 0.2 each, top_k = 2: [0, 1], kept {found}"


@task("5.3", "C5.12")
def test_top_k_of_0_or_more_than_there_are_keeps_all(stage):
    for top_k in (0, 9):
        found = kept(stage, SHARES, params(top_k=top_k))
        assert found == [0, 1, 2, 3], f"4 tokens, top_k = {top_k}: all of them, kept {found}"


@task("5.3", "C5.13")
def test_top_p_keeps_the_token_that_reaches_it(stage):
    for top_p, expected in [(0.4, [1]), (0.6, [1, 3]), (0.79, [1, 3]), (0.9, [1, 2, 3])]:
        found = kept(stage, SHARES, params(top_p=top_p))
        assert found == expected, f"shares {SHARES}, top_p = {top_p}: {expected}, kept {found}"


@task("5.3", "C5.13")
def test_the_likeliest_token_stays_however_small_top_p_is(stage):
    found = rounded(stage.probabilities(logits_of(SHARES), params(top_p=1e-9)))
    assert found == [0.0, 1.0, 0.0, 0.0], f"expected all on token 1, got {found}"


@task("5.3", "C5.14")
def test_the_temperature_comes_before_top_p(stage):
    # At temperature 2 the shares are about 0.12, 0.38, 0.21, 0.29.
    found = kept(stage, SHARES, params(temperature=2.0, top_p=0.6))
    assert found == [1, 3], f"shares {SHARES} at temperature 2, top_p = 0.6: [1, 3], kept {found}"
    # At 0.5 they are 0.01, 0.68, 0.06, 0.25: the first alone reaches 0.6, unlike before.
    found = kept(stage, SHARES, params(temperature=0.5, top_p=0.6))
    assert found == [1], f"shares {SHARES} at temperature 0.5, top_p = 0.6: [1], kept {found}"


@task("5.3", "C5.14")
def test_top_p_is_a_share_of_what_top_k_has_left(stage):
    # Of 0.5 and 0.3 the first has 0.625.
    found = kept(stage, SHARES, params(top_k=2, top_p=0.6))
    assert found == [1], f"shares {SHARES}, top_k = 2, top_p = 0.6: [1], kept {found}"


@task("5.3", "C5.14")
def test_what_is_kept_is_scaled_to_sum_to_1(stage):
    found = rounded(stage.probabilities(logits_of(SHARES), params(top_k=2)))
    assert found == [0.0, 0.625, 0.0, 0.375], f"expected 0.5 and 0.3 over 0.8, got {found}"


def expected_probabilities(logits, own):
    """The same in plain numbers, one step a line; None where rounding decides what is kept."""
    exact = [value / own.temperature for value in logits]
    order = sorted(range(len(exact)), key=lambda i: (-exact[i], i))
    order = order[: own.top_k] if own.top_k else order
    weights = [math.exp(exact[i] - exact[order[0]]) for i in order]
    shares = [weight / sum(weights) for weight in weights]
    before = [sum(shares[:rank]) for rank in range(len(shares))]
    if own.top_p < 1:
        if any(abs(reached - own.top_p) < 1e-5 for reached in before):
            return None
        shares = [s if b < own.top_p else 0.0 for s, b in zip(shares, before, strict=True)]
    ranked = dict(zip(order, shares, strict=True))
    return [ranked.get(i, 0.0) / sum(shares) for i in range(len(logits))]


@task("5.3", "C5.14")
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=8),
    st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    st.integers(0, 9),
    st.sampled_from([0.05, 0.3, 0.55, 0.8, 0.95, 1.0]),
)
def test_any_row_of_logits_gives_the_probabilities_of_the_definition(
    stage, tenths, temperature, top_k, top_p
):
    logits = [value / 10 for value in tenths]
    own = params(temperature, top_k, top_p)
    expected = expected_probabilities(logits, own)
    if expected is None:
        return
    found = stage.probabilities(torch.tensor(logits), own).tolist()
    close = all(abs(a - b) < 1e-5 for a, b in zip(found, expected, strict=True))
    assert close, (
        f"logits {logits}, temperature {temperature}, top_k {top_k}, top_p {top_p}:"
        f" expected {rounded(expected)}, got {rounded(found)}"
    )


@task("5.3", "C5.15")
def test_tokens_are_drawn_as_often_as_their_probability_says(stage):
    own = params(top_k=3)
    drawn = [stage.sample(logits_of(SHARES), own, generator(seed)) for seed in range(600)]
    # 0.5, 0.15 and 0.3 over 0.95; four standard deviations of 600 draws are at most 0.082.
    for token, share in enumerate([0.0, 0.526, 0.158, 0.316]):
        found = drawn.count(token) / len(drawn)
        wrong = f"token {token} has probability {share}; {found:.3f} of 600 draws were it"
        assert abs(found - share) < (0.082 if share else 1e-9), wrong


@task("5.3", "C5.15")
def test_the_same_generator_state_draws_the_same_token(stage):
    logits, own = torch.zeros(1000), params()
    first = [stage.sample(logits, own, generator(seed)) for seed in range(5)]
    again = [stage.sample(logits, own, generator(seed)) for seed in range(5)]
    assert first == again, f"seeds 0 to 4 drew {first}, and then {again}"


# 5.4 one token for each sequence

VOCABULARY = 1000


class TokenModel:
    """A model whose logits follow from the row's token alone: any number of tokens is likely."""

    def hidden(self, batch):
        return batch.token_ids[:, None]

    def logits(self, hidden):
        rows = []
        for (token,) in hidden.tolist():
            row = torch.zeros(VOCABULARY)
            row[token] = 0.5
            rows.append(row)
        return torch.stack(rows)


def sequences_of(stages, **wanted):
    """Sequences by name: name=(token ids, what SamplingParams get)."""
    ch01 = stages.load("ch01_sequence")
    return {
        name: ch01.Sequence(name, token_ids, ch01.SamplingParams(**own))
        for name, (token_ids, own) in wanted.items()
    }


def execute(stage, sequences, model=None):
    """One step: all of them prefill."""
    batch = stage.make_batch(
        token_ids=[token for s in sequences for token in s.token_ids],
        positions=[position for s in sequences for position in range(s.num_tokens)],
        slot_mapping=[16 * i + p for i, s in enumerate(sequences) for p in range(s.num_tokens)],
        query_starts=[sum(s.num_tokens for s in sequences[:i]) for i in range(len(sequences) + 1)],
        context_lens=[s.num_tokens for s in sequences],
        block_tables=[[i] for i in range(len(sequences))],
    )
    return stage.ModelRunner(model or TokenModel()).execute(batch, sequences)


@task("5.4", "C5.16")
def test_each_sequence_gets_the_token_of_its_own_row(stage, stages):
    made = sequences_of(stages, A=([3, 5], {}), B=([8], {}), C=([1, 1, 7], {}))
    found = execute(stage, list(made.values()))
    assert found == [5, 8, 7], f"the last rows' best tokens are [5, 8, 7], got {found}"


@task("5.4", "C5.16")
def test_each_sequence_is_sampled_by_its_own_params(stage, stages):
    greedy, random = {"temperature": 0.0}, {"temperature": 1.0, "seed": 3}
    made = sequences_of(stages, A=([5], random), B=([5], greedy), C=([5], random | {"top_k": 1}))
    a, b, c = execute(stage, list(made.values()))
    assert b == 5, f"B is greedy and its best token is 5, got {b}"
    assert c == 5, f"C draws among one token, 5, got {c}"
    assert a != 5, f"A draws among {VOCABULARY} tokens that are about equally likely, got {a}"


@task("5.4", "C5.17")
def test_a_request_gets_the_same_token_alone_and_in_any_batch(stage, stages):
    random = {"temperature": 1.0, "seed": 7}
    made = sequences_of(
        stages, A=([1, 2, 3], random), B=([4], random), C=([6, 7], random | {"seed": 8})
    )
    alone = [execute(stage, [each])[0] for each in made.values()]
    together = execute(stage, list(made.values()))
    assert together == alone, f"A, B, C drew {alone} alone, and {together} in one batch"
    backwards = execute(stage, list(made.values())[::-1])[::-1]
    assert backwards == alone, f"A, B, C drew {alone} alone, {backwards} in the other order"


@task("5.4", "C5.17")
def test_a_token_that_is_computed_again_after_a_preemption_is_the_same(stage, stages):
    made = sequences_of(stages, A=([1, 2, 3], {"temperature": 1.0, "seed": 7}))
    runs = [execute(stage, [made["A"]])[0] for _ in range(3)]
    assert len(set(runs)) == 1, f"three times the same step, three tokens: {runs}"


@task("5.4", "C5.18")
def test_another_seed_draws_another_token(stage, stages):
    wanted = {f"R{seed}": ([5], {"temperature": 1.0, "seed": seed}) for seed in range(12)}
    found = execute(stage, list(sequences_of(stages, **wanted).values()))
    # 1,000 tokens are about equally likely: two equal ones among twelve are rare, six are not.
    assert len(set(found)) > 6, f"seeds 0 to 11 drew {found}"


@task("5.4", "C5.18")
def test_each_next_token_draws_another_number(stage, stages):
    # The last token is 5 each time, so the probabilities are the same in all twelve steps.
    wanted = {f"R{n}": ([5] * n, {"temperature": 1.0, "seed": 3}) for n in range(1, 13)}
    made = sequences_of(stages, **wanted).values()
    found = [execute(stage, [each])[0] for each in made]
    assert len(set(found)) > 6, f"twelve tokens in a row with seed 3: {found}"
