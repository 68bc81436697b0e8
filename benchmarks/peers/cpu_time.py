"""Processor time of a process and of all it started: it shows whether an idle one spins."""

from __future__ import annotations

import os
from pathlib import Path


def session_cpu_seconds(session: int) -> float | None:
    """Seconds, user and system, of all living processes of a session; None without /proc.

    A worker is the leader of a session of its own, so `session` is its process id.
    """
    if not Path("/proc/self/stat").exists():
        return None
    ticks = sum(_ticks(entry, session) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(process: Path, session: int) -> int:
    """Clock ticks of one process, if it belongs to the session and still lives."""
    try:
        stat = (process / "stat").read_text()
    except OSError:
        return 0
    # pid (name) state ppid pgrp session ...: a name may hold blanks and brackets. Counted from
    # the state, the session is field 3, user and system ticks are fields 11 and 12.
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if int(fields[3]) == session else 0
