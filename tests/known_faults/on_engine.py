"""The whole engine on a runner without a model: block size 16, every check on."""

from __future__ import annotations

from typing import Any

from minivllm import LLMEngine
from minivllm.core.batch import SampledToken, ScheduledBatch
from tests import model_free
from tests.known_faults.texts import VOCAB_SIZE
from tests.model_free import HistoryRunner

MAX_MODEL_LEN = 1_000


class ScriptedRunner(HistoryRunner):
    """Keeps and checks histories as its parent does, and then emits the tokens of a script."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
        self._script = script

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        super().execute(batch)
        return [
            SampledToken(self._script[sequence.num_tokens - sequence.num_prompt_tokens])
            for sequence in batch.sequences
            if sequence.samples
        ]


def make_engine(
    num_kv_blocks: int, runner: HistoryRunner | None = None, **config: Any
) -> LLMEngine:
    runner = runner or HistoryRunner(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
    settings = {"block_size": 16, "prefix_cache_max_share": 1.0} | config
    return model_free.make_engine(runner, num_kv_blocks=num_kv_blocks, **settings)


def alone(prompt: list[int], num_tokens: int) -> list[int]:
    """What any right engine must generate for `prompt`, computed without one."""
    return model_free.greedy(prompt, num_tokens, VOCAB_SIZE)


def computed(engine: LLMEngine) -> list[dict[str, tuple[int, int]]]:
    """For each step so far: request id -> the positions [start, end) it computed."""
    return [{row[0]: (row[2], row[3]) for row in batch} for batch in engine.runner.batches]
