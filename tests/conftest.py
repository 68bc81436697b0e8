"""What all tests share."""

import sys

import pytest


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
