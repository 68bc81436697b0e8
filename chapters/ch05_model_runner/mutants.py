"""Chapter 5's named wrong answers."""

from chapters.catalog import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="positions_count_through_the_batch",
        task="5.1",
        broken="C5.2",
        story="Every prompt but the first is computed as if other people's text stood before it.",
        changes=(
            (
                "positions += range(start, end)",
                "positions += range(len(positions), len(positions) + end - start)",
            ),
        ),
    ),
    Mutant(
        name="decode_at_the_next_position",
        task="5.1",
        broken="C5.2",
        story="The newest token is rotated to the position after its own: answers slowly drift.",
        changes=(
            (
                "positions += range(start, end)",
                "positions += range(start, end) if start == 0 else [end]",
            ),
        ),
    ),
    Mutant(
        name="slots_shifted_by_one",
        task="5.1",
        broken="C5.3",
        story="Each key lies one slot behind its place, and the last of a block in a foreign one.",
        changes=(
            (
                "slots += pool.slot_mapping(sequence, start, end)",
                "slots += [slot + 1 for slot in pool.slot_mapping(sequence, start, end)]",
            ),
        ),
    ),
    Mutant(
        name="slots_without_the_table",
        task="5.1",
        broken="C5.3",
        story="Positions are taken for slots: every sequence writes over the first blocks.",
        changes=(
            ("slots += pool.slot_mapping(sequence, start, end)", "slots += range(start, end)"),
        ),
    ),
    Mutant(
        name="query_starts_are_lengths",
        task="5.1",
        broken="C5.4",
        story="From the third sequence on, rows are given to the wrong request.",
        changes=(("query_starts.append(len(token_ids))", "query_starts.append(end - start)"),),
    ),
    Mutant(
        name="decode_does_not_see_itself",
        task="5.1",
        broken="C5.5",
        story="num_computed_tokens is taken for the context: the newest token's key is not read.",
        changes=(
            (
                "context_lens=[sequence.num_tokens for sequence in sequences]",
                "context_lens=[each.num_computed_tokens or each.num_tokens for each in sequences]",
            ),
        ),
    ),
    Mutant(
        name="context_is_the_number_of_rows",
        task="5.1",
        broken="C5.5",
        story="A decode has one row and so sees one key: it answers as if there were no prompt.",
        changes=(
            (
                "context_lens=[sequence.num_tokens for sequence in sequences]",
                "context_lens=[b - a for a, b in zip(query_starts, query_starts[1:])]",
            ),
        ),
    ),
    Mutant(
        name="prefills_before_decodes",
        task="5.1",
        broken="C5.1",
        story="The scheduler hands out tokens in its own order: each request gets another's.",
        changes=(
            (
                "sequences = step.decodes + step.prefills",
                "sequences = step.prefills + step.decodes",
            ),
            (
                "starts = [each.num_tokens - 1 for each in step.decodes] + [0 for _ in"
                " step.prefills]",
                "starts = [0 for _ in step.prefills] + [each.num_tokens - 1 for each in"
                " step.decodes]",
            ),
        ),
    ),
    Mutant(
        name="logits_of_the_first_row",
        task="5.2",
        broken="C5.7",
        story="Every prompt is answered as if it ended after its first token.",
        changes=(("batch.query_starts[1:].long() - 1", "batch.query_starts[:-1].long()"),),
    ),
    Mutant(
        name="logits_of_the_row_behind_the_last",
        task="5.2",
        broken="C5.7",
        story="The end is taken for the last: a request continues its neighbour's text.",
        changes=(
            (
                "batch.query_starts[1:].long() - 1",
                "batch.query_starts[1:].long() % len(batch.token_ids)",
            ),
        ),
    ),
    Mutant(
        name="head_over_every_row",
        task="5.2",
        broken="C5.9",
        story="A prompt of 1,000 tokens costs 200 MB of scores, of which one row is read.",
        changes=(
            (
                "return model.logits(hidden[last_rows(batch)])",
                "return model.logits(hidden)[last_rows(batch)]",
            ),
        ),
    ),
    Mutant(
        name="top_p_drops_the_first_token",
        task="5.3",
        broken="C5.13",
        story="When one token alone exceeds top_p, nothing is left and the draw fails or is wild.",
        changes=(("likelier = kept.cumsum(dim=-1) - kept", "likelier = kept.cumsum(dim=-1)"),),
    ),
    Mutant(
        name="temperature_after_top_p",
        task="5.3",
        broken="C5.14",
        story="top_p cuts the model's own distribution, so a cold request keeps unlikely tokens.",
        changes=(
            ("(logits.double() - logits.max()) / params.temperature", "logits.double()"),
            (
                "return torch.zeros_like(kept).scatter(0, order, kept / kept.sum())",
                "kept = kept ** (1 / params.temperature)\n"
                "    return torch.zeros_like(kept).scatter(0, order, kept / kept.sum())",
            ),
        ),
    ),
    Mutant(
        name="temperature_multiplies",
        task="5.3",
        broken="C5.11",
        story="A low temperature makes the text wilder instead of calmer.",
        changes=(("/ params.temperature", "* params.temperature"),),
    ),
    Mutant(
        name="top_k_off_by_one",
        task="5.3",
        broken="C5.12",
        story="top_k = 1, which must be greedy, draws among two.",
        changes=(("scores[params.top_k :]", "scores[params.top_k + 1 :]"),),
    ),
    Mutant(
        name="top_k_keeps_every_tie",
        task="5.3",
        broken="C5.12",
        story="With many equal scores, as from a quantised head, far more than top_k tokens stay.",
        changes=(
            (
                '        scores[params.top_k :] = float("-inf")',
                "        edge = scores[min(params.top_k, len(scores)) - 1].clone()\n"
                '        scores[scores < edge] = float("-inf")',
            ),
        ),
    ),
    Mutant(
        name="probabilities_left_in_sorted_order",
        task="5.3",
        broken="C5.11",
        story="The rank of a token is taken for its id: the text is made of the vocabulary's head.",
        changes=(
            (
                "return torch.zeros_like(kept).scatter(0, order, kept / kept.sum())",
                "return kept / kept.sum()",
            ),
        ),
    ),
    Mutant(
        name="greedy_by_sampling",
        task="5.3",
        broken="C5.10",
        story="Temperature 0 draws from the softmax: the same prompt has another answer each time.",
        changes=(
            (
                "return int(logits.argmax())",
                "return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))",
            ),
        ),
    ),
    Mutant(
        name="draws_without_the_generator",
        task="5.3",
        broken="C5.15",
        story="A seed has no effect: the global generator, which everybody moves, is used.",
        changes=(
            (
                "torch.multinomial(probabilities(logits, params), 1, generator=generator)",
                "torch.multinomial(probabilities(logits, params), 1)",
            ),
        ),
    ),
    Mutant(
        name="one_generator_for_the_batch",
        task="5.4",
        broken="C5.17",
        story="Who draws second depends on who drew first: a seed gives other text under load.",
        changes=(
            (
                "logits = next_logits(self.model, batch)",
                "logits = next_logits(self.model, batch)\n"
                "        generator = generator_for(sequences[0])",
            ),
            (
                "sample(row, sequence.params, generator_for(sequence))",
                "sample(row, sequence.params, generator)",
            ),
        ),
    ),
    Mutant(
        name="one_set_of_params_for_the_batch",
        task="5.4",
        broken="C5.16",
        story="Whoever is first decides how hot everybody's text is.",
        changes=(
            (
                "sample(row, sequence.params, generator_for(sequence))",
                "sample(row, sequences[0].params, generator_for(sequence))",
            ),
        ),
    ),
    Mutant(
        name="every_token_draws_the_same_number",
        task="5.4",
        broken="C5.18",
        story="Made anew from the seed alone, the generator repeats itself: so does the text.",
        changes=(
            (
                "hash((sequence.params.seed, sequence.num_tokens))",
                "hash((sequence.params.seed, 0))",
            ),
        ),
    ),
    Mutant(
        name="seed_is_ignored",
        task="5.4",
        broken="C5.18",
        story="n requests with one prompt and n seeds all get the same answer.",
        changes=(
            ("hash((sequence.params.seed, sequence.num_tokens))", "hash((0, sequence.num_tokens))"),
        ),
    ),
)
