"""Logits to tokens: the one place where a sequence's next token is chosen.

The same logits and seed give the same token in any batch: nothing here looks across rows. A
draw's random number is a function of seed, index and position, not the next number of a shared
generator; and of torch's exp and log only softmax and log_softmax are used, which work row by
row: an elementwise exp may round an element differently at another place in memory.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.ranking import best_ids, largest
from kernels.transfer import places_on, to_device
from minivllm.core.batch import SampledToken, ScheduledSequence, TokenLogprobs
from minivllm.errors import RunnerError
from minivllm.sampling_params import SamplingParams

Mask = Callable[[Tensor, list[SamplingParams]], Tensor]
"""Which scores [n, vocab_size] a step drops, from them and the parameters of each row."""

_FLOAT32 = torch.finfo(torch.float32)
_MASK_64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, made odd


class Sampler:
    """Chooses tokens. It has no state: everything a choice depends on is in its arguments.

    Repetition penalty: CTRL, Keskar et al. 2019. Top-k: Fan et al. 2018. Top-p: nucleus
    sampling, Holtzman et al. 2020. Min-p: Nguyen et al. 2024.
    """

    def sample(
        self, logits: Tensor, sequences: list[ScheduledSequence], eos_token_ids: Sequence[int]
    ) -> list[SampledToken]:
        """Choose the next token of each sequence.

        logits         [len(sequences), vocab_size], any float dtype; not changed
        sequences      the sequence of each row; params.seed is set if temperature > 0
        eos_token_ids  ids that end an output, unless the request ignores them

        The steps, in the order in which transformers' `generate` has its processors:

            0  logits to float32; the `logprobs` a request asks for are those of the model's own
               distribution, before any other step (vLLM's default, "raw logprobs")
            1  repetition penalty, on every token of prompt and output
            2  min_tokens: -inf for EOS (unless ignored) and stop tokens while too few are out
            3  temperature 0: the largest logit, the lowest id on a tie; done
            4  divide by the temperature
            5  top-k: keep the k largest, and whatever equals the k-th
            6  top-p: the softmax of what is left; drop from the least likely upwards while at
               most 1 - top_p is dropped; of equal ones at the edge the lower ids go first
            7  min-p: the softmax of what is left; drop what is below min_p times the best
            8  draw, in float64

        Steps 5 to 7 keep what transformers' keep. Only which of equal ones top-p keeps at the edge
        is undefined there: its sort is not stable.

        Raises RunnerError if the rows do not fit the sequences, a row has NaN, +inf or nothing
        but -inf, or a seed is missing.
        """
        if logits.dim() != 2 or logits.shape[0] != len(sequences):
            wrong = f"logits have shape {list(logits.shape)} for {len(sequences)} sequences"
            raise RunnerError(f"{wrong}; there must be one row a sequence")
        raw = scores = logits.float()
        params = [sequence.params for sequence in sequences]
        if any(own.repetition_penalty != 1 or own.min_tokens > 0 for own in params):
            scores = raw.clone()
            _change_known_tokens(scores, sequences, eos_token_ids)
        best_scores, best = largest(scores)
        random_rows = [row for row, own in enumerate(params) if own.temperature > 0]
        if random_rows:
            at = to_device(random_rows, scores.device)
            # The best score becomes 0, so that no division by a small temperature overflows.
            shifted = scores[at] - best_scores[at, None]
            best[at] = _draw(shifted, [sequences[row] for row in random_rows])
        # Only here is a GPU waited for. What a row without a best one has drawn is not read.
        _check_best(best_scores.tolist(), sequences)
        token_ids = best.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        if rows := [row for row, own in enumerate(params) if own.logprobs is not None]:
            num_best = [params[row].logprobs or 0 for row in rows]
            wanted = raw[to_device(rows, raw.device)]
            found = _logprobs_of(wanted, [token_ids[row] for row in rows], num_best)
            logprobs = dict(zip(rows, found, strict=True))
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]

    def prompt_logprobs(
        self, logits: Tensor, next_token_ids: list[int], num_best: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of known next tokens, and of the `num_best` best in their places.

        logits          [n, vocab_size], any float dtype; row i is computed at position p
        next_token_ids  n ids; entry i is the token at position p + 1

        Each dict is best first, the lower id first on a tie, and holds the next token too.
        """
        return _logprobs_of(logits.float(), next_token_ids, [num_best] * len(next_token_ids))


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one draw: a multiple of 2**-53.

    It is the `position`-th number of the SplitMix64 stream (Steele et al. 2014) that starts at
    the mixed seed. That generator only adds a constant to its state, so any of its numbers is
    one multiplication away. Unmixed, the streams of some seeds would be shifted copies.
    """
    start = _mix(seed & _MASK_64)
    return (_mix((start + (position + 1) * _GOLDEN_GAMMA) & _MASK_64) >> 11) * 2.0**-53


def _mix(bits: int) -> int:
    """SplitMix64's finalizer: every input bit changes each output bit about half of the time."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK_64
    return bits ^ (bits >> 31)


def _change_known_tokens(
    scores: Tensor, sequences: list[ScheduledSequence], eos_token_ids: Sequence[int]
) -> None:
    """Steps 1 and 2, in place. All rows at once: on a GPU each operation is a launch."""
    params = [sequence.params for sequence in sequences]
    seen, ends = {}, {}
    for row, (own, sequence) in enumerate(zip(params, sequences, strict=True)):
        if own.repetition_penalty != 1:
            seen[row] = sequence.token_ids
        if sequence.num_tokens - sequence.num_prompt_tokens < own.min_tokens:
            known = [*own.stop_token_ids, *(() if own.ignore_eos else eos_token_ids)]
            ends[row] = [token_id for token_id in known if token_id < scores.shape[1]]
    if seen:
        at = places_on(scores.device, seen)
        penalties = [_in_float32(own.repetition_penalty) for own in params]
        old, penalty = scores[at], _column(penalties, scores)[at[0], 0]
        new = torch.where(old < 0, old * penalty, old / penalty)
        # A tiny penalty makes a large logit overflow; infinity would look like a broken model.
        scores[at] = new.clamp(max=_FLOAT32.max)
    if ends:
        scores[places_on(scores.device, ends)] = -math.inf


def _check_best(best: list[float], sequences: list[ScheduledSequence]) -> None:
    """A row's maximum tells all: NaN if there is one, -inf if no token is left."""
    for value, sequence in zip(best, sequences, strict=True):
        if not math.isfinite(value):
            place = f"request {sequence.request_id!r}, position {sequence.num_tokens}"
            needed = "a finite one, no NaN, and a token that min_tokens does not forbid"
            raise RunnerError(f"{place}: the largest logit is {value}; a row needs {needed}")


def _draw(scores: Tensor, sequences: list[ScheduledSequence]) -> Tensor:
    """Steps 4 to 8: int64 token ids [n]; `scores` [n, vocab_size] float32 is overwritten."""
    params = [seq.params for seq in sequences]
    scores /= _column([_in_float32(own.temperature) for own in params], scores)
    asks_top_k = [0 < own.top_k < scores.shape[1] for own in params]
    _drop(scores, params, asks_top_k, _below_top_k)
    _drop(scores, params, [own.top_p < 1 for own in params], _outside_top_p)
    _drop(scores, params, [own.min_p > 0 for own in params], _below_min_p)
    # Inverse of the cumulative distribution: the first token whose running sum exceeds the
    # random share of the total. A token of probability 0 adds nothing, so it is never the first;
    # and because uniform() < 1 the share stays below the total.
    running = scores.double().softmax(dim=-1).cumsum(dim=-1)
    share = _column([_uniform_of(seq) for seq in sequences], running) * running[:, -1:]
    return torch.searchsorted(running, share, right=True).flatten()


def _uniform_of(sequence: ScheduledSequence) -> float:
    """The random number for the token at position len(token_ids): output i draws as seed + i."""
    params = sequence.params
    if params.seed is None:
        found = f"request {sequence.request_id!r} has temperature {params.temperature} and no seed"
        raise RunnerError(f"{found}; whoever adds the request draws one")
    return uniform(params.seed + sequence.index, sequence.num_tokens)


def _drop(scores: Tensor, params: list[SamplingParams], asks: list[bool], mask: Mask) -> None:
    """In the rows that ask for it, -inf in place where `mask` says so."""
    rows = [row for row, asked in enumerate(asks) if asked]
    if rows:
        at = to_device(rows, scores.device)
        kept = scores[at]
        scores[at] = kept.masked_fill(mask(kept, [params[row] for row in rows]), -math.inf)


def _below_top_k(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """Step 5: what is below the k-th largest score."""
    largest = scores.topk(max(own.top_k for own in params)).values
    last = to_device([[own.top_k - 1] for own in params], scores.device)
    return scores < largest.gather(1, last)


def _outside_top_p(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """Step 6: what is outside the smallest set whose probabilities reach top_p."""
    # Stable, because equal scores may lie on both sides of the edge.
    ascending, order = scores.sort(dim=-1, stable=True)
    may_go = _column([1 - own.top_p for own in params], scores)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= may_go
    # Rounding may leave the whole sum below 1, and a tiny top_p would drop the best too.
    dropped[:, -1] = False
    return dropped.scatter(1, order, dropped)


def _below_min_p(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """Step 7: what is below min_p times the best probability."""
    probabilities = scores.softmax(dim=-1)
    floor = _column([own.min_p for own in params], scores)
    return probabilities < floor * probabilities.amax(dim=-1, keepdim=True)


def _column(numbers: list[float], like: Tensor) -> Tensor:
    """[n, 1] of the dtype and on the device of `like`."""
    return to_device(numbers, like.device, like.dtype)[:, None]


def _in_float32(value: float) -> float:
    """The nearest positive float32: a tiny value would become 0, a huge one infinity."""
    return min(max(value, _FLOAT32.tiny), _FLOAT32.max)


def _logprobs_of(logits: Tensor, ids: list[int], num_best: list[int]) -> list[TokenLogprobs]:
    """For each row of `logits` [n, vocab_size] its num_best best tokens and its given one."""
    logprobs = logits.log_softmax(dim=-1)
    best = best_ids(logprobs, max(num_best, default=0))
    places = torch.cat((best, to_device(ids, logits.device)[:, None]), dim=1)
    rows = zip(places.tolist(), logprobs.gather(1, places).tolist(), num_best, strict=True)
    # The given token is last, unless it is among the best.
    return [dict(zip((*i[:n], i[-1]), (*p[:n], p[-1]), strict=True)) for i, p, n in rows]
