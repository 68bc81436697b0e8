"""How one request wants its tokens chosen, and when it wants to stop."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
        for name, (kinds, low, high, allowed) in _LIMITS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or not low <= value <= high:
                self._refuse(name, allowed)
        if self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"at most max_tokens, which is {self.max_tokens}")
        if self.ignore_eos not in (True, False):
            self._refuse("ignore_eos", "True or False")
        self._set_tuple("stop", str, lambda string: string != "", "strings that are not empty")
        self._set_tuple("stop_token_ids", int, lambda token_id: token_id >= 0, "ids, 0 or more")

    def _set_tuple(self, name: str, kind: type, allows: Callable[[Any], bool], words: str) -> None:
        value = getattr(self, name)
        # A single string is one stop string, not a sequence of letters.
        items = (value,) if isinstance(value, kind) else value
        items = tuple(items) if isinstance(items, Iterable) else (None,)
        if not all(type(item) is kind and allows(item) for item in items):
            self._refuse(name, f"a sequence of {words}")
        object.__setattr__(self, name, items)

    def _refuse(self, name: str, allowed: str) -> None:
        raise InvalidRequestError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")


_ABOVE_0 = math.nextafter(0, 1)
_MAY_BE_NONE = ("seed", "logprobs", "prompt_logprobs")
# name -> (types, least, most, in words)
_LIMITS: dict[str, tuple[tuple[type, ...], float, float, str]] = {
    "temperature": ((int, float), 0, math.inf, "0 (greedy) or more"),
    "top_k": ((int,), 0, math.inf, "a whole number, 0 (off) or more"),
    "top_p": ((int, float), _ABOVE_0, 1, "above 0 and at most 1"),
    "min_p": ((int, float), 0, 1, "between 0 (off) and 1"),
    "repetition_penalty": ((int, float), _ABOVE_0, math.inf, "above 0 (1 is off)"),
    "max_tokens": ((int,), 1, math.inf, "a whole number, 1 or more"),
    "min_tokens": ((int,), 0, math.inf, "a whole number, 0 or more"),
    "seed": ((int,), 0, 2**63 - 1, "None or 0 to 2**63 - 1"),
    "n": ((int,), 1, math.inf, "a whole number, 1 or more"),
    "logprobs": ((int,), 0, math.inf, "None or 0 or more"),
    "prompt_logprobs": ((int,), 0, math.inf, "None or 0 or more"),
}
