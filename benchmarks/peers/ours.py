"""The contestant minivllm: the finished engine, without a tokenizer, as all of them.

python -m benchmarks.peers.ours MODEL [--no-prefix-cache]      started by contestants.py
"""

from __future__ import annotations

import argparse
from time import perf_counter

from benchmarks.peers import settings
from benchmarks.peers.contestant import Answer, Job, serve_contestant
from minivllm import EngineConfig, LLMEngine, SamplingParams
from minivllm.core.batch import Runner


class Ours:
    """An engine, and one job after another."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    @classmethod
    def load(cls, model: str, enable_prefix_caching: bool = True) -> Ours:
        """From a model folder, on the CPU."""
        # Imported late: a given engine needs no model.
        from minivllm.model.runner import ModelRunner

        config = EngineConfig(
            model=model,
            device="cpu",
            kv_cache_bytes=settings.KV_CACHE_GIB << 30,
            max_num_seqs=settings.MAX_NUM_SEQS,
            max_num_batched_tokens=settings.MAX_NUM_BATCHED_TOKENS,
            max_model_len=settings.MAX_MODEL_LEN,
            enable_prefix_caching=enable_prefix_caching,
        )
        runner: Runner = ModelRunner(config)
        return cls(LLMEngine(config, runner))

    def generate(self, job: Job) -> Answer:
        """Do one job."""
        engine = self._engine
        if job.forget:
            engine.reset_prefix_cache()
        params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
        outputs: list[list[int]] = [[] for _ in job.prompts]
        cached_tokens = [0 for _ in job.prompts]
        cache_seconds = self._cache_seconds()
        started = perf_counter()
        for number, prompt in enumerate(job.prompts):
            engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[int(output.request_id)] = output.token_ids
                cached_tokens[int(output.request_id)] = output.num_cached_tokens or 0
        seconds = perf_counter() - started
        return Answer(seconds, outputs, cached_tokens, self._cache_seconds() - cache_seconds)

    def _cache_seconds(self) -> float:
        stats = self._engine.stats()
        return stats["lookup_seconds"] + stats["publish_seconds"]


def main() -> None:
    """Load, then serve."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers.ours")
    parser.add_argument("model")
    parser.add_argument("--no-prefix-cache", action="store_true")
    arguments = parser.parse_args()
    ours = Ours.load(arguments.model, not arguments.no_prefix_cache)
    serve_contestant(ours, ["minivllm", "torch"])


if __name__ == "__main__":
    main()
