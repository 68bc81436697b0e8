"""Where and when a figure was measured, in one line: no figure is printed without it."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path


def machine() -> str:
    """Processor, usable cores, operating system, Python, and today's date."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.machine()}"
    return f"{_processor()}, {cores} cores, {system}, Python {platform.python_version()}, " + str(
        date.today()
    )


def _processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
