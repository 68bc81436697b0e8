"""The demo with a runner that has no model: what it shows, and when it says that it failed."""

import doctest
import json
import re
import zlib
from pathlib import Path

import pytest

import minivllm
from minivllm import LLMEngine
from minivllm.core.batch import SampledToken
from minivllm.demo import run_demo
from minivllm.pool_picture import pool_picture
from tests.model_free import make_engine, params
from tests.test_llm import ByteTokenizer

SCRIPT = json.loads((Path(minivllm.__file__).parent / "demo.json").read_text())


class WordTokenizer(ByteTokenizer):
    """A token a word."""

    def encode(self, text):
        return [10 + zlib.crc32(word.encode()) % 1000 for word in text.split()]

    def decode(self, token_ids):
        return "".join(f" w{token_id}" for token_id in token_ids)


class QuickRunner:
    """Answers with digits that depend on the prompt; a faulty one on the batch, too."""

    vocab_size, max_model_len, eos_token_ids = 1010, 4000, ()

    def __init__(self, is_faulty=False):
        self.is_faulty = is_faulty

    def kv_bytes_per_block(self, block_size):
        return block_size

    def init_kv(self, num_blocks, block_size):
        self.num_blocks = num_blocks

    def execute(self, batch):
        wrong = sum(s.end - s.start for s in batch.sequences) if self.is_faulty else 0
        samples = [s for s in batch.sequences if s.samples]
        return [SampledToken((s.token_ids[-9] + s.num_tokens + wrong) % 10) for s in samples]


def demo(capsys, runner):
    code = run_demo(lambda config: LLMEngine(config, runner, WordTokenizer()))
    return code, capsys.readouterr().out


@pytest.fixture
def shown(capsys):
    code, out = demo(capsys, QuickRunner())
    assert code == 0
    return out


def test_everybody_is_asked_and_answered(shown):
    for name, question in SCRIPT["questions"].items():
        assert f"{name}: {question}" in shown
    assert len(re.findall(r"w\d w\d w\d w\d", shown)) >= 6


def test_the_table_tells_cold_from_warm(shown):
    rows = re.findall(r"│ (\w+) +│ +(\d+) │ +(\d+) │ +(\d+) │ +([\d.]+) s │", shown)
    assert [row[0] for row in rows] == list(SCRIPT["questions"])
    for name, num_prompt, num_cached, num_computed, _ in rows:
        assert int(num_prompt) == int(num_cached) + int(num_computed)
        assert (int(num_cached) == 0) == (name == "Amara")
        assert int(num_cached) % 16 == 0


def test_the_pool_shows_the_shared_blocks_with_their_ref_counts(shown):
    num_shared = int(re.search(r"Bruno: shared 0-(\d+);", shown)[1]) + 1
    (first_line,) = re.findall(r"^ +0  (\S+)$", shown, re.MULTILINE)
    assert first_line.startswith("6" * num_shared), "five block tables and the cache"
    assert "ref count" in shown


def test_the_prefix_is_computed_once_with_the_cache_and_six_times_without(shown):
    computed = [
        int(number.replace(",", "")) / int(total.replace(",", ""))
        for number, total in re.findall(r"Computed ([\d,]+) of ([\d,]+) prompt tokens", shown)
    ]
    assert computed[0] == computed[1] < 0.35
    assert computed[2] == 1


def test_it_says_that_the_answers_are_equal_and_what_to_read_next(shown):
    assert "All three runs gave everybody the same answer" in shown
    assert "minivllm/core/kv_cache.py" in shown
    for line in SCRIPT["read_next"]:
        if line.startswith("  minivllm/"):
            assert (Path(minivllm.__file__).parent.parent / line.split()[0]).is_file()


def test_answers_that_differ_are_a_fault_and_exit_code_1(capsys):
    code, out = demo(capsys, QuickRunner(is_faulty=True))
    assert code == 1
    assert "differ between the runs" in out


def test_a_picture_of_a_pool_tells_free_cached_own_and_shared_blocks_apart():
    engine = make_engine(num_kv_blocks=12)
    engine.add_request("past", [9] * 5, params(1))
    engine.step()
    engine.add_request("a", [*range(8), 20], params(9))
    engine.step()
    engine.add_request("b", [*range(8), 21], params(9))
    engine.step()
    # Block 0 stayed cached; 1 and 2 are in both tables and cached; 3 and 4 are private.
    a, b = engine.scheduler.running
    assert pool_picture(engine.kv, [a, b]).plain.splitlines() == [
        "    0  c3311.......",
        "      a: shared 1-2; own 3",
        "      b: shared 1-2; own 4",
    ]
    engine.abort("b")
    engine.step()
    assert pool_picture(engine.kv, [a]).plain.splitlines()[1] == "      a: shared none; own 1-3"


@pytest.mark.parametrize("count", [9, 10])
def test_a_cell_has_one_character_also_for_many_holders(count):
    engine = make_engine(num_kv_blocks=60, max_num_seqs=20)
    engine.add_request("leader", [*range(8), 20], params(30))
    engine.step()
    for i in range(count - 2):  # with the leader and the cache: count
        engine.add_request(str(i), [*range(8), 30 + i], params(30))
    engine.step()
    assert pool_picture(engine.kv).plain[7] == ("9" if count == 9 else "+")


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(minivllm.pool_picture) == (0, 1)


@pytest.mark.model
def test_the_real_demo_gives_equal_answers_with_the_cache_on_and_off(capsys):
    assert run_demo() == 0
    out = capsys.readouterr().out
    assert "The Copper Kettle is open on Saturdays" in out
