"""Attention in parts: however the rows are cut, each gets what it would alone."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import attention_plan
from kernels.attention_part import Part, SharingPart
from kernels.attention_plan import attention_parts
from minivllm.model.attention import TorchAttention
from tests.test_attention_torch import poisoned_cache, reference, scheduled
from tests.tiny_models import one_thread


@pytest.fixture(scope="module", autouse=True)
def _single_threaded():
    with one_thread():
        yield


@pytest.fixture
def eager(monkeypatch):
    """Sharing pays from one key on; calls and tiles are small."""
    monkeypatch.setattr(attention_plan, "_LEAST_SPARED_KEYS", 1)
    monkeypatch.setattr(attention_plan, "_MOST_KEYS_A_CALL", 16)
    monkeypatch.setattr(attention_plan, "_TILE_ROWS", 3)


@st.composite
def sharing_batches(draw):
    """Families of sequences whose tables begin alike: (block size, ranges, tables, num_blocks)."""
    block_size = draw(st.integers(1, 4))
    ranges, tables, num_blocks = [], [], 0
    for _ in range(draw(st.integers(1, 3))):
        num_shared = draw(st.integers(0, 3))
        shared = list(range(num_blocks, num_blocks + num_shared))
        num_blocks += num_shared
        for _ in range(draw(st.integers(1, 4))):
            start = num_shared * block_size + draw(st.integers(0, 6))
            end = start + draw(st.one_of(st.just(1), st.integers(1, 8)))
            num_own = -(-end // block_size) - num_shared
            tables.append(shared + list(range(num_blocks, num_blocks + num_own)))
            ranges.append((start, end))
            num_blocks += num_own
    ids = draw(st.permutations(range(num_blocks + 1)))
    order = draw(st.permutations(range(len(ranges))))
    tables = [[ids[block] for block in table] for table in tables]
    return block_size, [ranges[i] for i in order], [tables[i] for i in order], len(ids)


@given(batch=sharing_batches(), heads=st.sampled_from([(4, 4), (6, 2)]), seed=st.integers(0, 999))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whoever_shares_gets_what_the_reference_gives(eager, batch, heads, seed):
    block_size, ranges, tables, num_blocks = batch
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(seed)
    cache = poisoned_cache(num_blocks, block_size, kv_heads, 8)
    # A block has one content, whoever holds it; behind a sequence's end its slots stay NaN.
    filled = torch.randn(2, num_blocks, block_size, kv_heads, 8, generator=generator)
    histories = []
    for (_, end), table in zip(ranges, tables, strict=True):
        slots = [table[p // block_size] * block_size + p % block_size for p in range(end)]
        histories.append([part.flatten(0, 1)[slots] for part in filled])
        for part, content in zip(cache, filled, strict=True):
            part.flatten(0, 1)[slots] = content.flatten(0, 1)[slots]
    queries = [torch.randn(end - start, num_heads, 8, generator=generator) for start, end in ranges]
    sequences = [scheduled(*span, table) for span, table in zip(ranges, tables, strict=True)]

    output = TorchAttention.begin_step(sequences, cache).attend(torch.cat(queries), cache)

    expected = [
        reference(query, *history, start)
        for query, history, (start, _) in zip(queries, histories, ranges, strict=True)
    ]
    torch.testing.assert_close(output.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)


def rows_of(part, num_rows):
    return torch.arange(num_rows)[part.rows].tolist()


def test_the_example_of_the_module(eager):
    cache = poisoned_cache(8, 4, 1, 2)
    steps = [(12, 13, [7, 2, 5, 4]), (13, 14, [7, 2, 6, 1]), (0, 3, [3])]
    sharing, alone = attention_parts([scheduled(*step) for step in steps], cache)
    assert isinstance(sharing, SharingPart)
    assert sorted(rows_of(sharing, 5)) == [0, 1]
    assert sharing.shared.slots.tolist() == [[28, 29, 30, 31, 8, 9, 10, 11]]
    (own,) = sharing.own
    of_a = [20, 21, 22, 23, 16, 16, 16, 16]
    of_b = [24, 25, 26, 27, 4, 5, 5, 5]
    assert own.slots.tolist() == [of_a, of_b], "behind the last one nothing is written"
    assert own.mask.isinf().logical_not().sum(-1).flatten().tolist() == [13 - 8, 14 - 8]
    assert isinstance(alone, Part)
    assert (rows_of(alone, 5), alone.is_causal) == ([2, 3, 4], True)
    assert alone.slots.tolist() == [[12, 13, 14]]


def test_every_row_is_in_exactly_one_part(eager):
    cache = poisoned_cache(40, 4, 1, 2)
    steps = [(20, 31, list(range(8))), (9, 10, [0, 1, 9]), (0, 7, [10, 11]), (17, 18, [*range(5)])]
    sequences = [scheduled(*step) for step in steps]
    num_rows = sum(s.end - s.start for s in sequences)
    rows = [row for part in attention_parts(sequences, cache) for row in rows_of(part, num_rows)]
    assert sorted(rows) == list(range(num_rows))


def test_few_shared_keys_are_not_worth_a_part_of_their_own():
    cache = poisoned_cache(80, 16, 1, 2)

    def kinds(num_shared_blocks, num_sequences):
        shared = list(range(num_shared_blocks))
        end = 16 * num_shared_blocks + 1
        sequences = [scheduled(end - 1, end, [*shared, 70 + i]) for i in range(num_sequences)]
        return {type(part) for part in attention_parts(sequences, cache)}

    assert kinds(31, 2) == {Part}, "one of the two spares 496 keys"
    assert kinds(32, 2) == {SharingPart}, "512"
    assert kinds(16, 3) == {SharingPart}, "two of the three spare 256 each"


def test_a_prefill_attends_in_tiles_each_up_to_its_last_row():
    cache = poisoned_cache(40, 16, 1, 2)
    parts = attention_parts([scheduled(0, 600, list(range(38)))], cache)
    assert [part.rows for part in parts] == [slice(0, 256), slice(256, 512), slice(512, 600)]
    assert [part.slots.shape for part in parts] == [(1, 256), (1, 512), (1, 600)]


def test_decoding_sequences_of_about_one_length_are_one_call():
    cache = poisoned_cache(400, 16, 1, 2)
    ends = [100, 500, 110, 480, 105]
    sequences = [scheduled(end - 1, end, list(range(i, i + 32))) for i, end in enumerate(ends)]
    parts = attention_parts(sequences, cache)
    assert [rows_of(part, 5) for part in parts] == [[1, 3], [0, 2, 4]]
