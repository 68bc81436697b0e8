"""In CI a skip for any reason but a missing GPU fails the run: a skipped test proves nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
A_TEST = "import pytest\n\ndef test_a():\n    pytest.skip({reason!r})\n"
A_FILE = "import pytest\n\npytest.skip({reason!r}, allow_module_level=True)\n"


def run_pytest(folder, content, ci):
    """pytest with this project's conftest on a file of its own: (exit code, output)."""
    path = folder / "test_skipping.py"
    path.write_text(content)
    command = [sys.executable, "-m", "pytest", str(path), "-p", "tests.conftest", "--color=no"]
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    child = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | ({"CI": "true"} if ci else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    return child.returncode, child.stdout + child.stderr


@pytest.mark.parametrize("content", [A_TEST, A_FILE], ids=["a test", "a file"])
def test_a_skip_fails_the_run_in_ci_and_is_named(tmp_path, content):
    code, output = run_pytest(tmp_path, content.format(reason="no such package"), ci=True)
    assert code != 0
    assert "skipped in CI, where the only reason may be 'no GPU': no such package" in output


def test_a_missing_gpu_may_be_skipped_for_in_ci(tmp_path):
    code, output = run_pytest(tmp_path, A_TEST.format(reason="no GPU here"), ci=True)
    assert (code, "1 skipped" in output) == (0, True), output


def test_outside_ci_a_skip_is_a_skip(tmp_path):
    code, output = run_pytest(tmp_path, A_TEST.format(reason="no such package"), ci=False)
    assert (code, "1 skipped" in output) == (0, True), output
