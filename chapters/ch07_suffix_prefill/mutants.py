"""Chapter 7's named wrong answers."""

from chapters.catalog import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="suffix_tokens_from_the_head",
        task="7.1",
        broken="C7.1",
        story="The first tokens of the prompt are computed again, at the places of the last ones.",
        changes=(("sequence.token_ids[start:end]", "sequence.token_ids[: end - start]"),),
    ),
    Mutant(
        name="suffix_positions_from_0",
        task="7.1",
        broken="C7.2",
        story="The suffix is rotated as if it began the text: answers ignore what came before.",
        changes=(("positions += range(start, end)", "positions += range(end - start)"),),
    ),
    Mutant(
        name="suffix_slots_from_0",
        task="7.1",
        broken="C7.3",
        story="The suffix is written over the shared prefix: all who read it are poisoned.",
        changes=(
            (
                "pool.slot_mapping(sequence, start, end)",
                "pool.slot_mapping(sequence, 0, end - start)",
            ),
        ),
    ),
    Mutant(
        name="context_of_the_suffix_alone",
        task="7.1",
        broken="C7.4",
        story="The kernel is told of 2 keys where 10 lie: it reads the head of the prefix only.",
        changes=(("[end for _, _, end in scheduled]", "[e - s for _, s, e in scheduled]"),),
    ),
    Mutant(
        name="context_of_the_whole_sequence_in_a_chunk",
        task="7.1",
        broken="C7.4",
        story="A chunk reads slots behind its end: what was there before, another's KV or NaN.",
        changes=(
            (
                "[end for _, _, end in scheduled]",
                "[sequence.num_tokens for sequence, _, _ in scheduled]",
            ),
        ),
    ),
    Mutant(
        name="attention_cannot_see_the_prefix",
        task="7.2",
        broken="C7.5",
        story="The rows attend to each other only, as in a prefill: the cached text is forgotten.",
        changes=(
            (
                "hidden = torch.ones(",
                "scores[..., :start] = float('-inf')\n    hidden = torch.ones(",
            ),
        ),
    ),
    Mutant(
        name="mask_by_relative_position",
        task="7.2",
        broken="C7.5",
        story="Row i sees keys 0 .. i: a suffix sees the head of its prefix and not even itself.",
        changes=((".triu(start + 1)", ".triu(1)"),),
    ),
    Mutant(
        name="mask_hides_the_own_position",
        task="7.2",
        broken="C7.6",
        story="Off by one: no row sees the token it stands on.",
        changes=((".triu(start + 1)", ".triu(max(start, 1))"),),
    ),
    Mutant(
        name="suffix_without_a_mask",
        task="7.2",
        broken="C7.6",
        story="Rows of a prompt see the tokens after them: KV differs from that of a decode.",
        changes=((".triu(start + 1)", ".triu(end)"),),
    ),
    Mutant(
        name="keys_in_the_order_of_their_blocks",
        task="7.2",
        broken="C7.7",
        story="With blocks that were freed and taken again, the text is read in another order.",
        changes=(("keys = key_cache[block_table]", "keys = key_cache[block_table.sort().values]"),),
    ),
    Mutant(
        name="whole_blocks_are_read",
        task="7.2",
        broken="C7.7",
        story="Values of slots that were never written get weight 0, and 0 * NaN is NaN.",
        changes=(("end = start + num_rows", "end = len(block_table) * key_cache.shape[1]"),),
    ),
    Mutant(
        name="kv_head_by_modulo",
        task="7.2",
        broken="C7.8",
        story="Heads 0, 2, 4 read the first KV head: a real model talks nonsense, a tiny one less.",
        changes=(
            ("keys = keys.repeat_interleave(group, dim=1)", "keys = keys.repeat(1, group, 1)"),
            (
                "values = values.repeat_interleave(group, dim=1)",
                "values = values.repeat(1, group, 1)",
            ),
        ),
    ),
    Mutant(
        name="scores_not_scaled",
        task="7.2",
        broken="C7.9",
        story="The softmax is too sharp: fluent text with other words than the model's.",
        changes=((" * head_dim**-0.5", ""),),
    ),
    Mutant(
        name="budget_charged_before_the_lookup",
        task="7.3",
        broken="C7.11",
        story="A prompt of 1,000 tokens, 990 of them cached, waits for a budget of 1,000.",
        changes=(
            ("if num_tokens > self.budget_left:", "if sequence.num_tokens > self.budget_left:"),
            ("self.budget_left -= num_tokens", "self.budget_left -= sequence.num_tokens"),
        ),
    ),
    Mutant(
        name="budget_check_before_the_lookup",
        task="7.3",
        broken="C7.11",
        story="Charged right, but admitted only if the whole prompt would fit: seats stay empty.",
        changes=(
            ("if num_tokens > self.budget_left:", "if sequence.num_tokens > self.budget_left:"),
        ),
    ),
    Mutant(
        name="budget_never_charged",
        task="7.3",
        broken="C7.11",
        story="Steps grow without limit, and those who decode wait for them.",
        changes=(("            self.budget_left -= num_tokens\n", ""),),
    ),
    Mutant(
        name="hits_not_given_to_allocate",
        task="7.3",
        broken="C7.12",
        story="The whole prompt is computed, cached or not, though only its suffix was charged.",
        changes=(
            (
                "self.pool.allocate(sequence, num_tokens, hits)",
                "self.pool.allocate(sequence, sequence.num_tokens)",
            ),
        ),
    ),
    Mutant(
        name="hits_not_given_to_can_allocate",
        task="7.3",
        broken="C7.12",
        story="Idle hits are counted as room for the suffix: the allocation fails in mid-step.",
        changes=(
            (
                "self.pool.can_allocate(sequence, num_tokens, hits)",
                "self.pool.can_allocate(sequence, num_tokens)",
            ),
        ),
    ),
    Mutant(
        name="nobody_waits",
        task="7.3",
        broken="C7.13",
        story="Ten requests with one new prefix compute it ten times: the cache came too late.",
        changes=(
            ("return len(hits) < len(keys) and keys[len(hits)] in under_way", "return False"),
        ),
    ),
    Mutant(
        name="only_the_first_block_is_waited_for",
        task="7.3",
        broken="C7.13",
        story="Two turns of one conversation share its start and compute the rest twice.",
        changes=(
            (
                "return len(hits) < len(keys) and keys[len(hits)] in under_way",
                "return not hits and bool(keys) and keys[0] in under_way",
            ),
        ),
    ),
    Mutant(
        name="passed_over_ends_the_admission",
        task="7.3",
        broken="C7.14",
        story="One request that waits for a prefix keeps all behind it waiting with it.",
        changes=(("                continue\n", "                break\n"),),
    ),
    Mutant(
        name="passed_over_is_lost",
        task="7.3",
        broken="C7.14",
        story="A request that waits for a prefix is in no queue: its client never hears again.",
        changes=(
            (
                "                continue\n",
                "                self.waiting.remove(sequence)\n                continue\n",
            ),
        ),
    ),
    Mutant(
        name="passed_over_goes_to_the_back",
        task="7.3",
        broken="C7.14",
        story="Who shares a popular prefix is overtaken again and again.",
        changes=(
            (
                "                continue\n",
                "                self.waiting.remove(sequence)\n"
                "                self.waiting.append(sequence)\n"
                "                continue\n",
            ),
        ),
    ),
    Mutant(
        name="waits_for_a_block_it_may_not_use",
        task="7.3",
        broken="C7.15",
        story="A step is lost for a block that the lookup, at most num_tokens - 1, cannot take.",
        changes=(
            (
                "limit = (sequence.num_tokens - 1) // self.pool.block_size",
                "limit = sequence.num_tokens // self.pool.block_size",
            ),
        ),
    ),
    Mutant(
        name="small_ones_overtake",
        task="7.3",
        broken="C7.16",
        story="A long prompt starves: there is always a short one that fits into what is left.",
        changes=(
            (
                "            if num_tokens > self.budget_left:\n                break\n",
                "            if num_tokens > self.budget_left:\n                continue\n",
            ),
        ),
    ),
    Mutant(
        name="running_in_order_of_admission",
        task="7.3",
        broken="C7.17",
        story="Who waited for a prefix counts as the newest and is preempted before its juniors.",
        changes=(("        self.running.sort(key=lambda running: running.arrival)\n", ""),),
    ),
)
