"""Chapter 4's tasks, their contract and their hints."""

from chapters.catalog import Chapter, Task

TABLES = Task(
    number="4.1",
    title="Validated tables",
    contract={
        "C4.1": "a block id below 0, or from num_blocks on, among those that a context needs raises"
        " TableError, which names the sequence, the logical block and the id",
        "C4.2": "a context that needs more blocks than its row has raises TableError, which names"
        " the sequence, the context and the number of blocks that it needs",
        "C4.3": "a context of less than one position raises TableError, which names the sequence",
        "C4.4": "entries behind those that a context needs are padding: whatever stands there is"
        " accepted",
    },
    hints=(
        "A GPU follows block 10 of 10 without a word, and reads whatever lies there. Which entries"
        " of a row does a context of 5 with blocks of 4 make a kernel follow, and which not?",
        "block_tables.tolist() and context_lens.tolist() are plain Python. For each sequence: is"
        " there a key at all, does the row have ceil(context_len / block_size) entries, and is"
        " each of these, and only these, at least 0 and less than num_blocks?",
        "for i, (row, n) in enumerate(zip(tables, contexts)): if n < 1, raise; needed = -(-n //"
        " block_size); if needed > len(row), raise; for logical, block in enumerate(row[:needed]):"
        " if not 0 <= block < num_blocks, raise TableError(f'sequence {i}, ...').",
    ),
)

STORE = Task(
    number="4.2",
    title="Store KV",
    contract={
        "C4.5": "row i of key and of value lies in slot slot_mapping[i] of its cache afterwards,"
        " to the bit",
        "C4.6": "no other slot is written",
    },
    hints=(
        "One program copies one token's row. Which token is it, where does its row begin in key,"
        " and where in key_cache?",
        "tl.program_id(0) is the token; tl.load(slot_mapping + token) is its slot. A tensor comes"
        " as a pointer, and pointer + tl.arange(0, BLOCK_ROW) is BLOCK_ROW addresses in a row:"
        " too many where ROW is no power of two, so loads and stores take mask=.",
        "columns = tl.arange(0, BLOCK_ROW); inside = columns < ROW; row = tl.load(key + token * ROW"
        " + columns, mask=inside); tl.store(key_cache + slot * ROW + columns, row, mask=inside);"
        " then the same for value.",
    ),
)

DECODE = Task(
    number="4.3",
    title="Decode with online softmax",
    contract={
        "C4.7": "a decode reads the positions 0 .. context_len - 1 of its sequence and no others,"
        " each from the slot that its block table says",
        "C4.8": "the weights are the softmax of q k * scale over all these positions",
        "C4.9": "when a tile raises the maximum, total and accumulator shrink by exp(old - new)",
        "C4.10": "scores of any size have a softmax: exp is taken of score - maximum only",
        "C4.11": "a lane of a tile that lies behind the context weighs nothing, not exp(0)",
        "C4.12": "no slot behind the context is loaded: NaN there does not reach the output",
        "C4.13": "head h uses KV head h // group_size",
        "C4.14": "half-precision inputs are multiplied and summed in float32",
        "C4.15": "every element of the output is written, and nothing beside it",
    },
    hints=(
        "With keys and values in one tensor each, how would you compute one row's softmax while"
        " holding only 16 keys at a time? What do you need to remember of the tiles before?",
        "slots_of is the four lines at the top of the file, for a whole tile: load table[position"
        " // BLOCK_SIZE], then block * BLOCK_SIZE + position % BLOCK_SIZE. A key's address is"
        " key_cache + (slot * num_kv_heads + kv_head) * HEAD_DIM + dim. Give three masks a thought:"
        " loads (position < context_len), lanes of a short tile (-inf before the maximum), head"
        " sizes that are no power of two.",
        "for first in range(0, context_len, TILE): keys = first + tl.arange(0, TILE); load key;"
        " scores = tl.sum(q[None, :] * key, 1) * scale, -inf where keys >= context_len; new ="
        " tl.maximum(maximum, tl.max(scores, 0)); shrink = tl.exp(maximum - new); weights ="
        " tl.exp(scores - new); total = total * shrink + tl.sum(weights, 0); accumulator ="
        " accumulator * shrink + tl.sum(weights[:, None] * value, 0); maximum = new. At the end"
        " store accumulator / total.",
    ),
)

PREFILL = Task(
    number="4.4",
    title="Prefill with a causal mask",
    contract={
        "C4.16": "a row at absolute position p sees the positions 0 .. p, all of them and no other,"
        " wherever the rows of its sequence start",
        "C4.17": "sequence i computes the rows query_starts[i] up to query_starts[i + 1]: each of"
        " them is written once, and nothing beside them",
        "C4.18": "what C4.8 to C4.14 say of a decode holds of each row",
    },
    hints=(
        "A sequence has 20 positions, and 16 of them were written before. Its four rows are 0 to 3"
        " of this launch. At which positions do they stand, and how many keys does each see?",
        "The last row stands at context_len - 1, so row r of num_rows stands at context_len -"
        " num_rows + r. Your decode kernel does the rest once scores are [TILE rows, TILE keys]:"
        " maximum and total become [TILE], and a row's number shrinks its row of the accumulator"
        " (shrink[:, None]). Rows behind num_rows must neither be loaded nor stored.",
        "scores = tl.dot(q, tl.trans(key), input_precision='ieee') * scale; scores ="
        " tl.where(keys[None, :] <= positions[:, None], scores, float('-inf')); new ="
        " tl.maximum(maximum, tl.max(scores, 1)); weights = tl.exp(scores - new[:, None]);"
        " accumulator = accumulator * shrink[:, None] + tl.dot(weights, value,"
        " input_precision='ieee'). Begin with: if first_row >= num_rows: return.",
    ),
)

CHAPTER = Chapter(
    number=4,
    name="ch04_paged_attention",
    title="PagedAttention",
    minutes=180,
    builds="Three Triton kernels that store keys and values in blocks and attend to them through a"
    " block table, equal to plain torch, and verified without a GPU.",
    needs=(),
    tasks=(TABLES, STORE, DECODE, PREFILL),
)
