"""What an engine is built from: one frozen set of choices."""

from collections.abc import Callable
from dataclasses import dataclass

from minivllm.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_KV_CACHE_BYTES = 1 << 30

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "native", "torch", "triton")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Frozen and checked when made: a wrong value raises ConfigError that names it.

    model                    "smollm2-135m", a local Hugging Face folder, or a hub id
    device                   "auto" is cuda where torch sees one, else cpu
    dtype                    "auto" is float32 on cpu and the checkpoint's own on cuda
    block_size               tokens in a KV block
    num_kv_blocks            usable blocks in the pool; None: from kv_cache_bytes
    kv_cache_bytes           bytes for the pool; None (when num_kv_blocks is None too) is 1 GiB on
                             cpu, and on cuda 90 % of what is free, less what a step computes in
    max_num_seqs             sequences that may run at the same time
    max_num_batched_tokens   tokens computed in one step, all sequences together
    max_model_len            prompt and output together; None: what the model was trained for
    max_prefill_chunk        most prompt tokens of one sequence in one step; None: the budget
    enable_prefix_caching    reuse the KV blocks of prefixes computed before
    prefix_cache_max_share   share of the pool, 0 to 1, that may stay cached while nobody uses it
    weights_version          part of every block's key; give another one for other weights
    attention_backend        "auto" is triton on cuda, native (C, compiled here) on cpu, and torch
                             where these cannot run; MINIVLLM_ATTENTION overrides
    hash_function            bytes -> bytes for block keys; None: xxhash, 128 bit
    debug_checks             check every invariant in every step (slow)
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_prefill_chunk: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_max_share: float = 1.0
    weights_version: str = ""
    attention_backend: str = "auto"
    hash_function: Callable[[bytes], bytes] | None = None
    debug_checks: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.model, str) or not self.model:
            self._refuse("model", "a name, a folder or a hub id")
        self._check_choice("device", DEVICES)
        self._check_choice("dtype", DTYPES)
        self._check_choice("attention_backend", ATTENTION_BACKENDS)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            self._check_positive(name)
        for name in ("num_kv_blocks", "kv_cache_bytes", "max_model_len", "max_prefill_chunk"):
            if getattr(self, name) is not None:
                self._check_positive(name)
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError(
                f"num_kv_blocks is {self.num_kv_blocks} and kv_cache_bytes is"
                f" {self.kv_cache_bytes}; give one of the two"
            )
        share = self.prefix_cache_max_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            self._refuse("prefix_cache_max_share", "between 0 and 1")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            self._refuse(name, f"one of {', '.join(choices)}")

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(name, "a whole number, 1 or more")

    def _refuse(self, name: str, allowed: str) -> None:
        raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")
