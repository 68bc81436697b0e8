"""One tiny random model for all tests of this package, and transformers as its oracle."""

from __future__ import annotations

import pytest

from tests.alignment import Oracle
from tests.known_faults.recorded import Tiny
from tests.tiny_models import save_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return Tiny(folder, Oracle(save_model("llama", folder)))
