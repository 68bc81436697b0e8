"""Chapter 2. Who runs in this step, how many tokens, and who gives way.

A step computes some prefills (a whole prompt each) and some decodes (the newest token of each
running sequence), together at most `max_num_batched_tokens`. Budget 12, prompts A = 6 tokens and
B = 8 tokens, memory for both:

    step   decodes   prefills   charged   why
    1      -         A          6         B's 8 do not fit into the 6 that are left
    2      A         B          1 + 8     A gains a token in every step
    3      A B       -          1 + 1

A pool of 4 blocks of 2 tokens, prompts A and B = 3 tokens each, C = 1 token comes later:

    step   decodes   prefills   free   why
    1      -         A B        0      2 blocks each: positions 0, 1 and position 2
    2      A B       -          0      position 3 lies in a block they have
    3      A         -          1      A's position 4 needs a block: B, the newest, gives back 2
    4      A         -          1      B waits with 5 tokens, needs 3 blocks; C waits behind it
"""

from typing import Any, NamedTuple, Protocol

from chapters.stages import stage

ch01 = stage("ch01_sequence")
SequenceState = ch01.SequenceState


class Pool(Protocol):
    """Memory for KV, as the scheduler sees it."""

    num_blocks: int
    block_size: int

    def can_allocate(self, sequence: Any, num_new_tokens: int) -> bool:
        """Would allocate succeed? Changes nothing."""

    def allocate(self, sequence: Any, num_new_tokens: int) -> None:
        """Give the sequence the blocks to compute `num_new_tokens` more positions."""

    def commit(self, sequence: Any, end: int) -> None:
        """The KV of the sequence's positions up to `end` is written."""

    def free(self, sequence: Any) -> None:
        """Take all its blocks back."""


class CountingPool:
    """A Pool that only counts blocks: all that a scheduler needs to be tried out."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks

    def can_allocate(self, sequence: Any, num_new_tokens: int) -> bool:
        """See Pool."""
        num_blocks: int = sequence.num_new_blocks(num_new_tokens, self.block_size)
        return num_blocks <= self.num_free

    def allocate(self, sequence: Any, num_new_tokens: int) -> None:
        """See Pool. The table of a pool without blocks holds -1 for each."""
        num_blocks = sequence.num_new_blocks(num_new_tokens, self.block_size)
        if num_blocks > self.num_free:
            raise ValueError(f"{num_blocks} blocks asked for, {self.num_free} are free")
        self.num_free -= num_blocks
        sequence.block_table += [-1] * num_blocks

    def commit(self, sequence: Any, end: int) -> None:
        """See Pool."""
        sequence.advance(end)

    def free(self, sequence: Any) -> None:
        """See Pool."""
        self.num_free += len(sequence.block_table)
        sequence.block_table.clear()


class Step(NamedTuple):
    """What to compute now.

    decodes   sequences that compute their newest token
    prefills  sequences that compute all of their tokens, positions [0, num_tokens)
    """

    decodes: list[Any]
    prefills: list[Any]


class Scheduler:
    """Waiting and running sequences, both in order of arrival, and the finished ones.

    pool                     memory for KV
    max_num_batched_tokens   most tokens to compute in one step, at least max_model_len
    max_num_seqs             most sequences that run at a time
    max_model_len            most tokens of one sequence, prompt and output
    eos_token_ids            token ids that end an output
    budget_left              what the step being scheduled may still charge
    """

    def __init__(
        self,
        pool: Pool,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
        max_model_len: int = 512,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        if max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"a prefill is computed whole: max_num_batched_tokens = {max_num_batched_tokens}"
                f" must be at least max_model_len = {max_model_len}"
            )
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        # A decode costs a token, so more seats than budget would leave one without (I12).
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.finished: list[Any] = []
        self.preemptions = 0
        self.budget_left = max_num_batched_tokens
        self._num_arrived = 0

    def add(self, sequence: Any) -> None:
        """Let a sequence wait for its turn.

        Raises ValueError if it could never run: max_model_len or more tokens, or more than the
        whole pool holds.
        """
        holds = self.pool.num_blocks * self.pool.block_size
        if sequence.num_tokens >= self.max_model_len:
            raise ValueError(
                f"prompt has {sequence.num_tokens} tokens; max_model_len = {self.max_model_len}"
                f" leaves room for prompts of at most {self.max_model_len - 1}"
            )
        if sequence.num_tokens > holds:
            raise ValueError(f"prompt has {sequence.num_tokens} tokens; the pool holds {holds}")
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """Decide what to compute now: decodes first, then as many waiting prompts as fit.

        Each step has the whole budget. In a step that preempted somebody nobody is admitted: the
        pool is short.
        """
        # task 2.3
        self.budget_left = self.max_num_batched_tokens
        num_preemptions = self.preemptions
        decodes = self._schedule_decodes()
        prefills = self._admit_waiting() if self.preemptions == num_preemptions else []
        return Step(decodes, prefills)
        # end of task

    def _admit_waiting(self) -> list[Any]:
        """Admit from the front while there is a seat, budget for all its tokens, and memory.

        Who is admitted gets its blocks, is charged all its tokens, and runs. Nobody is overtaken:
        the first who does not fit ends it, and nothing of it has changed. Returns the admitted.
        """
        # task 2.1
        admitted = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            num_tokens = sequence.num_tokens
            if num_tokens > self.budget_left or not self.pool.can_allocate(sequence, num_tokens):
                break
            self.pool.allocate(sequence, num_tokens)
            self.budget_left -= num_tokens
            sequence.run()
            self.running.append(self.waiting.pop(0))
            admitted.append(sequence)
        return admitted
        # end of task

    def _schedule_decodes(self) -> list[Any]:
        """Charge one token for each running sequence, oldest first, and let the pool allocate it.

        Who cannot have it preempts the newest running sequence, perhaps itself, until it can. A
        sequence that is alone and still cannot have it has outgrown the pool: it ends with
        finish_reason "error". Returns those that decode.
        """
        # task 2.3
        decodes = []
        for sequence in list(self.running):
            while sequence.state is SequenceState.RUNNING:
                if self.pool.can_allocate(sequence, 1):
                    self.pool.allocate(sequence, 1)
                    self.budget_left -= 1
                    decodes.append(sequence)
                    break
                if self.running == [sequence]:
                    self._finish(sequence, "error")
                else:
                    self._preempt_newest()
        return decodes
        # end of task

    def _preempt_newest(self) -> None:
        """Take the blocks of the newest running sequence; it waits, at its place by arrival.

        It keeps its tokens, and will compute all of them anew. Counts one more preemption.
        """
        # task 2.3
        sequence = self.running.pop()
        self.pool.free(sequence)
        sequence.preempt()
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda waiting: waiting.arrival)
        self.preemptions += 1
        # end of task

    def commit(self, step: Step, token_ids: list[int]) -> None:
        """The step is computed: take over the token chosen for each sequence of it.

        `token_ids` holds one token for each of `step.decodes`, then one for each of
        `step.prefills`. All that a sequence knew is now computed: the pool is told first, then
        the token appended. A sequence that has come to a stop is finished at once.
        """
        # task 2.2
        for sequence, token_id in zip(step.decodes + step.prefills, token_ids, strict=True):
            self.pool.commit(sequence, sequence.num_tokens)
            sequence.append_token(token_id)
            reason = sequence.stop_reason(self.eos_token_ids, self.max_model_len)
            if reason is not None:
                self._finish(sequence, reason)
        # end of task

    def abort(self, request_id: str) -> None:
        """End a waiting or running request, between two steps, with the reason "abort".

        Raises KeyError if none of this id waits or runs.
        """
        # task 2.2
        for sequence in self.waiting + self.running:
            if sequence.request_id == request_id:
                self._finish(sequence, "abort")
                return
        raise KeyError(f"no unfinished request {request_id!r}")
        # end of task

    def _finish(self, sequence: Any, reason: str) -> None:
        """Move a sequence from its queue to `finished`, for this reason, and free its blocks."""
        # task 2.2
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self.pool.free(sequence)
        sequence.finish(reason)
        self.finished.append(sequence)
        # end of task
