"""An engine around a scheduler, with a model that needs no tensors.

The next token is a function of all tokens before it, so an output tells whether its sequence was
computed in the right order and from the right tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from chapters.stages import Stages
from chapters.testing import Broken

EOS = 0


def next_token(token_ids: list[int]) -> int:
    """The fake model: the next token depends on every token, and on its place."""
    value = 1
    for token_id in token_ids:
        value = (value * 31 + token_id) % 1009
    return value % 23


def alone(sequence: Any, pool_holds: int, max_model_len: int) -> tuple[list[int], str]:
    """(token ids, finish reason) of this request if it had the engine for itself."""
    token_ids = list(sequence.token_ids[: sequence.num_prompt_tokens])
    while True:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] == EOS:
            return token_ids, "stop"
        num_output = len(token_ids) - sequence.num_prompt_tokens
        if num_output == sequence.params.max_tokens or len(token_ids) == max_model_len:
            return token_ids, "length"
        if len(token_ids) > pool_holds:
            return token_ids, "error"


def make_scheduler(
    stage: Any, pool: Any, budget: int = 64, seats: int = 16, max_model_len: int | None = None
) -> Any:
    """A scheduler for sequences of up to `budget` tokens, unless max_model_len says less."""
    return stage.Scheduler(
        pool,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        max_model_len=max_model_len or budget,
        eos_token_ids=(EOS,),
    )


def add(
    scheduler: Any,
    stages: Stages,
    lengths: Mapping[str, int],
    max_tokens: Mapping[str, int] | None = None,
) -> None:
    """Add requests {name: prompt length}; max_tokens is 30 where {name: max_tokens} is silent."""
    ch01 = stages.load("ch01_sequence")
    for name, length in lengths.items():
        params = ch01.SamplingParams(max_tokens=(max_tokens or {}).get(name, 30))
        # Each request has a prompt of its own, and none of its tokens is EOS.
        prompt = [ord(name[-1]) + i for i in range(length)]
        scheduler.add(ch01.Sequence(name, prompt, params))


class Request(NamedTuple):
    """One request of a workload, which comes and perhaps is aborted at the beginning of a step."""

    num_prompt_tokens: int
    max_tokens: int
    arrives: int
    aborted: int | None


class Taken(NamedTuple):
    """A step that has been taken, and what held before it.

    decoding      sequences that were decoding: their tokens then
    waiting       sequences that were waiting
    num_ended     sequences that it ended
    num_charged   tokens that it computed
    """

    step: Any
    decoding: dict[Any, int]
    waiting: list[Any]
    num_ended: int
    num_charged: int


def take_step(scheduler: Any, token_of: Callable[[list[int]], int] = next_token) -> Taken:
    """What an engine does: schedule, choose a token for each sequence, commit."""
    decoding = {each: each.num_tokens for each in scheduler.running if each.is_decoding}
    queue, num_finished = list(scheduler.waiting), len(scheduler.finished)
    step = scheduler.schedule()
    num_charged = len(step.decodes) + sum(each.num_tokens for each in step.prefills)
    scheduler.commit(step, [token_of(each.token_ids) for each in step.decodes + step.prefills])
    return Taken(step, decoding, queue, len(scheduler.finished) - num_finished, num_charged)


def abort(scheduler: Any, name: str) -> None:
    """Abort a request that has not ended. Raises Broken if the scheduler does not know it."""
    try:
        scheduler.abort(name)
    except KeyError as error:
        raise Broken("I10", f"{name} has not ended, but abort finds it nowhere") from error


def run_workload(
    scheduler: Any, stages: Stages, workload: list[Request]
) -> Iterator[tuple[list[Any], Taken]]:
    """Run up to six requests until all have ended; a prompt is cut to what the pool holds.

    After each step, all sequences so far and what was Taken. Raises Broken if it has no end.
    """
    holds = scheduler.pool.num_blocks * scheduler.pool.block_size
    sequences: dict[str, Any] = {}
    for number in range(1000):
        for name, request in zip("ABCDEF", workload, strict=False):
            if request.arrives == number:
                length = min(request.num_prompt_tokens, holds)
                add(scheduler, stages, {name: length}, {name: request.max_tokens})
                sequences[name] = scheduler.waiting[-1]
            is_live = name in sequences and sequences[name].finish_reason is None
            if request.aborted == number and is_live:
                abort(scheduler, name)
        if scheduler.waiting or scheduler.running:
            taken = take_step(scheduler)
            yield list(sequences.values()), taken
        elif len(sequences) == len(workload):
            return
    raise Broken("I11", f"after 1,000 steps {names(scheduler.waiting)} still waits")


def names(sequences: Iterable[Any]) -> str:
    """Request ids with a blank between, "-" for none."""
    return " ".join(sequence.request_id for sequence in sequences) or "-"
