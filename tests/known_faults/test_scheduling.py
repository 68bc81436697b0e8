"""Known faults of scheduling: aborts, chunks, preemption, fairness. On the whole engine.

Block size 16 and cap 1.0. Unless a test needs real attention, the runner has no model: its slots
remember the tokens they were computed from, and every read is compared with them.
"""

import pytest
import torch

from minivllm import SamplingParams
from tests.alignment import ATOL, RTOL, RecordingEngine
from tests.known_faults.on_engine import alone, computed, make_engine
from tests.known_faults.texts import text
from tests.model_free import params, run


@pytest.mark.parametrize("num_steps", [0, 1], ids=["none stepped", "all running"])
def test_aborting_ten_requests_one_by_one_leaves_nothing_behind(num_steps):
    """Known fault 9: an aborted request stayed in its queue, or kept its blocks."""
    engine = make_engine(30)
    for i in range(10):
        engine.add_request(str(i), text(i, 20), params(50))
    for _ in range(num_steps):
        engine.step()
    queue = "num_running" if num_steps else "num_waiting"
    assert engine.stats()[queue] == 10
    assert engine.stats()["blocks_in_use"] == 20 * num_steps
    left = []
    for i in range(10):
        engine.abort(str(i))
        left.append(engine.stats()[queue])
    assert left == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    stats = engine.stats()
    assert (stats["num_waiting"], stats["num_running"]) == (0, 0)
    assert stats["blocks_in_use"] == 0
    assert stats["blocks_free"] + stats["blocks_cached_idle"] == 30
    assert [output.finish_reason for output in engine.step()] == ["abort"] * 10
    assert not engine.has_unfinished_requests()


def test_three_long_prompts_share_the_budget_in_chunks():
    """Known fault 10: the chunk limit held for one sequence only, or ate what the budget had left.

    Budget 1,024, chunk limit 400, prompts of 800:

        step   A              B              C              charged
        1      [0, 400)       [0, 400)       [0, 224)         1,024
        2      [400, 800)     [400, 800)     [224, 448)       1,024
        3      [800, 801)     [800, 801)     [448, 800)         354
    """
    engine = make_engine(160, max_num_batched_tokens=1024, max_prefill_chunk=400)
    prompts = {name: text(i, 800) for i, name in enumerate("ABC")}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params(2))
    finished = run(engine)
    steps = computed(engine)
    sizes = [[end - start for start, end in step.values()] for step in steps[:3]]
    assert sizes == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]
    assert [list(step) for step in steps[:3]] == [["A", "B", "C"]] * 3
    assert steps[1] == {"A": (400, 800), "B": (400, 800), "C": (224, 448)}
    assert steps[2] == {"A": (800, 801), "B": (800, 801), "C": (448, 800)}
    for name, prompt in prompts.items():
        assert finished[name, 0].token_ids == alone(prompt, 2)


def test_a_second_chunk_attends_to_the_first_one_too(tiny, monkeypatch):
    """Known fault 11: the second chunk attended to its own positions only, or to unwritten ones.

    Budget 50, prompt 80: the chunks are 50 and 30, and their attention reads 50 and 80 positions.
    Slots that nobody has written hold NaN: one of them read, and the logits would be NaN too.
    """
    prompt = [i * 37 % 97 for i in range(80)]
    # What plain torch is handed can be counted; the kernels in C have their own tests.
    recording = RecordingEngine(tiny.folder, max_num_batched_tokens=50, attention_backend="torch")
    engine = recording.engine
    for layer in engine.runner._kv:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    reads = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def count(query, keys, *others, **options):
        reads.append((query.shape[-2], keys.shape[-2]))
        return attend(query, keys, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
    engine.add_request("a", prompt, SamplingParams(max_tokens=1))
    engine.step()
    num_layers = len(engine.runner._kv)
    assert reads == [(50, 50)] * num_layers
    reads.clear()
    (output,) = engine.step()
    assert reads == [(30, 80)] * num_layers
    expected = tiny.oracle.logits(prompt, output.token_ids)
    torch.testing.assert_close(recording.logits("a", 1), expected, atol=ATOL, rtol=RTOL)
    assert output.token_ids == expected.argmax(dim=-1).tolist()


PROMPTS = {"A": text(0, 80), "B": text(1, 80)}


def preempted():
    """An engine at the moment A's first decode has preempted B.

    10 blocks: A and B hold 5 each and have sampled a token. A's position 80 needs a 6th block.
    """
    engine = make_engine(10, max_num_batched_tokens=160)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, params(8))
    engine.step()
    assert engine.stats()["blocks_in_use"] == 10
    assert engine.stats()["preemptions"] == 0
    engine.step()
    assert engine.stats()["preemptions"] == 1
    return engine


def test_a_preempted_sequence_keeps_its_sampled_token_and_both_end_as_if_alone():
    """Known fault 12: the token sampled before a preemption was dropped, or sampled twice."""
    engine = preempted()
    assert computed(engine)[1] == {"A": (80, 81)}
    (b,) = engine.scheduler.waiting
    assert b.request_id == "B"
    assert b.token_ids[b.num_prompt_tokens :] == alone(PROMPTS["B"], 1)
    finished = run(engine)
    for name, prompt in PROMPTS.items():
        assert finished[name, 0].token_ids == alone(prompt, 8)
        assert finished[name, 0].finish_reason == "length"
    assert engine.stats()["preemptions"] == 1
    assert engine.stats()["generated_tokens"] == 16, "no token was sampled twice"
    assert engine.stats()["blocks_in_use"] == 0


def test_a_request_stopped_after_its_first_chunk_leaves_only_what_was_computed():
    """Known fault 18: the whole prompt was findable once its first chunk was computed.

    Chunk 1 of 2 computes [0, 50): 3 full blocks. The other two are not written.
    """
    prompt = text(0, 80)
    engine = make_engine(20, max_num_batched_tokens=50)
    engine.add_request("stopped", prompt, params())
    engine.step()
    engine.abort("stopped")
    assert engine.stats()["blocks_cached_idle"] == 3
    engine.add_request("next", prompt, params())
    output = run(engine)["next", 0]
    assert output.num_cached_tokens == 48
    assert computed(engine)[1] == {"next": (48, 80)}
    assert output.token_ids == alone(prompt, 4)


def test_a_sequence_that_resumes_with_a_hit_is_charged_its_total_minus_what_is_cached():
    """Known fault 19: on its return a sequence was charged for all its tokens, or by its first hit.

    B comes back with 80 + 1 tokens. A took one block of B's 5 cached ones, the tail: 64 are hit,
    81 - 64 = 17 are charged.
    """
    engine = preempted()
    while "B" not in computed(engine)[-1]:
        engine.step()
    assert computed(engine)[-1] == {"B": (64, 81)}
    assert engine.scheduler.budget_left == 160 - 17
    finished = run(engine)
    stats = engine.stats()
    assert (stats["resumed_query_tokens"], stats["resumed_hit_tokens"]) == (81, 64)
    assert stats["prompt_tokens_computed"] == 80 + 80 + 16
    assert finished["B", 0].num_cached_tokens == 0, "its first admission hit nothing"


def test_new_prompts_at_every_step_do_not_hold_up_a_sequence_that_decodes():
    """Known fault 23: new prefills were scheduled first, so whoever decoded stood still."""
    engine = make_engine(64, max_num_batched_tokens=64)
    engine.add_request("decodes", text(0, 20), params(40))
    lengths, finished = [], set()
    for i in range(1, 41):
        engine.add_request(f"new {i}", text(i, 80), params(1))
        for output in engine.step():
            if output.request_id == "decodes":
                lengths.append(len(output.token_ids))
                assert output.token_ids == alone(text(0, 20), lengths[-1])
            elif output.finished:
                finished.add(output.request_id)
    assert lengths == list(range(1, 41)), "one token every step"
    assert engine.stats()["preemptions"] == 0
    # And the decode does not hold up the prompts: 63 of the 64 tokens are theirs each step.
    assert len(finished) == (44 + 39 * 63) // 80


def test_with_less_budget_than_decodes_everybody_still_gets_their_tokens():
    """Known fault 23, with budget 3 and 5 runnable decodes: the last two were never scheduled.

    Three run, each with a token every step. The other two follow: 8 + 8 steps, no more.
    """
    engine = make_engine(20, max_num_batched_tokens=3, max_num_seqs=5)
    for i in range(5):
        engine.add_request(str(i), text(i, 1), params(8))
    finished = run(engine)
    for i in range(5):
        assert finished[str(i), 0].token_ids == alone(text(i, 1), 8)
    steps = computed(engine)
    assert len(steps) == 16
    for i in range(5):
        active = [step for step, ranges in enumerate(steps) if str(i) in ranges]
        assert len(active) == 8
        assert active == list(range(active[0], active[0] + 8)), f"request {i} stood still"
