"""Decode steps recorded once and replayed: a GPU graph for each of a ladder of batch sizes.

A decode step is some hundred launches of small kernels, and the host takes longer to launch them
than the device to run them. A CUDA graph is the whole sequence of launches, recorded once and
started as one. It repeats what it recorded to the letter: the same sizes at the same addresses.
So a batch is padded to the next size of a ladder, and its numbers are copied to where the
recording reads them.

    ladder of 64     1  2  4  8  16  32  48  64
    5 sequences      run as 8: three more whose context is empty and whose slot is -1, nowhere
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.batch import PagedBatch
from kernels.sequence import StepSequence
from kernels.transfer import to_device

Compute = Callable[[], torch.Tensor]
"""A computation over fixed addresses; each call gives its result at the same address."""

Record = Callable[[Compute], Compute]
"""A computation -> the same one, recorded."""

Forward = Callable[[torch.Tensor, PagedBatch], torch.Tensor]
"""(token ids [n] int64, a batch of n single-token sequences) -> hidden states [n, hidden]."""


def ladder(largest: int) -> tuple[int, ...]:
    """The batch sizes to record: 1, 2, 4, 8, each multiple of 16 below `largest`, and `largest`.

    Itself, too, when it is no multiple: of 100 the top is 100, not 96, or 97 sequences would
    find no recording.
    """
    steps = (1, 2, 4, 8, *range(16, largest, 16))
    return (*(size for size in steps if size < largest), largest)


def rung_for(num_sequences: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that is at least num_sequences, which one must be."""
    return sizes[bisect_left(sizes, num_sequences)]


class CudaGraphRecorder:
    """Records computations as CUDA graphs that take what they need in between from one pool.

    They may: no two of them run at once, and each result is read before the next one runs. Once
    all recordings are gone, or one could not be made, torch takes no more for this pool: make
    another recorder.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Not torch's own: all engines of a process would record on that one.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Compute) -> Compute:
        """Record `compute`. It also runs once, eagerly.

        That compiles kernels, loads libraries and gives cuBLAS its memory for this stream, none
        of which may happen in a recording. Other threads may use the GPU meanwhile.
        """
        now = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        # A recording that fails may leave the thread on its stream: this puts it back.
        with torch.cuda.stream(now):
            self._stream.wait_stream(now)
            try:
                with torch.cuda.stream(self._stream):
                    compute()
            finally:
                now.wait_stream(self._stream)
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True, slots=True)
class _Rung:
    """One recording, and the addresses it reads its numbers from."""

    token_ids: torch.Tensor
    batch: PagedBatch
    run: Compute


class DecodeGraphs:
    """Runs decode batches from recordings, each made when a batch first needs it.

    A recording is made with the numbers of the batch at hand, so that the run before it writes
    no slot but those that the batch must write anyway. Where one cannot be made, for want of
    memory say, a warning says so, the step is computed all the same, and none is tried again.

    new_recorder     makes a CudaGraphRecorder; on a CPU, a stand-in
    max_num_seqs     most sequences of a batch: the ladder's top, unless there are fewer blocks
    max_context_len  most positions of a sequence: how wide block tables are, and for what
                     length the attention kernel's split is chosen
    """

    def __init__(
        self,
        new_recorder: Callable[[], Record],
        *,
        device: torch.device,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_context_len: int,
    ) -> None:
        self._new_recorder = new_recorder
        self._device = device
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_context_len = min(max_context_len, num_blocks * block_size)
        self._ladder = ladder(min(max_num_seqs, num_blocks))
        self._works = True
        self.forget()

    @property
    def num_recordings(self) -> int:
        """How many batch sizes have a recording; 0 once it was given up."""
        return len(self._rungs)

    def fits(self, sequences: Sequence[StepSequence]) -> bool:
        """True for a batch of decodes only. One prefill among them, and the step is not graphed."""
        is_small = self._works and len(sequences) <= self._ladder[-1]
        return is_small and all(s.end - s.start == 1 for s in sequences)

    def hidden(self, sequences: Sequence[StepSequence], forward: Forward) -> torch.Tensor:
        """[len(sequences), hidden]; read it before the next call, which overwrites it.

        forward  what to record; must launch the same for equal sizes, and not wait
        """
        size = rung_for(len(sequences), self._ladder)
        token_ids = self._token_ids(sequences, size)
        if size in self._rungs:
            # Only as many columns of tables as this batch needs.
            self._rungs[size].token_ids.copy_(token_ids, non_blocking=True)
            self._rungs[size].batch.copy_from(self._batch(sequences, size))
            hidden = self._rungs[size].run()
        else:
            hidden = self._first(token_ids, self._widest_batch(sequences, size), forward)
        return hidden[: len(sequences)]

    def forget(self) -> None:
        """Drop all recordings: they hold addresses of weights or caches that are replaced."""
        self._rungs: dict[int, _Rung] = {}
        self._record = self._new_recorder()

    def _first(self, token_ids: torch.Tensor, batch: PagedBatch, forward: Forward) -> torch.Tensor:
        """Make the recording of this size and run it; or, if it cannot be made, only compute."""
        try:
            run = self._record(lambda: forward(token_ids, batch))
        except Exception as error:
            logging.getLogger(__name__).warning("decode steps run without recordings: %s", error)
            self._works = False
            self.forget()  # gives back their memory
            return forward(token_ids, batch)
        except BaseException:  # Ctrl-C
            self.forget()
            raise
        self._rungs[len(token_ids)] = _Rung(token_ids, batch, run)
        return run()

    def _token_ids(self, sequences: Sequence[StepSequence], size: int) -> torch.Tensor:
        ids = [sequence.token_ids[sequence.start] for sequence in sequences]
        return to_device(ids + [0] * (size - len(ids)), self._device)

    def _batch(
        self, sequences: Sequence[StepSequence], size: int, max_blocks: int | None = None
    ) -> PagedBatch:
        return PagedBatch.from_host(
            [sequence.block_table for sequence in sequences],
            [(sequence.start, sequence.end) for sequence in sequences],
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            device=self._device,
            num_sequences=size,
            max_blocks=max_blocks,
        )

    def _widest_batch(self, sequences: Sequence[StepSequence], size: int) -> PagedBatch:
        """A batch to record: its tables have a column for every block that a sequence can have."""
        batch = self._batch(sequences, size, -(-self._max_context_len // self._block_size))
        # The kernel is chosen when it is recorded, and this length is what it is chosen by.
        return replace(batch, max_context_len=self._max_context_len)
