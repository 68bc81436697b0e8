"""Kernels in C for a CPU, in float32: what a few hundred lines can do without a GPU.

    library.py      the C files, compiled once for this processor, and loaded
    pointers.py     addresses of tensors, checked
    memory.py       memory in large pages

    vectors.h       eight numbers at a time; e^x and silu
    tile.h          a few rows times a panel: nearly all time is spent in this loop
    linear.c        the linear layer                              linear.py
    attention.c     PagedAttention of any query range             attention.py
    rotary.c        rotary embedding, keys and values stored      attention.py
    rms_norm.c      RMSNorm, alone or with the residual added     ops.py
    silu_and_mul.c  the gated half of a feed-forward layer        ops.py
    layer.c         all of these, as the parts of a layer         layer.py
    kernels.h       what they call of each other

One promise holds for all of them: the bits of a row's result depend on that row and what it sees,
never on which rows are computed beside it, where a cached prefix ended, or how many threads there
are. Every sum has one order. So a serving engine built on them returns with its cache on, bit for
bit, what it returns with its cache off.

Plain torch references of the same functions stand in `kernels.reference`.
"""
