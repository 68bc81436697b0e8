"""The bookkeeping of decode graphs, with a stand-in for the graph: the function itself, called."""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import reference
from kernels.decode_graphs import CudaGraphRecorder, DecodeGraphs, ladder, rung_for
from kernels.errors import KernelInputError
from minivllm.core.batch import ScheduledSequence
from minivllm.sampling_params import SamplingParams

LARGEST = st.integers(1, 1000)
BLOCK_SIZE = 4


@given(LARGEST)
def test_a_ladder_ascends_from_one_to_the_largest_itself(largest):
    sizes = ladder(largest)
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))


@given(LARGEST, st.data())
def test_every_batch_gets_the_smallest_rung_that_holds_it(largest, data):
    sizes = ladder(largest)
    number = data.draw(st.integers(1, largest))
    assert rung_for(number, sizes) == min(size for size in sizes if size >= number)


@given(LARGEST, st.data())
def test_padding_never_doubles_a_batch_nor_adds_more_than_fifteen(largest, data):
    number = data.draw(st.integers(1, largest))
    padding = rung_for(number, ladder(largest)) - number
    assert padding < min(number, 16)


def test_100_is_in_the_ladder_of_100():
    assert ladder(100) == (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 100)
    assert ladder(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    assert ladder(3) == (1, 2, 3)


class FakeStream:
    def __init__(self, name, log):
        self._name = name
        self._log = log

    def __repr__(self):
        return self._name

    def wait_stream(self, other):
        self._log.append(f"{self} waits for {other}")


class FakeCuda:
    """torch.cuda's graphs and streams, as far as a recorder uses them: notes what happens where."""

    def __init__(self, monkeypatch):
        self.log = []
        self.usual = self.now = FakeStream("the usual stream", self.log)
        self.num_streams = self.num_pools = 0
        self.fails_at_the_end = False
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.new_pool)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.new_graph)
        monkeypatch.setattr(torch.cuda, "graph", self.recording)
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.on_stream)

    def new_pool(self):
        self.num_pools += 1
        return f"pool {self.num_pools}"

    def new_graph(self):
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def new_stream(self):
        self.num_streams += 1
        return FakeStream(f"stream {self.num_streams}", self.log)

    @contextmanager
    def on_stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def recording(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        before, self.now = self.now, stream
        self.log.append(f"recording begins in {pool} on {stream}")
        yield
        if self.fails_at_the_end:  # as torch 2.11 does: the stream is not put back
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        self.now = before
        self.log.append("recording ends")


def test_a_cuda_graph_is_recorded_after_one_eager_run_and_replayed_without_python(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    log = cuda.log
    results = [torch.tensor(0), torch.tensor(1)]

    def compute():
        log.append(f"compute on {cuda.now}")
        return results[log.count("compute on stream 1") - 1]

    replay = CudaGraphRecorder()(compute)
    assert log == [
        "stream 1 waits for the usual stream",
        "compute on stream 1",
        "the usual stream waits for stream 1",
        "recording begins in pool 1 on stream 1",
        "compute on stream 1",
        "recording ends",
    ]
    assert replay() is results[1]  # the recording's own output, not the eager run's
    assert log[6:] == ["replay"]
    assert cuda.now is cuda.usual


def test_all_recordings_of_a_recorder_share_a_pool_and_a_stream_and_no_other_recorder_does(
    monkeypatch,
):
    cuda = FakeCuda(monkeypatch)
    record, another = CudaGraphRecorder(), CudaGraphRecorder()
    for number in range(3):
        record(lambda number=number: torch.tensor(number))
    another(lambda: torch.tensor(3))
    assert cuda.log.count("recording begins in pool 1 on stream 1") == 3
    assert cuda.log.count("recording begins in pool 2 on stream 2") == 1


def test_after_a_computation_that_fails_halfway_its_kernels_are_waited_for(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def compute():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        CudaGraphRecorder()(compute)
    assert cuda.log[-1] == "the usual stream waits for stream 1"
    assert cuda.now is cuda.usual


def test_a_recording_that_fails_leaves_the_thread_on_its_own_stream(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cuda.fails_at_the_end = True
    with pytest.raises(RuntimeError, match="a previous error"):
        CudaGraphRecorder()(lambda: torch.tensor(0))
    assert cuda.now is cuda.usual


class Recorder:
    """Stands in for CUDA graphs: counts recordings, and a replay only calls the function.

    The function's inputs are noted at every call, by address and by value.
    """

    def __init__(self, **sizes):
        self.num_recorders = 0
        self.num_recorded = 0
        self.seen = []
        self.error = None
        settings = {
            "device": torch.device("cpu"),
            "num_blocks": 40,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 8,
            "max_context_len": 24,
        }
        self.graphs = DecodeGraphs(self._new_recorder, **(settings | sizes))

    def _new_recorder(self):
        self.num_recorders += 1
        return self._record

    def _record(self, compute):
        if self.error is not None:
            raise self.error
        self.num_recorded += 1
        return compute

    def _forward(self, token_ids, batch):
        self.seen.append((token_ids, batch))
        return torch.stack((token_ids, batch.positions, batch.slots), dim=1)

    def run(self, sequences):
        """Rows of [token id, position, slot], one a sequence."""
        assert self.graphs.fits(sequences)
        return self.graphs.hidden(sequences, self._forward).tolist()


def decode(position, table, token_id=7):
    ids = [0] * position + [token_id]
    return ScheduledSequence("r", ids, position, position + 1, table, SamplingParams())


def test_a_batch_is_padded_to_its_rung_with_empty_contexts_stored_nowhere():
    recorder = Recorder()
    rows = recorder.run([decode(5, [9, 2], 11), decode(0, [3], 12), decode(7, [4, 5], 13)])
    assert rows == [[11, 5, 2 * 4 + 1], [12, 0, 3 * 4], [13, 7, 5 * 4 + 3]]
    token_ids, batch = recorder.seen[-1]
    assert token_ids.tolist() == [11, 12, 13, 0]
    assert batch.context_lens.tolist() == [6, 1, 8, 0]
    assert batch.slots.tolist()[3:] == [-1]
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]


def test_the_next_batch_of_a_rung_is_copied_to_the_addresses_of_the_recording():
    recorder = Recorder()
    recorder.run([decode(5, [9, 2])])
    token_ids, batch = recorder.seen[-1]
    addresses = [token_ids.data_ptr(), batch.packed.data_ptr()]

    assert recorder.run([decode(9, [1, 6, 8], 21)]) == [[21, 9, 8 * 4 + 1]]

    token_ids, batch = recorder.seen[-1]
    assert [token_ids.data_ptr(), batch.packed.data_ptr()] == addresses
    assert batch.block_tables[0, :3].tolist() == [1, 6, 8]
    assert recorder.num_recorded == 1


def test_only_the_columns_a_batch_needs_are_copied_and_what_is_behind_them_is_not_read():
    recorder = Recorder()
    recorder.run([decode(22, [1, 2, 3, 4, 5, 6]), decode(0, [7])])
    assert recorder.run([decode(5, [8, 9], 3), decode(2, [10], 4)]) == [[3, 5, 37], [4, 2, 42]]
    _, batch = recorder.seen[-1]
    assert batch.block_tables.tolist() == [[8, 9, 3, 4, 5, 6], [10, 0, 0, 0, 0, 0]]
    assert batch.context_lens.tolist() == [6, 3]
    key, value = torch.full((2, 40, BLOCK_SIZE, 1, 8), float("nan"))
    for block in (8, 9, 10):
        key[block], value[block] = 1.0, float(block)
    found = reference.paged_attention(torch.ones(2, 1, 8), key, value, batch)
    assert found[:, 0, 0].tolist() == [pytest.approx((4 * 8 + 2 * 9) / 6), 10]


def test_nothing_of_a_larger_batch_stays_in_the_padding_of_a_smaller_one():
    recorder = Recorder()
    recorder.run([decode(i, [i, 20 + i]) for i in range(4)])
    recorder.run([decode(i, [i, 20 + i]) for i in range(3)])
    _, batch = recorder.seen[-1]
    assert recorder.num_recorded == 1
    assert batch.context_lens.tolist()[3:] == [0]
    assert batch.slots.tolist()[3:] == [-1]
    assert batch.block_tables[3].tolist() == [0] * 6


def test_each_rung_is_recorded_once_when_it_is_first_needed():
    recorder = Recorder()
    for number in (1, 3, 4, 2, 3, 1, 5, 8):
        recorder.run([decode(1, [block]) for block in range(number)])
    assert recorder.num_recorded == recorder.graphs.num_recordings == 4  # 1, 4, 2, 8


def test_forgotten_recordings_are_made_anew():
    recorder = Recorder()
    recorder.run([decode(1, [0])])
    recorder.graphs.forget()
    assert recorder.run([decode(2, [1], 5)]) == [[5, 2, 6]]
    assert recorder.num_recorded == 2
    # A pool whose recordings are all gone takes no more: there is another recorder for them.
    assert recorder.num_recorders == 2


def test_where_no_recording_can_be_made_the_step_is_computed_and_none_is_tried_again(caplog):
    recorder = Recorder()
    recorder.run([decode(1, [0])])
    recorder.error = torch.OutOfMemoryError("CUDA out of memory")
    assert recorder.run([decode(2, [1], 5), decode(3, [2], 6)]) == [[5, 2, 6], [6, 3, 11]]
    assert caplog.messages == ["decode steps run without recordings: CUDA out of memory"]
    assert not recorder.graphs.fits([decode(1, [0])])
    assert recorder.graphs.num_recordings == 0
    assert recorder.num_recorders == 2  # the first one's recordings and their memory are given back


def test_an_error_of_the_computation_itself_is_raised():
    recorder = Recorder()
    recorder.error = RuntimeError("no recording")

    def forward(token_ids, batch):
        raise RuntimeError("no step either")

    with pytest.raises(RuntimeError, match="no step either"):
        recorder.graphs.hidden([decode(1, [0])], forward)


def test_after_an_interrupted_recording_all_are_made_anew():
    recorder = Recorder()
    recorder.run([decode(1, [0])])
    recorder.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        recorder.run([decode(2, [1]), decode(3, [2])])
    recorder.error = None
    assert recorder.run([decode(2, [1], 5)]) == [[5, 2, 6]]
    assert (recorder.num_recorded, recorder.num_recorders) == (2, 2)


def test_graphs_keep_no_hold_of_what_they_record():
    class Model:
        def forward(self, token_ids, batch):
            return torch.zeros(len(token_ids), 1)

    model, graphs = Model(), Recorder().graphs
    graphs._record = lambda compute: torch.zeros(1, 1).clone  # a graph holds addresses only
    model.graphs = graphs
    graphs.hidden([decode(1, [0])], model.forward)
    watched = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert watched() is None
    finally:
        gc.enable()


def test_the_kernel_is_chosen_for_the_longest_context_whatever_the_first_batch_had():
    recorder = Recorder(max_context_len=23)
    recorder.run([decode(1, [0])])
    _, batch = recorder.seen[-1]
    assert batch.max_context_len == 23
    assert batch.block_tables.shape == (1, 6)


def test_a_small_pool_bounds_tables_and_ladder():
    recorder = Recorder(num_blocks=3, max_num_seqs=8, max_context_len=1000)
    rows = recorder.run([decode(1, [block]) for block in range(3)])
    assert len(rows) == 3
    assert recorder.seen[-1][1].block_tables.shape == (3, 3)


def test_only_decodes_fit_and_no_more_than_the_ladder_holds():
    graphs = Recorder(max_num_seqs=2).graphs
    chunk = ScheduledSequence("r", [1] * 9, 3, 5, [0, 1], SamplingParams())
    assert graphs.fits([decode(1, [0]), decode(1, [1])])
    assert not graphs.fits([decode(1, [0]), chunk])
    assert not graphs.fits([decode(1, [0]), decode(1, [1]), decode(1, [2])])


def test_a_table_that_points_outside_the_pool_is_refused_before_anything_is_copied():
    recorder = Recorder()
    recorder.run([decode(1, [5])])
    with pytest.raises(KernelInputError, match="block 40"):
        recorder.run([decode(1, [40])])
    assert recorder.seen[-1][1].block_tables[0, 0] == 5
