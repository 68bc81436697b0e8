"""What is the same for every contestant."""

from __future__ import annotations

import os

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 2048
KV_CACHE_GIB = 2
_INHERITED_PREFIXES = ("VLLM_", "OMP_", "GOMP_", "KMP_", "MKL_", "LD_PRELOAD", "MINIVLLM_")


def cores() -> list[int]:
    """Numbers of the processor cores this process may use: every contestant gets all of them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def inherited() -> dict[str, str]:
    """What the caller's environment sets beside them that changes how fast somebody computes."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(_INHERITED_PREFIXES)
    }


def variables() -> dict[str, str]:
    """Of each contestant's environment: as many threads as cores, and nothing from the network."""
    return {
        "OMP_NUM_THREADS": str(len(cores())),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
