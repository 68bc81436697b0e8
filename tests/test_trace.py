"""The trace of real runs fits its schema, and tells the truth about the pool."""

import json
from pathlib import Path

import jsonschema
import pytest

import minivllm
from minivllm.errors import RunnerError
from tests.model_free import HistoryRunner, make_engine, params, run

SCHEMA = json.loads((Path(minivllm.__file__).parent / "trace_schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
EVENTS = [ref["$ref"].rsplit("/", 1)[1] for ref in SCHEMA["oneOf"]][1:]
PREFIX = list(range(12))


def eventful_lines():
    """Everything that can happen, in a pool of 10 blocks of 4."""
    lines = []
    engine = make_engine(
        num_kv_blocks=10,
        max_num_batched_tokens=16,
        prefix_cache_max_share=0.8,
        write_trace_line=lines.append,
    )
    engine.add_request("leader", [*PREFIX, 20], params(3))
    engine.add_request("follower", [*PREFIX, 21], params(3))  # passed over while leader computes
    run(engine)
    engine.add_request("anew", [*PREFIX, 22], params(2), cache_read=False)  # swaps for the cached
    run(engine)
    for name, first in (("old", 30), ("new", 40)):  # grow until one is preempted, evicting
        engine.add_request(name, [first] * 12, params(14))
    run(engine)
    engine.add_request("gone", [7, 7, 7], params(9, n=2), cache_salt="s", cacheable_tokens=2)
    engine.step()
    engine.abort("gone")
    run(engine)
    engine.runner.fail_next = ValueError("once")
    engine.add_request("again", [8, 8], params(1))
    with pytest.raises(RunnerError):
        engine.step()
    run(engine)
    engine.add_request("large", [9] * 30, params(30))  # outgrows the pool alone
    assert run(engine)["large", 0].finish_reason == "error"
    assert engine.reset_prefix_cache()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def lines():
    return eventful_lines()


def test_every_line_of_an_eventful_run_fits_the_schema(lines):
    VALIDATOR.check_schema(SCHEMA)
    for line in lines:
        VALIDATOR.validate(line)


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_of_the_schema_occurs(lines, event):
    assert event in {line.get("event") for line in lines}


def test_line_1_is_the_header_and_no_other_is(lines):
    header, *rest = lines
    assert header == {
        "format": "minivllm-trace-1",
        "block_size": 4,
        "num_kv_blocks": 10,
        "max_num_batched_tokens": 16,
    }
    assert all("event" in line for line in rest)


@pytest.mark.parametrize("event", EVENTS)
def test_a_line_with_a_field_missing_or_too_many_does_not_fit(lines, event):
    line = next(line for line in lines if line.get("event") == event)
    for field in line:
        short = {name: value for name, value in line.items() if name != field}
        assert not VALIDATOR.is_valid(short), f"{event} without {field}"
    assert not VALIDATOR.is_valid(line | {"surprise": 1})


def test_an_unknown_event_or_format_does_not_fit(lines):
    assert not VALIDATOR.is_valid({"event": "teleport", "sequence": "a"})
    assert not VALIDATOR.is_valid(lines[0] | {"format": "minivllm-trace-0"})


def test_the_holders_of_a_block_are_as_many_as_its_ref_count(lines):
    for line in lines:
        if "holders" in line:
            assert len(line["holders"]) == line["ref_count"], line


def test_a_replay_of_the_events_gives_the_free_list_and_tables_of_every_step(lines):
    num_blocks = lines[0]["num_kv_blocks"]
    counts, tables = dict.fromkeys(range(num_blocks), 0), {}
    for line in lines[1:]:
        if "block" in line:
            counts[line["block"]] = line["ref_count"]
        if line["event"] in ("allocate", "reference"):
            tables.setdefault(line["sequence"], []).append(line["block"])
        elif line["event"] == "swap":
            swapped = line
        elif line["event"] == "release":
            table = tables[line["sequence"]]
            if table[-1] == line["block"]:
                table.pop()
            else:  # the other half of a swap
                table[table.index(line["block"])] = swapped["block"]
        elif line["event"] == "step":
            assert sorted(line["free"]) == [b for b in counts if counts[b] == 0]
            for work in line["scheduled"]:
                assert work["block_table"] == tables[work["sequence"]]


def test_the_steps_are_numbered_and_their_budget_adds_up(lines):
    steps = [line for line in lines if line.get("event") == "step"]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        used = sum(work["end"] - work["start"] for work in step["scheduled"])
        assert used + step["budget_left"] == 16


def test_without_a_reader_nothing_is_written():
    engine = make_engine(HistoryRunner())
    engine.add_request("a", [1, 2], params(1))
    assert run(engine)["a", 0].finished


def test_hashes_that_are_not_bytes_stand_in_the_trace_as_text():
    lines = []
    engine = make_engine(hash_function=hash, write_trace_line=lines.append)
    engine.add_request("a", PREFIX, params(1))
    run(engine)
    for line in map(json.loads, lines):
        VALIDATOR.validate(line)
