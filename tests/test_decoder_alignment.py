"""The decoder against transformers, in float32: every row's logits, over arbitrary chunkings."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.batch import ScheduledSequence
from minivllm.model.attention import KVCache, TorchAttention
from minivllm.model.decoder import Decoder
from minivllm.model.linear import DenseLinear
from minivllm.model.loader import Checkpoint, ModelFolder, resolve_model
from minivllm.sampling_params import SamplingParams
from tests.tiny_models import VARIANTS, VOCAB_SIZE, one_thread, save_model

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
BLOCK_SIZE = 4


@pytest.fixture(scope="module", autouse=True)
def _single_threaded():
    with one_thread():
        yield


class Replay:
    """A decoder and a paged cache; computes the ranges it is told to and keeps all logits."""

    def __init__(self, folder, num_blocks):
        opened = ModelFolder.open(folder)
        self.config = opened.config
        checkpoint = Checkpoint(folder, torch.device("cpu"), torch.float32)
        self.decoder = Decoder(opened.config, checkpoint, DenseLinear)
        shape = (num_blocks, BLOCK_SIZE, opened.config.num_kv_heads, opened.config.head_dim)
        # NaN in every slot: reading one that was not written cannot go unnoticed.
        self.kv = [
            KVCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
            for _ in range(opened.config.num_layers)
        ]

    @torch.inference_mode()
    def step(self, spans):
        """spans: (token_ids, start, end, table) each; returns the logits of all rows of each."""
        sequences = [
            ScheduledSequence("r", ids, start, end, table, SamplingParams())
            for ids, start, end, table in spans
        ]
        token_ids = [token for ids, start, end, _ in spans for token in ids[start:end]]
        attention = TorchAttention.begin_step(sequences, self.kv[0])
        hidden = self.decoder.hidden(torch.tensor(token_ids), self.kv, attention)
        return self.decoder.logits(hidden).split([end - start for _, start, end, _ in spans])


def oracle_logits(model, token_ids):
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(request.param, folder)


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_every_chunking_of_a_mixed_batch_gives_the_oracles_logits(tiny, data):
    folder, model = tiny
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3), label="lengths")
    seed = data.draw(st.integers(0, 1000), label="seed")
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    ids = rng.sample(range(sum(needed)), sum(needed))
    tables = [ids[sum(needed[:i]) : sum(needed[: i + 1])] for i in range(len(needed))]

    replay = Replay(folder, len(ids))
    found = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        # Each unfinished sequence computes some of its rows: often one, as in a decode.
        live = [i for i, at in enumerate(done) if at < lengths[i]]
        ends = [
            done[i] + data.draw(st.one_of(st.just(1), st.integers(1, lengths[i] - done[i])))
            for i in live
        ]
        logits = replay.step(
            [(prompts[i], done[i], end, tables[i]) for i, end in zip(live, ends, strict=True)]
        )
        for i, end, rows in zip(live, ends, logits, strict=True):
            found[i].append(rows)
            done[i] = end

    for prompt, rows in zip(prompts, found, strict=True):
        torch.testing.assert_close(torch.cat(rows), oracle_logits(model, prompt), **TOLERANCE)


def test_positions_far_beyond_the_original_context_give_the_oracles_logits(tiny):
    # For llama3 rope the tiny models stretch 32 positions to 256.
    folder, model = tiny
    rng = random.Random(7)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(256)]
    (rows,) = Replay(folder, 64).step([(prompt, 0, 256, list(range(64)))])
    torch.testing.assert_close(rows, oracle_logits(model, prompt), **TOLERANCE)


@pytest.mark.model
def test_the_default_model_equals_transformers_on_the_converted_folder():
    import transformers

    folder = resolve_model("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = random.Random(0)
    for length in (1, 16, 333):
        prompt = [rng.randrange(49152) for _ in range(length)]
        replay = Replay(folder, -(-length // BLOCK_SIZE))
        table = rng.sample(range(len(replay.kv[0].keys)), len(replay.kv[0].keys))
        cut = length // 3
        spans = [(0, cut), (cut, length)] if cut else [(0, length)]
        rows = torch.cat([replay.step([(prompt, *span, table)])[0] for span in spans])
        torch.testing.assert_close(rows, oracle_logits(model, prompt), **TOLERANCE)
