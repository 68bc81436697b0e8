"""What both alignment tests need: an oracle in transformers, and the engine's logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minivllm import EngineConfig, LLMEngine, SamplingParams

ATOL = RTOL = 1e-4
BLOCK_SIZE = 16


@dataclass
class Expected:
    """Greedy tokens, and the logits [num_tokens, vocab_size] each was chosen from."""

    token_ids: list[int]
    logits: np.ndarray

    def first(self, num_tokens: int) -> Expected:
        return Expected(self.token_ids[:num_tokens], self.logits[:num_tokens])


@torch.inference_mode()
def transformers_greedy(model, prompt: list[int], num_tokens: int) -> Expected:
    """transformers' own generate, greedy, without stopping at an EOS token."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(result.logits).float().numpy()
    return Expected(result.sequences[0, len(prompt) :].tolist(), logits)


class RecordingEngine:
    """An engine on a real runner that keeps the logits of every token it chooses."""

    def __init__(self, model: str, **config):
        settings = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 400}
        self.engine = LLMEngine(
            EngineConfig(model=str(model), debug_checks=True, **(settings | config))
        )
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        sampler = self.engine.runner._sampler
        sample = sampler.sample

        def record(logits, sequences, eos_token_ids):
            for row, sequence in zip(logits, sequences, strict=True):
                position = sequence.num_tokens - sequence.num_prompt_tokens
                self.logits[sequence.request_id, position] = row.float().clone()
            return sample(logits, sequences, eos_token_ids)

        sampler.sample = record

    def run(self, prompts: dict[str, list[int]], num_tokens: int):
        """Run all prompts together; returns the finished outputs by request id."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for request_id, prompt in prompts.items():
            self.engine.add_request(request_id, prompt, params)
        finished = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    finished[output.request_id] = output
        return finished

    def check(self, prompts: dict[str, list[int]], expected: dict[str, Expected], num_tokens: int):
        """Run, and compare every token and every logit; returns the outputs."""
        outputs = self.run(prompts, num_tokens)
        for name in prompts:
            self.compare(name, outputs[name].token_ids, expected[name].first(num_tokens))
        return outputs

    def compare(self, request_id: str, token_ids: list[int], expected: Expected):
        assert token_ids == expected.token_ids, request_id
        logits = torch.stack([self.logits[request_id, i] for i in range(len(token_ids))])
        np.testing.assert_allclose(
            logits.numpy(), expected.logits, atol=ATOL, rtol=RTOL, err_msg=request_id
        )


# Each situation: (model folder, prompts, expected, num_tokens). `expected` has an entry for each
# of `prompts`, and for each of whole_blocks(prompts) and pairs(prompts).


def chunked(model, prompts, expected, num_tokens):
    engine = RecordingEngine(model, max_num_batched_tokens=16)
    engine.check(prompts, expected, num_tokens)
    longest = max(len(prompt) for prompt in prompts.values())
    assert engine.engine.stats()["steps"] > longest / 16


def preempted(model, prompts, expected, num_tokens):
    # Room for the longest alone, not for all of them.
    longest = max(len(prompt) for prompt in prompts.values())
    engine = RecordingEngine(model, num_kv_blocks=-(-(longest + num_tokens) // BLOCK_SIZE))
    engine.check(prompts, expected, num_tokens)
    assert engine.engine.stats()["preemptions"] > 0


def second_time(model, prompts, expected, num_tokens):
    engine = RecordingEngine(model)
    engine.check(prompts, expected, num_tokens)
    again = engine.check(prompts, expected, num_tokens)
    for name, prompt in prompts.items():
        assert again[name].num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def whole_blocks_exactly(model, prompts, expected, num_tokens):
    engine = RecordingEngine(model)
    whole = whole_blocks(prompts)
    engine.check(whole, expected, num_tokens)
    again = engine.check(whole, expected, num_tokens)
    for name, prompt in whole.items():
        assert len(prompt) % BLOCK_SIZE == 0
        assert again[name].num_cached_tokens == len(prompt) - BLOCK_SIZE


def one_prefix_submitted_together(model, prompts, expected, num_tokens):
    engine = RecordingEngine(model)
    together = pairs(prompts)
    outputs = engine.check(together, expected, num_tokens)
    assert sum(output.num_cached_tokens > 0 for output in outputs.values()) == len(together) // 2


def cache_off(model, prompts, expected, num_tokens):
    engine = RecordingEngine(model, enable_prefix_caching=False)
    engine.check(prompts, expected, num_tokens)
    again = engine.check(prompts, expected, num_tokens)
    assert all(output.num_cached_tokens == 0 for output in again.values())


SITUATIONS = [
    chunked,
    preempted,
    second_time,
    whole_blocks_exactly,
    one_prefix_submitted_together,
    cache_off,
]


def whole_blocks(prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Each prompt cut to a multiple of the block size."""
    return {
        f"whole {name}": prompt[: max(len(prompt) // BLOCK_SIZE, 1) * BLOCK_SIZE]
        for name, prompt in prompts.items()
        if len(prompt) >= BLOCK_SIZE
    }


def pairs(prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Each prompt, and beside it one that parts from it in its last three tokens."""
    found = {}
    for name, prompt in prompts.items():
        if len(prompt) > BLOCK_SIZE + 4:
            found[f"pair {name} a"] = prompt
            found[f"pair {name} b"] = [*prompt[:-3], prompt[-1], prompt[-3], prompt[0]]
    return found
