"""Chapter 2's names over the finished engine's scheduler and KV cache, with the cache unused."""

from types import SimpleNamespace
from typing import Any, NamedTuple

from minivllm.config import EngineConfig
from minivllm.core import scheduler as core
from minivllm.core.batch import SampledToken
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.trace import Trace


class Step(NamedTuple):
    """Chapter 2's Step. `prefills` are those of which this step computes the newest token."""

    decodes: list[Any]
    prefills: list[Any]


class CountingPool(KVCache):
    """The finished engine's KV cache; chapter 1's adapter makes sequences that do not share."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.metrics = Metrics()
        super().__init__(num_blocks, EngineConfig(block_size=block_size), self.metrics, Trace())

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self.blocks.num_free


class Scheduler:
    """The finished engine's scheduler, and what LLMEngine does around it."""

    def __init__(
        self,
        pool: CountingPool,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        config = EngineConfig(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
        )
        self._core = core.Scheduler(pool, config, pool.metrics, Trace())
        self.pool = pool
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.waiting = self._core.waiting
        self.running = self._core.running
        self.finished = self._core.finished
        self._num_arrived = 0

    @property
    def budget_left(self) -> int:
        """What the step may still charge."""
        return self._core.budget_left

    def add(self, sequence: Any) -> None:
        """LLMEngine numbers arrivals."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._core.add(sequence)

    def schedule(self) -> Step:
        """The finished engine's step, its decodes and prefills apart."""
        self._core.schedule()
        return self._step()

    def _admit_waiting(self) -> list[Any]:
        """Who is scheduled now and was not before."""
        scheduled = set(self._core.scheduled)
        self._core._admit_waiting()
        return [sequence for sequence in self._core.scheduled if sequence not in scheduled]

    def _step(self) -> Step:
        step = Step([], [])
        for sequence, num_tokens in self._core.scheduled.items():
            if sequence.is_decoding:
                step.decodes.append(sequence)
            elif sequence.num_computed_tokens + num_tokens == sequence.num_tokens:
                step.prefills.append(sequence)
        return step

    def commit(self, step: Step, token_ids: list[int]) -> None:
        """LLMEngine commits, and ends those that have come to a stop."""
        for sequence in self._core.commit([SampledToken(token_id) for token_id in token_ids]):
            reason = sequence.stop_reason(self.eos_token_ids, self.max_model_len)
            if reason is not None:
                self._core.finish(sequence, reason)

    def abort(self, request_id: str) -> None:
        """LLMEngine finds the sequence, and ends it."""
        for sequence in self.waiting + self.running:
            if sequence.request_id == request_id:
                self._core.finish(sequence, "abort")
                return


def adapt() -> SimpleNamespace:
    """The names of chapter 2 that its tests use."""
    return SimpleNamespace(CountingPool=CountingPool, Scheduler=Scheduler, Step=Step)
