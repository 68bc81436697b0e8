"""Chapter 1's tasks, their contract and their hints."""

from chapters.catalog import Chapter, Task

TOKENS = Task(
    number="1.1",
    title="Known and computed tokens",
    contract={
        "C1.1": "num_tokens counts all known tokens, num_output_tokens only the generated ones",
        "C1.2": "append_token adds a token whose KV is not written: num_computed_tokens stays",
        "C1.3": "is_decoding is true exactly when there is output and only its newest token is not"
        " computed",
        "C1.4": "advance(end) sets num_computed_tokens to end; unless num_computed_tokens < end <="
        " num_tokens it raises ValueError and changes nothing",
        "C1.5": "append_token raises ValueError and adds nothing while a known token is not"
        " computed",
    },
    hints=(
        "The prompt has 6 tokens and one has been generated. How many are known, and the KV of how"
        " many is written? Which step writes the KV of the generated one?",
        "token_ids, num_prompt_tokens and num_computed_tokens are all you need; three of the five"
        " are one comparison or one subtraction. Check in the two that change something before"
        " you change it.",
        "num_tokens: len(self.token_ids). is_decoding: num_output_tokens > 0 and"
        " num_computed_tokens == num_tokens - 1. append_token: if num_computed_tokens !="
        " num_tokens, raise ValueError(...); else self.token_ids.append(token_id), and nothing"
        " more.",
    ),
)

BLOCKS = Task(
    number="1.2",
    title="Blocks needed",
    contract={
        "C1.6": "blocks_for(n, block_size) is the smallest number of blocks that hold n tokens",
        "C1.7": "num_new_blocks is what the table lacks to cover num_computed_tokens +"
        " num_new_tokens positions, and never less than 0",
    },
    hints=(
        "Block size 4, 8 positions computed in 2 blocks. Where does the KV of position 8 go? And"
        " that of position 9?",
        "Round up, do not round down and add one: 8 tokens fill 2 blocks, not 3. For the table,"
        " count what the end of the range needs, then take off what is there: prefill and decode"
        " are one case then.",
        "blocks_for: -(-num_tokens // block_size). num_new_blocks: end ="
        " self.num_computed_tokens + num_new_tokens, then max(0, blocks_for(end, block_size) -"
        " len(self.block_table)).",
    ),
)

STATES = Task(
    number="1.3",
    title="States",
    contract={
        "C1.8": "run() leads from WAITING to RUNNING",
        "C1.9": "preempt() leads from RUNNING to WAITING and keeps every token, generated ones too",
        "C1.10": "after preempt() no position counts as computed",
        "C1.11": "finish(reason) leads from WAITING or RUNNING to FINISHED and keeps the reason",
        "C1.12": "any other move raises ValueError and changes nothing",
    },
    hints=(
        "A preempted sequence lost its blocks. Which of its numbers were about them, and which are"
        " about its text?",
        "_leave(...) raises for you: call it first, with the states that a move may start from.",
        "preempt: self._leave(SequenceState.RUNNING), then state = SequenceState.WAITING and"
        " num_computed_tokens = 0; token_ids is left alone. finish: leave either of two states,"
        " set state and finish_reason.",
    ),
)

STOP = Task(
    number="1.4",
    title="Stop rules",
    contract={
        "C1.13": 'an EOS token is a reason to "stop", unless ignore_eos is set',
        "C1.14": 'a token of stop_token_ids is a reason to "stop", whatever ignore_eos says',
        "C1.15": "no token stops an output before min_tokens are generated, itself included",
        "C1.16": 'the output ends with "length" at exactly max_tokens generated tokens',
        "C1.17": 'it also ends with "length" once prompt and output have max_model_len tokens',
        "C1.18": 'when both reasons hold, the answer is "stop"',
        "C1.19": "stop_reason only looks: the stop token stays in the output",
    },
    hints=(
        "With max_tokens = 3 the third token has just been appended. What does num_output_tokens"
        " say now: 2 or 3?",
        "Ask three things in this order: is the newest token one that may stop, are enough tokens"
        " generated for it to count, is there room for one more? ignore_eos belongs to the first"
        " question, and there only to EOS.",
        "is_stop = (token in eos_token_ids and not ignore_eos) or token in stop_token_ids; if"
        ' is_stop and num_output_tokens >= min_tokens: "stop"; if num_output_tokens >= max_tokens'
        ' or num_tokens >= max_model_len: "length"; else None.',
    ),
)

CHAPTER = Chapter(
    number=1,
    name="ch01_sequence",
    title="Sequence",
    minutes=120,
    builds="One request as the engine sees it: which tokens are known, which are computed, how many"
    " blocks they need, and when it stops.",
    needs=(),
    tasks=(TOKENS, BLOCKS, STATES, STOP),
    observed=("Sequence",),
)
