"""Chapters 1 to 7, assembled: the tokens and logits of transformers, and of the finished engine."""

from pathlib import Path

import pytest
import torch

from chapters.ch04_paged_attention import reference
from chapters.engine import Limits, through_chapter_5, through_chapter_7
from chapters.model import load_network, model_with_kernels, model_with_suffix_attention
from chapters.stages import Stages
from minivllm.model.loader import resolve_model
from minivllm.tokenizer import Tokenizer
from tests import texts
from tests.alignment import ATOL, RTOL, Oracle, RecordingEngine
from tests.interpreter import needs_interpreter, run_in_interpreter
from tests.tiny_models import VOCAB_SIZE, save_model

BLOCK_SIZE = 4


class Recorded:
    """Chapter 5's Model, which remembers every row of logits it has given, in order."""

    def __init__(self, model):
        self._model = model
        self.rows = []

    def hidden(self, batch):
        return self._model.hidden(batch)

    def logits(self, hidden):
        logits = self._model.logits(hidden)
        self.rows += list(logits.clone())
        return logits


def whole_prompts(stages, network, limits):
    """Chapters 1 to 5: (engine, its recorded model)."""
    size = limits.num_blocks, limits.block_size
    model = Recorded(model_with_kernels(reference, network, *size))
    return through_chapter_5(stages, model, limits), model


def cached_prefixes(stages, network, limits):
    """Chapters 1 to 7: (engine, its recorded model)."""
    size = limits.num_blocks, limits.block_size
    attention = stages.load("ch07_suffix_prefill").suffix_attention
    model = Recorded(model_with_suffix_attention(attention, network, *size))
    return through_chapter_7(stages, model, limits), model


class Ran:
    """Prompts that ran together.

    token_ids, logits  what was generated, and from which scores, by name
    num_cached         tokens that were found cached when a prompt was admitted first
    num_resumed        of those admitted again after a preemption, how many tokens were found
    """

    def __init__(self, engine, model, prompts, num_tokens):
        stages = Stages()
        params = stages.load("ch01_sequence").SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        sequences = {name: engine.add(name, prompt, params) for name, prompt in prompts.items()}
        model.rows.clear()
        self.logits = {name: [] for name in prompts}
        self.num_cached, self.num_resumed = {}, {}
        while engine.has_unfinished:
            num_rows = len(model.rows)
            ranges = engine.step()
            for (sequence, start, end), row in zip(ranges, model.rows[num_rows:], strict=True):
                name = sequence.request_id
                self.logits[name].append(row)
                if name not in self.num_cached:
                    self.num_cached[name] = start
                elif end - start > 1:
                    self.num_resumed[name] = start
        self.token_ids = {
            name: sequence.token_ids[len(prompts[name]) :] for name, sequence in sequences.items()
        }
        self.preemptions = engine.scheduler.preemptions

    def check(self, prompts, oracle):
        """Every token and every logit is transformers'."""
        for name, prompt in prompts.items():
            expected = oracle.logits(prompt, self.token_ids[name])
            assert self.token_ids[name] == expected.argmax(dim=-1).tolist(), name
            ours = torch.stack(self.logits[name])
            torch.testing.assert_close(ours, expected, atol=ATOL, rtol=RTOL, msg=name)


# Tiny models

NUM_TOKENS = 12
TINY = ["llama", "qwen3"]


@pytest.fixture(scope="module", params=TINY)
def tiny(request, tmp_path_factory):
    """(folder, network, prompts, oracle) of a random model."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = Oracle(save_model(request.param, folder))
    random = torch.Generator().manual_seed(7)
    shared, *others = (
        torch.randint(VOCAB_SIZE, (length,), generator=random).tolist()
        for length in (18, 3, 5, 9, 1, 21)
    )
    # Three that begin alike, one of one token, one that shares nothing.
    prompts = {f"shared {i}": shared + rest for i, rest in enumerate(others[:3])}
    prompts |= {"one token": others[3], "alone": others[4]}
    return folder, load_network(str(folder)), prompts, oracle


def limits(**changes):
    sizes = {"num_blocks": 64, "block_size": BLOCK_SIZE, "max_model_len": 64}
    return Limits(**(sizes | {"max_num_batched_tokens": 128} | changes))


@pytest.mark.parametrize("assemble", [whole_prompts, cached_prefixes])
def test_all_tokens_and_logits_are_those_of_transformers(tiny, assemble):
    _, network, prompts, oracle = tiny
    Ran(*assemble(Stages(), network, limits()), prompts, NUM_TOKENS).check(prompts, oracle)


@pytest.mark.parametrize("assemble", [whole_prompts, cached_prefixes])
def test_all_tokens_are_those_of_transformers_own_generate(tiny, assemble):
    _, network, prompts, oracle = tiny
    ran = Ran(*assemble(Stages(), network, limits()), prompts, NUM_TOKENS)
    expected = {name: oracle.generate(prompt, NUM_TOKENS) for name, prompt in prompts.items()}
    assert ran.token_ids == expected


@pytest.mark.parametrize("assemble", [whole_prompts, cached_prefixes])
def test_all_tokens_are_those_of_the_finished_engine(tiny, assemble):
    folder, network, prompts, _ = tiny
    ran = Ran(*assemble(Stages(), network, limits()), prompts, NUM_TOKENS)
    outputs = RecordingEngine(folder).run(prompts, NUM_TOKENS)
    assert ran.token_ids == {name: outputs[name].token_ids for name in prompts}


@pytest.mark.parametrize("assemble", [whole_prompts, cached_prefixes])
def test_preemptions_change_no_token_and_no_logit(tiny, assemble):
    _, network, prompts, oracle = tiny
    ran = Ran(*assemble(Stages(), network, limits(num_blocks=20)), prompts, NUM_TOKENS)
    ran.check(prompts, oracle)
    assert ran.preemptions > 0


def test_who_returns_from_a_preemption_may_find_its_own_blocks_and_agrees(tiny):
    _, network, prompts, oracle = tiny
    engine, model = cached_prefixes(Stages(), network, limits(num_blocks=20))
    ran = Ran(engine, model, prompts, NUM_TOKENS)
    ran.check(prompts, oracle)
    assert any(start > 0 for start in ran.num_resumed.values()), ran.num_resumed


def test_prompts_that_begin_alike_compute_their_beginning_once_and_agree(tiny):
    _, network, prompts, oracle = tiny
    ran = Ran(*cached_prefixes(Stages(), network, limits()), prompts, NUM_TOKENS)
    ran.check(prompts, oracle)
    whole_blocks = 18 // BLOCK_SIZE * BLOCK_SIZE
    assert ran.num_cached == {
        "shared 0": 0,
        "shared 1": whole_blocks,
        "shared 2": whole_blocks,
        "one token": 0,
        "alone": 0,
    }


def test_a_second_time_all_but_the_last_block_is_found_and_agrees(tiny):
    _, network, prompts, oracle = tiny
    engine, model = cached_prefixes(Stages(), network, limits())
    Ran(engine, model, prompts, NUM_TOKENS)
    again = Ran(engine, model, prompts, NUM_TOKENS)
    again.check(prompts, oracle)
    assert again.num_cached == {
        name: (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for name, prompt in prompts.items()
    }


def test_the_next_turn_of_a_conversation_finds_what_was_generated_and_agrees(tiny):
    _, network, prompts, oracle = tiny
    engine, model = cached_prefixes(Stages(), network, limits())
    first = Ran(engine, model, {"turn 1": prompts["alone"]}, NUM_TOKENS)
    longer = {"turn 2": [*prompts["alone"], *first.token_ids["turn 1"], 5, 6, 7]}
    second = Ran(engine, model, longer, NUM_TOKENS)
    second.check(longer, oracle)
    assert second.num_cached["turn 2"] == (len(prompts["alone"]) + NUM_TOKENS - 1) // 4 * 4


def test_evictions_change_no_token_and_no_logit(tiny):
    _, network, prompts, oracle = tiny
    engine, model = cached_prefixes(Stages(), network, limits(num_blocks=12, max_num_seqs=1))
    for _ in range(2):
        Ran(engine, model, prompts, NUM_TOKENS).check(prompts, oracle)
    assert engine.scheduler.pool.evictions > 0


@pytest.mark.kernels
@needs_interpreter
def test_chapter_4s_own_kernels_give_the_tokens_of_their_reference(tmp_path):
    file = Path(__file__).with_name("chapters_interpreted.py")
    run_in_interpreter(str(file), tmp_path / "report.xml")


# The real model


NUM_REAL_TOKENS = 20


@pytest.fixture(scope="module")
def real():
    """(network, prompts, oracle, tokens of the finished engine): three share a beginning."""
    from transformers import AutoModelForCausalLM

    folder = resolve_model("smollm2-135m")
    encode = Tokenizer(folder).encode
    prompts = {
        f"visitor {i}": encode(texts.SYSTEM_PROMPT + question)
        for i, question in enumerate(texts.QUESTIONS[:3])
    }
    prompts["a question"] = encode("The capital of France is")
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    finished = RecordingEngine(folder).run(prompts, NUM_REAL_TOKENS)
    expected = {name: output.token_ids for name, output in finished.items()}
    return load_network(), prompts, oracle, expected


# So many blocks hold the prompts but not what is generated: somebody is preempted.
@pytest.mark.model
@pytest.mark.parametrize(("assemble", "num_blocks"), [(whole_prompts, 29), (cached_prefixes, 15)])
def test_the_real_model_agrees_with_transformers_and_the_finished_engine(
    real, assemble, num_blocks
):
    network, prompts, oracle, expected = real
    engine, model = assemble(Stages(), network, Limits(num_blocks=num_blocks))
    ran = Ran(engine, model, prompts, NUM_REAL_TOKENS)
    ran.check(prompts, oracle)
    assert ran.token_ids == expected
    assert ran.preemptions > 0
    assert (sum(ran.num_cached.values()) > 0) == (assemble is cached_prefixes)
