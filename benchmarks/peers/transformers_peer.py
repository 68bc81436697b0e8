"""The contestant transformers: `generate` on one batch, padded on the left.

python -m benchmarks.peers.transformers_peer MODEL      started by contestants.py
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.contestant import Answer, Job, serve_contestant

_PAD = 0


class TransformersPeer:
    """A model with transformers' own defaults. It keeps no KV from one call to the next."""

    def __init__(self, model: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.inference_mode()
    def generate(self, job: Job) -> Answer:
        """Do one job."""
        longest = max(len(prompt) for prompt in job.prompts)
        padding = [longest - len(prompt) for prompt in job.prompts]
        rows = [[_PAD] * n + prompt for n, prompt in zip(padding, job.prompts, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        started = perf_counter()
        result = self._model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=job.max_tokens,
            min_new_tokens=job.max_tokens,
            eos_token_id=None,
            pad_token_id=_PAD,
        )
        outputs = result[:, longest:].tolist()
        return Answer(perf_counter() - started, outputs, [0 for _ in job.prompts])


def main() -> None:
    """Load, then serve."""
    peer = TransformersPeer(sys.argv[1])
    serve_contestant(peer, ["transformers", "torch"])


if __name__ == "__main__":
    main()
