"""The block-table player: what it shows is what the trace says, and a wrong trace does not pass."""

import copy
import json
import random
from contextlib import suppress

import pytest

from book import traces
from chapters.contents import chapter_named, mutant_named
from chapters.regions import mutated
from chapters.stages import solution_path
from chapters.trace import trace_lines
from minivllm.errors import RunnerError
from tests.chapters.test_recorded_trace import Work, run_engine
from tests.model_free import make_engine, params, run
from tests.site.browser import PHONE, visit
from tests.test_trace import eventful_lines

pytestmark = pytest.mark.site


@pytest.fixture(scope="module")
def opened(browser, served):
    with visit(browser, served, "player.html") as opened:
        yield opened
        assert opened.errors == []


@pytest.fixture
def page(opened):
    """The page of the player, with one trace and at its start."""
    show(opened.page, traces.record("shared-prefix"))
    return opened.page


def show(page, lines, name="trace.jsonl"):
    """Choose a file, as a reader would, and wait until it is shown or refused."""
    text = "\n".join(lines) + "\n"
    file = {"name": name, "mimeType": "text/plain", "buffer": text.encode()}
    page.evaluate("document.querySelector('.btp-pool').dataset.old = 'yes'")
    page.locator(".btp-file").set_input_files(file)
    page.wait_for_function(
        "!document.querySelector('.btp-message').hidden"
        " || !document.querySelector('.btp-pool').dataset.old"
    )


def drop(page, text, name="dropped.jsonl"):
    """Drop a file on the player."""
    page.evaluate(
        """([text, name]) => {
            const data = new DataTransfer()
            data.items.add(new File([text], name))
            const player = document.querySelector(".block-table-player")
            player.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }))
        }""",
        [text, name],
    )


def press(page, key):
    page.locator(".btp-body").focus()
    page.keyboard.press(key)


SHOWN_COUNTS = """[...document.querySelectorAll(".btp-block")].map((cell) =>
    [Number(cell.dataset.block), Number(cell.querySelector(".btp-count").textContent)])"""


def shown_counts(page):
    """Block -> ref count, as drawn."""
    return dict(page.evaluate(SHOWN_COUNTS))


def step_through(page):
    """Press the button for the next event until the end; what is drawn after each."""
    drawn = page.evaluate(
        f"""() => {{
            const forward = document.querySelector("button[aria-label='Forward one event']")
            const numEvents = Number(document.querySelector(".btp-controls input").max)
            return Array.from({{length: numEvents}}, () => (forward.click(), {SHOWN_COUNTS}))
        }}"""
    )
    return [dict(counts) for counts in drawn]


def mismatches(page, lines):
    """[event index, [[invariant, message], ...]] of each event that breaks an invariant."""
    return page.evaluate(
        """(text) => {
            const player = BlockTablePlayer
            const replay = new player.Replay(player.parseTrace(text))
            const told = (i) => replay.at(i).mismatches.map((m) => [m.invariant, m.message])
            return replay.mismatches.map((i) => [i, told(i)])
        }""",
        "\n".join(lines),
    )


# What is shown


@pytest.mark.parametrize("name", traces.SCENARIOS)
def test_every_step_through_a_recorded_run_shows_the_ref_counts_of_the_trace(opened, name):
    page, lines = opened.page, traces.record(name)
    show(page, lines)
    header, *events = [json.loads(line) for line in lines]
    counts = dict.fromkeys(range(header["num_kv_blocks"]), 0)
    assert shown_counts(page) == counts
    for number, (event, shown) in enumerate(zip(events, step_through(page), strict=True), 1):
        if "block" in event:
            counts[event["block"]] = event["ref_count"]
        assert shown == counts, f"after event {number}: {event}"
    assert page.locator(".btp-event").inner_text().startswith(f"{len(events)}/{len(events)} ")


def test_the_step_event_shows_the_queues_the_budget_and_the_orders_of_the_trace(page):
    lines = traces.record("preempt-and-resume")
    show(page, lines)
    for line in map(json.loads, lines[1:]):
        press(page, "ArrowRight")
        if line["event"] != "step":
            continue
        queues = {q: page.locator(f"[data-queue={q}] .btp-chip").all_inner_texts() for q in QUEUES}
        assert queues["waiting"] == line["waiting"]
        assert queues["running"] == line["running"]
        assert queues["free"] == [f"b{block}" for block in line["free"]]
        assert queues["idle"] == [f"b{block}" for block in line["lru"]]
        charged = 16 - line["budget_left"]
        assert page.locator(".btp-budget-text").inner_text() == f"{charged} of 16"


QUEUES = ("waiting", "running", "free", "idle")


def test_a_strip_shows_what_was_found_what_is_computed_and_what_waits(page):
    page.locator("select[aria-label='jump to an event']").select_option(label="12  step 2")
    ben = page.locator("[data-sequence=ben] .btp-position")
    kinds = [cell.get_attribute("class").split("btp-")[-1] for cell in ben.all()]
    assert kinds == ["found"] * 4 + ["now"] * 2 + ["beyond"] * 2
    blocks = page.locator("[data-sequence=ben] .btp-table").all_text_contents()
    assert blocks == ["b0", "b2"]


def test_a_caption_says_what_happened_and_names_the_invariant(page):
    page.locator("select[aria-label='jump to an event']").select_option(
        label="10  reference ben b0"
    )
    text = page.locator(".btp-caption").inner_text()
    assert "Ref count 2 becomes 3" in text
    assert "I2: a ref count is" in text


@pytest.mark.parametrize(("start", "index"), [("reference", 9), ("10", 9), ("", -1), ("gone", -1)])
def test_a_page_says_where_to_begin(page, start, index):
    find = """([text, start]) =>
        BlockTablePlayer.findStart(BlockTablePlayer.parseTrace(text).events, start)"""
    assert page.evaluate(find, ["\n".join(GOOD), start]) == index


def test_the_home_page_begins_where_the_count_becomes_3(browser, served):
    with visit(browser, served, "index.html") as opened:
        assert shown_counts(opened.page)[0] == 3


# Moving


def test_keys_move_forward_back_by_steps_and_to_both_ends(page):
    where = page.locator(".btp-caption")
    num_events = len(traces.record("shared-prefix")) - 1
    for key, expected in [
        ("ArrowRight", f"1/{num_events} add"),
        ("ArrowRight", f"2/{num_events} match"),
        ("ArrowLeft", f"1/{num_events} add"),
        ("PageDown", f"5/{num_events} step"),
        ("PageDown", f"12/{num_events} step"),
        ("PageUp", f"5/{num_events} step"),
        ("End", f"{num_events}/{num_events} finish"),
        ("Home", "The start: "),
    ]:
        press(page, key)
        assert where.inner_text().startswith(expected), f"after {key}"


def test_buttons_and_slider_move_too(page):
    where = page.locator(".btp-caption")
    page.get_by_role("button", name="Forward one event").click()
    assert where.inner_text().startswith("1/")
    page.get_by_role("button", name="Forward to the next step").click()
    assert where.inner_text().startswith("5/")
    page.get_by_role("button", name="Back one event").click()
    assert where.inner_text().startswith("4/")
    page.get_by_role("slider", name="event").fill("7")
    assert where.inner_text().startswith("7/")
    page.get_by_role("button", name="To the start").click()
    assert where.inner_text().startswith("The start")


def test_space_plays_to_the_end_and_stops(page):
    page.locator("select[aria-label=speed]").select_option("fast")
    press(page, "End")
    for _ in range(4):
        press(page, "ArrowLeft")
    press(page, " ")
    assert page.get_by_role("button", name="Pause").count() == 1
    num_events = len(traces.record("shared-prefix")) - 1
    page.locator(".btp-event", has_text=f"{num_events}/{num_events}").wait_for(timeout=10_000)
    page.get_by_role("button", name="Play").wait_for(timeout=5_000)


def test_a_swipe_to_the_left_is_a_step_forward(browser, served):
    with visit(browser, served, "player.html", viewport=PHONE, touch=True) as opened:
        before = opened.page.locator(".btp-caption").inner_text()
        opened.page.evaluate(
            """() => {
                const stage = document.querySelector(".btp-stage")
                const touch = (type, x) => stage.dispatchEvent(new PointerEvent(type, {
                    pointerType: "touch", clientX: x, clientY: 100, bubbles: true }))
                touch("pointerdown", 300)
                touch("pointerup", 120)
            }"""
        )
        assert before.startswith("The start")
        assert opened.page.locator(".btp-caption").inner_text().startswith("1/")


def test_a_chosen_block_tells_its_story(page):
    press(page, "End")
    page.locator("[data-block='0']").click()
    text = page.locator(".btp-detail").inner_text()
    assert text.startswith("b0: ref count 1, held by cache; positions 0 to 3")
    assert "key " in text


def test_a_block_can_be_chosen_by_key(page):
    for key, block in [("b", "b0"), ("b", "b1"), ("B", "b0"), ("B", "b7")]:
        press(page, key)
        assert page.locator(".btp-detail").inner_text().startswith(f"{block}: ")


def test_recorded_runs_can_be_chosen_from_a_list(page):
    title = traces.SCENARIOS["failed-step"].title
    page.get_by_role("combobox", name="recorded trace").select_option(label=title)
    page.locator(".btp-caption", has_text="The start: 8 blocks of 4 slots").wait_for()
    assert page.locator(".btp-block").count() == 8


# A trace of the reader's own


def test_a_dropped_file_is_shown(page):
    drop(page, "\n".join(traces.record("wait-for-prefix")))
    page.locator(".btp-caption", has_text="The start: 10 blocks").wait_for()


def test_a_large_pool_shows_the_blocks_that_the_trace_touches(opened):
    lines = []
    engine = make_engine(num_kv_blocks=1500, write_trace_line=lines.append)
    engine.add_request("a", range(10), params(2))
    while engine.has_unfinished_requests():
        engine.step()
    show(opened.page, lines)
    assert list(shown_counts(opened.page)) == [0, 1, 2]
    assert "1497 of 1500 blocks are not drawn" in opened.page.locator(".btp-notes").inner_text()


def change(line, **fields):
    return json.dumps(json.loads(line) | fields)


def without(line, field):
    return json.dumps({name: value for name, value in json.loads(line).items() if name != field})


GOOD = traces.record("shared-prefix")
BROKEN = {
    "empty": ([], "the trace is empty"),
    "only a header": (GOOD[:1], "the trace has a header but no event"),
    "a picture": (["\x89PNG"], "line 1 is not JSON"),
    "another JSON file": (['{"a": 1}'], "line 1, the header: format, block_size"),
    "another format": (
        [change(GOOD[0], format="minivllm-trace-9"), *GOOD[1:]],
        'line 1, the header: format is "minivllm-trace-9", not "minivllm-trace-1"',
    ),
    "cut off": ([*GOOD[:6], GOOD[6][:20]], "line 7 is not JSON"),
    "an unknown event": (
        [*GOOD[:2], change(GOOD[2], event="teleport"), *GOOD[3:]],
        'line 3: there is no event "teleport"',
    ),
    "a field missing": (
        [*GOOD[:3], without(GOOD[3], "ref_count"), *GOOD[4:]],
        "line 4, event allocate: ref_count is missing",
    ),
    "a field too many": (
        [*GOOD[:3], change(GOOD[3], colour="red"), *GOOD[4:]],
        'line 4, event allocate: there is no field "colour"',
    ),
    "a value of the wrong type": (
        [*GOOD[:3], change(GOOD[3], block="b0"), *GOOD[4:]],
        'line 4, event allocate: block is "b0"; it must be of type integer',
    ),
    "a block outside the pool": (
        [*GOOD[:3], change(GOOD[3], block=8), *GOOD[4:]],
        "line 4, event allocate: block 8, but the last block of the pool is 7",
    ),
    "an empty range": (
        [*GOOD[:6], change(GOOD[6], start=6), *GOOD[7:]],
        "line 7, event write: [6, 6) holds no position",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_trace_gets_a_message_that_names_the_line(page, fault):
    lines, message = BROKEN[fault]
    drop(page, "\n".join(lines), "broken.jsonl")
    alert = page.locator(".btp-message")
    alert.wait_for(timeout=5_000)
    assert f"broken.jsonl: {message}" in alert.inner_text()


def test_after_a_broken_trace_the_one_before_is_still_there(page):
    drop(page, "nonsense")
    page.locator(".btp-message").wait_for(timeout=5_000)
    press(page, "End")
    assert shown_counts(page)[0] == 1


# The replay does not believe the trace


def test_an_eventful_run_replays_without_a_mismatch(page):
    lines = eventful_lines()
    assert mismatches(page, [json.dumps(line) for line in lines]) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_random_run_replays_without_a_mismatch(page, seed):
    assert mismatches(page, random_run(seed)) == []


@pytest.mark.parametrize("name", ["solution", "share_is_not_counted"])
def test_the_trace_of_a_chapters_check_is_shown_as_it_was(page, tmp_path, name):
    # What a check leaves in the workbook; a wrong answer's faults are shown, not hidden.
    files = {}
    if name != "solution":
        chapter = chapter_named("ch06_prefix_cache")
        files[chapter.name] = tmp_path / "mutant.py"
        source = solution_path(chapter.name).read_text()
        files[chapter.name].write_text(mutated(source, mutant_named(chapter, name)))
    work = Work(files)
    with suppress(Exception):
        run_engine(work)
    lines = list(trace_lines(work.recorder.story))
    found = mismatches(page, lines)
    assert bool(found) == (name != "solution"), found
    show(page, lines)
    assert "6 blocks" in page.locator(".btp-body").inner_text()


def random_run(seed):
    """Requests of all kinds through a small pool, with aborts, resets and failing steps."""
    chance = random.Random(seed)
    lines = []
    engine = make_engine(
        block_size=chance.choice([1, 2, 4]),
        num_kv_blocks=chance.randint(8, 20),
        max_num_batched_tokens=chance.randint(3, 24),
        prefix_cache_max_share=chance.choice([0.3, 1.0]),
        write_trace_line=lines.append,
    )
    bases = [[chance.randrange(50) for _ in range(7)] for _ in range(2)]
    for i in range(30):
        if chance.random() < 0.5:
            add_any(engine, str(i), [*chance.choice(bases)[: chance.randint(1, 7)], i], chance)
        live = engine.scheduler.waiting + engine.scheduler.running
        if chance.random() < 0.1 and live:
            engine.abort(chance.choice(live).request_id)
        if chance.random() < 0.1:
            engine.reset_prefix_cache()
        if chance.random() < 0.1:
            engine.runner.fail_next = ValueError("planted")
        with suppress(RunnerError):
            engine.step()
    engine.runner.fail_next = None
    run(engine)
    return lines


def add_any(engine, name, prompt, chance):
    """Add a request that may use the cache in one way or another."""
    engine.add_request(
        name,
        prompt,
        params(chance.randint(1, 9), n=chance.choice([1, 2])),
        cache_read=chance.random() < 0.8,
        cache_write=chance.random() < 0.8,
        cache_salt=chance.choice([None, None, "s"]),
    )


EVENTFUL = eventful_lines()


def tampered(event, **fields):
    """The eventful run with the last event of a kind changed; fields may be functions."""
    lines = copy.deepcopy(EVENTFUL)
    line = next(line for line in reversed(lines) if line.get("event") == event)
    for name, value in fields.items():
        line[name] = value(line[name]) if callable(value) else value
    return [json.dumps(line) for line in lines]


def dropped(event):
    """The eventful run without the last event of a kind."""
    at = max(i for i, line in enumerate(EVENTFUL) if line.get("event") == event)
    return [json.dumps(line) for i, line in enumerate(EVENTFUL) if i != at]


LIES = {
    "a ref count too high": ("I2", tampered("reference", ref_count=lambda n: n + 1)),
    "a ref count too low": ("I2", tampered("publish", ref_count=lambda n: n - 1)),
    "a holder too many": ("I2", tampered("release", holders=lambda held: [*held, "ghost"])),
    "another key": ("I7", tampered("reference", key="0" * 32)),
    "a block handed out twice": ("I1", tampered("allocate", block=lambda b: (b + 9) % 10)),
    "a write behind what is computed": ("I4", tampered("write", start=0)),
    "a free list that misses a block": ("I1", tampered("step", free=lambda f: f[1:])),
    "a step that was left out": ("I11", tampered("step", step=lambda n: n + 1)),
    "a budget that does not add up": ("I8", tampered("step", budget_left=lambda n: n + 1)),
    "a sequence that nobody waits for": ("I10", tampered("step", running=["ghost"])),
    "tokens lost in a preemption": ("I10", tampered("preempt", num_tokens=lambda n: n - 1)),
    "an output shorter than it was": ("I10", tampered("finish", output_token_ids=lambda t: t[1:])),
    "a release that was not told": ("I2", dropped("release")),
    "a write that was not told": ("I6", dropped("write")),
    "an eviction that was not told": ("I1", dropped("evict")),
    "an add that was not told": ("I10", dropped("add")),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_trace_that_lies_is_found_out(page, lie):
    invariant, lines = LIES[lie]
    found = [broken for _, each in mismatches(page, lines) for broken, _ in each]
    assert invariant in found, f"found {found}"


def test_a_mismatch_is_shown_where_it_happens_and_can_be_jumped_to(page):
    lines = [*GOOD[:3], change(GOOD[3], ref_count=2), *GOOD[4:]]
    show(page, lines)
    assert (
        "In 1 of 27 events the trace breaks an invariant"
        in page.locator(".btp-faults").inner_text()
    )
    page.get_by_role("button", name="Go to the first one").click()
    alert = page.locator(".btp-mismatch")
    assert "I2 does not hold. the trace counts 2 for b0, the replay 1" in alert.inner_text()
    assert "btp-suspect" in page.locator("[data-block='0']").get_attribute("class")


def test_a_schema_keyword_that_the_player_does_not_know_is_an_error(page):
    wrong = "BlockTablePlayer.misfit(1, {multipleOf: 2}, {})"
    with pytest.raises(Exception, match="keyword multipleOf is not supported"):
        page.evaluate(wrong)
