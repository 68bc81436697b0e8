"""Which process each contestant is."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers import settings
from benchmarks.peers.environment import FOLDER, ROOT
from benchmarks.peers.protocol import Worker
from benchmarks.peers.works import OURS, OURS_UNCACHED, TRANSFORMERS, VLLM, VLLM_ONE_PROCESS

_PROGRAMS = {
    OURS: ["ours"],
    OURS_UNCACHED: ["ours", "--no-prefix-cache"],
    TRANSFORMERS: ["transformers_peer"],
    VLLM: ["vllm_peer"],
    VLLM_ONE_PROCESS: ["vllm_peer"],
}


def start(name: str, model: Path, vllm_python: Path | None) -> Worker:
    """Start the contestant of this name, and wait until it has loaded.

    vllm_python   needed for vLLM only
    """
    is_vllm = name in (VLLM, VLLM_ONE_PROCESS)
    python = str(vllm_python) if is_vllm else sys.executable
    module, *options = _PROGRAMS[name]
    command = [python, "-m", f"benchmarks.peers.{module}", str(model), *options]
    log = FOLDER / "logs" / f"{name.replace(', ', '-').replace(' ', '-')}.log"
    variables = settings.variables()
    if is_vllm:
        variables |= vllm_variables()
    if name == VLLM_ONE_PROCESS and vllm_python is not None:
        variables |= one_process_variables(vllm_python.parents[1])
    return Worker(name, command, log, variables, ROOT)


def vllm_variables() -> dict[str, str]:
    """What vLLM is told in both forms: all cores, and room for as much KV as ours."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, settings.cores())),
        "VLLM_NO_USAGE_STATS": "1",
    }


def one_process_variables(environment: Path) -> dict[str, str]:
    """Put vLLM's scheduler and its model into one process, with Intel's OpenMP.

    By itself it takes three, which look out for each other's messages on the cores that should
    compute. One process cannot bind its threads, so they are bound here, as vLLM would do it.
    """
    openmp = environment / "lib" / "libiomp5.so"
    cores = ",".join(map(str, settings.cores()))
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if not openmp.is_file():  # it comes with vLLM, but not on every processor
        return variables
    return variables | {
        "LD_PRELOAD": str(openmp),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }
