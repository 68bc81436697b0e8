"""The site, built once a session, served over http and opened from files, in one browser."""

import functools
import http.server
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from book.places import ROOT
from tests.site.browser import find_chromium, open_browser


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site; `seconds` is what the build took, generated pages included."""
    folder = tmp_path_factory.mktemp("site")
    started = time.perf_counter()
    run_module("book")
    run_module("mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder))
    return SimpleNamespace(folder=folder, seconds=time.perf_counter() - started)


def run_module(name, *arguments):
    """Run `python -m name` in the repository; a failure shows what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"python -m {name} failed:\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="session")
def served(site):
    """The site's address over http."""
    handler = functools.partial(_QuietHandler, directory=site.folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture(scope="session")
def browser():
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium found: install Debian's chromium, or name one in CHROMIUM")
    with open_browser(path) as browser:
        yield browser


@pytest.fixture(scope="session")
def addresses(site, served):
    """How a page is reached: over http, and from its file."""
    return {"http": served, "file": site.folder.as_uri()}
