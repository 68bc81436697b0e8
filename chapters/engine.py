"""The engine that the chapters add up to: schedule, build a batch, execute, commit, again.

What differs between chapters 5 and 7 is which parts it is made of, and that is decided once, when
it is made: through_chapter_5, through_chapter_7.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

from chapters.stages import Stages


class StuckError(RuntimeError):
    """A step computed nothing and finished nothing, though requests are left (I11)."""


@dataclass(frozen=True)
class Limits:
    """How large an engine is: see the classes of chapters 2 and 3 for what each one means."""

    num_blocks: int = 256
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 16
    max_model_len: int = 2048
    eos_token_ids: tuple[int, ...] = ()


class Range(NamedTuple):
    """A sequence and the positions [start, end) that a step computes of it."""

    sequence: Any
    start: int
    end: int


class Engine:
    """A scheduler, a runner, and what stands between them.

    new_sequence  chapter 1's Sequence
    scheduler     chapter 2's, or 7's; its pool is chapter 3's, or 6's
    ranges        what the scheduler returned -> the Ranges, in the order of their rows
    build_batch   (what the scheduler returned, pool) -> chapter 5's Batch
    runner        chapter 5's
    """

    def __init__(
        self,
        *,
        new_sequence: Callable[..., Any],
        scheduler: Any,
        ranges: Callable[[Any], list[Range]],
        build_batch: Callable[[Any, Any], Any],
        runner: Any,
    ) -> None:
        self.scheduler = scheduler
        self._new_sequence = new_sequence
        self._ranges = ranges
        self._build_batch = build_batch
        self._runner = runner

    def add(self, request_id: str, token_ids: Sequence[int], params: Any) -> Any:
        """Let a request wait for its turn; its sequence, which will grow.

        `params` are chapter 1's SamplingParams. Raises what the stages raise: ValueError for an
        empty prompt, or for one that is too long.
        """
        sequence = self._new_sequence(request_id, list(token_ids), params)
        self.scheduler.add(sequence)
        return sequence

    @property
    def has_unfinished(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Range]:
        """Compute one step; what was computed. Each of those sequences has gained a token.

        Raises StuckError.
        """
        num_finished = len(self.scheduler.finished)
        scheduled = self.scheduler.schedule()
        ranges = self._ranges(scheduled)
        if ranges:
            batch = self._build_batch(scheduled, self.scheduler.pool)
            token_ids = self._runner.execute(batch, [each.sequence for each in ranges])
            self.scheduler.commit(scheduled, token_ids)
        elif len(self.scheduler.finished) == num_finished:
            waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
            raise StuckError(
                f"the step computed nothing and finished nothing (I11);"
                f" {waiting} requests wait, {running} run"
            )
        return ranges

    def run(self) -> None:
        """Step until every request is finished."""
        while self.has_unfinished:
            self.step()


def through_chapter_5(stages: Stages, model: Any, limits: Limits) -> Engine:
    """Chapters 1 to 5: every prompt is computed whole. `model` is chapter 5's Model."""
    pool = stages.load("ch03_block_manager").BlockManager(limits.num_blocks, limits.block_size)
    runner = stages.load("ch05_model_runner")
    return Engine(
        new_sequence=stages.load("ch01_sequence").Sequence,
        scheduler=_scheduler(stages.load("ch02_scheduler"), pool, limits),
        ranges=_whole_prompts_and_newest_tokens,
        build_batch=runner.build_batch,
        runner=runner.ModelRunner(model),
    )


def through_chapter_7(stages: Stages, model: Any, limits: Limits) -> Engine:
    """Chapters 1 to 7: a prompt is computed from where its cached prefix ends."""
    pool = stages.load("ch06_prefix_cache").CachingBlockManager(
        limits.num_blocks, limits.block_size
    )
    suffix_prefill = stages.load("ch07_suffix_prefill")
    return Engine(
        new_sequence=stages.load("ch01_sequence").Sequence,
        scheduler=_scheduler(suffix_prefill, pool, limits),
        ranges=lambda scheduled: [Range(*each) for each in scheduled],
        build_batch=suffix_prefill.build_batch,
        runner=stages.load("ch05_model_runner").ModelRunner(model),
    )


def _scheduler(stage: Any, pool: Any, limits: Limits) -> Any:
    return stage.Scheduler(
        pool,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        eos_token_ids=limits.eos_token_ids,
    )


def _whole_prompts_and_newest_tokens(step: Any) -> list[Range]:
    """Chapter 2's Step as ranges."""
    decodes = [Range(each, each.num_tokens - 1, each.num_tokens) for each in step.decodes]
    return decodes + [Range(each, 0, each.num_tokens) for each in step.prefills]


MakeEngine = Callable[[Stages, Any, Limits], Engine]
"""(stages, chapters.model.Network, limits) -> an engine that computes with that network."""


# Torch is loaded only when there is something to compute: these import it late.


def with_reference_attention(stages: Stages, network: Any, limits: Limits) -> Engine:
    """A MakeEngine: through chapter 5, attending with chapter 4's plain torch reference."""
    from chapters.ch04_paged_attention import reference
    from chapters.model import model_with_kernels

    model = model_with_kernels(reference, network, limits.num_blocks, limits.block_size)
    return through_chapter_5(stages, model, limits)


def with_chapter_4_kernels(stages: Stages, network: Any, limits: Limits) -> Engine:
    """A MakeEngine: through chapter 5, attending with chapter 4's own kernels.

    They need a GPU, or TRITON_INTERPRET=1 in the environment from the start and a tiny network.
    """
    from chapters.model import model_with_kernels

    kernels = stages.load("ch04_paged_attention")
    model = model_with_kernels(kernels, network, limits.num_blocks, limits.block_size)
    return through_chapter_5(stages, model, limits)


def with_suffix_attention(stages: Stages, network: Any, limits: Limits) -> Engine:
    """A MakeEngine: through chapter 7, attending with chapter 7's function."""
    from chapters.model import model_with_suffix_attention

    attention = stages.load("ch07_suffix_prefill").suffix_attention
    model = model_with_suffix_attention(attention, network, limits.num_blocks, limits.block_size)
    return through_chapter_7(stages, model, limits)


# Answers with the real model


class Timed(NamedTuple):
    """One request that had the engine for itself.

    num_cached_tokens    of the prompt, found in the prefix cache; 0 before chapter 7
    first_token_seconds  from the moment the request was added
    seconds              until it was finished
    """

    sequence: Any
    num_cached_tokens: int
    first_token_seconds: float
    seconds: float


def time_request(engine: Engine, request_id: str, token_ids: Sequence[int], params: Any) -> Timed:
    """Add a request to an engine that has no other, run it to its end, and look at the clock."""
    begin = perf_counter()
    sequence = engine.add(request_id, token_ids, params)
    (first,) = engine.step()
    first_token_seconds = perf_counter() - begin
    engine.run()
    return Timed(sequence, first.start, first_token_seconds, perf_counter() - begin)


class Answer(NamedTuple):
    """What an assembled engine says to one prompt, and what it took."""

    prompt: str
    text: str
    timed: Timed

    def __str__(self) -> str:
        sequence, num_cached, first, seconds = self.timed
        prompt = f"{sequence.num_prompt_tokens} prompt tokens, {num_cached} of them cached"
        output = f"{sequence.num_output_tokens} tokens in {seconds:.2f} s"
        return (
            f"{self.prompt}\n  {self.text}\n  ({prompt}; first token after {first:.2f} s, {output})"
        )


INSTRUCTIONS = (
    "You answer questions about the capitals of countries. Answer in one short sentence, with the"
    " name of the country and the name of its capital. Say nothing else."
)
QUESTIONS = ("What is the capital of France?", "What is the capital of Italy?")


def ask(
    stages: Stages,
    prompts: Sequence[str],
    *,
    make_engine: MakeEngine = with_suffix_attention,
    max_tokens: int = 32,
) -> Iterator[Answer]:
    """Let one engine of these stages answer the prompts with the default model, greedily.

    They are asked one after another, each as a conversation that begins with INSTRUCTIONS; from
    the second on, an engine with a prefix cache has that beginning.

    Raises minivllm.errors.ModelError if the model is not there and cannot be had, ValueError for
    a prompt that does not fit into 2,048 tokens, StuckError, and whatever the stages raise.
    """
    from chapters.model import load_network

    network = load_network()
    tokenizer = network.tokenizer
    assert tokenizer is not None  # the default model has one
    engine = make_engine(stages, network, Limits(eos_token_ids=network.eos_token_ids))
    params = stages.load("ch01_sequence").SamplingParams(max_tokens=max_tokens)
    for i, prompt in enumerate(prompts):
        token_ids = tokenizer.apply_chat_template(
            [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": prompt}]
        )
        timed = time_request(engine, str(i), token_ids, params)
        said = tokenizer.decode(timed.sequence.token_ids[len(token_ids) :])
        yield Answer(prompt, said.strip(), timed)
