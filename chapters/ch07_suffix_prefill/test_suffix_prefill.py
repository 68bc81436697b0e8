"""Chapter 7's tests: ranges, attention over a cached prefix, and who is charged for what."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chapters.ch05_model_runner.history import HistoryModel, first_difference, next_token
from chapters.testing import Broken, run_machine, task

BLOCK_SIZE = 4


# 7.1 a batch of ranges


def example(stages):
    """The chapter's example: A is computed and published, B holds its two blocks and a third."""
    ch01, ch06 = stages.load("ch01_sequence"), stages.load("ch06_prefix_cache")
    pool = ch06.CachingBlockManager(num_blocks=6, block_size=BLOCK_SIZE)
    a = ch01.Sequence("A", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    pool.allocate(a, 9)
    pool.commit(a, 9)
    a.append_token(50)
    pool.allocate(a, 1)
    b = ch01.Sequence("B", [1, 2, 3, 4, 5, 6, 7, 8, 13, 14])
    pool.allocate(b, 2, pool.match(b))
    assert (a.block_table, b.block_table) == ([0, 1, 2], [0, 1, 3])
    return pool, a, b


def example_batch(stage, stages):
    """A decodes its position 9 while B computes its suffix [8, 10)."""
    pool, a, b = example(stages)
    ranges = [stage.ScheduledSequence(a, 9, 10), stage.ScheduledSequence(b, 8, 10)]
    return stage.build_batch(ranges, pool)


@task("7.1", "C7.1")
def test_the_rows_are_the_tokens_of_each_range(stage, stages):
    found = example_batch(stage, stages).token_ids.tolist()
    wrong = f"A computes [9, 10), B its suffix [8, 10): token_ids [50, 13, 14], got {found}"
    assert found == [50, 13, 14], wrong


@task("7.1", "C7.2")
def test_a_suffix_has_the_positions_behind_its_prefix(stage, stages):
    found = example_batch(stage, stages).positions.tolist()
    wrong = f"A computes [9, 10), B its suffix [8, 10): positions [9, 8, 9], got {found}"
    assert found == [9, 8, 9], wrong


@task("7.1", "C7.3", "I3")
def test_a_suffix_is_written_to_its_own_block_and_not_to_the_shared_ones(stage, stages):
    found = example_batch(stage, stages).slot_mapping.tolist()
    wrong = f"position 9 of A is slot 9; 8 and 9 of B are in block 3: [9, 12, 13], got {found}"
    assert found == [9, 12, 13], wrong


@task("7.1", "C7.4")
def test_a_suffix_sees_its_prefix_too(stage, stages):
    found = example_batch(stage, stages).context_lens.tolist()
    wrong = f"both sequences' last rows see the keys 0 .. 9: [10, 10], got {found}"
    assert found == [10, 10], wrong


@task("7.1", "C7.4")
def test_a_range_that_ends_before_the_last_token_has_a_context_up_to_its_end(stage, stages):
    pool, _, b = example(stages)
    found = stage.build_batch([stage.ScheduledSequence(b, 8, 9)], pool).context_lens.tolist()
    wrong = f"[8, 9) of B's 10 tokens sees the keys 0 .. 8: expected [9], got {found}"
    assert found == [9], wrong


@task("7.1", "C7.1")
def test_each_sequence_has_its_rows_and_its_table(stage, stages):
    batch = example_batch(stage, stages)
    starts, tables = batch.query_starts.tolist(), batch.block_tables.tolist()
    assert starts == [0, 1, 3], f"query_starts: expected [0, 1, 3], got {starts}"
    assert tables == [[0, 1, 2], [0, 1, 3]], f"expected [[0, 1, 2], [0, 1, 3]], got {tables}"


@task("7.1", "I4")
@settings(max_examples=30)
@given(st.integers(1, 14), st.lists(st.integers(1, 6), min_size=1, max_size=14))
def test_a_prompt_in_any_pieces_reads_its_own_tokens(stage, stages, num_tokens, sizes):
    ch01, ch06 = stages.load("ch01_sequence"), stages.load("ch06_prefix_cache")
    pool = ch06.CachingBlockManager(num_blocks=8, block_size=BLOCK_SIZE)
    model = HistoryModel(pool.num_blocks, BLOCK_SIZE)
    sequence = ch01.Sequence("A", [20 + position for position in range(num_tokens)])
    other = ch01.Sequence("other", [7])
    for size in [*sizes, num_tokens]:
        start = sequence.num_computed_tokens
        if start == num_tokens:
            break
        end = min(start + size, num_tokens)
        pool.allocate(sequence, end - start)
        if not other.block_table:  # so that the blocks of the sequence are not in order
            pool.allocate(other, 1)
        model.hidden(stage.build_batch([stage.ScheduledSequence(sequence, start, end)], pool))
        wrong = first_difference(
            f"A in [{start}, {end})", sequence.token_ids[:end], model.reads[-1]
        )
        assert wrong is None, wrong
        pool.commit(sequence, end)


# 7.2 attention over prefix and suffix


def caches(table, num_blocks, num_kv_heads, head_dim, keys, values):
    """Paged caches in which the positions of `table` hold keys and values, and NaN elsewhere."""
    found = torch.full((2, num_blocks * BLOCK_SIZE, num_kv_heads, head_dim), float("nan"))
    for position, (key, value) in enumerate(zip(keys, values, strict=True)):
        slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        found[0, slot], found[1, slot] = key, value
    return found.unflatten(1, (num_blocks, BLOCK_SIZE)).unbind(0)


def attend(stage, query, table, keys, values, start):
    """suffix_attention over caches that hold these keys and values; [positions, heads, dim]."""
    key_cache, value_cache = caches(table, 8, keys.shape[1], keys.shape[2], keys, values)
    return stage.suffix_attention(query, key_cache, value_cache, torch.tensor(table), start)


def pointing_at(position, num_keys):
    """Keys of which a query of ones sees only one; position p has the value p."""
    keys = torch.zeros(num_keys, 1, 4)
    keys[position] = 50.0
    values = torch.arange(float(num_keys))[:, None, None].expand(num_keys, 1, 4)
    return keys, values


def rows_of_ones(num_rows, num_heads=1):
    return torch.ones(num_rows, num_heads, 4)


def first_value(output):
    """The first channel of each row's first head, rounded; NaN stays visible."""
    return [round(float(row[0, 0]), 3) for row in output]


@task("7.2", "C7.5")
def test_a_row_sees_the_keys_of_the_prefix(stage):
    # All weight on position 1, in the prefix; the rows stand at 6 and 7.
    keys, values = pointing_at(1, num_keys=8)
    found = first_value(attend(stage, rows_of_ones(2), [2, 5], keys, values, start=6))
    assert found == [1.0, 1.0], f"both rows must find the value 1 of position 1, got {found}"


@task("7.2", "C7.6")
def test_a_row_sees_its_own_position_and_none_behind_it(stage):
    # All weight on position 6: the row that stands there may see it, the row before it not.
    keys, values = pointing_at(6, num_keys=8)
    at_5, at_6, at_7 = first_value(attend(stage, rows_of_ones(3), [2, 5], keys, values, start=5))
    assert at_5 == 2.5, f"the row at 5 sees the keys 0 .. 5, mean value 2.5, got {at_5}"
    assert at_6 == 6.0, f"the row at 6 sees its own key, value 6.0, got {at_6}"
    assert at_7 == 6.0, f"the row at 7 sees the key before its own, value 6.0, got {at_7}"


@task("7.2", "C7.6")
def test_without_a_prefix_it_is_plain_causal_attention(stage):
    keys, values = torch.zeros(4, 1, 4), torch.arange(4.0)[:, None, None].expand(4, 1, 4)
    found = first_value(attend(stage, rows_of_ones(4), [3], keys, values, start=0))
    assert found == [0.0, 0.5, 1.0, 1.5], f"means of the values so far, got {found}"


@task("7.2", "C7.7")
def test_keys_are_read_in_the_order_of_the_table(stage):
    for position in (0, 3, 4, 8):
        keys, values = pointing_at(position, num_keys=9)
        found = first_value(attend(stage, rows_of_ones(1), [6, 1, 4], keys, values, start=8))
        wrong = f"table [6, 1, 4]: position {position} has the value {position}, got {found[0]}"
        assert found == [float(position)], wrong


@task("7.2", "C7.7")
def test_a_table_that_goes_on_and_a_block_that_is_not_full_are_cut_off(stage):
    keys, values = torch.zeros(6, 1, 4), torch.ones(6, 1, 4)
    found = first_value(attend(stage, rows_of_ones(1), [6, 1, 4], keys, values, start=5))
    wrong = f"6 positions are written, what is behind them is NaN and must not be read: {found}"
    assert found == [1.0], wrong


@task("7.2", "C7.8")
def test_heads_share_a_kv_head_in_groups(stage):
    keys = torch.zeros(5, 2, 4)
    values = torch.tensor([10.0, 20.0])[None, :, None].expand(5, 2, 4)
    output = attend(stage, rows_of_ones(1, num_heads=6), [0, 1], keys, values, start=4)
    found = output[0, :, 0].tolist()
    expected = [10.0, 10.0, 10.0, 20.0, 20.0, 20.0]
    wrong = f"6 heads, 2 KV heads with the values 10 and 20: expected {expected}, got {found}"
    assert found == pytest.approx(expected), wrong


@task("7.2", "C7.9")
def test_scores_are_scaled_by_the_root_of_the_head_size(stage):
    # q k = 4 for position 1, 0 for position 0; divided by sqrt(4): softmax of 0 and 2.
    keys, values = pointing_at(1, num_keys=2)
    found = first_value(attend(stage, rows_of_ones(1), [0], keys / 50.0, values, start=1))
    assert found == [0.881], f"head size 4, scores 0 and 4 / 2: the weight 0.881, got {found}"


@task("7.2", "C7.6")
@settings(max_examples=25)
@given(
    st.integers(0, 9),
    st.integers(1, 6),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.permutations(range(8)),
    st.integers(0, 1000),
)
def test_any_suffix_agrees_with_the_definition(stage, start, num_rows, heads, blocks, seed):
    num_heads, num_kv_heads = heads
    end, random = start + num_rows, torch.Generator().manual_seed(seed)
    query = torch.randn(num_rows, num_heads, 4, generator=random)
    keys, values = torch.randn(2, end, num_kv_heads, 4, generator=random)
    table = blocks[: -(-end // BLOCK_SIZE)]
    found = attend(stage, query, table, keys, values, start)
    for row in range(num_rows):
        for head in range(num_heads):
            kv_head, seen = head * num_kv_heads // num_heads, start + row + 1
            scores = keys[:seen, kv_head] @ query[row, head] / 2.0
            right = scores.softmax(0) @ values[:seen, kv_head]
            same = torch.allclose(found[row, head], right, atol=1e-5)
            assert same, (
                f"start {start}, {num_rows} rows, {num_heads} heads over {num_kv_heads} KV heads:"
                f" row {row}, head {head} must be {right.tolist()}, got {found[row, head].tolist()}"
            )


# Without triton and without a checkpoint: the finished engine's layers with random weights.


class RealLayers:
    """A model of random weights over chapter 6's pool, and one sequence computed in ranges."""

    def __init__(self, stage, stages, num_blocks=12):
        from chapters.ch04_paged_attention import reference
        from chapters.model import PagedModel, attention_by_sequence, random_network

        ch06 = stages.load("ch06_prefix_cache")
        self.stage = stage
        self.new_sequence = stages.load("ch01_sequence").Sequence
        self.pool = ch06.CachingBlockManager(num_blocks, BLOCK_SIZE)
        attention = attention_by_sequence(stage.suffix_attention)
        network = random_network()
        self.model = PagedModel(network, reference.store_kv, attention, num_blocks, BLOCK_SIZE)

    @torch.inference_mode()
    def compute(self, name, token_ids, *, up_to=None):
        """Look up, compute the rest in one range; the sequence, where it began, its logits."""
        sequence = self.new_sequence(name, token_ids)
        hits = self.pool.match(sequence)
        start, end = len(hits) * BLOCK_SIZE, up_to or len(token_ids)
        self.pool.allocate(sequence, end - start, hits)
        batch = self.stage.build_batch(
            [self.stage.ScheduledSequence(sequence, start, end)], self.pool
        )
        logits = self.model.logits(self.model.hidden(batch))
        self.pool.commit(sequence, end)
        return sequence, start, logits

    def contents(self, sequence, num_positions):
        """Keys and values of its positions, all layers."""
        blocks = torch.tensor(sequence.block_table)
        caches = [cache for layer in self.model.kv for cache in layer]
        return torch.stack([cache[blocks].flatten(0, 1)[:num_positions] for cache in caches])


PREFIX = [5, 17, 60, 3, 3, 42, 8, 11]


@task("7.2", "C7.10", "I4")
def test_a_suffix_gives_the_logits_of_a_whole_prefill(stage, stages):
    warm, cold = RealLayers(stage, stages), RealLayers(stage, stages)
    warm.compute("A", [*PREFIX, 70, 71])
    _, start, found = warm.compute("B", [*PREFIX, 90, 1, 33])
    _, _, expected = cold.compute("B", [*PREFIX, 90, 1, 33])
    assert start == len(PREFIX), f"8 tokens of B are cached, {start} were taken"
    apart = (found - expected[-3:]).abs().max().item()
    assert apart < 1e-4, f"the logits of positions 8, 9, 10 differ by up to {apart:.2g}"


@task("7.2", "C7.10", "I4")
def test_a_suffix_leaves_the_block_contents_of_a_whole_prefill(stage, stages):
    warm, cold = RealLayers(stage, stages), RealLayers(stage, stages)
    warm.compute("A", [*PREFIX, 70, 71])
    ours, _, _ = warm.compute("B", [*PREFIX, 90, 1, 33])
    theirs, _, _ = cold.compute("B", [*PREFIX, 90, 1, 33])
    apart = (warm.contents(ours, 11) - cold.contents(theirs, 11)).abs()
    worst = apart.amax(dim=(0, 2, 3)).nan_to_num(float("inf")).tolist()
    wrong = [position for position, value in enumerate(worst) if value > 1e-4]
    assert not wrong, f"keys and values of positions {wrong} of 11 differ from a whole prefill's"


@task("7.2", "I3")
def test_a_suffix_does_not_touch_the_prefix(stage, stages):
    warm = RealLayers(stage, stages)
    ours, _, _ = warm.compute("A", [*PREFIX, 70, 71])
    before = warm.contents(ours, 8)
    warm.compute("B", [*PREFIX, 90, 1, 33])
    assert torch.equal(warm.contents(ours, 8), before), "blocks 0 and 1, shared by A and B, changed"


# 7.3 charge the suffix, wait for a prefix


class Bench:
    """A scheduler over a caching pool; tokens are chosen by a rule that looks at nothing."""

    def __init__(self, stage, stages, num_blocks=16, **limits):
        limits = {"max_num_batched_tokens": 40, "max_model_len": 40} | limits
        self.ch01 = stages.load("ch01_sequence")
        self.pool = stages.load("ch06_prefix_cache").CachingBlockManager(num_blocks, BLOCK_SIZE)
        self.scheduler = stage.Scheduler(self.pool, **limits)

    def add(self, name, token_ids, max_tokens=8):
        params = self.ch01.SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(self.ch01.Sequence(name, token_ids, params))

    def step(self):
        """One step; {name: (start, end)} of what it computed."""
        scheduled = self.scheduler.schedule()
        found = {each.sequence.request_id: (each.start, each.end) for each in scheduled}
        self.scheduler.commit(scheduled, [100 + each.end for each in scheduled])
        return found

    def warm(self, token_ids):
        """Compute a prompt that ends at once: its full blocks are cached and idle."""
        self.add("W", token_ids, max_tokens=1)
        self.step()
        assert not self.scheduler.running

    @property
    def waiting(self):
        return [sequence.request_id for sequence in self.scheduler.waiting]

    @property
    def running(self):
        return [sequence.request_id for sequence in self.scheduler.running]


def counting(start, num_tokens):
    return list(range(start, start + num_tokens))


@task("7.3", "C7.12")
def test_a_prompt_is_computed_from_where_its_cached_prefix_ends(stage, stages):
    bench = Bench(stage, stages)
    bench.warm(counting(1, 8))
    bench.add("B", [*counting(1, 8), 33, 33])
    found = bench.step()
    assert found == {"B": (8, 10)}, f"8 of B's 10 tokens are cached: [8, 10), computed {found}"
    table = bench.scheduler.running[0].block_table
    assert table[:2] == [0, 1], f"the prefix lies in the blocks 0 and 1, B's table is {table}"


@task("7.3", "C7.11")
def test_only_the_suffix_is_charged(stage, stages):
    bench = Bench(stage, stages)
    bench.warm(counting(1, 8))
    bench.add("B", [*counting(1, 8), 33, 33])
    bench.scheduler.schedule()
    left = bench.scheduler.budget_left
    assert left == 38, f"budget 40, B computes 2 of its 10 tokens: 38 are left, not {left}"


@task("7.3", "C7.11")
def test_a_long_prompt_fits_a_small_budget_if_most_of_it_is_cached(stage, stages):
    bench = Bench(stage, stages, max_num_batched_tokens=16, max_model_len=16)
    bench.warm(counting(1, 12))
    bench.add("B", [*counting(50, 12)])
    bench.add("C", [*counting(1, 12), 33, 33])
    found = bench.step()
    expected = {"B": (0, 12), "C": (12, 14)}
    wrong = f"budget 16: B costs 12, C 14 - 12 = 2; expected {expected}, computed {found}"
    assert found == expected, wrong


@task("7.3", "C7.12", "I9")
def test_hits_are_not_counted_as_room_for_the_suffix(stage, stages):
    # Blocks 0 and 1 are cached and idle, A has the third: B's suffix needs a fourth.
    bench = Bench(stage, stages, num_blocks=3)
    bench.warm(counting(1, 8))
    bench.add("A", [70, 71], max_tokens=2)
    bench.step()
    bench.add("B", [*counting(1, 8), 33, 33])
    found = bench.step()
    assert found == {"A": (2, 3)}, f"no block is left for B's suffix; computed {found}"
    idle = sorted(bench.pool.idle)
    assert idle == [0, 1], f"B is refused: blocks 0 and 1 stay cached and idle, idle are {idle}"


@task("7.3", "C7.13")
def test_who_needs_a_block_that_another_is_about_to_compute_is_passed_over(stage, stages):
    bench = Bench(stage, stages)
    bench.add("A", [*counting(1, 8), 33, 34])
    bench.add("B", [*counting(1, 8), 35])
    found = bench.step()
    wrong = f"A computes B's first block in this step, so B is passed over; computed {found}"
    assert found == {"A": (0, 10)}, wrong


@task("7.3", "C7.14", "I10")
def test_who_is_passed_over_keeps_its_place_and_those_behind_it_may_go(stage, stages):
    bench = Bench(stage, stages, max_num_seqs=2)
    bench.add("A", [*counting(1, 8), 33, 34])
    bench.add("B", [*counting(1, 8), 35])
    bench.add("C", [70, 71])
    bench.add("D", [80, 81])
    found = bench.step()
    assert list(found) == ["A", "C"], f"B is passed over, C goes: A and C, computed {found}"
    assert bench.waiting == ["B", "D"], f"B, then D still wait; waiting are {bench.waiting}"


@task("7.3", "C7.13")
def test_in_the_next_step_it_finds_that_block(stage, stages):
    bench = Bench(stage, stages)
    bench.add("A", [*counting(1, 8), 33, 34])
    bench.add("B", [*counting(1, 8), 35])
    bench.step()
    found = bench.step()
    wrong = f"A decodes, B finds 8 tokens and computes [8, 9); computed {found}"
    assert found == {"A": (10, 11), "B": (8, 9)}, wrong


@task("7.3", "C7.13")
def test_a_prefix_that_goes_on_is_waited_for_as_well(stage, stages):
    # The first block is cached, A is about to compute the second one, which B needs, too.
    bench = Bench(stage, stages)
    bench.warm(counting(1, 4))
    bench.add("A", [*counting(1, 8), 33])
    bench.add("B", [*counting(1, 8), 35, 36])
    first, second = bench.step(), bench.step()
    assert first == {"A": (4, 9)}, f"expected A in [4, 9) alone, computed {first}"
    assert second["B"] == (8, 10), f"then B in [8, 10), computed {second}"


@task("7.3", "C7.13")
def test_requests_with_other_next_blocks_do_not_wait_for_each_other(stage, stages):
    bench = Bench(stage, stages)
    bench.warm(counting(1, 4))
    bench.add("A", [*counting(1, 8), 33])
    bench.add("B", [*counting(1, 4), 9, 9, 9, 9, 35])
    found = bench.step()
    expected = {"A": (4, 9), "B": (4, 9)}
    assert found == expected, f"they share only what is cached: {expected}, computed {found}"


@task("7.3", "C7.15")
def test_a_block_that_a_lookup_may_not_use_is_not_waited_for(stage, stages):
    # B has 8 tokens, of which a lookup may use 7: one block, and that one is cached.
    bench = Bench(stage, stages)
    bench.warm(counting(1, 4))
    bench.add("A", [*counting(1, 8), 33])
    bench.add("B", counting(1, 8))
    found = bench.step()
    expected = {"A": (4, 9), "B": (4, 8)}
    wrong = f"B could not use the block that A computes: {expected}, computed {found}"
    assert found == expected, wrong


@task("7.3", "C7.16")
def test_nobody_overtakes_one_for_whom_the_budget_is_short(stage, stages):
    bench = Bench(stage, stages, max_num_batched_tokens=16, max_model_len=16)
    bench.add("A", counting(1, 10))
    bench.add("B", counting(30, 9))
    bench.add("C", [70])
    found = bench.step()
    wrong = f"budget 16: A costs 10, B's 9 do not fit, C waits behind B; computed {found}"
    assert found == {"A": (0, 10)}, wrong


@task("7.3", "C7.16")
def test_nobody_overtakes_one_for_whom_memory_is_short(stage, stages):
    bench = Bench(stage, stages, num_blocks=5)
    bench.add("A", counting(1, 10))
    bench.add("B", counting(30, 9))
    bench.add("C", [70])
    found = bench.step()
    wrong = f"5 blocks: A has 3, B needs 3, C waits behind B; computed {found}"
    assert found == {"A": (0, 10)}, wrong


@task("7.3", "C7.17")
def test_who_was_passed_over_still_counts_as_older_than_those_who_went(stage, stages):
    bench = Bench(stage, stages)
    bench.add("A", [*counting(1, 8), 33, 34])
    bench.add("B", [*counting(1, 8), 35])
    bench.add("C", [70, 71])
    bench.step()
    bench.step()
    wrong = f"by arrival A, B, C: the newest, C, gives way first; running are {bench.running}"
    assert bench.running == ["A", "B", "C"], wrong


@task("7.3", "C7.11", "I10")
def test_a_preempted_sequence_finds_what_it_had_published(stage, stages):
    # 4 blocks. A grows into a third one: B, the newest, gives way, and its first block survives.
    bench = Bench(stage, stages, num_blocks=4)
    bench.add("A", counting(1, 7), max_tokens=3)
    bench.add("B", counting(30, 6))
    first, second, third = bench.step(), bench.step(), bench.step()
    assert (first, second) == ({"A": (0, 7), "B": (0, 6)}, {"A": (7, 8), "B": (6, 7)})
    assert third == {"A": (8, 9)}, f"A takes a block from B; computed {third}"
    assert bench.scheduler.waiting or bench.running == ["B"]
    found = bench.step()
    # 8 tokens, the two it had generated included; its first block was published.
    assert found == {"B": (4, 8)}, f"B keeps 8 tokens, finds 4 of them: [4, 8), computed {found}"


# The invariants, over any schedule


@st.composite
def prompts(draw):
    """Prompts of 1 to 13 tokens that often begin alike: blocks of few kinds, and a rest."""
    blocks = draw(st.lists(st.sampled_from([[1, 1, 1, 1], [2, 2, 2, 2]]), max_size=2))
    rest = draw(st.lists(st.integers(1, 3), max_size=5))
    return [token for block in blocks for token in block] + rest or [1]


def check_pool(pool, sequences):
    """I1, I2."""
    held = [block for sequence in sequences for block in sequence.block_table]
    for block, count in enumerate(pool.ref_counts):
        in_tables, is_cached = held.count(block), pool.cached_at(block) is not None
        if count != in_tables + is_cached:
            said = f"block {block} counts {count}; {in_tables} tables and {is_cached:d} cache"
            raise Broken("I2", f"{said} entries hold it")
    num_in_use = len(set(held))
    if pool.num_free + len(pool.idle) + num_in_use != pool.num_blocks:
        raise Broken(
            "I1",
            f"{pool.num_free} blocks are free, {len(pool.idle)} idle, {num_in_use} in use:"
            f" not {pool.num_blocks} together",
        )


def check_reads(model, batch, scheduled):
    """I4: each row has read the history of its own tokens."""
    row = 0
    for sequence, start, end in scheduled:
        for position in range(start, end):
            tokens = sequence.token_ids[: position + 1]
            wrong = first_difference(sequence.request_id, tokens, model.reads[row])
            if wrong:
                raise Broken("I4", wrong)
            row += 1


@task("7.3", "I4")
def test_over_any_schedule_the_invariants_hold(stage, stages):
    ch01, ch06 = stages.load("ch01_sequence"), stages.load("ch06_prefix_cache")

    class Schedules(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.pool = ch06.CachingBlockManager(num_blocks=6, block_size=BLOCK_SIZE)
            self.scheduler = stage.Scheduler(
                self.pool, max_num_batched_tokens=20, max_num_seqs=3, max_model_len=20
            )
            self.model = HistoryModel(self.pool.num_blocks, BLOCK_SIZE)
            self.sequences = []

        @rule(each=st.lists(prompts(), min_size=1, max_size=3), max_tokens=st.integers(1, 9))
        def add(self, each, max_tokens):
            for token_ids in each:
                name = f"R{len(self.sequences)}"
                params = ch01.SamplingParams(max_tokens=max_tokens)
                self.sequences.append(ch01.Sequence(name, token_ids, params))
                self.scheduler.add(self.sequences[-1])

        @precondition(lambda self: self.scheduler.waiting + self.scheduler.running)
        @rule(which=st.integers(0, 9))
        def abort(self, which):
            unfinished = self.scheduler.waiting + self.scheduler.running
            self.scheduler.abort(unfinished[which % len(unfinished)].request_id)

        @precondition(lambda self: self.scheduler.waiting + self.scheduler.running)
        @rule()
        def step(self):
            scheduler = self.scheduler
            decoding = {s.request_id: s.num_tokens for s in scheduler.running}
            num_finished = len(scheduler.finished)
            published = {
                self.pool.cached_at(block)
                for block in range(self.pool.num_blocks)
                if self.pool.cached_at(block)
            }
            contents = {each: self.slots(each.block) for each in published}
            scheduled = scheduler.schedule()
            for sequence, start, end in scheduled:
                if start >= end:
                    raise Broken("I8", f"{sequence.request_id} computes [{start}, {end}): nothing")
            num_tokens = sum(end - start for _, start, end in scheduled)
            if num_tokens > scheduler.max_num_batched_tokens:
                raise Broken("C7.11", f"the step computes {num_tokens} tokens, its budget is 20")
            if scheduled:
                batch = stage.build_batch(scheduled, self.pool)
                self.model.hidden(batch)
                check_reads(self.model, batch, scheduled)
                chosen = [next_token(s.token_ids[:end]) for s, _, end in scheduled]
                scheduler.commit(scheduled, chosen)
            elif len(scheduler.finished) == num_finished:
                raise Broken("I11", "the step computed nothing and finished nothing")
            for each, before in contents.items():
                if self.pool.cached_at(each.block) is each and self.slots(each.block) != before:
                    raise Broken("I3", f"published block {each.block} was written")
            for sequence in scheduler.running:
                before = decoding.get(sequence.request_id)
                if before == sequence.num_tokens:
                    raise Broken("I12", f"{sequence.request_id} ran and gained no token")

        @precondition(lambda self: self.scheduler.waiting + self.scheduler.running)
        @rule()
        def run_to_the_end(self):
            for _ in range(200):
                if not (self.scheduler.waiting or self.scheduler.running):
                    return
                self.step()
            raise Broken("I11", "no end after 200 steps")

        @invariant()
        def nothing_is_lost(self):
            queues = (self.scheduler.waiting, self.scheduler.running, self.scheduler.finished)
            for sequence in self.sequences:
                places = sum(queue.count(sequence) for queue in queues)
                if places != 1:
                    raise Broken("I10", f"{sequence.request_id} is in {places} queues, not in one")

        @invariant()
        def tables_and_counts_agree(self):
            check_pool(self.pool, self.sequences)
            for sequence in self.scheduler.running:
                needed = -(-sequence.num_computed_tokens // BLOCK_SIZE)
                if len(sequence.block_table) != needed:
                    raise Broken(
                        "I5",
                        f"{sequence.request_id}: {sequence.num_computed_tokens} positions are"
                        f" computed, its table has {len(sequence.block_table)} blocks",
                    )

        def slots(self, block):
            start = block * BLOCK_SIZE
            return copy.copy(self.model.slots[start : start + BLOCK_SIZE])

    Schedules.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
    run_machine(Schedules)
