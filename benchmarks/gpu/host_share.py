"""How much of a decode step the GPU computes, and how much of it it waits for the host."""

from __future__ import annotations

from benchmarks.cpu_step import add_requests
from benchmarks.gpu.report import Figure
from benchmarks.gpu.throughput import abort_all
from benchmarks.host_step import PARTS, decode_steps
from minivllm import LLMEngine
from minivllm.core.block_manager import blocks_for

MOST_NEW_TOKENS = 128
"""More than the first sequences generate until the last prompt is read and all steps are timed."""


def decode_step_figure(engine: LLMEngine, batch: int, context: int, num_steps: int) -> Figure:
    """A whole step, beside the part of it in which the host only waits for the chosen tokens.

    That part contains the launch of the head and the choice of tokens too, which take the host
    little. Its share of the step is how busy the GPU is, at most. `batch` is the most there are:
    as many as the pool holds to their end, so that nobody is preempted.
    """
    blocks_each = blocks_for(context + MOST_NEW_TOKENS, engine.config.block_size)
    batch = min(batch, engine.kv.num_blocks // blocks_each)
    add_requests(engine, batch, context, MOST_NEW_TOKENS)
    while engine.has_unfinished_requests() and len(engine.step()) < batch:
        pass
    parts = decode_steps(engine, batch, num_steps)
    abort_all(engine)
    whole = sum(parts.values())
    host = ", ".join(f"{name} {parts[name]:.2f}" for name in PARTS if name != "execute")
    return Figure(
        "decode step",
        f"{batch} sequences of {context:,} tokens",
        "ms",
        whole,
        "launch and wait for tokens",
        parts["execute"],
        f"the host alone: {host} ms",
    )
