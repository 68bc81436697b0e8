"""Each reason for a miss, told from the trace of a run in which it is the true one."""

import subprocess
import sys

import pytest

from minivllm.errors import TraceError
from minivllm.explain import explain
from tests.model_free import greedy, make_engine, params, run

PREFIX = list(range(12))  # three blocks of 4


class Traced:
    """An engine whose trace goes to a file."""

    def __init__(self, path, **config):
        self.path = path
        self.lines = []
        self.engine = make_engine(write_trace_line=self.lines.append, **config)

    def add(self, name, prompt, max_tokens=2, n=1, **options):
        self.engine.add_request(name, prompt, params(max_tokens, n=n), **options)

    def run(self, name, prompt, max_tokens=2, **options):
        self.add(name, prompt, max_tokens, **options)
        return run(self.engine)[name, 0]

    def explain(self, name):
        self.path.write_text("".join(line + "\n" for line in self.lines))
        return explain(self.path, name)


@pytest.fixture
def traced(tmp_path):
    return Traced(tmp_path / "trace.jsonl")


def test_the_first_request_of_all_meets_an_empty_cache(traced):
    traced.run("a", PREFIX)
    found = traced.explain("a")
    assert (found.why[0], found.missed_block, found.num_hit_tokens) == ("never seen", 0, 0)
    assert "nothing was computed" in found.why[1]


def test_a_token_never_seen_is_named_with_its_position(traced):
    traced.run("far", [40, 41, 42, 43])
    traced.run("near", [*PREFIX, 20, 21, 22, 23])
    output = traced.run("b", [*PREFIX, 20, 33, 22, 23, 24])
    found = traced.explain("b")
    assert found.num_hit_tokens == output.num_cached_tokens == 12
    assert (found.why[0], found.missed_block, found.num_prompt_tokens) == ("never seen", 3, 17)
    assert "request near comes closest; at position 13" in found.why[1]
    assert "this one has token 33, that one 21" in found.why[1]


def test_a_prompt_that_goes_on_where_the_closest_one_ended_is_told_so(traced):
    traced.run("a", PREFIX[:6], max_tokens=1)
    traced.run("b", PREFIX)
    found = traced.explain("b")
    assert (found.why[0], found.missed_block) == ("never seen", 1)
    assert "at position 6" in found.why[1]
    assert f"that one {greedy(PREFIX[:6], 1)[0]}" in found.why[1]


def test_generated_tokens_count_as_seen(traced):
    output = traced.run("a", PREFIX, max_tokens=6)
    traced.run("b", [*PREFIX, *output.token_ids[:5], 49, 49, 49, 49])
    found = traced.explain("b")
    assert (found.num_hit_tokens, found.why[0]) == (16, "never seen")
    assert "request a comes closest; at position 17" in found.why[1]


def test_an_evicted_block_is_dated(tmp_path):
    traced = Traced(tmp_path / "t", num_kv_blocks=4)
    traced.run("a", [*PREFIX, 20])
    traced.run("b", [30] * 6)
    steps_before = traced.engine.stats()["steps"]
    output = traced.run("c", [*PREFIX, 20])
    found = traced.explain("c")
    assert found.num_hit_tokens == output.num_cached_tokens == 8
    assert (found.why[0], found.missed_block) == ("evicted", 2)
    assert found.why[1] == "request a had published it; evicted on the way to step 3"
    assert found.step == steps_before + 1


def test_a_block_that_was_published_again_after_its_eviction_is_a_hit(tmp_path):
    traced = Traced(tmp_path / "t", num_kv_blocks=4)
    traced.run("a", [*PREFIX, 20])
    traced.run("b", [30] * 13)
    traced.run("c", [*PREFIX, 20])
    traced.run("d", [*PREFIX, 20])
    assert traced.explain("c").why[0] == "evicted"
    assert traced.explain("d").why[0] == "nothing missed"


def test_a_reset_is_not_called_an_eviction(traced):
    traced.run("a", [*PREFIX, 20])
    assert traced.engine.reset_prefix_cache()
    traced.run("b", [*PREFIX, 20])
    assert traced.explain("b").why[0] == "reset"


def test_another_salt_is_named_with_both_values(traced):
    traced.run("a", [*PREFIX, 20], cache_salt="tea")
    traced.run("b", [*PREFIX, 20], cache_salt="milk")
    found = traced.explain("b")
    assert (found.why[0], found.missed_block) == ("other key field", 0)
    assert "under ('salt', 'tea')" in found.why[1]
    assert "asks under ('salt', 'milk')" in found.why[1]


def test_a_key_field_that_only_one_of_the_two_has_is_named(traced):
    traced.run("a", [*PREFIX, 20], key_fields=(("adapter", "x"),))
    traced.run("b", [*PREFIX, 20])
    assert "under ('adapter', 'x'); this one asks under nothing" in traced.explain("b").why[1]


def test_a_request_that_does_not_read_the_cache_is_told_so(traced):
    traced.run("a", [*PREFIX, 20])
    traced.run("b", [*PREFIX, 20], cache_read=False)
    assert traced.explain("b").why[0] == "cache read off"


def test_when_all_that_may_be_looked_up_hit_the_last_token_is_the_reason(traced):
    traced.run("a", PREFIX)
    traced.run("b", PREFIX)
    found = traced.explain("b")
    assert (found.why[0], found.missed_block, found.num_hit_tokens) == ("nothing missed", None, 8)
    assert "only 11 tokens are looked up" in found.why[1]
    assert "I8" in found.why[1]


def test_a_limit_on_cacheable_tokens_is_named(traced):
    traced.run("a", [*PREFIX, 20])
    traced.run("b", [*PREFIX, 20], cacheable_tokens=8)
    found = traced.explain("b")
    assert (found.why[0], found.num_hit_tokens) == ("nothing missed", 8)
    assert "only 8 tokens may be cached" in found.why[1]


def test_a_follower_is_told_how_long_it_waited(traced):
    traced.engine.add_request("a", [*PREFIX, 20], params(2))
    traced.engine.add_request("b", [*PREFIX, 21], params(2))
    run(traced.engine)
    found = traced.explain("b")
    assert (found.num_hit_tokens, found.num_waits, found.step) == (12, 1, 2)
    assert "waited  1 steps" in str(found)


def test_a_request_that_waits_for_a_block_in_flight_is_told_so(tmp_path):
    traced = Traced(tmp_path / "t", max_num_batched_tokens=8)
    traced.add("a", [*PREFIX, 20])
    traced.add("b", [*PREFIX, 21])
    traced.engine.step()
    traced.engine.step()
    found = traced.explain("b")  # its lookup for step 2: a has computed two of three blocks
    assert (found.why[0], found.missed_block) == ("in flight", 2)
    assert found.why[1].startswith("request a has computed 8 of the same 12 positions, so far")


@pytest.mark.parametrize(
    ("options", "why"),
    [({"cache_write": False}, "it may not write"), ({"cacheable_tokens": 5}, "only its first 5")],
)
def test_a_block_that_was_computed_but_not_published_says_why(traced, options, why):
    traced.run("a", [*PREFIX, 20], **options)
    traced.run("b", [*PREFIX, 20])
    found = traced.explain("b")
    assert found.why[0] == "not published"
    assert why in found.why[1]


def test_a_token_that_was_chosen_last_was_never_computed(traced):
    (token,) = traced.run("a", PREFIX[:7], max_tokens=1).token_ids
    traced.run("b", [*PREFIX[:7], token, 20])
    found = traced.explain("b")
    assert (found.why[0], found.missed_block) == ("never seen", 1)
    assert found.why[1] == "request a has computed 7 of the same 8 positions, and stopped there"


def test_a_request_that_was_aborted_halfway_is_named(tmp_path):
    traced = Traced(tmp_path / "t", max_num_batched_tokens=4)
    traced.add("a", [*PREFIX, 20])
    traced.engine.step()
    traced.engine.abort("a")
    traced.run("b", [*PREFIX, 20])
    found = traced.explain("b")
    assert (found.why[0], found.num_hit_tokens) == ("never seen", 4)
    assert "computed 4 of the same 8 positions, and stopped" in found.why[1]


def test_a_hash_collision_is_named(tmp_path):
    traced = Traced(tmp_path / "t", hash_function=lambda data: b"same")
    traced.run("a", [1] * 5)
    traced.run("b", [2] * 5)
    traced.run("c", [2] * 5)
    found = traced.explain("c")
    assert (found.why[0], found.missed_block) == ("not published", 0)
    assert "equal hash (I7)" in found.why[1]


def test_the_first_lookup_counts_not_the_one_after_a_preemption(tmp_path):
    traced = Traced(tmp_path / "t", num_kv_blocks=6)
    traced.add("a", [30] * 8, max_tokens=16)
    traced.add("b", PREFIX[:8], max_tokens=8)
    finished = run(traced.engine)
    assert traced.engine.stats()["preemptions"] > 0
    assert finished["b", 0].num_cached_tokens == 0
    found = traced.explain("b")
    assert (found.step, found.num_hit_tokens, found.missed_block) == (1, 0, 0)


def test_the_second_of_n_outputs_goes_by_its_own_name(traced):
    traced.add("a", [*PREFIX, 20], n=2)
    run(traced.engine)
    assert traced.explain("a").num_hit_tokens == 0
    assert traced.explain("a#1").num_hit_tokens == 12


def test_of_an_id_used_twice_the_last_use_is_explained(traced):
    traced.run("a", [*PREFIX, 20])
    traced.run("a", [*PREFIX, 20])
    assert traced.explain("a").num_hit_tokens == 12


def test_the_text_says_it_in_a_few_lines(traced):
    traced.run("a", [*PREFIX, 20])
    traced.run("b", [*PREFIX, 20, 21, 22, 23, 24])
    assert str(traced.explain("b")).splitlines()[:3] == [
        "request b: 17 prompt tokens",
        "  found   12 tokens in 3 blocks of 4, looked up for step 3",
        "  missed  block 3, positions [12, 16)",
    ]


# Files that do not help


def test_an_unknown_request_is_told_which_ones_there_are(traced):
    traced.run("a", PREFIX)
    with pytest.raises(TraceError, match="no request 'z'; it has a"):
        traced.explain("z")


def test_a_request_whose_turn_did_not_come_is_told_so(traced):
    traced.add("a", PREFIX)
    with pytest.raises(TraceError, match="never looked up"):
        traced.explain("a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("hello\n", "line 1 .*JSONDecodeError"),
        ("[]\n", "line 1"),
        ('{"format": "other", "block_size": 4}\n', "line 1 .*format is 'other'"),
        ('{"format": "minivllm-trace-1"}\n', "line 1 .*block_size"),
        ('{"format": "minivllm-trace-1", "block_size": 4}\n{"event": "wri', "line 2"),
        ('{"format": "minivllm-trace-1", "block_size": 4}\n[1]\n', "line 2"),
        ('{"format": "minivllm-trace-1", "block_size": 4}\n{"event": "write"}\n', "line 2"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        explain(path, "a")


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="line 1"):
        explain(path, "a")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read .*nowhere: No such file"):
        explain(tmp_path / "nowhere", "a")


def test_explain_needs_no_torch():
    code = (
        "import sys\nfor name in ('torch', 'numpy', 'transformers', 'tokenizers'):\n"
        "    sys.modules[name] = None\nimport minivllm.explain"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
