"""Each row's largest scores, and one rule for ties: the lower id first."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(each row's largest score [n], its id [n] int64); NaN is the largest of all.

    scores  [n, vocab_size] float32
    """
    # Numpy looks at eight scores at a time, torch on a CPU at one.
    best = torch.from_numpy(scores.numpy().argmax(-1)) if scores.is_cpu else scores.argmax(-1)
    return scores.gather(1, best[:, None]).flatten(), best


def best_ids(scores: Tensor, count: int) -> Tensor:
    """[n, count] int64: the ids of each row's largest scores, largest first.

    scores  [n, vocab_size] float32, no NaN; count may be more than there are ids

    torch.topk alone promises nothing about ties, and a stable sort of the whole vocabulary takes
    several times as long.
    """
    bits = scores.view(torch.int32)
    # Read as whole numbers, floats keep their order, but for the negative ones, which are
    # turned round. With the id behind each no two are equal.
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32
    ids = torch.arange(scores.shape[1], device=scores.device)
    return (ordered - ids).topk(min(count, len(ids))).indices
