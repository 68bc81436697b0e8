"""How one request wants its tokens chosen, and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from minivllm.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Frozen and checked when made: a wrong value raises InvalidRequestError that names it.

    temperature         0 is greedy (the largest logit, the lowest id on a tie); else > 0
    top_k               keep the k most likely tokens; 0 is off
    top_p               keep the smallest set of tokens whose probabilities reach top_p; in (0, 1]
    min_p               drop tokens below min_p times the best probability; in [0, 1], 0 is off
    repetition_penalty  divide positive and multiply negative logits of tokens seen; 1 is off
    max_tokens          generate at most this many tokens
    min_tokens          before this many, neither an EOS nor a stop token can be chosen, and no
                        stop string ends the text
    stop                strings that end the text; the text ends before the string
    stop_token_ids      token ids that end the output, besides the model's EOS ids
    ignore_eos          go on after an EOS token
    seed                random numbers depend only on seed, index and position; None draws a seed
    n                   this many outputs of one prompt; output i uses seed + i
    logprobs            for each generated token, the log-probabilities of this many best tokens
                        and of the chosen one
    prompt_logprobs     the same for each prompt token but the first
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every field; turn `stop` and `stop_token_ids` into tuples."""
        self._check_real("temperature", low=0.0, allowed="0 (greedy) or more")
        self._check_int("top_k", low=0, allowed="0 (off) or more")
        self._check_real("top_p", low=0.0, high=1.0, allowed="above 0 and at most 1")
        if self.top_p == 0:
            self._refuse("top_p", "above 0 and at most 1")
        self._check_real("min_p", low=0.0, high=1.0, allowed="between 0 (off) and 1")
        self._check_real("repetition_penalty", low=0.0, allowed="above 0 (1 is off)")
        if self.repetition_penalty == 0:
            self._refuse("repetition_penalty", "above 0 (1 is off)")
        self._check_int("max_tokens", low=1, allowed="1 or more")
        self._check_int("min_tokens", low=0, allowed="0 or more")
        if self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"at most max_tokens, which is {self.max_tokens}")
        self._check_int("n", low=1, allowed="1 or more")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, low=0, allowed="None or 0 or more")
        if self.seed is not None:
            self._check_int("seed", low=0, high=2**63 - 1, allowed="None or 0 to 2**63 - 1")
        if self.ignore_eos not in (True, False):
            self._refuse("ignore_eos", "True or False")
        self._set_tuple("stop", str)
        if "" in self.stop:
            self._refuse("stop", "strings that are not empty")
        self._set_tuple("stop_token_ids", int)
        if any(token_id < 0 for token_id in self.stop_token_ids):
            self._refuse("stop_token_ids", "token ids, 0 or more")

    def _check_int(self, name: str, *, low: int, allowed: str, high: int | None = None) -> None:
        value = getattr(self, name)
        if not _is_int(value) or value < low or (high is not None and value > high):
            self._refuse(name, allowed)

    def _check_real(self, name: str, *, low: float, allowed: str, high: float = math.inf) -> None:
        value = getattr(self, name)
        is_real = _is_int(value) or isinstance(value, float)
        if not is_real or not math.isfinite(value) or not low <= value <= high:
            self._refuse(name, allowed)

    def _set_tuple(self, name: str, kind: type) -> None:
        value = getattr(self, name)
        # A single string is one stop string, not a sequence of letters.
        items = (value,) if isinstance(value, (str, int)) else value
        items = tuple(items) if isinstance(items, Iterable) else (None,)
        if not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
            self._refuse(name, f"a sequence of {kind.__name__}")
        object.__setattr__(self, name, items)

    def _refuse(self, name: str, allowed: str) -> None:
        raise InvalidRequestError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")


def _is_int(value: object) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
