"""PagedAttention: Triton kernels for a GPU, C for a CPU, each with a plain torch reference.

    store_kv.py           scatter new keys and values into the paged cache
    paged_attention.py    attention of any query range: prefill, chunk, suffix, decode, mixed
    split_attention.py    decode that splits a long context among programs and merges
    attention.py          which of the two a batch gets
    rotary.py             norms of heads, rotary embedding, and the rotated keys stored: one pass
    rms_norm.py           RMSNorm, alone or with the residual added first
    silu_and_mul.py       the gated half of a feed-forward layer

    native/               the same in C, for a CPU: see `kernels.native`
    gathered_attention.py attention in plain torch, where neither can run

    layer_parts.py        what a decoder layer is made of, for whoever computes it

    reference.py          what each of them must compute, in torch, without a trick
    block_tables.py       block tables and ranges, checked on the host before one is followed
    batch.py              PagedBatch: what of a step the kernels read, in one piece
    transfer.py           numbers to the device, without waiting for it
    launch.py             checks and small helpers all launchers share
    available.py          whether Triton kernels can run here
    errors.py             KernelInputError

One memory layout. A layer has one key cache and one value cache, both contiguous:

    [num_blocks, block_size, num_kv_heads, head_dim]

A *slot* is where one position's KV lies: `slot = block_id * block_size + position % block_size`.
Flattened to [num_blocks * block_size, num_kv_heads * head_dim], a cache is a table with one row
a slot: storing a token is writing one row, and a head's part of a row is head_dim neighbours.

Head sizes 64, 80, 96, 128 and 256 and block sizes 16 to 256 are what the tiles are chosen for.
Any other even head size up to 256, and any other block size, is computed rightly, too.

Block tables, query starts, context lengths, positions and slots are int32; kernels widen to
64 bits before they multiply a slot by the length of its row, which soon exceeds 2**31.

Nothing is imported here: `kernels.reference`, `kernels.batch`, `kernels.errors` and what is for a
CPU work where triton is not installed. The rest runs on a CUDA GPU, or, with TRITON_INTERPRET=1 in
the environment before triton is imported, in Triton's interpreter on the CPU.
"""
