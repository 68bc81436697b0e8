"""Chapter 2's named wrong answers."""

from chapters.catalog import Mutant

MUTANTS = (
    Mutant(
        name="short_prompts_overtake",
        task="2.1",
        broken="C2.1",
        story="A long prompt waits for ever on a busy server, because a shorter one always fits"
        " first.",
        changes=(
            (
                "        while self.waiting and len(self.running) < self.max_num_seqs:\n"
                "            sequence = self.waiting[0]\n",
                "        for sequence in list(self.waiting):\n"
                "            if len(self.running) >= self.max_num_seqs:\n"
                "                break\n",
            ),
            (
                "                break\n            self.pool.allocate(sequence, num_tokens)\n",
                "                continue\n            self.pool.allocate(sequence, num_tokens)\n",
            ),
            (
                "            self.running.append(self.waiting.pop(0))\n",
                "            self.waiting.remove(sequence)\n"
                "            self.running.append(sequence)\n",
            ),
        ),
    ),
    Mutant(
        name="admission_does_not_charge",
        task="2.1",
        broken="C2.2",
        story="Each prompt is held against the whole budget, so two that fit alone overrun it"
        " together: the batch is larger than what the GPU's buffers were made for.",
        changes=(("            self.budget_left -= num_tokens\n", ""),),
    ),
    Mutant(
        name="budget_never_quite_used",
        task="2.1",
        broken="C2.2",
        story="A prompt that just fits is refused; one as long as the budget never runs.",
        changes=(("if num_tokens > self.budget_left or", "if num_tokens >= self.budget_left or"),),
    ),
    Mutant(
        name="seats_counted_twice",
        task="2.1",
        broken="C2.3",
        story="Those admitted in this step stand in running already and are counted once more:"
        " half the seats stay empty while people wait.",
        changes=(
            (
                "while self.waiting and len(self.running) < self.max_num_seqs:",
                "while self.waiting and len(self.running) + len(admitted) < self.max_num_seqs:",
            ),
        ),
    ),
    Mutant(
        name="seats_of_this_step_only",
        task="2.1",
        broken="C2.3",
        story="Only those admitted now are counted, so more run than the batch has rows for.",
        changes=(
            (
                "while self.waiting and len(self.running) < self.max_num_seqs:",
                "while self.waiting and len(admitted) < self.max_num_seqs:",
            ),
        ),
    ),
    Mutant(
        name="memory_for_one_token",
        task="2.1",
        broken="C2.4",
        story="A prompt is admitted with the block of its first token; the KV of the rest has no"
        " place.",
        changes=(
            (
                "or not self.pool.can_allocate(sequence, num_tokens):\n                break\n"
                "            self.pool.allocate(sequence, num_tokens)\n",
                "or not self.pool.can_allocate(sequence, 1):\n                break\n"
                "            self.pool.allocate(sequence, 1)\n",
            ),
        ),
    ),
    Mutant(
        name="refused_prompt_is_charged",
        task="2.1",
        broken="C2.6",
        story="A prompt that memory holds up is charged nevertheless: the budget is spent on work"
        " that nobody does.",
        changes=(
            (
                "            if num_tokens > self.budget_left or not",
                "            num_charged = self.budget_left = self.budget_left - num_tokens\n"
                "            if num_charged < 0 or not",
            ),
            (
                "            self.budget_left -= num_tokens\n            sequence.run()\n",
                "            sequence.run()\n",
            ),
        ),
    ),
    Mutant(
        name="tokens_for_the_prefills_first",
        task="2.2",
        broken="C2.7",
        story="One person reads the next word of another one's answer.",
        changes=(("zip(step.decodes + step.prefills,", "zip(step.prefills + step.decodes,"),),
    ),
    Mutant(
        name="commit_computes_one_position",
        task="2.2",
        broken="C2.7",
        story="Commit says of a prefill what is true of a decode, one position more: the rest of"
        " the prompt counts as not computed.",
        changes=(
            (
                "self.pool.commit(sequence, sequence.num_tokens)",
                "self.pool.commit(sequence, sequence.num_computed_tokens + 1)",
            ),
        ),
    ),
    Mutant(
        name="only_the_models_length_stops",
        task="2.2",
        broken="C2.8",
        story="Answers go on behind their EOS and past max_tokens, until the model has no position"
        " left: the model plays the user, too.",
        changes=(
            (
                "            if reason is not None:\n",
                "            if sequence.num_tokens >= self.max_model_len:\n",
            ),
            ("self._finish(sequence, reason)\n", 'self._finish(sequence, "length")\n'),
        ),
    ),
    Mutant(
        name="finished_keeps_its_blocks",
        task="2.2",
        broken="C2.9",
        story="Every answer takes some memory with it; after an hour nobody is admitted.",
        changes=(
            (
                "        self.pool.free(sequence)\n        sequence.finish(reason)\n",
                '        if reason == "abort":\n            self.pool.free(sequence)\n'
                "        sequence.finish(reason)\n",
            ),
        ),
    ),
    Mutant(
        name="abort_keeps_the_blocks",
        task="2.2",
        broken="C2.9",
        story="Whoever closes the browser takes the blocks of their answer along, for ever.",
        changes=(
            (
                "        self.pool.free(sequence)\n        sequence.finish(reason)\n",
                '        if reason != "abort":\n            self.pool.free(sequence)\n'
                "        sequence.finish(reason)\n",
            ),
        ),
    ),
    Mutant(
        name="abort_of_the_running_only",
        task="2.2",
        broken="C2.10",
        story="Who gives up while waiting is answered all the same, to nobody.",
        changes=(
            ("for sequence in self.waiting + self.running:", "for sequence in self.running:"),
        ),
    ),
    Mutant(
        name="prompts_stop_the_decodes",
        task="2.3",
        broken="I12",
        story="A step is all prefill or all decode: while prompts arrive, every answer under way"
        " stands still.",
        changes=(
            (
                "        decodes = self._schedule_decodes()\n"
                "        prefills = self._admit_waiting() if self.preemptions =="
                " num_preemptions else []\n"
                "        return Step(decodes, prefills)\n",
                "        prefills = self._admit_waiting()\n"
                "        if prefills or self.preemptions > num_preemptions:\n"
                "            return Step([], prefills)\n"
                "        return Step(self._schedule_decodes(), [])\n",
            ),
        ),
    ),
    Mutant(
        name="prompts_are_charged_first",
        task="2.3",
        broken="C2.12",
        story="Prompts take the whole budget and the last blocks; decodes come on top of the"
        " budget, and preempt whom they have just let in.",
        changes=(
            (
                "        decodes = self._schedule_decodes()\n"
                "        prefills = self._admit_waiting() if self.preemptions =="
                " num_preemptions else []\n"
                "        return Step(decodes, prefills)\n",
                "        running = list(self.running)\n"
                "        prefills = self._admit_waiting()\n"
                "        decodes = [each for each in self._schedule_decodes() if each in running]\n"
                "        return Step(decodes, prefills)\n",
            ),
        ),
    ),
    Mutant(
        name="decodes_are_not_charged",
        task="2.3",
        broken="C2.12",
        story="The prompts get the whole budget and the decodes come on top: with 200 people"
        " reading, each step is 200 tokens over.",
        changes=(("                    self.budget_left -= 1\n", ""),),
    ),
    Mutant(
        name="budget_for_all_steps_together",
        task="2.3",
        broken="C2.12",
        story="The budget is spent once; after that no prompt is ever admitted again.",
        changes=(
            (
                "        self.budget_left = self.max_num_batched_tokens\n        num_preemptions",
                "        num_preemptions",
            ),
        ),
    ),
    Mutant(
        name="decode_takes_no_block",
        task="2.3",
        broken="C2.13",
        story="The pool is asked, but nothing is taken: at the first block edge the KV goes to"
        " whatever block the table's next entry names.",
        changes=(("                    self.pool.allocate(sequence, 1)\n", ""),),
    ),
    Mutant(
        name="preempts_the_oldest",
        task="2.3",
        broken="C2.14",
        story="The one that has waited the longest and has the most to lose starts again, and under"
        " pressure nobody ever comes to an end.",
        changes=(("sequence = self.running.pop()\n", "sequence = self.running.pop(0)\n"),),
    ),
    Mutant(
        name="newest_fails_instead_of_waiting",
        task="2.3",
        broken="C2.14",
        story="Under load the latest request gets an error, although it would only have to wait.",
        changes=(("if self.running == [sequence]:", "if self.running[-1] is sequence:"),),
    ),
    Mutant(
        name="preempted_is_lost",
        task="2.3",
        broken="I10",
        story="A preempted request is in no list any more: its client waits until the connection"
        " breaks.",
        changes=(
            (
                "        self.waiting.append(sequence)\n        self.waiting.sort",
                "        self.waiting.sort",
            ),
        ),
    ),
    Mutant(
        name="preempted_keeps_its_blocks",
        task="2.3",
        broken="C2.14",
        story="A preemption frees nothing, so one follows the other until the last sequence ends"
        " with an error.",
        changes=(
            (
                "        self.pool.free(sequence)\n        sequence.preempt()\n",
                "        sequence.preempt()\n",
            ),
        ),
    ),
    Mutant(
        name="preempted_loses_its_tokens",
        task="2.3",
        broken="C2.15",
        story="A preempted request starts its answer again: whoever reads along sees the beginning"
        " twice.",
        changes=(
            (
                "        sequence.preempt()\n",
                "        sequence.preempt()\n"
                "        del sequence.token_ids[sequence.num_prompt_tokens :]\n",
            ),
        ),
    ),
    Mutant(
        name="preempted_goes_to_the_back",
        task="2.3",
        broken="C2.15",
        story="Who gave way once is overtaken by all that came meanwhile, and may give way again.",
        changes=(("        self.waiting.sort(key=lambda waiting: waiting.arrival)\n", ""),),
    ),
    Mutant(
        name="admits_right_after_a_preemption",
        task="2.3",
        broken="C2.16",
        story="The victim comes back in the step that preempted it, and is preempted again in the"
        " next: the engine computes the same prompt over and over.",
        changes=(
            (
                "self._admit_waiting() if self.preemptions == num_preemptions else []",
                "self._admit_waiting()",
            ),
        ),
    ),
    Mutant(
        name="outgrown_waits_for_ever",
        task="2.3",
        broken="I11",
        story="A sequence that the whole pool cannot hold preempts itself and waits for memory that"
        " will never be there, and everybody waits behind it.",
        changes=(
            (
                "                if self.running == [sequence]:\n"
                '                    self._finish(sequence, "error")\n'
                "                else:\n"
                "                    self._preempt_newest()\n",
                "                self._preempt_newest()\n",
            ),
        ),
    ),
)
