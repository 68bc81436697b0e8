"""Chapter 1's named wrong answers."""

from chapters.catalog import Mutant

MUTANTS = (
    Mutant(
        name="newest_token_counts_as_computed",
        task="1.1",
        broken="C1.2",
        story="The next step starts one position too late: the newest token's KV is never written,"
        " and all later tokens attend to what happened to lie in its slot.",
        changes=(
            (
                "        self.token_ids.append(token_id)\n",
                "        self.token_ids.append(token_id)\n"
                "        self.num_computed_tokens = self.num_tokens\n",
            ),
        ),
    ),
    Mutant(
        name="output_counts_the_prompt",
        task="1.1",
        broken="C1.1",
        story="A request with a long prompt ends at its first token: the prompt has used up its"
        " max_tokens.",
        changes=(("return self.num_tokens - self.num_prompt_tokens", "return self.num_tokens"),),
    ),
    Mutant(
        name="end_of_a_prompt_is_a_decode",
        task="1.1",
        broken="C1.3",
        story="A prompt of one token, or the last token of a long one, is charged and batched as a"
        " decode, before any token of it was generated.",
        changes=(
            (
                "return self.num_output_tokens > 0 and self.num_computed_tokens",
                "return self.num_computed_tokens",
            ),
        ),
    ),
    Mutant(
        name="preempted_output_is_a_decode",
        task="1.1",
        broken="C1.3",
        story="A sequence that comes back from preemption computes one token of the many whose KV"
        " it lost, and attends to nothing for the others.",
        changes=(
            (
                "return self.num_output_tokens > 0 and self.num_computed_tokens =="
                " self.num_tokens - 1",
                "return self.num_output_tokens > 0",
            ),
        ),
    ),
    Mutant(
        name="advance_past_the_known_tokens",
        task="1.1",
        broken="C1.4",
        story="KV counts as written for positions whose token nobody knows yet; the tokens that"
        " come to stand there are never computed.",
        changes=(
            (
                "if not self.num_computed_tokens < end <= self.num_tokens:",
                "if not self.num_computed_tokens < end:",
            ),
        ),
    ),
    Mutant(
        name="token_chosen_before_its_context",
        task="1.1",
        broken="C1.5",
        story="After the first part of a long prompt a token is taken for the rest of it: the"
        " answer begins in the middle of the question.",
        changes=(
            (
                "if self.num_computed_tokens != self.num_tokens:",
                "if self.num_computed_tokens == 0:",
            ),
        ),
    ),
    Mutant(
        name="blocks_rounded_down",
        task="1.2",
        broken="C1.6",
        story="The tokens after the last full block have no block: their KV is written into"
        " somebody else's.",
        changes=(("return -(-num_tokens // block_size)", "return num_tokens // block_size"),),
    ),
    Mutant(
        name="full_last_block_counted_twice",
        task="1.2",
        broken="C1.6",
        story="Every prompt whose length is a multiple of the block size holds a block that it"
        " does not use, and a pool that would just do refuses it.",
        changes=(("return -(-num_tokens // block_size)", "return num_tokens // block_size + 1"),),
    ),
    Mutant(
        name="growth_at_a_full_block",
        task="1.2",
        broken="C1.7",
        story="The table grows when a token fills a block, `% block_size == 0`, not when one needs"
        " a new one, `== 1`: it comes one token early, and after a prompt that fills its last block"
        " it does not come at all.",
        changes=(
            (
                "return max(0, blocks_for(end, block_size) - len(self.block_table))",
                "if self.block_table:\n            return int(end % block_size == 0)\n"
                "        return blocks_for(end, block_size)",
            ),
        ),
    ),
    Mutant(
        name="table_forgotten",
        task="1.2",
        broken="C1.7",
        story="Each decode takes blocks for the whole sequence anew: the pool is empty after a few"
        " tokens.",
        changes=((" - len(self.block_table))", ")"),),
    ),
    Mutant(
        name="preempted_loses_its_tokens",
        task="1.3",
        broken="C1.9",
        story="A preempted request starts its answer again: whoever reads along sees the beginning"
        " twice, and with a temperature it is another one.",
        changes=(
            (
                "        self.num_computed_tokens = 0\n",
                "        self.num_computed_tokens = 0\n"
                "        del self.token_ids[self.num_prompt_tokens :]\n",
            ),
        ),
    ),
    Mutant(
        name="preempted_counts_as_computed",
        task="1.3",
        broken="C1.10",
        story="Its blocks are gone, but nothing is computed again: it goes on over the KV of"
        " whoever had its new blocks before.",
        changes=(("        self.num_computed_tokens = 0\n", ""),),
    ),
    Mutant(
        name="finished_twice",
        task="1.3",
        broken="C1.12",
        story="An abort that comes late turns a finished answer into an aborted one, and its blocks"
        " are freed twice.",
        changes=(
            (
                "        self._leave(SequenceState.WAITING, SequenceState.RUNNING)\n",
                "        self._leave(*SequenceState)\n",
            ),
        ),
    ),
    Mutant(
        name="length_off_by_one",
        task="1.4",
        broken="C1.16",
        story="Every answer is one token longer than was asked and paid for.",
        changes=(
            (
                "if self.num_output_tokens >= params.max_tokens or",
                "if self.num_output_tokens > params.max_tokens or",
            ),
        ),
    ),
    Mutant(
        name="model_length_off_by_one",
        task="1.4",
        broken="C1.17",
        story="The last token stands at a position that the model has never seen and the batch has"
        " no room for.",
        changes=(("or self.num_tokens >= max_model_len:", "or self.num_tokens > max_model_len:"),),
    ),
    Mutant(
        name="stop_token_dropped",
        task="1.4",
        broken="C1.19",
        story="The end-of-turn token is missing in the output: the next turn of the conversation"
        " does not continue these tokens, and its prefix misses.",
        changes=(
            (
                '            return "stop"\n',
                '            self.token_ids.pop()\n            return "stop"\n',
            ),
        ),
    ),
    Mutant(
        name="stop_token_ids_forgotten",
        task="1.4",
        broken="C1.14",
        story="A chat template's own end token does not end the answer: the model goes on and plays"
        " the user.",
        changes=(("is_stop = is_eos or token_id in params.stop_token_ids", "is_stop = is_eos"),),
    ),
    Mutant(
        name="ignore_eos_ignored",
        task="1.4",
        broken="C1.13",
        story="A benchmark that asks for 128 tokens each gets as many as the model likes, and its"
        " tokens per second mean nothing.",
        changes=((" and not params.ignore_eos", ""),),
    ),
    Mutant(
        name="ignore_eos_ignores_stop_tokens",
        task="1.4",
        broken="C1.14",
        story="A request with its own stop token and ignore_eos never stops at it.",
        changes=(
            (
                "is_eos = token_id in eos_token_ids and not params.ignore_eos\n"
                "        is_stop = is_eos or token_id in params.stop_token_ids",
                "is_eos = token_id in eos_token_ids or token_id in params.stop_token_ids\n"
                "        is_stop = is_eos and not params.ignore_eos",
            ),
        ),
    ),
    Mutant(
        name="min_tokens_ignored",
        task="1.4",
        broken="C1.15",
        story="A request that asks for at least 20 tokens gets an empty answer when the model"
        " begins with EOS.",
        changes=((" and self.num_output_tokens >= params.min_tokens", ""),),
    ),
    Mutant(
        name="length_before_stop",
        task="1.4",
        broken="C1.18",
        story="An answer that ends by itself at its last allowed token is reported as cut off, and"
        " the client asks for more.",
        changes=(
            (
                "if is_stop and self.num_output_tokens >= params.min_tokens:",
                "if is_stop and params.min_tokens <= self.num_output_tokens < params.max_tokens:",
            ),
        ),
    ),
)
