"""What a test did is told from outside, whoever wrote the class and however broken it is."""

from types import SimpleNamespace

import pytest

from chapters.observe import Recorder
from chapters.picture import operations, pool_picture
from chapters.stages import Stages


class Counter:
    """Something to observe: `add` works through `step`."""

    def __init__(self, start=0):
        self.value = start
        self.step()

    def step(self):
        self.value += 1
        return self.value

    def add(self, count):
        for _ in range(count):
            self.step()

    def fail(self):
        raise ValueError("no")


@pytest.fixture
def observed():
    """A module with an observed class of its own, and its recorder."""
    module = SimpleNamespace(Counter=type("Counter", (Counter,), {}))
    recorder = Recorder()
    recorder.observe(module, ("Counter",))
    return module, recorder


def told(recorder):
    return [(each.text, each.outcome) for each in recorder.story.operations]


def test_only_calls_from_outside_are_operations(observed):
    module, recorder = observed
    counter = module.Counter(start=3)
    counter.add(2)
    counter.step()
    assert recorder.story.text == "Counter(start=3)"
    assert told(recorder) == [("add(2)", ""), ("step()", "-> 7")]


def test_an_exception_is_an_outcome_and_goes_on(observed):
    module, recorder = observed
    counter = module.Counter()
    with pytest.raises(ValueError, match="no"):
        counter.fail()
    counter.step()
    assert told(recorder) == [("fail()", "raises ValueError: no"), ("step()", "-> 2")]


def test_a_new_root_begins_a_new_story(observed):
    module, recorder = observed
    module.Counter().step()
    module.Counter(5)
    assert recorder.story.text == "Counter(5)"
    assert told(recorder) == []


def test_an_older_root_keeps_its_own_story(observed):
    module, recorder = observed
    first = module.Counter(1)
    module.Counter(2).step()
    first.step()
    assert recorder.story.text == "Counter(1)"
    assert told(recorder) == [("step()", "-> 3")]


def test_after_the_end_nothing_is_recorded(observed):
    module, recorder = observed
    counter = module.Counter()
    recorder.stop()
    counter.step()
    assert told(recorder) == []


def test_a_class_that_is_missing_is_left_out():
    recorder = Recorder()
    recorder.observe(SimpleNamespace(), ("Missing",))
    assert recorder.story is None


def test_the_class_itself_is_not_changed_for_others(observed):
    module, recorder = observed
    Counter().step()
    assert recorder.story is None
    assert module.Counter is not Counter


# Pools


@pytest.fixture
def stages():
    return Stages()


def observed_pool(stages, name="ch03_block_manager", cls="BlockManager", **sizes):
    module = stages.load(name)
    recorder = Recorder()
    recorder.observe(module, (cls,))
    return getattr(module, cls)(**sizes), recorder


def sequence(stages, name, *token_ids):
    return stages.load("ch01_sequence").Sequence(name, list(token_ids))


def test_the_operations_name_sequences_and_say_what_changed(stages):
    pool, recorder = observed_pool(stages, num_blocks=3, block_size=2)
    a = sequence(stages, "A", 7, 8, 9)
    pool.allocate(a, 3)
    pool.commit(a, 3)
    pool.free(a)
    assert list(operations(recorder.story)) == [
        "     BlockManager(num_blocks=3, block_size=2)",
        "     A = 7 8 9",
        "   1 allocate(A, 3)   A takes 0 1",
        "   2 commit(A, 3)   A computed [0, 3)",
        "   3 free(A)   A gives back 1 0",
    ]


def test_two_sequences_of_one_name_are_told_apart(stages):
    pool, recorder = observed_pool(stages, num_blocks=3, block_size=2)
    pool.allocate(sequence(stages, "A", 1), 1)
    pool.allocate(sequence(stages, "A", 2), 1)
    assert [each.text for each in recorder.story.operations] == [
        "allocate(A, 1)",
        "allocate(A#2, 1)",
    ]


def test_the_picture_shows_tokens_counts_holders_and_tables(stages):
    pool, recorder = observed_pool(stages, num_blocks=3, block_size=2)
    a = sequence(stages, "A", 7, 8, 9)
    pool.allocate(a, 3)
    pool.commit(a, 3)
    assert list(pool_picture(recorder.story.now())) == [
        "block 0    [7 8]              ref 1  A",
        "block 1    [9 _]              ref 1  A",
        "free       2",
        "A          waiting, 3 of 3 tokens computed, table [0 1]",
    ]


def test_the_picture_shows_keys_the_cache_and_the_order_of_eviction(stages):
    pool, recorder = observed_pool(
        stages, "ch06_prefix_cache", "CachingBlockManager", num_blocks=4, block_size=2
    )
    a = sequence(stages, "A", 1, 2, 3, 4, 5)
    pool.allocate(a, 5)
    pool.commit(a, 5)
    pool.free(a)
    b = sequence(stages, "B", 1, 2, 9)
    pool.allocate(b, 1, pool.match(b))
    lines = list(pool_picture(recorder.story.now()))
    keys = [pool.cached_at(block).key.hex()[:8] for block in (0, 1)]
    assert lines[:4] == [
        f"block 0    [1 2]              ref 2  cache, B  key {keys[0]}",
        f"block 1    [3 4]              ref 1  cache  key {keys[1]}",
        "block 2    [_ _]              ref 1  B",
        "free       3",
    ]
    assert lines[4].startswith("idle       1 ")


@pytest.mark.parametrize(
    ("spoil", "line", "mark"),
    [
        (lambda pool, a: pool.ref_counts.__setitem__(0, 0), "block 0", "I2"),
        (lambda pool, a: pool._free.append(0), "block 0", "I2"),
        (lambda pool, a: pool._free.append(2), "block 2", "I1"),
        (lambda pool, a: pool._free.remove(2), "block 2", "I1"),
    ],
)
def test_the_picture_marks_what_cannot_be_right(stages, spoil, line, mark):
    pool, recorder = observed_pool(stages, num_blocks=3, block_size=2)
    a = sequence(stages, "A", 7)
    pool.allocate(a, 1)
    spoil(pool, a)
    marked = [each for each in pool_picture(recorder.story.now()) if "<--" in each]
    assert len(marked) == 1
    assert marked[0].startswith(line)
    assert marked[0].endswith(f"<-- {mark}")


def test_a_right_pool_has_no_mark(stages):
    pool, recorder = observed_pool(stages, num_blocks=3, block_size=2)
    pool.allocate(sequence(stages, "A", 7), 1)
    assert "<--" not in "\n".join(pool_picture(recorder.story.now()))


def test_blocks_that_the_failure_names_are_marked(stages):
    pool, recorder = observed_pool(stages, num_blocks=3, block_size=2)
    pool.allocate(sequence(stages, "A", 7), 1)
    lines = list(pool_picture(recorder.story.now(), {0: "C3.4"}))
    assert lines[0].endswith("<-- C3.4")


def test_a_half_written_class_is_told_as_far_as_it_goes():
    class Pool:
        def __init__(self):
            self.num_blocks = 2
            self.ref_counts = None

        @property
        def block_size(self):
            raise NotImplementedError

        def free_order(self):
            raise NotImplementedError

        def take(self):
            raise NotImplementedError("Task 3.1")

    recorder = Recorder()
    recorder.observe(SimpleNamespace(Pool=Pool), ("Pool",))
    with pytest.raises(NotImplementedError):
        Pool().take()
    assert told(recorder) == [("take()", "raises NotImplementedError: Task 3.1")]
    assert list(pool_picture(recorder.story.now()))
