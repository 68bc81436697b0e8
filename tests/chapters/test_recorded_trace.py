"""What a story leaves for the player fits the engine's schema, and tells the truth."""

import json
from pathlib import Path

import jsonschema
import pytest

import minivllm
from chapters.contents import chapter_named, mutants_of
from chapters.observe import Recorder
from chapters.regions import mutated
from chapters.stages import Stages, solution_path
from chapters.trace import trace_lines

SCHEMA = json.loads((Path(minivllm.__file__).parent / "trace_schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
MOST_STEPS = 20


class Work:
    """Requests of 4 or 5 tokens that share a start, in a pool of 8 blocks of 2, all observed."""

    def __init__(self, files=None):
        self.stages = Stages(files)
        self.recorder = Recorder()

    def pool(self, **sizes):
        module = self.stages.load("ch06_prefix_cache")
        self.recorder.observe(module, ("CachingBlockManager",))
        return module.CachingBlockManager(**{"num_blocks": 8, "block_size": 2} | sizes)

    def scheduler(self, **sizes):
        module = self.stages.load("ch07_suffix_prefill")
        self.recorder.observe(module, ("Scheduler",))
        pool = self.stages.load("ch06_prefix_cache").CachingBlockManager(6, 2)
        return module.Scheduler(pool, **{"max_num_batched_tokens": 32, "max_model_len": 12} | sizes)

    def sequence(self, name, *token_ids, **params):
        ch01 = self.stages.load("ch01_sequence")
        return ch01.Sequence(name, list(token_ids), ch01.SamplingParams(**params))

    @property
    def lines(self):
        return [json.loads(line) for line in trace_lines(self.recorder.story)]


def run_engine(work):
    scheduler = work.scheduler()
    for name, start in (("A", 1), ("B", 1), ("C", 5)):
        scheduler.add(work.sequence(name, start, 2, 3, 4, ord(name), max_tokens=5))
    for _ in range(MOST_STEPS):  # wrong code may go on for ever
        if not scheduler.waiting and not scheduler.running:
            return
        scheduled = scheduler.schedule()
        scheduler.commit(scheduled, [9] * len(scheduled))


def events(lines, *names):
    return [line for line in lines if line.get("event") in names]


def test_every_line_fits_the_schema_and_an_engine_makes_all_kinds():
    work = Work()
    run_engine(work)
    for line in work.lines:
        VALIDATOR.validate(line)
    kinds = {line.get("event") for line in work.lines}
    expected = {"add", "allocate", "reference", "write", "publish", "release", "evict", "step"}
    assert expected | {"preempt", "finish"} <= kinds


def test_line_1_has_the_sizes():
    work = Work()
    run_engine(work)
    assert work.lines[0] == {
        "format": "minivllm-trace-1",
        "block_size": 2,
        "num_kv_blocks": 6,
        "max_num_batched_tokens": 32,
    }


def test_a_step_line_follows_each_operation():
    work = Work()
    run_engine(work)
    steps = events(work.lines, "step")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert len(steps) == len(work.recorder.story.operations)


def test_a_replay_of_the_events_gives_the_tables_and_counts_of_every_step():
    work = Work()
    run_engine(work)
    holders = {block: [] for block in range(6)}
    for line in work.lines[1:]:
        if "block" in line:
            assert len(line["holders"]) == line["ref_count"], line
            holders[line["block"]] = line["holders"]
        if line["event"] == "step":
            assert sorted(line["free"]) == [b for b in holders if not holders[b]]
            assert sorted(line["lru"]) == [b for b in holders if holders[b] == ["cache"]]
            for each in line["scheduled"]:
                mine = [b for b in holders if each["sequence"] in holders[b]]
                assert sorted(each["block_table"]) == mine


def test_what_was_found_is_not_written():
    work = Work()
    pool = work.pool()
    a, b = work.sequence("A", 1, 2, 3, 4, 5), work.sequence("B", 1, 2, 3, 4, 6)
    pool.allocate(a, 5)
    pool.commit(a, 5)
    pool.allocate(b, 1, pool.match(b))
    pool.commit(b, 5)
    written = [(e["sequence"], e["start"], e["end"]) for e in events(work.lines, "write")]
    assert written == [("A", 0, 5), ("B", 4, 5)]
    referenced = [(e["sequence"], e["block"]) for e in events(work.lines, "reference")]
    assert referenced == [("B", 0), ("B", 1)]


def test_a_second_copy_is_swapped_for_the_cached_block():
    work = Work()
    pool = work.pool()
    a, b = work.sequence("A", 1, 2, 3), work.sequence("B", 1, 2, 4)
    for each in (a, b):
        pool.allocate(each, 3)
    for each in (a, b):
        pool.commit(each, 3)
    swap, release = events(work.lines, "swap", "release")
    assert (swap["sequence"], swap["block"], swap["holders"]) == ("B", 0, ["cache", "A", "B"])
    assert (release["sequence"], release["block"], release["holders"]) == ("B", 2, [])


def test_an_eviction_comes_before_the_block_is_taken():
    work = Work()
    pool = work.pool(num_blocks=2)
    a, b = work.sequence("A", 1, 2, 3), work.sequence("B", 7, 8, 9)
    pool.allocate(a, 3)
    pool.commit(a, 3)
    pool.free(a)
    pool.allocate(b, 3)
    last = [line for line in work.lines if line.get("block") == 0][-2:]
    assert [line["event"] for line in last] == ["evict", "allocate"]


def test_the_count_is_the_one_that_the_code_keeps():
    work = Work()
    pool = work.pool()
    a = work.sequence("A", 1)
    pool.allocate(a, 1)
    pool.ref_counts[0] = 0
    pool.free_order()
    pool.match(a)
    pool.allocate(work.sequence("B", 2), 1)
    assert pool.ref_counts[0] == 0
    (allocated, _) = events(work.lines, "allocate")
    assert (allocated["ref_count"], allocated["holders"]) == (1, ["A"])


CHAPTER = chapter_named("ch06_prefix_cache")


@pytest.mark.parametrize("mutant", mutants_of(CHAPTER), ids=lambda mutant: mutant.name)
def test_the_trace_of_wrong_code_fits_the_schema_too(mutant, tmp_path):
    file = tmp_path / "prefix_cache.py"
    file.write_text(mutated(solution_path(CHAPTER.name).read_text(), mutant))
    work = Work({CHAPTER.name: file})
    try:
        run_engine(work)
    except Exception as error:  # it is wrong
        print(f"{mutant.name}: {error}")
    for line in work.lines:
        VALIDATOR.validate(line)
