"""The whole engine in bfloat16 on our kernels as they are compiled: their PTX, run on a CPU.

Prompts share a prefix, are read in chunks, and decode beside each other; then all of it once more,
when the prefix is found in the cache. How far the logits may be from transformers' says
RecordingEngine.check_half_precision.
"""

import random

import pytest
import torch
import transformers

pytest.importorskip("triton", reason="the package triton is not installed")

from benchmarks.ptx.launch import PtxMachine
from tests.alignment import BLOCK_SIZE, RecordingEngine
from tests.interpreter import needs_compiler
from tests.tiny_models import one_thread

pytestmark = [pytest.mark.kernels, needs_compiler]

VOCAB_SIZE = 128
NUM_TOKENS = 4
RNG = random.Random(0)
PREFIX = [RNG.randrange(VOCAB_SIZE) for _ in range(3 * BLOCK_SIZE)]
PROMPTS = {
    f"r{length}": [*PREFIX, *(RNG.randrange(VOCAB_SIZE) for _ in range(length))]
    for length in (1, 20)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3 of two layers with heads as a real one has them: 64 numbers, and norms."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("qwen3")
    transformers.Qwen3ForCausalLM(config).eval().save_pretrained(path)
    return path


@pytest.mark.parametrize("capability", [80, 90])
def test_its_logits_are_transformers_cold_and_with_a_warm_prefix(
    folder, capability, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with one_thread(), PtxMachine(capability).launching() as machine:
        engine = RecordingEngine(
            folder, attention_backend="triton", dtype="bfloat16", max_num_batched_tokens=40
        )
        # The second prompt finds the first one's prefix; then both find all their whole blocks.
        whole = sum(len(prompt) // BLOCK_SIZE for prompt in PROMPTS.values())
        for num_hits in (len(PREFIX), whole * BLOCK_SIZE):
            before = engine.engine.stats()["prefix_hit_tokens"]
            decided = engine.check_half_precision(PROMPTS, folder, "bfloat16", NUM_TOKENS)
            assert decided > 0, "the rule says nothing about these tokens"
            found = engine.engine.stats()["prefix_hit_tokens"] - before
            assert found == num_hits
    kernels = {launch.kernel for launch in machine.launches}
    assert {"paged_attention_kernel", "rotary_store_kv_kernel", "silu_and_mul_kernel"} <= kernels
