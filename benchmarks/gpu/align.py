"""The engine on the card beside transformers on the card, logit for logit.

Two right programs round differently, so in half precision tokens may differ where the two best
logits lie closer together than rounding reaches. The rule: an error is a distance from
transformers' float32 logits on the same tokens. The engine's error must stay within twice
transformers' own, both as the root mean square over all logits; the largest of them says little,
two right programs differ in it by more than twice now and then. And the engine's token must be
transformers' wherever the gap between the two best logits exceeds transformers' largest error.
In float32, with TF32 off on both sides, every token must be the same.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.recordings import check_recordings
from benchmarks.gpu.report import Figure, Report
from minivllm import EngineConfig, LLMEngine, SamplingParams
from minivllm.config import DEFAULT_MODEL
from minivllm.core.batch import SampledToken, ScheduledSequence
from minivllm.model.download import cache_folder
from minivllm.model.sampler import Sampler
from tests.tiny_models import VARIANTS, save_model

DTYPES = ("float32", "bfloat16", "float16")
NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 16, 45, 100)
NUM_KV_BLOCKS = 400
# Most of it goes into compiling: every model has head sizes of its own.
MOST_SECONDS = 400.0


class RecordingSampler(Sampler):
    """A sampler that keeps the logits of every token it chooses, by request and position."""

    def __init__(self) -> None:
        self.logits: dict[tuple[str, int], torch.Tensor] = {}

    def sample(
        self, logits: torch.Tensor, sequences: list[ScheduledSequence], eos_token_ids: Sequence[int]
    ) -> list[SampledToken]:
        """See Sampler."""
        for row, sequence in zip(logits, sequences, strict=True):
            self.logits[sequence.request_id, sequence.num_tokens] = row.float().clone()
        return super().sample(logits, sequences, eos_token_ids)


class Run(NamedTuple):
    """What the engine made of one prompt; logits [len(token_ids), vocab_size] float32."""

    prompt: list[int]
    token_ids: list[int]
    logits: torch.Tensor
    num_cached_tokens: int


class Errors(NamedTuple):
    """Distances from the float32 logits: the largest, and the root mean square over all."""

    largest: float
    root_mean_square: float


class Verdict(NamedTuple):
    """The engine beside transformers.

    num_decided  tokens whose two best logits lie further apart than transformers' largest error
    num_wrong    those of them at which the engine chose another token
    """

    ours: Errors
    theirs: Errors
    num_decided: int
    num_wrong: int


def judge(
    token_ids: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor
) -> Verdict:
    """token_ids [n] the engine chose; its, transformers' and float32's logits [n, vocab_size]."""
    their_errors = errors(theirs, exact)
    best = theirs.topk(2).values
    is_decided = best[:, 0] - best[:, 1] > their_errors.largest
    is_wrong = is_decided & (token_ids != theirs.argmax(dim=-1))
    return Verdict(
        ours=errors(ours, exact),
        theirs=their_errors,
        num_decided=int(is_decided.sum()),
        num_wrong=int(is_wrong.sum()),
    )


def errors(logits: torch.Tensor, exact: torch.Tensor) -> Errors:
    """NaN if there is one among them."""
    apart = logits - exact
    return Errors(float(apart.abs().max()), float(apart.square().mean().sqrt()))


def run_engine(engine: LLMEngine, prompts: Sequence[list[int]], num_tokens: int) -> list[Run]:
    """All prompts in one batch, greedy."""
    sampler = RecordingSampler()
    engine.runner._sampler = sampler  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    runs: dict[str, Run] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                name, prompt = output.request_id, prompts[int(output.request_id)]
                rows = [sampler.logits[name, len(prompt) + i] for i in range(num_tokens)]
                logits = torch.stack(rows)
                runs[name] = Run(prompt, output.token_ids, logits, output.num_cached_tokens)
    return [runs[str(index)] for index in range(len(prompts))]


@torch.inference_mode()
def teacher_forced(model: Any, run: Run) -> torch.Tensor:
    """The logits of transformers for each place of run.token_ids, given all tokens before it."""
    text = [*run.prompt, *run.token_ids[:-1]]
    ids = torch.tensor([text], device=model.device)
    logits: torch.Tensor = model(ids, logits_to_keep=len(run.token_ids)).logits[0]
    return logits.float()


def load_transformers(folder: Path, dtype: str, device: torch.device) -> Any:
    """The float32 model attends by plain matrix products: no kernel may round to TF32 in it."""
    from transformers import AutoModelForCausalLM

    attention = "eager" if dtype == "float32" else "sdpa"
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    return model.to(device).eval()


def align_model(
    name: str,
    folder: Path,
    prompts: Sequence[list[int]],
    device: torch.device,
    report: Report,
    dtypes: Sequence[str] = DTYPES,
) -> None:
    """Every dtype, with a cold prefix cache and then a warm one; into the report."""
    exact = load_transformers(folder, "float32", device)
    for dtype in dtypes:
        with report.attempt(f"{name}, {dtype}"):
            theirs = exact if dtype == "float32" else load_transformers(folder, dtype, device)
            engine = LLMEngine(
                EngineConfig(
                    model=str(folder), device=device.type, dtype=dtype, num_kv_blocks=NUM_KV_BLOCKS
                )
            )
            _align_engine(f"{name}, {dtype}", engine, prompts, theirs, exact, report)


def _align_engine(
    name: str,
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    theirs: Any,
    exact: Any,
    report: Report,
) -> None:
    for temperature in ("cold", "warm"):
        setting = f"{name}, {temperature}"
        runs = run_engine(engine, prompts, NUM_TOKENS)
        if (temperature == "warm") != any(run.num_cached_tokens for run in runs):
            report.add_problem(f"{setting}: the prefix cache did not do its part")
        check_recordings(engine, setting, report)
        _compare(setting, runs, theirs, exact, report)


def _compare(setting: str, runs: Sequence[Run], theirs: Any, exact: Any, report: Report) -> None:
    tokens = torch.cat([torch.tensor(run.token_ids, device=exact.device) for run in runs])
    ours = torch.cat([run.logits for run in runs])
    true = torch.cat([teacher_forced(exact, run) for run in runs])
    same = true if theirs is exact else torch.cat([teacher_forced(theirs, run) for run in runs])
    verdict = judge(tokens, ours, same, true)
    report.add_all(figures_of(setting, verdict, len(tokens)))
    for text in broken_promises(verdict):
        report.add_problem(f"{setting}: {text}")


def figures_of(setting: str, verdict: Verdict, num_tokens: int) -> Iterator[Figure]:
    """Both errors beside transformers'; the largest is what tokens are decided by."""
    ours, theirs = verdict.ours, verdict.theirs
    decided = f"{verdict.num_decided} of {num_tokens} tokens decided, {verdict.num_wrong} wrong"
    for measure, our_error, their_error, note in (
        ("root mean square logit error", ours.root_mean_square, theirs.root_mean_square, ""),
        ("largest logit error", ours.largest, theirs.largest, decided),
    ):
        yield Figure(measure, setting, "", our_error, "transformers", their_error, note)


def broken_promises(verdict: Verdict) -> Iterator[str]:
    """What the rule of this file's head is violated by.

    In float32 transformers is its own yardstick: its error is 0, and only tokens are compared.
    """
    if verdict.num_wrong:
        yield f"{verdict.num_wrong} of {verdict.num_decided} decided tokens are not transformers'"
    if not verdict.num_decided:
        yield "no token is decided: nothing says that the engine chooses as transformers does"
    ours, theirs = verdict.ours.root_mean_square, verdict.theirs.root_mean_square
    if not math.isfinite(ours):
        yield f"our error is {ours}: not all logits are numbers"
    # Their error may be NaN, and no comparison with NaN is true.
    elif theirs != 0 and not ours <= 2 * theirs:
        yield f"our error {ours:.3g} is more than twice transformers' {theirs:.3g}"


def align(device: torch.device, report: Report) -> None:
    """Tiny random models of every architecture; the default model, too, where it is at hand."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    deadline = time.monotonic() + MOST_SECONDS
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        for variant in VARIANTS:
            if time.monotonic() > deadline:
                report.add_problem(f"{variant} was not compared: the time was over")
                continue
            with report.attempt(variant):
                folder = Path(name, variant)
                vocab_size = save_model(variant, folder).config.vocab_size
                align_model(variant, folder, _prompts(rng, vocab_size), device, report)
    default = cache_folder() / DEFAULT_MODEL
    if not (default / "config.json").is_file():
        report.notes.append(f"{DEFAULT_MODEL} is not at hand: only random models were compared")
    elif time.monotonic() > deadline:
        report.add_problem(f"{DEFAULT_MODEL} was not compared: the time was over")
    else:
        with report.attempt(DEFAULT_MODEL):
            align_model(DEFAULT_MODEL, default, _prompts(rng, 49_152), device, report)


def _prompts(rng: random.Random, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]
