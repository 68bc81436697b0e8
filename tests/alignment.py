"""What the alignment tests need: an oracle in transformers or alone, and the engine's logits."""

from __future__ import annotations

from functools import partial

import torch

from minivllm import EngineConfig, LLMEngine, SamplingParams

ATOL = RTOL = 1e-4
BLOCK_SIZE = 16


class Oracle:
    """What transformers computes for a prompt and the tokens that follow it."""

    atol, rtol = ATOL, RTOL

    def __init__(self, model):
        self._model = model.eval()
        self._logits = {}

    @torch.inference_mode()
    def logits(self, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size]: what transformers chooses each of token_ids from.

        One pass over prompt and tokens, without a cache. If the largest logit of each row is the
        token that follows, then `token_ids` is transformers' greedy output, by induction; that
        its own generate() agrees is tested too.
        """
        text = (*prompt, *token_ids[:-1])
        key = (len(prompt), text)
        if key not in self._logits:
            logits = self._model(torch.tensor([text]), logits_to_keep=len(token_ids)).logits[0]
            self._logits[key] = logits.float()
        return self._logits[key]

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """transformers' own greedy generate, which does not stop at an EOS token."""
        ids = torch.tensor([prompt])
        result = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return result[0, len(prompt) :].tolist()


class AloneOracle:
    """What the engine itself computes for a prompt alone, its cache off, to the bit."""

    atol = rtol = 0.0

    def __init__(self, model):
        self._engine = RecordingEngine(model, enable_prefix_caching=False)
        self._logits = {}

    def logits(self, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size]: what each token is chosen from."""
        key = (tuple(prompt), len(token_ids))
        if key not in self._logits:
            self._engine.run({"alone": prompt}, len(token_ids))
            self._logits[key] = self._engine.logits("alone", len(token_ids))
        return self._logits[key]


class RecordingEngine:
    """An engine on a real runner that keeps the logits of every token it chooses."""

    def __init__(self, model, **config):
        settings = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 400}
        self.engine = LLMEngine(
            EngineConfig(model=str(model), debug_checks=True, **(settings | config))
        )
        self._logits = {}
        sampler = self.engine.runner._sampler
        sample = sampler.sample

        def record(logits, sequences, eos_token_ids):
            for row, sequence in zip(logits, sequences, strict=True):
                position = sequence.num_tokens - sequence.num_prompt_tokens
                self._logits[sequence.request_id, position] = row.float().clone()
            return sample(logits, sequences, eos_token_ids)

        sampler.sample = record

    def logits(self, request_id: str, num_tokens: int) -> torch.Tensor:
        """[num_tokens, vocab_size]: what each generated token was chosen from."""
        return torch.stack([self._logits[request_id, i] for i in range(num_tokens)])

    def run(self, prompts: dict[str, list[int]], num_tokens: int):
        """Run all prompts together; the finished outputs by request id."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for request_id, prompt in prompts.items():
            self.engine.add_request(request_id, prompt, params)
        finished = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    finished[output.request_id] = output
        return finished

    def check(self, prompts: dict[str, list[int]], oracle: Oracle | AloneOracle, num_tokens: int):
        """Run, compare every token and every logit with the oracle's; the outputs."""
        outputs = self.run(prompts, num_tokens)
        for name, prompt in prompts.items():
            token_ids = outputs[name].token_ids
            assert len(token_ids) == num_tokens
            expected = oracle.logits(prompt, token_ids)
            assert token_ids == expected.argmax(dim=-1).tolist(), name
            ours = self.logits(name, num_tokens)
            told = partial("{}: {}".format, name)
            torch.testing.assert_close(ours, expected, atol=oracle.atol, rtol=oracle.rtol, msg=told)
        return outputs

    def check_half_precision(self, prompts, folder, dtype: str, num_tokens: int) -> int:
        """Run, and compare with transformers in the same dtype; how many tokens it decides.

        Two right programs round differently, so tokens may differ where the two best logits lie
        closer together than rounding reaches. The rule: measure transformers' own error in the
        dtype, its largest distance from its float32 logits on the same tokens. Our error must
        stay within twice that, and our token must be transformers' wherever the gap between its
        two best logits exceeds the error.
        """
        from transformers import AutoModelForCausalLM

        outputs = self.run(prompts, num_tokens)
        load = AutoModelForCausalLM.from_pretrained
        same = Oracle(load(folder, dtype=getattr(torch, dtype)))
        exact = Oracle(load(folder, dtype=torch.float32))
        rows = []
        for name, prompt in prompts.items():
            tokens = outputs[name].token_ids
            theirs, true = same.logits(prompt, tokens), exact.logits(prompt, tokens)
            rows.append((torch.tensor(tokens), self.logits(name, num_tokens), theirs, true))
        tokens, ours, theirs, true = (torch.cat(part) for part in zip(*rows, strict=True))
        their_error = (theirs - true).abs().max()
        our_error = (ours - true).abs().max()
        assert their_error > 0, "the dtype made no difference: it was not used"
        assert our_error <= 2 * their_error
        best = theirs.topk(2).values
        is_decided = best[:, 0] - best[:, 1] > their_error
        assert torch.equal(tokens[is_decided], theirs.argmax(dim=-1)[is_decided])
        assert self.engine.runner._kv[0].keys.dtype == getattr(torch, dtype)
        return int(is_decided.sum())


# Each situation: (model folder, prompts, oracle, num_tokens).


def chunked(model, prompts, oracle, num_tokens):
    engine = RecordingEngine(model, max_num_batched_tokens=16)
    engine.check(prompts, oracle, num_tokens)
    longest = max(len(prompt) for prompt in prompts.values())
    assert engine.engine.stats()["steps"] > longest / 16


def preempted(model, prompts, oracle, num_tokens):
    # Room for all prompts, and none for what they generate.
    num_blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts.values())
    engine = RecordingEngine(model, num_kv_blocks=num_blocks)
    engine.check(prompts, oracle, num_tokens)
    assert engine.engine.stats()["preemptions"] > 0


def second_time(model, prompts, oracle, num_tokens):
    engine = RecordingEngine(model)
    engine.check(prompts, oracle, num_tokens)
    again = engine.check(prompts, oracle, num_tokens)
    for name, prompt in prompts.items():
        assert again[name].num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def whole_blocks_exactly(model, prompts, oracle, num_tokens):
    engine = RecordingEngine(model)
    whole = whole_blocks(prompts)
    engine.check(whole, oracle, num_tokens)
    again = engine.check(whole, oracle, num_tokens)
    for name, prompt in whole.items():
        assert len(prompt) % BLOCK_SIZE == 0
        assert again[name].num_cached_tokens == len(prompt) - BLOCK_SIZE


def one_prefix_submitted_together(model, prompts, oracle, num_tokens):
    engine = RecordingEngine(model)
    together = pairs(prompts)
    outputs = engine.check(together, oracle, num_tokens)
    assert sum(output.num_cached_tokens > 0 for output in outputs.values()) == len(together) // 2


def cache_off(model, prompts, oracle, num_tokens):
    engine = RecordingEngine(model, enable_prefix_caching=False)
    engine.check(prompts, oracle, num_tokens)
    again = engine.check(prompts, oracle, num_tokens)
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
