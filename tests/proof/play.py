"""Play a workload on a real engine, with every check on, until the last output is returned."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from minivllm import EngineConfig, LLMEngine, SamplingParams
from minivllm.core.sequence import Sequence
from minivllm.errors import EngineBusyError, InvalidRequestError, RunnerError, UnknownRequestError
from tests.proof.checks import CacheChecks, Expected, StepChecks, blocks_needed
from tests.proof.oracle import Broken, HistoryRunner, greedy
from tests.proof.situations import Situations
from tests.proof.workloads import (
    EOS,
    STOP,
    VOCAB_SIZE,
    Abort,
    Add,
    Drain,
    Fail,
    LoadWeights,
    Operation,
    Reset,
    Step,
    Workload,
)

MAX_STEPS = 2_000  # far more than any workload needs


class Record(NamedTuple):
    """What one workload came to."""

    num_requests: int
    num_steps: int
    situations: Counter[str]


class Done(NamedTuple):
    """One operation that was done, for a report.

    detail        what it came to, where the operation itself does not say it
    num_batches   so many batches had been computed before it
    """

    operation: Operation
    detail: str | list[int]
    num_batches: int


class Injected(Exception):
    """The failure that a workload asked for."""


def play(workload: Workload) -> Record:
    """Play the whole workload; raises Broken, or whatever the engine raised, if a promise is."""
    return Player(workload).run()


class Player:
    """One engine and what is done to it.

    log   what was done so far, an operation that is under way included
    """

    def __init__(self, workload: Workload) -> None:
        setup = workload.setup
        self.workload = workload
        self.runner = HistoryRunner(VOCAB_SIZE, eos_token_ids=[EOS])
        self.engine = LLMEngine(EngineConfig(**setup.config()), self.runner)
        self.situations = Situations(self.engine.kv)
        # The engine's own trace writes text; this one counts.
        self.engine.kv._trace = self.engine.scheduler._trace = self.situations
        self.runner.is_published = lambda block: self.engine.kv.cache.at(block) is not None
        self.cache_checks = CacheChecks(self.engine, self.runner, self.situations)
        self.checks = StepChecks(self.engine, self.cache_checks, self.situations)
        self.log: list[Done] = []
        self.num_requests = 0
        self.num_steps = 0

    def run(self) -> Record:
        """Do every operation, then step until nothing is left."""
        for operation in self.workload.operations:
            self.do(operation)
        self.do(Drain())
        self.checks.check_end()
        return Record(self.num_requests, self.num_steps, self.situations.counts)

    def do(self, operation: Operation) -> None:
        """Do one operation, and check all that must hold after it."""
        _ACTIONS[type(operation)](self, operation)
        self.checks.check()

    # The operations

    def _add(self, operation: Add) -> None:
        prompt = list(operation.prompt)
        if operation.continues is not None and self.checks.texts:
            prompt = self.checks.texts[operation.continues % len(self.checks.texts)] + prompt
            self.situations.note("conversation continued")
        params = SamplingParams(
            max_tokens=operation.max_tokens,
            n=operation.n,
            stop_token_ids=(STOP,) if operation.stops else (),
            ignore_eos=operation.ignore_eos,
            seed=0,
        )
        refusal = self._refusal(operation.name, prompt)
        self._log(operation, "" if operation.continues is None else prompt)
        adapter = operation.adapter
        try:
            self.engine.add_request(
                operation.name,
                prompt,
                params,
                cache_salt=operation.salt,
                cache_read=operation.read,
                cache_write=operation.write,
                cacheable_tokens=operation.cacheable,
                key_fields=() if adapter is None else (("adapter", adapter),),
            )
        except InvalidRequestError as error:
            if refusal is None:
                raise Broken(f"section 6: {operation} is refused: {error}") from error
            self.situations.note(refusal)
            return
        if refusal is not None:
            raise Broken(f"section 6: {operation} is accepted; {refusal}")
        self.num_requests += 1
        self._note_added(operation, prompt)
        for index in range(operation.n):
            name = operation.name, index
            self.checks.expect(name, self._expected(prompt, params))

    def _refusal(self, name: str, prompt: list[int]) -> str | None:
        """Why the request must be refused, if it must."""
        kv = self.engine.kv
        if any(name == live for live, _ in self.checks.expected):
            return "request refused: id in use"
        if not prompt:
            return "request refused: empty"
        if len(prompt) >= self.engine.max_model_len:
            return "request refused: longer than the model"
        if blocks_needed(len(prompt), kv.block_size) > kv.num_blocks:
            return "request refused: longer than the pool"
        return None

    def _expected(self, prompt: list[int], params: SamplingParams) -> Expected:
        """The output as it must become, whatever the engine does meanwhile."""
        room = self.engine.max_model_len - len(prompt)
        tokens = greedy(prompt, min(params.max_tokens, room), VOCAB_SIZE, self.runner.weights)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        for i, token in enumerate(tokens):
            if token in ends:
                return Expected(prompt, tokens[: i + 1], "stop")
        return Expected(prompt, tokens, "length")

    def _note_added(self, operation: Add, prompt: list[int]) -> None:
        size, note = self.engine.kv.block_size, self.situations.note
        note(
            "prompt ends in a partial block"
            if len(prompt) % size
            else "prompt of exactly whole blocks"
        )
        if len(prompt) == size * self.engine.kv.num_blocks:
            note("request that fills the pool exactly")
        if operation.n > 1:
            note("several outputs of one prompt")

    def _step(self, operation: Step) -> None:
        self._log(operation)
        if not self.engine.has_unfinished_requests():
            if self.engine.step() != []:
                raise Broken("I10: without a request, step() returned something")
            return
        self.num_steps += 1
        moment = self.checks.before_step()
        try:
            outputs = self.engine.step()
        except RunnerError as error:
            # A complaint of the oracle comes wrapped as a failure of the runner.
            raise error.__cause__ or Broken(f"I11: {error}") from error
        self.checks.after_step(moment, outputs)

    def _drain(self, operation: Drain) -> None:
        self._log(operation)
        while self.engine.has_unfinished_requests():
            if self.num_steps > MAX_STEPS:
                raise Broken(f"I11: no end after {MAX_STEPS} steps")
            self.do(Step())

    def _fail(self, operation: Fail) -> None:
        num_failed = 0
        self._log(operation)
        for _ in range(operation.times):
            if not self.engine.has_unfinished_requests():
                break
            num_failed += self._failing_step(operation)
        if num_failed > 1:
            self.situations.note("step failed several times in a row")

    def _failing_step(self, operation: Fail) -> bool:
        """One step that must fail, unless it has nothing to compute; says whether it did."""
        runner, note = self.runner, self.situations.note
        if operation.kind == "wrong answer":
            runner.spoil_next = True
        else:
            is_error = operation.kind == "error"
            runner.fail_next = Injected() if is_error else KeyboardInterrupt()
            runner.fail_after = operation.after
        self.num_steps += 1
        moment = self.checks.before_step()
        num_batches = len(runner.batches)
        try:
            outputs = self.engine.step()
        except (RunnerError, KeyboardInterrupt) as error:
            if isinstance(error.__cause__, Broken):
                raise error.__cause__ from error
            self._note_failure(operation)
        else:
            if len(runner.batches) > num_batches:
                raise Broken("section 6: the runner failed, and step() did not raise")
            # Only returned what had ended before: the runner was not called.
            runner.fail_next, runner.spoil_next = None, False
            self.checks.after_step(moment, outputs)
            return False
        self.checks.after_failure(moment)
        if self.situations.waits:
            note("step failed while others wait for its prefix")
        return True

    def _note_failure(self, operation: Fail) -> None:
        note = self.situations.note
        num_positions = sum(end - start for _, _, start, end, _ in self.runner.batches[-1])
        if operation.kind == "wrong answer":
            note("step answered wrongly by the runner")
        elif operation.after == 0:
            note("step failed before any write")
        elif operation.after < num_positions:
            note("step failed in the middle of its writes")
        else:
            note("step failed after its writes")
        if operation.kind == "interrupt":
            note("step interrupted")

    def _abort(self, operation: Abort) -> None:
        if operation.state == "nobody":
            self._log(operation)
            self._abort_unknown()
            return
        candidates = [s for s in self._unfinished() if operation.state in self._states(s)]
        if not candidates:
            self._log(operation, "there is none")
            return
        chosen = candidates[operation.choice % len(candidates)]
        self._log(operation, chosen.request_id)
        for sequence in self._unfinished():
            if sequence.request_id == chosen.request_id:
                self._note_abort(sequence)
        self.engine.abort(chosen.request_id)
        for (request_id, _), expected in self.checks.expected.items():
            if request_id == chosen.request_id:
                expected.is_aborted = True
        if any(s.request_id == chosen.request_id for s in self._unfinished()):
            raise Broken(f"I10: {chosen.request_id} was aborted and is not finished")

    def _abort_unknown(self) -> None:
        try:
            self.engine.abort("nobody")
        except UnknownRequestError:
            self.situations.note("abort of an unknown request refused")
        else:
            raise Broken("section 6: aborting an unknown request was accepted")

    def _states(self, sequence: Sequence) -> set[str]:
        """What can be said of an unfinished sequence; Abort names one of these."""
        states = {"leader"} if sequence in self.situations.awaited() else set()
        if sequence in self.engine.scheduler.waiting:
            was_admitted = sequence.num_cached_tokens is not None
            return states | {"preempted" if was_admitted else "waiting"}
        return states | {"decoding" if sequence.num_output_tokens else "chunk"}

    def _note_abort(self, sequence: Sequence) -> None:
        words = {
            "waiting": "aborted while waiting",
            "preempted": "aborted while preempted",
            "chunk": "aborted in mid-prefill",
            "decoding": "aborted while decoding",
            "leader": "leader aborted while others wait",
        }
        for state in self._states(sequence):
            self.situations.note(words[state])

    def _reset(self, operation: Reset) -> None:
        self._log(operation)
        cached, in_use = self.cache_checks.cached(), self.engine.kv.num_in_use
        done = self.engine.reset_prefix_cache()
        if done != (in_use == 0):
            raise Broken(f"section 6: reset says {done} with {in_use} blocks in use")
        if self.cache_checks.cached() != ([] if done else cached):
            raise Broken(f"section 6: reset says {done}, and {len(cached)} blocks were cached")
        self.situations.note("reset done" if done else "reset refused")
        if done and cached and self.engine.scheduler.waiting:
            self.situations.note("reset done while requests wait")

    def _load_weights(self, operation: LoadWeights) -> None:
        self._log(operation)
        before, is_busy = self.runner.weights, self.engine.has_unfinished_requests()
        try:
            self.engine.load_weights(operation.path)
        except EngineBusyError as error:
            if not is_busy or self.runner.weights != before:
                raise Broken("section 6: refused weights were loaded") from error
            self.situations.note("weights refused")
            return
        if is_busy:
            raise Broken("section 6: weights were loaded under live requests")
        self.situations.note("weights loaded")

    # What they are made of

    def _unfinished(self) -> list[Sequence]:
        return [*self.engine.scheduler.waiting, *self.engine.scheduler.running]

    def _log(self, operation: Operation, detail: str | list[int] = "") -> None:
        self.log.append(Done(operation, detail, len(self.runner.batches)))


_ACTIONS = {
    Add: Player._add,
    Step: Player._step,
    Drain: Player._drain,
    Abort: Player._abort,
    Reset: Player._reset,
    LoadWeights: Player._load_weights,
    Fail: Player._fail,
}
