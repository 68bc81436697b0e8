"""What chapter 8 asks for."""

from chapters.catalog import Chapter, Task

CHAPTER = Chapter(
    number=8,
    name="ch08_proof",
    title="Proof",
    minutes=150,
    builds="property tests of your own that tell a right engine from every wrong one of this book",
    needs=("ch01_sequence", "ch03_block_manager", "ch06_prefix_cache", "ch07_suffix_prefill"),
    tasks=(
        Task(
            number="8.1",
            title="A test of the pool",
            contract={
                "C8.1": "pool_is_right(stages) returns on chapter 3's reference",
                "C8.2": "pool_is_right(stages) raises on every wrong answer to chapter 3",
                "C8.3": "check_counts raises AssertionError for a wrong count and for a block that"
                " is on the free list although it is held, or missing from it although it is not",
            },
            hints=(
                "What are all the things that a BlockManager may be asked for, and what must be"
                " true of the whole pool after each, whatever was asked before?",
                "A RuleBasedStateMachine: rules that add a sequence, compute more of it, free it,"
                " and take and release single blocks; an @invariant that calls check_counts. Let"
                " calls be refused, too: compare state() before and after (I9).",
                "before = state(pool, sequences); try the call; except BlockError: assert"
                " state(pool, sequences) == before. A call that should have been refused and was"
                " not must fail the test as well: compute beforehand whether it fits.",
            ),
        ),
        Task(
            number="8.2",
            title="A test of the cache",
            contract={
                "C8.4": "cache_is_right(stages) returns on chapter 6's reference",
                "C8.5": "cache_is_right(stages) raises on every wrong answer to chapter 6",
            },
            hints=(
                "How would you notice that a block was computed under another prefix, if its own"
                " four tokens are the right ones?",
                "CacheUse does everything that can be asked of a cache, and calls your methods that"
                " begin with check. In check_hits compare every slot of every hit with"
                " Slots.context of the sequence; in check_allocated and check_freed keep a list of"
                " idle blocks as they should stand, oldest first.",
                "Beside the contents: the longest prefix that is cached must be found; match and a"
                " refused allocate change nothing; a key is made from one context only; no cached"
                " block without the one before it; idle blocks leave in the order in which they"
                " became idle; at most max_num_idle of them; reset only when nobody holds a block.",
            ),
        ),
        Task(
            number="8.3",
            title="A test of the engine",
            contract={
                "C8.6": "engine_is_right(stages) returns on chapter 7's reference",
                "C8.7": "engine_is_right(stages) raises on every wrong answer to chapter 7",
            },
            hints=(
                "If a request's output is right, can its KV be wrong? If its KV is right, can its"
                " positions be wrong?",
                "EngineUse serves whole workloads and compares queues and outputs. Your"
                " check_scheduled compares every field of the batch with what the ranges say. Give"
                " it shared prompts, late arrivals, small pools, and a range that ends early.",
                "For the attention: AttentionCase has keys and values in a shuffled table, a cache"
                " full of NaN around them, and what each row should give. Start at every position:"
                " suffix_attention(case.query[start:], *case.cache, case.table, start).",
            ),
        ),
    ),
)
