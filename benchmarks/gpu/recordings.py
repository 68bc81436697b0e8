"""Whether an engine on a GPU decodes from recordings; it computes without them, only slower."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.report import Report
from minivllm import LLMEngine


def check_recordings(engine: LLMEngine, setting: str, report: Report) -> None:
    """A problem if an engine that has decoded on a GPU holds no recording, or gave them up."""
    runner: Any = engine.runner
    if runner.device.type != "cuda":
        return
    if runner._graphs is None or runner._graphs.num_recordings == 0:
        report.add_problem(f"{setting}: decode steps ran without recordings")
