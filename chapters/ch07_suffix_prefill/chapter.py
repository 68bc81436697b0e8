"""Chapter 7: what it asks for, and how it helps."""

from chapters.catalog import Chapter, Task

CHAPTER = Chapter(
    number=7,
    name="ch07_suffix_prefill",
    title="Suffix prefill",
    minutes=150,
    builds="an engine that computes only what its cache does not hold, and answers the sooner",
    needs=("ch02_scheduler", "ch05_model_runner"),
    tasks=(
        Task(
            number="7.1",
            title="A batch of ranges",
            contract={
                "C7.1": "the rows of a sequence are its tokens at the positions [start, end)",
                "C7.2": "positions count from the start of the sequence: the first row of a suffix"
                " stands at start, not at 0",
                "C7.3": "a row is written to the slot of its position; the prefix's slots are only"
                " read",
                "C7.4": "a context is end long: neither end - start, nor all tokens that are known",
            },
            hints=(
                "Chapter 5 knew two ways to begin: 0 for a prefill, num_tokens - 1 for a decode."
                " What are these two in words that also fit a suffix?",
                "Take your build_batch of chapter 5. Its loop treats every sequence alike already:"
                " only the list of starts goes, and the end is given, too. Then look at the context"
                " lengths.",
                "for sequence, start, end in scheduled: token_ids[start:end], range(start, end),"
                " pool.slot_mapping(sequence, start, end), query_starts as before;"
                " context_lens=[end for _, _, end in scheduled].",
            ),
        ),
        Task(
            number="7.2",
            title="Attention over prefix and suffix",
            contract={
                "C7.5": "a row sees the keys of the prefix, which another request may have written",
                "C7.6": "row i sees the keys 0 .. start + i, its own included and none behind it",
                "C7.7": "keys and values are those of the block table, in its order, and nothing"
                " behind position start + n is read",
                "C7.8": "query head h reads KV head h // group, group = num_heads / num_kv_heads",
                "C7.9": "scores are multiplied by head_dim ** -0.5",
                "C7.10": "a suffix gives the logits and the block contents of a whole prefill",
            },
            hints=(
                "Two rows at positions 8 and 9, ten keys. Draw the 2 x 10 table of who may see"
                " whom. In a whole prefill of ten rows, where do you find these two lines again?",
                "Gather first: key_cache[block_table] gives the blocks in order, flatten(0, 1)"
                " makes them positions, and the slice [:end] cuts off what is not written. Then"
                " the mask: row i stands at start + i.",
                "scores = einsum('qhd,khd->hqk', query, keys) * head_dim ** -0.5, with"
                " keys.repeat_interleave(group, dim=1); hide with"
                " torch.ones(n, end, dtype=torch.bool).triu(start + 1); softmax;"
                " einsum('hqk,khd->qhd', weights, values).",
            ),
        ),
        Task(
            number="7.3",
            title="Charge the suffix, wait for a prefix",
            contract={
                "C7.11": "a waiting prompt is looked up first and charged for what did not match",
                "C7.12": "the hits are given to the pool, when it is asked and when it allocates",
                "C7.13": "a sequence whose next block is being computed by one admitted in the same"
                " step is passed over, and finds that block in the next step",
                "C7.14": "who is passed over keeps its place, and those behind it may go",
                "C7.15": "a block is worth waiting for only if a lookup may use it",
                "C7.16": "the first one for which seat, budget or memory is short ends the"
                " admission: nobody overtakes it",
                "C7.17": "running stays in order of arrival",
            },
            hints=(
                "Ten people submit the same 1,000 tokens of instructions and a question of 20, all"
                " in one step. How many tokens must be computed, and what would have to happen to"
                " the other nine for a moment?",
                "The keys of a prompt are known before anything is computed. Collect those that"
                " each admitted sequence is about to publish; a sequence waits if the first key"
                " that it did not find is among them. A key that its lookup would not reach, at"
                " most num_tokens - 1, is none to wait for.",
                "for sequence in list(self.waiting): no seat: break; hits = pool.match(sequence);"
                " next block under way: continue; num_tokens = sequence.num_tokens - len(hits) *"
                " block_size; too many, or not can_allocate(sequence, num_tokens, hits): break;"
                " then as in chapter 2, and under_way |= set(pool.keys(sequence)[len(hits):]). At"
                " the end sort running by arrival.",
            ),
        ),
    ),
    observed=("Scheduler",),
)
