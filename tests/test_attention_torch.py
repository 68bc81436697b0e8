"""The torch attention backend against a float64 reference, over every kind of batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.batch import ScheduledSequence
from minivllm.model.attention import KVCache, TorchAttention
from minivllm.sampling_params import SamplingParams
from tests.tiny_models import one_thread

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _single_threaded():
    with one_thread():
        yield


def scheduled(start, end, block_table):
    return ScheduledSequence("r", [0] * end, start, end, block_table, SamplingParams())


def poisoned_cache(num_blocks, block_size, kv_heads, head_dim):
    """A cache in which every slot that was not written turns a result into NaN."""
    shape = (num_blocks, block_size, kv_heads, head_dim)
    return KVCache(torch.full(shape, math.nan), torch.full(shape, math.nan))


def reference(query, keys, values, start):
    """Attention of rows at positions start, start + 1, ... in float64, one row and head a time."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[1] // keys.shape[1]
    output = torch.empty_like(query)
    for row in range(len(query)):
        seen = start + row + 1
        for head in range(query.shape[1]):
            scores = keys[:seen, head // group] @ query[row, head] / math.sqrt(query.shape[2])
            output[row, head] = scores.softmax(0) @ values[:seen, head // group]
    return output


@st.composite
def batches(draw):
    """Ranges, a block size and shuffled tables: prefill, chunk, suffix and decode, mixed."""
    block_size = draw(st.integers(1, 5))
    ranges = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.one_of(st.just(0), st.integers(0, 12)))
        ranges.append((start, start + draw(st.one_of(st.just(1), st.integers(1, 9)))))
    needed = [-(-end // block_size) for _, end in ranges]
    ids = draw(st.permutations(range(sum(needed) + 2)))
    tables = [list(ids[sum(needed[:i]) : sum(needed[: i + 1])]) for i in range(len(needed))]
    return block_size, ranges, tables, len(ids)


@given(
    batch=batches(),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (4, 1)]),
    head_dim=st.sampled_from([2, 8, 20]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=120, deadline=None)
def test_a_mixed_batch_equals_the_reference_and_writes_only_its_own_slots(
    batch, heads, head_dim, seed
):
    block_size, ranges, tables, num_blocks = batch
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(seed)
    cache = poisoned_cache(num_blocks, block_size, kv_heads, head_dim)

    def random(num_rows, num):
        return torch.randn(num_rows, num, head_dim, generator=generator)

    history = [(random(end, kv_heads), random(end, kv_heads)) for _, end in ranges]
    queries = [random(end - start, num_heads) for start, end in ranges]
    slot_of = [
        [table[p // block_size] * block_size + p % block_size for p in range(end)]
        for (_, end), table in zip(ranges, tables, strict=True)
    ]
    # What earlier steps wrote: the positions before start.
    for (keys, values), slots, (start, _) in zip(history, slot_of, ranges, strict=True):
        cache.keys.flatten(0, 1)[slots[:start]] = keys[:start]
        cache.values.flatten(0, 1)[slots[:start]] = values[:start]

    sequences = [scheduled(*span, table) for span, table in zip(ranges, tables, strict=True)]
    step = TorchAttention.begin_step(sequences, cache)
    new = [
        torch.cat([pair[part][start:] for pair, (start, _) in zip(history, ranges, strict=True)])
        for part in (0, 1)
    ]
    step.gathered.store(*new, cache)
    output = step.attend(torch.cat(queries), cache)

    expected = [
        reference(query, *pair, start)
        for query, pair, (start, _) in zip(queries, history, ranges, strict=True)
    ]
    torch.testing.assert_close(output.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)
    written = {slot for slots in slot_of for slot in slots}
    for slot in set(range(num_blocks * block_size)) - written:
        assert cache.keys.flatten(0, 1)[slot].isnan().all(), f"slot {slot} was written"
        assert cache.values.flatten(0, 1)[slot].isnan().all(), f"slot {slot} was written"


def test_the_example_of_the_module_stores_at_slots_9_and_10():
    cache = poisoned_cache(8, 4, 1, 2)
    step = TorchAttention.begin_step([scheduled(5, 7, [7, 2])], cache)
    assert step.gathered.slot_mapping.tolist() == [9, 10]


def test_two_sequences_read_one_shared_prefix_block():
    cache = poisoned_cache(3, 2, 1, 4)
    keys, values, query = torch.randn(3, 3, 1, 4).unbind()
    first = TorchAttention.begin_step([scheduled(0, 3, [2, 0])], cache)
    first.gathered.store(keys, values, cache)
    alone = first.attend(query, cache)[2]

    suffix = TorchAttention.begin_step([scheduled(2, 3, [2, 1])], cache)
    suffix.gathered.store(keys[2:], values[2:], cache)

    torch.testing.assert_close(suffix.attend(query[2:], cache)[0], alone)


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch():
    cache = poisoned_cache(20, 4, 2, 8)
    cache.keys.normal_()
    cache.values.normal_()
    short, long = scheduled(5, 6, [3, 9]), scheduled(20, 31, [1, 0, 5, 7, 11, 12, 19, 2])
    query = torch.randn(12, 4, 8)

    together = TorchAttention.begin_step([short, long], cache).attend(query, cache)

    assert torch.equal(
        together[:1], TorchAttention.begin_step([short], cache).attend(query[:1], cache)
    )
    assert torch.equal(
        together[1:], TorchAttention.begin_step([long], cache).attend(query[1:], cache)
    )


def test_a_table_may_be_longer_than_the_context():
    cache = poisoned_cache(4, 2, 1, 2)
    step = TorchAttention.begin_step([scheduled(0, 1, [1, 3])], cache)
    step.gathered.store(torch.ones(1, 1, 2), torch.full((1, 1, 2), 5.0), cache)
    assert step.attend(torch.ones(1, 1, 2), cache).tolist() == [[[5.0, 5.0]]]
