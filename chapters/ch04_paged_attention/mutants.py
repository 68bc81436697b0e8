"""Chapter 4's named wrong answers."""

from chapters.catalog import Mutant

MUTANTS = (
    Mutant(
        name="negative_block_id_accepted",
        task="4.1",
        broken="C4.1",
        story="A placeholder of -1 reaches the kernel, which reads the memory before the cache.",
        changes=(("if not 0 <= block < num_blocks:", "if block >= num_blocks:"),),
    ),
    Mutant(
        name="block_id_behind_the_cache_accepted",
        task="4.1",
        broken="C4.1",
        story="One block too far is silent garbage, a wild one ends the process, hours later.",
        changes=(("if not 0 <= block < num_blocks:", "if not 0 <= block <= num_blocks:"),),
    ),
    Mutant(
        name="last_block_in_part_not_counted",
        task="4.1",
        broken="C4.2",
        story="A table that lacks the block for its newest tokens passes the check.",
        changes=(
            (
                "num_needed = -(-context_len // block_size)",
                "num_needed = context_len // block_size",
            ),
        ),
    ),
    Mutant(
        name="padding_is_judged",
        task="4.1",
        broken="C4.4",
        story="A batch of a long and a short sequence is refused for what stands behind the short"
        " one.",
        changes=(("enumerate(table[:num_needed])", "enumerate(table)"),),
    ),
    Mutant(
        name="store_ignores_the_offset",
        task="4.2",
        broken="C4.5",
        story="All tokens of a block are written to its first slot, and the last one stays.",
        changes=(
            (
                "slot = tl.load(slot_mapping + token)",
                "slot = tl.load(slot_mapping + token) // 4 * 4",
            ),
        ),
    ),
    Mutant(
        name="store_writes_its_padding_lanes",
        task="4.2",
        broken="C4.6",
        story="Each value spills into the next slot: into another sequence's KV, if it is a"
        " block's last.",
        changes=(
            (
                "tl.store(value_cache + slot * ROW + columns, value_row, mask=inside)",
                "tl.store(value_cache + slot * ROW + columns, value_row)",
            ),
        ),
    ),
    Mutant(
        name="table_indexed_by_position",
        task="4.3",
        broken="C4.7",
        story="Position 1 is looked for in the second block: the first key is right, all others are"
        " somebody else's.",
        changes=(
            (
                "tl.load(block_table + keys // BLOCK_SIZE, mask=written",
                "tl.load(block_table + keys, mask=written",
            ),
        ),
    ),
    Mutant(
        name="newest_key_unseen",
        task="4.3",
        broken="C4.7",
        story="The context ends one position early: a token does not attend to itself, and the text"
        " only gets a little worse.",
        changes=(
            (
                "for first in range(0, context_len, TILE):\n"
                "        keys = first + tl.arange(0, TILE)\n"
                "        written = keys < context_len\n",
                "for first in range(0, context_len, TILE):\n"
                "        keys = first + tl.arange(0, TILE)\n"
                "        written = keys < context_len - 1\n",
            ),
        ),
    ),
    Mutant(
        name="scale_forgotten",
        task="4.3",
        broken="C4.8",
        story="Scores are eight times too large at head size 64: nearly all weight falls on one"
        " token.",
        changes=(
            (
                "scores = tl.sum(query_row[None, :] * key, 1) * scale",
                "scores = tl.sum(query_row[None, :] * key, 1)",
            ),
        ),
    ),
    Mutant(
        name="accumulator_not_rescaled",
        task="4.3",
        broken="C4.9",
        story="Right for every context of one tile; beyond it, early tokens weigh too much.",
        changes=(
            (
                "accumulator = accumulator * shrink + tl.sum(weights[:, None] * value, 0)",
                "accumulator = accumulator + tl.sum(weights[:, None] * value, 0)",
            ),
        ),
    ),
    Mutant(
        name="softmax_without_the_running_maximum",
        task="4.3",
        broken="C4.10",
        story="exp overflows at a score of 89 in float32: NaN for some prompts, and for all tokens"
        " after them.",
        changes=(
            (
                "new_maximum = tl.maximum(maximum, tl.max(scores, 0))",
                "new_maximum = tl.max(scores, 0) * 0.0",
            ),
        ),
    ),
    Mutant(
        name="tail_lanes_weigh_exp_0",
        task="4.3",
        broken="C4.11",
        story="Lanes without a key have score 0 and count in the total: outputs are too small"
        " unless the context is a multiple of the tile.",
        changes=(('        scores = tl.where(written, scores, float("-inf"))\n', ""),),
    ),
    Mutant(
        name="tail_loaded_without_mask",
        task="4.3",
        broken="C4.12",
        story="Works as long as unwritten memory holds finite numbers; but 0 * NaN is NaN.",
        changes=(
            (
                "value = tl.load(value_cache + offsets, mask=loaded, other=0.0).to(tl.float32)\n"
                "        total = total * shrink + tl.sum(weights, 0)",
                "value = tl.load(value_cache + offsets, mask=inside[None, :], other=0.0)\n"
                "        total = total * shrink + tl.sum(weights, 0)",
            ),
        ),
    ),
    Mutant(
        name="kv_head_by_modulo",
        task="4.3",
        broken="C4.13",
        story="Heads take turns instead of sharing with their neighbours: right without grouped"
        " queries, nonsense with them.",
        changes=(
            (
                "kv_head = head // group_size\n    dims = tl.arange(0, BLOCK_D)",
                "kv_head = head % num_kv_heads\n    dims = tl.arange(0, BLOCK_D)",
            ),
        ),
    ),
    Mutant(
        name="products_in_half_precision",
        task="4.3",
        broken="C4.14",
        story="A sum of products beyond 65,504 is infinite in float16, and the softmax of it NaN.",
        changes=(
            (
                "query_row = tl.load(query + elements, mask=inside, other=0.0).to(tl.float32)",
                "query_row = tl.load(query + elements, mask=inside, other=0.0)",
            ),
            (
                "key = tl.load(key_cache + offsets, mask=loaded, other=0.0).to(tl.float32)\n"
                "        scores = tl.sum(",
                "key = tl.load(key_cache + offsets, mask=loaded, other=0.0)\n"
                "        scores = tl.sum(",
            ),
        ),
    ),
    Mutant(
        name="output_row_stored_without_mask",
        task="4.3",
        broken="C4.15",
        story="With head size 80 each row spills into the next one's; the last one into memory"
        " that belongs to somebody else.",
        changes=(
            (
                "tl.store(output + elements, accumulator / total, mask=inside)",
                "tl.store(output + elements, accumulator / total)",
            ),
        ),
    ),
    Mutant(
        name="mask_by_relative_position",
        task="4.4",
        broken="C4.16",
        story="Rows count from 0: right for a whole prompt, but behind a cached prefix a row sees"
        " only as many keys as there are rows before it.",
        changes=(("positions = context_len - num_rows + rows", "positions = rows"),),
    ),
    Mutant(
        name="own_key_masked",
        task="4.4",
        broken="C4.16",
        story="A row sees only what stands before it: the first row of a prompt sees nothing and is"
        " NaN.",
        changes=(("keys[None, :] <= positions[:, None]", "keys[None, :] < positions[:, None]"),),
    ),
    Mutant(
        name="keys_end_with_the_rows",
        task="4.4",
        broken="C4.16",
        story="The loop ends after as many keys as there are rows: attention is blind to the rest"
        " of a cached prefix.",
        changes=(
            (
                "end_key = min(context_len, context_len - num_rows + first_row + TILE)",
                "end_key = min(num_rows, first_row + TILE)",
            ),
        ),
    ),
    Mutant(
        name="last_tile_stored_whole",
        task="4.4",
        broken="C4.17",
        story="The rows behind a sequence's last one are those of the next sequence: who is written"
        " last wins.",
        changes=(
            (
                "tl.store(output + elements, accumulator / total[:, None], mask=own)",
                "tl.store(output + elements, accumulator / total[:, None], mask=inside[None, :])",
            ),
        ),
    ),
)
