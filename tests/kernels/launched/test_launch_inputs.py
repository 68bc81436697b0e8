"""Launchers refuse shapes, strides and dtypes a kernel would misread, and pick what fits."""

import pytest
import torch
from kernel_testing import DEVICE, INTERPRETED

from kernels.attention import attention
from kernels.batch import PagedBatch
from kernels.errors import KernelInputError
from kernels.launch import capability
from kernels.layer_parts import HeadNorms
from kernels.paged_attention import attention_tile, count_tiles, paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary_store_kv
from kernels.silu_and_mul import silu_and_mul
from kernels.split_attention import SHORT, TALL, choose_num_splits, split_attention, split_tile
from kernels.store_kv import store_kv

BATCH = PagedBatch.from_host([[1, 0]], [(3, 6)], num_blocks=2, block_size=16, device=DEVICE)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": zeros(4, 6, 64)}, r"query has shape \(4, 6, 64\), not \(3, 6, 64\)"),
        ({"query": zeros(3, 6, 32)}, r"query has shape"),
        ({"query": zeros(3, 5, 64)}, "5 query heads for 2 KV heads"),
        ({"query": zeros(3, 34, 64)}, "need 1 to 16"),
        ({"query": zeros(3, 64)}, "query has 2 dimensions"),
        ({"query": zeros(3, 6, 64, dtype=torch.float16)}, "key_cache is torch.float32"),
        ({"query": zeros(3, 64, 6).transpose(1, 2)}, "each token's row must be contiguous"),
        ({"key_cache": zeros(2, 2, 16, 64).transpose(1, 2)}, "need a contiguous"),
        ({"key_cache": zeros(3, 16, 2, 64)}, r"key_cache has shape \(3, 16, 2, 64\), not \(2,"),
        ({"value_cache": zeros(2, 16, 1, 64)}, "value_cache has shape"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"out": zeros(3, 5, 64)}, "out has shape"),
        ({"out": zeros(3, 6, 64, dtype=torch.float16)}, "out is torch.float16"),
        ({"out": zeros(6, 6, 64)[::2]}, "out has strides"),
    ],
)
def test_attention_refuses_what_it_would_misread(changed, message):
    inputs = {
        "query": zeros(3, 6, 64),
        "key_cache": zeros(2, 16, 2, 64),
        "value_cache": zeros(2, 16, 2, 64),
        "batch": BATCH,
    }
    for launch in (paged_attention, attention):
        with pytest.raises(KernelInputError, match=message):
            launch(**(inputs | changed))


@pytest.mark.parametrize("head_dim", [15, 288])
def test_odd_and_oversized_heads_are_refused(head_dim):
    cache = zeros(2, 16, 1, head_dim)
    with pytest.raises(KernelInputError, match=f"head size is {head_dim}; it must be even"):
        attention(zeros(3, 1, head_dim), cache, cache, BATCH)


def test_blocks_in_which_32_bits_cannot_count_are_refused(monkeypatch):
    monkeypatch.setattr("kernels.launch.MAX_BLOCK_NUMBERS", 16 * 2 * 64 - 1)
    cache = zeros(2, 16, 2, 64)
    with pytest.raises(KernelInputError, match="a block of 16 slots holds 2,048 numbers of keys"):
        attention(zeros(3, 2, 64), cache, cache, BATCH)


def test_doubles_are_refused():
    cache = zeros(2, 16, 1, 64, dtype=torch.float64)
    with pytest.raises(KernelInputError, match="the kernels know"):
        attention(zeros(3, 1, 64, dtype=torch.float64), cache, cache, BATCH)


@pytest.mark.parametrize("num_splits", [0, 3, 128])
def test_contexts_are_split_into_powers_of_two_only(num_splits):
    query, cache = zeros(3, 2, 64), zeros(2, 16, 2, 64)
    with pytest.raises(KernelInputError, match=f"num_splits is {num_splits}; it must be a power"):
        split_attention(query, cache, cache, BATCH, num_splits=num_splits)


def test_store_kv_refuses_another_number_of_rows():
    cache = zeros(2, 16, 2, 64)
    with pytest.raises(KernelInputError, match=r"value has shape \(2, 2, 64\), not \(3, 2, 64\)"):
        store_kv(zeros(3, 2, 64), zeros(2, 2, 64), cache, cache, BATCH)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cos": zeros(5, 32), "sin": zeros(5, 32)}, "hold 5 positions; the longest context has 6"),
        ({"sin": zeros(9, 32)}, r"sin has shape \(9, 32\)"),
        ({"cos": zeros(8, 64)}, "cos has shape"),
        ({"cos": zeros(8, 32, dtype=torch.float16)}, "need contiguous float32"),
        ({"key": zeros(3, 1, 64)}, "key has shape"),
        ({"query": zeros(3, 3, 64)}, "3 query heads for 2 KV heads"),
        ({"norms": HeadNorms(zeros(64), zeros(2), 0.1)}, r"key_norm has shape \(2,\), not \(64,\)"),
        ({"norms": HeadNorms(zeros(64, 2)[:, 0], zeros(64), 0.1)}, "query_norm has stride"),
        (
            {"norms": HeadNorms(zeros(64), zeros(64, dtype=torch.float16), 0.1)},
            "key_norm is torch.float16",
        ),
    ],
)
def test_rotary_refuses_what_it_would_misread(changed, message):
    inputs = {"query": zeros(3, 4, 64), "key": zeros(3, 2, 64), "value": zeros(3, 2, 64)}
    inputs |= {"cos": zeros(8, 32), "sin": zeros(8, 32), "batch": BATCH}
    inputs |= {"key_cache": zeros(2, 16, 2, 64), "value_cache": zeros(2, 16, 2, 64)}
    with pytest.raises(KernelInputError, match=message):
        rotary_store_kv(**(inputs | changed))


@pytest.mark.parametrize(
    "launch",
    [
        lambda: rms_norm(zeros(2, 8), zeros(9), 1e-5),
        lambda: rms_norm(zeros(8), zeros(8), 1e-5),
        lambda: rms_norm(zeros(2, 2, 8), zeros(8), 1e-5),
        lambda: rms_norm(zeros(8, 2).T, zeros(8), 1e-5),
        lambda: rms_norm(zeros(0, 8), zeros(8), 1e-5),
        lambda: add_rms_norm(zeros(2, 8), zeros(1, 8), zeros(8), 1e-5),
        lambda: add_rms_norm(zeros(2, 16)[:, :8], zeros(2, 8), zeros(8), 1e-5),
        lambda: silu_and_mul(zeros(2, 9)),
        lambda: silu_and_mul(zeros(2, 2, 8)),
    ],
)
def test_row_kernels_refuse_what_they_would_misread(launch):
    with pytest.raises(KernelInputError):
        launch()


def test_a_tensor_no_kernel_can_reach_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelInputError, match="gate_up is on cpu: move it to a CUDA device"):
        silu_and_mul(torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("num_sequences", "context", "splits"),
    [(1, 4096, 16), (1, 32768, 64), (8, 4096, 8), (64, 4096, 1), (8, 200, 1), (1, 511, 1)],
)
def test_splits_are_chosen_as_the_docstring_shows(num_sequences, context, splits):
    assert choose_num_splits(num_sequences, 8, context, num_multiprocessors=132) == splits


def test_the_rest_of_a_prompt_behind_a_long_one_is_split_and_a_whole_prompt_is_not():
    cases = {(4096, 4160): 8, (32768, 32832): 16, (0, 4096): 1, (0, 1024): 1, (0, 512): 1}
    for (start, end), splits in cases.items():
        num_blocks = -(-end // 16)
        batch = PagedBatch.from_host(
            [range(num_blocks)], [(start, end)], num_blocks=num_blocks, block_size=16
        )
        tile = split_tile(128, torch.bfloat16, 2 * (end - start), 90)
        num_tiles = count_tiles(batch, 2, tile)
        found = choose_num_splits(num_tiles, 8, end, num_multiprocessors=132, parts=TALL)
        assert found == splits, (start, end)


@pytest.mark.parametrize("parts", [SHORT, TALL])
def test_a_split_is_always_one_that_split_attention_takes(parts):
    for num_sequences in (1, 3, 17, 300):
        for num_kv_heads in (1, 3, 8):
            for context in (0, 1, 255, 256, 5000, 10**6):
                splits = choose_num_splits(num_sequences, num_kv_heads, context, 142, parts)
                assert 1 <= splits <= 64
                assert splits & (splits - 1) == 0
                assert splits == 1 or context // splits >= parts.least_keys


def test_tiles_are_powers_of_two_and_decode_gets_the_lowest():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head_dim in (20, 64, 80, 128, 256):
            for target in (80, 90, 120):
                assert attention_tile(head_dim, dtype, 16, target).block_m == 16
                prefill = attention_tile(head_dim, dtype, 17, target)
                assert prefill.block_m > 16
                assert all(n & (n - 1) == 0 for n in prefill[:3])


@pytest.mark.skipif(not INTERPRETED, reason="asks what a CPU counts as")
def test_a_cpu_counts_as_an_a100():
    assert capability(torch.device("cpu")) == 80
