"""The timeline of one request, printed by the code that counts it.

python -m chapters.ch01_sequence.measure [--mine]
"""

import argparse
from typing import Any

from benchmarks.machine import machine
from chapters.ch01_sequence.chapter import CHAPTER
from chapters.measuring import stages_for

BLOCK_SIZE = 4
PROMPT = "ABCDEF"
MAX_TOKENS = 3
COLUMNS = "{:<8}  {:>8}  {:>6}  {:>8}  {:>6}  {}"


def main() -> None:
    """Print the timeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mine", action="store_true", help="let your own code count")
    mine = parser.parse_args().mine
    print(f"{'your' if mine else 'the reference'} Sequence, {machine()}")
    print(f"block size {BLOCK_SIZE}, prompt {' '.join(PROMPT)}, max_tokens = {MAX_TOKENS}\n")
    print(COLUMNS.format("step", "computes", "blocks", "computed", "tokens", "in blocks, then"))
    for row in timeline(stages_for(CHAPTER, mine).load(CHAPTER.name)):
        print(row)
    print("\nA: its KV is written   g: known, not computed   .: a slot without a token")


def timeline(stage: Any) -> list[str]:
    """One line a step; the model says the alphabet."""
    sequence = stage.Sequence(
        "r", [ord(letter) for letter in PROMPT], stage.SamplingParams(max_tokens=MAX_TOKENS)
    )
    rows = []
    reason = None
    while reason is None:
        step = "decode" if sequence.is_decoding else "prefill"
        start, end = sequence.num_computed_tokens, sequence.num_tokens
        num_new_blocks = sequence.num_new_blocks(end - start, BLOCK_SIZE)
        sequence.block_table += range(num_new_blocks)
        sequence.advance(end)
        sequence.append_token(sequence.token_ids[-1] + 1)
        reason = sequence.stop_reason((), max_model_len=100)
        rows.append(
            COLUMNS.format(
                step,
                f"[{start}, {end})",
                len(sequence.block_table),
                sequence.num_computed_tokens,
                sequence.num_tokens,
                f"{drawn(sequence)}  {reason or ''}".rstrip(),
            )
        )
    return rows


def drawn(sequence: Any) -> str:
    """Its blocks with the tokens in them; behind them what has no block yet."""
    known = [chr(token_id) for token_id in sequence.token_ids]
    num_computed = sequence.num_computed_tokens
    slots = known[:num_computed] + [letter.lower() for letter in known[num_computed:]]
    num_slots = len(sequence.block_table) * BLOCK_SIZE
    slots += ["."] * (num_slots - len(slots))
    blocks = [slots[i : i + BLOCK_SIZE] for i in range(0, num_slots, BLOCK_SIZE)]
    return " ".join(["[" + " ".join(block) + "]" for block in blocks] + slots[num_slots:])


if __name__ == "__main__":
    main()
