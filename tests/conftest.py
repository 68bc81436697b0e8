"""What all tests share."""

import os
import signal
import sys

import pytest

ALLOWED_IN_CI = "no GPU"


@pytest.fixture(autouse=True)
def one_thread_for_small_tensors(request):
    """On a busy machine torch's threads wait for each other: tiny models run on one of them."""
    torch = sys.modules.get("torch")
    if torch is None or request.node.get_closest_marker("model"):
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def fail_a_skip_in_ci(report):
    """Where CI is set, nobody reads what was skipped: only a missing GPU is a reason."""
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not reason.startswith(ALLOWED_IN_CI):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where the only reason may be {ALLOWED_IN_CI!r}: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    fail_a_skip_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A whole file may be skipped, too."""
    report = yield
    fail_a_skip_in_ci(report)
    return report


def pytest_configure(config):
    """A suite in the background ignores Ctrl-C; its tests, and what they start, must not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
