"""Chapter 2's tasks, their contract and their hints."""

from chapters.catalog import Chapter, Task

ADMIT = Task(
    number="2.1",
    title="Admit whole prompts",
    contract={
        "C2.1": "prompts are admitted in the order in which they wait; the first that does not fit"
        " ends the admission, even if one behind it would fit",
        "C2.2": "a prompt fits only if all its tokens fit into budget_left, which they then reduce",
        "C2.3": "a prompt fits only while fewer than max_num_seqs sequences are in running, those"
        " just admitted included, each once",
        "C2.4": "a prompt fits only if the pool can allocate all its tokens; it is then allocated",
        "C2.5": "who is admitted has left waiting, stands last in running, and is RUNNING",
        "C2.6": "who is not admitted still waits at its place, without blocks and uncharged",
    },
    hints=(
        "12 tokens of budget, prompts of 6, 8 and 2 tokens wait. If the third may go before the"
        " second whenever it fits, when does the second run on a busy day?",
        "Look at waiting[0] only, and ask about it before you change anything: seat, budget,"
        " memory. running already holds those you admitted a moment ago.",
        "while self.waiting and len(self.running) < self.max_num_seqs: sequence = self.waiting[0];"
        " break if num_tokens > self.budget_left or the pool cannot allocate; then allocate,"
        " charge, sequence.run(), and move it with self.running.append(self.waiting.pop(0)).",
    ),
)

COMMIT = Task(
    number="2.2",
    title="Commit, finish, abort",
    contract={
        "C2.7": "commit tells the pool that all tokens a sequence knew are computed, then appends"
        " its new one; the tokens come for the decodes first, then for the prefills",
        "C2.8": "a sequence for which stop_reason gives a reason is finished in the same commit,"
        " with that reason; all others go on",
        "C2.9": "whoever ends has left waiting or running, stands in finished, and has no blocks",
        "C2.10": 'abort ends a waiting or a running request with the reason "abort", and no other',
        "C2.11": "abort raises KeyError for an id that neither waits nor runs",
    },
    hints=(
        "A prompt of 6 tokens has been computed and a token chosen. How many positions are computed"
        " after commit, and how many tokens known? Which of the two must be said first?",
        "One function for all ends keeps the blocks right: whatever the reason, a sequence leaves"
        " its queue, its blocks go back, and it moves to finished. Write _finish first.",
        "for sequence, token_id in zip(step.decodes + step.prefills, token_ids, strict=True):"
        " self.pool.commit(sequence, sequence.num_tokens); sequence.append_token(token_id);"
        " reason = sequence.stop_reason(self.eos_token_ids, self.max_model_len); finish it if there"
        " is one.",
    ),
)

DECODE = Task(
    number="2.3",
    title="Decode first, preempt the newest",
    contract={
        "C2.12": "every running sequence is a decode of the step, oldest first, charged one token"
        " before any prompt is looked at",
        "C2.13": "the pool allocates one token for every decode",
        "C2.14": "who cannot be allocated its token preempts the newest running sequence, perhaps"
        " itself, until it can",
        "C2.15": "a preempted sequence gives back all its blocks, keeps its tokens, and waits at"
        " its place by arrival",
        "C2.16": "in a step that preempted somebody nobody is admitted",
        "C2.17": "a sequence that cannot be allocated its token although it is alone ends with the"
        ' reason "error"',
        "C2.18": "whatever else runs, an output is the one that its request would have alone",
    },
    hints=(
        "Ten people read along as their answers grow, and an eleventh sends a long prompt. Who"
        " should wait? And if memory is short: whose work is the least lost, and who would be"
        " treated unfairly?",
        "schedule is four lines: the whole budget again, decodes, admission unless preemptions has"
        " changed, Step. In _schedule_decodes go through a copy of running, because a preemption"
        " changes it; who was preempted before its turn is no longer RUNNING.",
        "for sequence in list(self.running): while sequence.state is SequenceState.RUNNING: if the"
        " pool can allocate 1: allocate, charge, add to the decodes, break; elif self.running =="
        ' [sequence]: self._finish(sequence, "error"); else: self._preempt_newest(). There:'
        " pop the last of running, free its blocks, preempt() it, put it into waiting, sort by"
        " arrival, count.",
    ),
)

CHAPTER = Chapter(
    number=2,
    name="ch02_scheduler",
    title="Scheduler",
    minutes=150,
    builds="Continuous batching: sequences come and go between any two steps, under one token"
    " budget and within the memory there is.",
    needs=("ch01_sequence",),
    tasks=(ADMIT, COMMIT, DECODE),
    observed=("Scheduler",),
)
