"""The benchmarks of memory pressure measure what they say, and their policies are right."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import pressure
from benchmarks.chart import Line, line_chart
from benchmarks.conversations import Chat, ChatShape
from benchmarks.mooncake import TraceError, read_trace, replay
from benchmarks.policies import PolicyCache, by_frequency, by_recency
from minivllm import EngineConfig, LLMEngine
from tests.model_free import HistoryRunner

SMALL = ChatShape(conversations=5, turns=3, system_tokens=20, user_tokens=7, answer_tokens=6)


@st.composite
def traces(draw):
    """Requests that continue earlier ones at random places."""
    requests = []
    for number in range(draw(st.integers(1, 25))):
        start = draw(st.sampled_from([[], *requests]))
        kept = start[: draw(st.integers(0, 6))]
        new = draw(st.integers(0 if kept else 1, 4))
        requests.append(kept + [100 * number + i for i in range(new)])
    return requests


@settings(max_examples=200, deadline=None)
@given(traces(), st.integers(12, 40))
def test_simulated_lru_finds_what_the_engines_lru_finds(requests, capacity):
    cache = PolicyCache(capacity, by_recency)
    assert [cache.serve(ids) for ids in requests] == list(replay(requests, capacity))


def test_lfu_keeps_what_is_used_often_where_lru_keeps_what_is_new():
    often, once = [1, 2], [[10, 11], [20, 21], [30, 31]]
    trace = [often, often, often, *once, often]
    lfu, lru = PolicyCache(6, by_frequency), PolicyCache(6, by_recency)
    assert [lfu.serve(ids) for ids in trace][-1] == 2
    assert [lru.serve(ids) for ids in trace][-1] == 0


def test_a_threshold_of_two_finds_a_prefix_from_its_third_use_on():
    cache = PolicyCache(100, by_recency, times_seen=2)
    assert [cache.serve([1, 2, 3]) for _ in range(4)] == [0, 0, 3, 3]


def test_an_endless_cache_finds_every_repeated_block():
    requests = [[1, 2, 3], [1, 2, 4], [5, 2, 3], [1, 2, 3, 6]]
    assert list(replay(requests, 100)) == [0, 2, 0, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hash_ids": [1]}\n{"other": 2}', "line 2"),
        ("no json", "line 1"),
        ('{"hash_ids": [1, -2]}', "whole numbers"),
        ('{"hash_ids": 5}', "whole numbers"),
        ("", "holds no request"),
    ],
)
def test_a_broken_trace_is_refused_by_line(tmp_path, text, message):
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "trace.jsonl")


def test_the_command_replays_a_trace(tmp_path, monkeypatch, capsys):
    requests = [[0, i, 100 + i] for i in range(9)]
    lines = "\n".join(json.dumps({"hash_ids": ids}) for ids in requests)
    (tmp_path / "trace.jsonl").write_text(lines)
    monkeypatch.setattr(pressure, "CAPACITIES", (10, 20))
    path = str(tmp_path / "trace.jsonl")
    monkeypatch.setattr("sys.argv", ["pressure", "--trace", path, "--plot", str(tmp_path)])
    assert pressure.main() == 0
    out = capsys.readouterr().out
    assert "endless" in out
    # 8 of 27 blocks are the shared first one, found again: by the engine and two policies.
    assert out.count("29.63%") == 3 * 3, out
    # Who must have seen it twice finds it 7 times.
    assert out.count("25.93%") == 3, out
    ElementTree.parse(tmp_path / "pressure-trace.svg")


def test_a_missing_trace_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pressure", "--trace", str(tmp_path / "none")])
    assert pressure.main() == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_a_chat_grows_by_questions_and_answers():
    chat = Chat(SMALL, vocab_size=50)
    first = chat.prompts(0)
    chat.answer(2, [7] * SMALL.answer_tokens)
    second = chat.prompts(1)
    assert len({tuple(prompt[:20]) for prompt in first}) == 1
    assert second[2][: len(first[2])] == first[2]
    assert second[2][len(first[2]) :][:6] == [7] * 6
    assert len(second[2]) == 20 + 7 + 6 + 7


def test_more_pool_means_more_hits_and_the_same_answers():
    points = [(20, 100), (100, 100), (200, 100), (100, 0)]
    runner = HistoryRunner(max_model_len=400)
    small, exact, large, capped = pressure.measure_chat(lambda: runner, SMALL, points)
    assert small.hit_rate < exact.hit_rate
    assert exact.evicted_blocks == large.evicted_blocks == 0
    assert small.evicted_blocks > 0
    assert capped.hit_rate < exact.hit_rate
    needed = SMALL.blocks_needed(pressure.BLOCK_SIZE)
    assert exact.num_kv_blocks == needed
    table = pressure.chat_table([small, exact, large, capped])
    assert f"{needed:,}" in table
    for svg in pressure.chat_charts([small, exact, large, capped]).values():
        ElementTree.fromstring(svg)


def test_a_pool_of_what_all_text_fills_is_just_enough():
    runner = HistoryRunner(max_model_len=400)
    config = EngineConfig(num_kv_blocks=SMALL.blocks_needed(16), max_num_seqs=4)
    engine = LLMEngine(config, runner)
    pressure.replay_chat(engine, SMALL)
    stats = engine.stats()
    assert stats["evicted_blocks"] == 0
    # A conversation's last block may be part full, so it is released, not cached.
    assert stats["blocks_free"] <= SMALL.conversations


def test_a_wrong_answer_stops_the_benchmark():
    runner = HistoryRunner(max_model_len=400)
    execute = runner.execute

    def execute_differently(batch):
        sampled = execute(batch)
        is_second = runner.num_computed > 600
        return [token._replace(token_id=0) for token in sampled] if is_second else sampled

    runner.execute = execute_differently
    with pytest.raises(SystemExit, match="changed an answer"):
        list(pressure.measure_chat(lambda: runner, SMALL, [(100, 100), (50, 100)]))


def test_a_chart_has_a_point_for_each_figure():
    svg = line_chart(
        "t & u", "x", "y", [1, 10, 100], [Line("a", [0, 1, 2])], x_labels="abc", logarithmic=True
    )
    root = ElementTree.fromstring(svg)
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    xs = [float(circle.get("cx")) for circle in circles]
    assert len(xs) == 3
    assert xs[2] - xs[1] == pytest.approx(xs[1] - xs[0])


def test_labels_of_a_chart_do_not_touch():
    svg = line_chart(
        "t", "x", "y", [10, 15, 200], [Line("a", [1, 1, 1])], x_labels=["10", "15", "200"]
    )
    assert ">10<" in svg
    assert ">15<" not in svg
    assert ">200<" in svg
    assert svg.count("<circle") == 3
