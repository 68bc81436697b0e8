"""New weights under a running engine: nothing that was cached before may be read again."""

import pytest

from minivllm.errors import EngineBusyError, ModelError
from tests.alignment import Oracle, RecordingEngine
from tests.tiny_models import save_model

PROMPT = {"a": [i * 7 % 97 for i in range(50)]}


@pytest.fixture
def models(tmp_path):
    """Two folders of the same network with other weights, and an oracle for each."""
    folders = [tmp_path / "first", tmp_path / "second"]
    return folders, [Oracle(save_model("llama", f, seed=i)) for i, f in enumerate(folders)]


def test_after_load_weights_the_new_model_answers_and_the_cache_misses(models):
    folders, (first, second) = models
    engine = RecordingEngine(folders[0])
    engine.check(PROMPT, first, 8)
    assert engine.check(PROMPT, first, 8)["a"].num_cached_tokens == 48
    engine.engine.load_weights(str(folders[1]))
    assert engine.check(PROMPT, second, 8)["a"].num_cached_tokens == 0
    assert engine.check(PROMPT, second, 8)["a"].num_cached_tokens == 48


def test_weights_that_cannot_be_loaded_change_nothing(models, tmp_path):
    folders, (first, _) = models
    engine = RecordingEngine(folders[0])
    engine.check(PROMPT, first, 8)
    with pytest.raises(ModelError, match="nowhere"):
        engine.engine.load_weights(str(tmp_path / "nowhere"))
    assert engine.check(PROMPT, first, 8)["a"].num_cached_tokens == 48


def test_a_live_request_keeps_its_weights(models):
    folders, (first, _) = models
    engine = RecordingEngine(folders[0])
    engine.engine.add_request("live", PROMPT["a"])
    engine.engine.step()
    with pytest.raises(EngineBusyError):
        engine.engine.load_weights(str(folders[1]))
    engine.engine.abort("live")
    engine.engine.step()
    engine.check(PROMPT, first, 8)
