"""How a contestant is spoken to: one JSON object a line, a job in, an answer out.

Jobs come on the worker's stdin. Answers go out on a pipe of their own, because libraries print
to stdout; what they print is kept in a log file. The first answer comes unasked, when the worker
has loaded, and says which versions it runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from benchmarks.peers.cpu_time import session_cpu_seconds
from benchmarks.peers.errors import PeerError

ANSWERS_FD = "PEERS_ANSWERS_FD"
_SHOWN_LOG_LINES = 15
_SECONDS_TO_LEAVE = 20.0
_SECONDS_TO_FALL_ASLEEP = 3.0
_LOOK_SECONDS = 0.2

Message = dict[str, Any]


class Worker:
    """A contestant's process, seen from outside. Use it in a `with`: it ends with the block.

    command    starts it; it calls serve()
    log        file that gets all it prints
    variables  of its environment, on top of this process's own
    folder     where it runs; None: here

    hello             its first answer
    idle_seconds      how long it has been between rest() and its next job, all together
    idle_cpu_seconds  processor time it used meanwhile; None where the system does not say
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start it, and wait until it has loaded. Raises PeerError if it does not."""
        self.name = name
        self.idle_seconds = 0.0
        self.idle_cpu_seconds: float | None = 0.0
        self._rests_since: tuple[float, float | None] | None = None
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        environment = {**os.environ, **(variables or {}), ANSWERS_FD: str(writing)}
        try:
            with log.open("wb") as printed:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=folder,
                    pass_fds=[writing],
                    # A session of its own: whatever it starts can be found, and ended, with it.
                    start_new_session=True,
                )
        except OSError as error:
            os.close(reading)
            raise PeerError(f"{name} could not be started: {error}") from error
        finally:
            os.close(writing)
        self._jobs = cast("IO[bytes]", self._process.stdin)
        self._answers = os.fdopen(reading, encoding="utf-8")
        try:
            self.hello = self._read()
        except BaseException:
            self.kill()
            raise

    def ask(self, job: Message) -> Message:
        """Its answer to one job. Raises PeerError, with the end of its log, if it ends instead."""
        self._end_rest()
        try:
            self._jobs.write(json.dumps(job).encode() + b"\n")
            self._jobs.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def rest(self) -> None:
        """Its turn is over: give it time to fall asleep before somebody else's begins.

        Threads look out for more work for a while; vLLM's worker process does so for a second.
        """
        deadline = time.perf_counter() + _SECONDS_TO_FALL_ASLEEP
        then = self._cpu_seconds()
        while time.perf_counter() < deadline:
            time.sleep(_LOOK_SECONDS)
            now = self._cpu_seconds()
            if now is not None and then is not None and now == then:
                break
            then = now
        self._rests_since = (time.perf_counter(), self._cpu_seconds())

    @property
    def idle_share(self) -> float | None:
        """Processor time of its rests by their length: 1 is a whole core. None: not known."""
        if self.idle_cpu_seconds is None or self.idle_seconds == 0:
            return None
        return self.idle_cpu_seconds / self.idle_seconds

    def stop(self) -> int:
        """Let it end; end it if it does not. Its exit code."""
        with suppress(BrokenPipeError):
            self._jobs.close()
        self._answers.close()
        try:
            return self._process.wait(_SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it and all it started, now: it may be in the middle of a long job. Its exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            self._jobs.close()
        self._answers.close()
        return self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
        else:
            self.kill()

    def _read(self) -> Message:
        line = self._answers.readline()
        if not line:
            raise self._ended()
        answer: Message = json.loads(line)
        return answer

    def _cpu_seconds(self) -> float | None:
        return session_cpu_seconds(self._process.pid)

    def _end_rest(self) -> None:
        """Count what it did since rest(), while it should do nothing."""
        if self._rests_since is None:
            return
        since, then = self._rests_since
        now = self._cpu_seconds()
        self.idle_seconds += time.perf_counter() - since
        if now is None or then is None or self.idle_cpu_seconds is None:
            self.idle_cpu_seconds = None
        else:
            self.idle_cpu_seconds += now - then
        self._rests_since = None

    def _ended(self) -> PeerError:
        code = self.stop()
        lines = self._log.read_text(errors="replace").splitlines()
        shown = "\n".join(f"    {line}" for line in lines[-_SHOWN_LOG_LINES:]) or "    (nothing)"
        return PeerError(
            f"{self.name} ended with exit code {code}. The last it printed, from {self._log}:\n"
            + shown
        )


def serve(hello: Message, answer: Callable[[Message], Message]) -> None:
    """The worker's side: say hello, then answer jobs until the other side hangs up."""
    with os.fdopen(int(os.environ[ANSWERS_FD]), "w", encoding="utf-8") as answers:
        print(json.dumps(hello), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
