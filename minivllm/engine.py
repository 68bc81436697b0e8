"""The step loop: schedule -> execute -> commit.

The engine owns no decision and no computation: the scheduler decides, the runner computes, and
the engine checks what comes in, carries the batch across, and hands out what was gained.
"""

import operator
import secrets
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from minivllm.config import DEFAULT_KV_CACHE_BYTES, EngineConfig
from minivllm.core.batch import Runner, SampledToken, ScheduledBatch, TokenLogprobs
from minivllm.core.block_manager import blocks_for
from minivllm.core.invariants import check_batch, check_between_steps
from minivllm.core.kv_cache import KVCache
from minivllm.core.metrics import Metrics
from minivllm.core.scheduler import Scheduler
from minivllm.core.sequence import CachePolicy, Sequence, SequenceState
from minivllm.core.trace import Trace, TraceRecorder
from minivllm.detokenizer import Detokenizer
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineBusyError,
    InvalidRequestError,
    RunnerError,
    UnknownRequestError,
)
from minivllm.fair_lock import FairLock
from minivllm.interrupts import interrupts_held, interrupts_let_through
from minivllm.output import RequestOutput
from minivllm.sampling_params import SamplingParams


class TextDecoder(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def fingerprint(self) -> str:
        """Differs between tokenizers that give a text different ids."""

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, special tokens left out."""


@dataclass(slots=True)
class _Branch:
    """What the engine remembers of one output until it is returned; times in seconds."""

    detokenizer: Detokenizer
    sequence: Sequence
    added_at: float
    first_token_after: float | None = None


class LLMEngine:
    """Takes requests at any time, and advances all of them by one step at each step().

    config     sizes and choices
    runner     whoever computes; None loads the model that config names
    tokenizer  gives outputs their text; None without a runner loads the model's. Where there is
               none, outputs have no text, and stop strings are refused
    write_trace_line  if given, gets each event of the run as one JSON line

    Threads may share an engine. Each call is whole: another thread's call happens before or
    after it, so a request added or aborted during a step counts from the next one on, and its
    thread waits for the end of this one. Who waits gets in between two steps, however quickly
    they follow. An output goes to whoever steps: by the time another thread aborts a request,
    its last output may have been returned, and abort() raises UnknownRequestError. Read
    `scheduler`, `kv` and `metrics` only while no other thread calls; stats() is safe at any time.

    Ctrl-C is answered when a call has ended, and in step() also while the runner computes. A call
    from within another one, by the runner or a signal handler, raises EngineBusyError.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner | None = None,
        tokenizer: TextDecoder | None = None,
        *,
        write_trace_line: Callable[[str], object] | None = None,
    ) -> None:
        if runner is None:
            # Imported late: a given runner needs no torch.
            from minivllm.model.runner import ModelRunner
            from minivllm.tokenizer import find_tokenizer

            runner = model_runner = ModelRunner(config)
            tokenizer = tokenizer or find_tokenizer(model_runner.model_path)
        self.config = config
        self.runner = runner
        self.tokenizer = tokenizer
        self.max_model_len = _max_model_len(config, runner)
        num_blocks = _num_kv_blocks(config, runner)
        runner.init_kv(num_blocks, config.block_size)
        self.metrics = Metrics()
        trace = Trace()
        if write_trace_line is not None:
            trace = TraceRecorder(write_trace_line, config, num_blocks)
        self.kv = KVCache(num_blocks, config, self.metrics, trace)
        self.scheduler = Scheduler(self.kv, config, self.metrics, trace)
        self._requests: dict[str, dict[int, _Branch]] = {}
        self._num_arrivals = 0
        self._num_weight_loads = 0
        self._lock = FairLock()

    # Requests

    def check_request(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> list[int]:
        """Return the prompt as a list, or raise InvalidRequestError; nothing is added."""
        token_ids = _token_ids(prompt_token_ids)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        self._check_vocabulary("prompt", token_ids)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        given = f"prompt has {len(token_ids):,} tokens"
        if len(token_ids) >= self.max_model_len:
            most = f"the model takes {self.max_model_len:,}, prompt and output together"
            fits = f"shorten the prompt to at most {self.max_model_len - 1:,}"
            raise InvalidRequestError(f"{given}; {most}: {fits}")
        size, pool = self.config.block_size, self.kv.num_blocks
        needed = blocks_for(len(token_ids), size)
        if needed > pool:
            holds = f"the pool holds {pool:,} blocks x {size} = {pool * size:,}"
            fits = f"raise num_kv_blocks to at least {needed:,} or shorten the prompt"
            raise InvalidRequestError(f"{given}; {holds}: {fits}")
        if params.stop and self.tokenizer is None:
            given = f"stop is {params.stop!r}, but the engine has no tokenizer"
            raise InvalidRequestError(f"{given}; give it one or use stop_token_ids")
        return token_ids

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        cache_read: bool = True,
        cache_write: bool = True,
        cacheable_tokens: int | None = None,
        key_fields: tuple[Any, ...] = (),
    ) -> None:
        """Let a request wait for its turn; its outputs come from step().

        cache_salt        only requests with the same salt share blocks
        cache_read        look up its prefix in the prefix cache
        cache_write       publish its blocks for others
        cacheable_tokens  only its first so many tokens take part in the cache; None is all
        key_fields        further values that must be equal to share, e.g. (("adapter", "a"),)

        Raises InvalidRequestError, or DuplicateRequestError while a request with this id has
        not been returned; nothing has changed then.
        """
        params = params or SamplingParams()
        if cacheable_tokens is not None and cacheable_tokens < 0:
            given = f"cacheable_tokens is {cacheable_tokens}"
            raise InvalidRequestError(f"{given}; it must be None or 0 or more")
        token_ids = self.check_request(prompt_token_ids, params)
        is_cached = self.config.enable_prefix_caching
        # Drawn now, so that a sequence that was preempted would draw the same tokens again.
        seed = secrets.randbelow(2**63) if params.seed is None else params.seed
        with interrupts_held(), self._lock:
            if self.is_live(request_id):
                raise DuplicateRequestError(f"request id {request_id!r} is in use; choose another")
            policy = CachePolicy(
                # Who wants the prompt's log-probabilities needs all rows computed.
                read=is_cached and cache_read and params.prompt_logprobs is None,
                write=is_cached and cache_write,
                cacheable_tokens=cacheable_tokens,
                key_fields=(*self._base_key_fields(), ("salt", cache_salt), *key_fields),
            )
            self._add(request_id, token_ids, replace(params, seed=seed), policy)

    def abort(self, request_id: str) -> None:
        """End all outputs of a request; the next step() returns them with reason "abort".

        Raises UnknownRequestError if no request with this id is live.
        """
        with interrupts_held(), self._lock:
            if not self.is_live(request_id):
                raise UnknownRequestError(f"no live request has the id {request_id!r}")
            for branch in self._requests[request_id].values():
                if branch.sequence.state is not SequenceState.FINISHED:
                    self.scheduler.finish(branch.sequence, "abort")

    def is_live(self, request_id: str) -> bool:
        """True from add_request until the last output of this request is returned."""
        return request_id in self._requests

    def has_unfinished_requests(self) -> bool:
        """True while step() has something to compute or to return."""
        return bool(self._requests)

    # The step

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence; return those that gained a token or ended.

        Raises RunnerError if the runner fails: the step is undone as if it had not been tried,
        all requests are still there, and the next step() tries again. Ctrl-C is answered while
        the runner computes, with the step undone, or at the end of the step.
        """
        with interrupts_held(), self._lock:
            batch = self.scheduler.schedule()
            advanced: list[Sequence] = []
            if batch.sequences:
                advanced = self.scheduler.commit(self._execute(batch))
            elif self._requests and not self.scheduler.finished:
                raise RunnerError("no sequence could be scheduled, and none has ended (I11)")
            for sequence in advanced:
                self._take_token(sequence)
            if self.config.debug_checks:
                check_between_steps(self.scheduler)
            # One output each, in this order, also for those that gained a token and ended.
            changed = dict.fromkeys(advanced + self.scheduler.finished)
            self.scheduler.finished.clear()
            return [self._output(sequence) for sequence in changed]

    def _execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        """Let the runner compute; whatever goes wrong, undo the step before it is raised."""
        try:
            if self.config.debug_checks:
                check_batch(self.kv, batch)
            with interrupts_let_through():
                sampled = self.runner.execute(batch)
            self._check_sampled(batch, sampled)
            return sampled
        except BaseException as error:
            # Also at Ctrl-C: first every block is accounted for, then the interrupt goes on.
            self.scheduler.roll_back()
            if isinstance(error, RunnerError) or not isinstance(error, Exception):
                raise
            raise RunnerError(f"the runner failed with {type(error).__name__}: {error}") from error

    def _check_sampled(self, batch: ScheduledBatch, sampled: list[SampledToken]) -> None:
        expected = sum(sequence.samples for sequence in batch.sequences)
        if len(sampled) != expected:
            raise RunnerError(f"the runner returned {len(sampled)} tokens for {expected} sequences")
        for token in sampled:
            if not 0 <= token.token_id < self.runner.vocab_size:
                size = f"the vocabulary has {self.runner.vocab_size:,} tokens"
                raise RunnerError(f"the runner chose token {token.token_id}; {size}")

    def _take_token(self, sequence: Sequence) -> None:
        """Note the time of a first token, grow the text, and end the sequence if it is done."""
        branch = self._requests[sequence.request_id][sequence.index]
        if branch.first_token_after is None:
            branch.first_token_after = time.perf_counter() - branch.added_at
        reason = sequence.stop_reason(self.runner.eos_token_ids, self.max_model_len)
        if reason != "stop":
            branch.detokenizer.append(sequence.token_ids[-1])
            reason = "stop" if branch.detokenizer.stopped else reason
        if reason is not None:
            self.scheduler.finish(sequence, reason)

    # The whole engine

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing changed, while sequences hold blocks."""
        with interrupts_held(), self._lock:
            return self.kv.reset()

    def load_weights(self, path: str) -> None:
        """Replace the weights by those of the model folder `path`; what was cached misses.

        Raises EngineBusyError while requests are live, ModelError if the folder does not fit;
        nothing has changed then.
        """
        load = getattr(self.runner, "load_weights", None)
        if load is None:
            raise RunnerError(f"{type(self.runner).__name__} cannot load weights")
        with interrupts_held(), self._lock:
            if self._requests:
                live = f"{len(self._requests)} requests are live"
                raise EngineBusyError(f"{live}; finish or abort them before load_weights")
            load(path)
            self._num_weight_loads += 1
            self.kv.reset()

    def stats(self) -> dict[str, int | float]:
        """Return counters since the start (see core/metrics.py) and the pool as it is now."""
        block_bytes = self.runner.kv_bytes_per_block(self.config.block_size)
        with interrupts_held(), self._lock:
            kv, idle = self.kv, self.kv.cache.num_idle
            return self.metrics.as_dict() | {
                "num_waiting": len(self.scheduler.waiting),
                "num_running": len(self.scheduler.running),
                "blocks_free": kv.blocks.num_free,
                "blocks_cached_idle": idle,
                "blocks_in_use": kv.num_in_use,
                "kv_bytes_cached_idle": idle * block_bytes,
                "kv_bytes_in_use": kv.num_in_use * block_bytes,
            }

    # What the methods are made of

    def _add(
        self, request_id: str, token_ids: list[int], params: SamplingParams, policy: CachePolicy
    ) -> None:
        """Make the n sequences of a request. They share the prompt's log-probabilities."""
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None] * len(token_ids)
        branches: dict[int, _Branch] = {}
        for index in range(params.n):
            sequence = Sequence(
                request_id=request_id,
                index=index,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                params=params,
                policy=policy,
                keys=self.kv.new_keys(policy),
                arrival=self._num_arrivals,
                prompt_logprobs=prompt_logprobs,
            )
            self._num_arrivals += 1
            detokenizer = Detokenizer(self._decode, params.stop, params.min_tokens)
            branches[index] = _Branch(detokenizer, sequence, time.perf_counter())
        # Only now: a key field of a wrong type has raised before anything was changed.
        self._requests[request_id] = branches
        for branch in branches.values():
            self.scheduler.add(branch.sequence)

    def _decode(self, token_ids: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids)

    def _output(self, sequence: Sequence) -> RequestOutput:
        """What `sequence` has come to; the request is forgotten with its last finished output."""
        branches = self._requests[sequence.request_id]
        branch = branches[sequence.index]
        if sequence.finish_reason is not None:
            branch.detokenizer.finish()
            del branches[sequence.index]
            if not branches:
                del self._requests[sequence.request_id]
        return RequestOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            text=branch.detokenizer.text,
            finish_reason=sequence.finish_reason,
            error=sequence.error,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_tokens=sequence.num_tokens,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            time_to_first_token=branch.first_token_after,
            known_token_ids=sequence.token_ids,
            known_logprobs=None if sequence.params.logprobs is None else sequence.logprobs,
            prompt_logprobs=sequence.prompt_logprobs,
        )

    def _base_key_fields(self) -> tuple[tuple[str, str | int], ...]:
        """Everything about this engine under which equal tokens give equal KV."""
        return (
            ("weights_version", self.config.weights_version),
            ("weight_loads", self._num_weight_loads),
            ("tokenizer", "" if self.tokenizer is None else self.tokenizer.fingerprint),
            ("position", getattr(self.runner, "position_config", "")),
        )

    def _check_vocabulary(self, name: str, token_ids: ReadOnlySequence[int]) -> None:
        size = self.runner.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                wrong = f"{name}: token id {token_id} is outside the vocabulary of {size:,} tokens"
                raise InvalidRequestError(f"{wrong}; it must be 0 to {size - 1}")


def _token_ids(prompt: Iterable[int]) -> list[int]:
    """Return whole numbers as ints; raise InvalidRequestError for text and anything else."""
    try:
        return [operator.index(token_id) for token_id in prompt]
    except TypeError:
        given = f"the prompt is {type(prompt).__name__} {prompt!r:.80}"
        raise InvalidRequestError(f"{given}; it must be a list of token ids") from None


def _max_model_len(config: EngineConfig, runner: Runner) -> int:
    """Return the smaller of what is asked for and what the model can; more is refused."""
    wanted = config.max_model_len or runner.max_model_len
    if wanted > runner.max_model_len:
        most = f"the model takes at most {runner.max_model_len:,} tokens"
        raise ConfigError(f"max_model_len is {wanted:,}; {most}")
    return wanted


def _num_kv_blocks(config: EngineConfig, runner: Runner) -> int:
    """Return the pool's size in blocks, from either of the two ways to say it."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    num_bytes = config.kv_cache_bytes or int(getattr(runner, "spare_bytes", DEFAULT_KV_CACHE_BYTES))
    block_bytes = runner.kv_bytes_per_block(config.block_size)
    if num_bytes < block_bytes:
        one = f"one block of {config.block_size} tokens takes {block_bytes:,} bytes"
        raise ConfigError(f"kv_cache_bytes is {num_bytes:,}: a pool of 0 blocks; {one}")
    return num_bytes // block_bytes
