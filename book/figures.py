"""`python -m book.figures [NAME ...]` draws the figures that are counted or measured, anew.

For each it writes docs/figures/NAME.svg and, in NAME.made, on which machine and when. Both are
committed: a page must not change because somebody else built it. Here stand figures that the
engine counts; tests/site compares the committed drawing with a new one.
"""

import sys
from collections.abc import Callable
from html import escape

from benchmarks.choices import BLOCK_SIZES, replay
from benchmarks.machine import machine
from book.letters import LetterRunner
from book.places import FIGURES, write
from minivllm import EngineConfig, LLMEngine, SamplingParams

NUM_PEOPLE = 6
NUM_SHARED = 1000  # tokens of instructions that all prompts begin with
NUM_OWN = 30  # tokens of each person's question
_GREY = "var(--md-default-fg-color--lighter, #667377)"
_ACCENT = "var(--md-accent-fg-color, #a34a12)"


def prompt_tokens_computed(enable_prefix_caching: bool) -> int:
    """Prompt positions that the engine computes for six people who ask at the same time."""
    config = EngineConfig(
        num_kv_blocks=512, max_num_batched_tokens=2048, enable_prefix_caching=enable_prefix_caching
    )
    engine = LLMEngine(config, _PatientRunner())
    shared = [i % 26 for i in range(NUM_SHARED)]
    for person in range(NUM_PEOPLE):
        own = [(7 * i + person) % 26 for i in range(NUM_OWN)]
        engine.add_request(str(person), shared + own, SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    return int(engine.stats()["prompt_tokens_computed"])


class _PatientRunner(LetterRunner):
    max_model_len = 2000


def six_people() -> str:
    """Bars: prompt tokens computed for six people, without and with the prefix cache."""
    rows = [
        ("cache off", prompt_tokens_computed(False)),
        ("cache on", prompt_tokens_computed(True)),
    ]
    asked = NUM_PEOPLE * (NUM_SHARED + NUM_OWN)
    title = f"Prompt tokens computed, of {asked:,} asked for: " + ", ".join(
        f"{count:,} with the {name}" for name, count in rows
    )
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 96" role="img"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="currentColor">',
        f"<title>{escape(title)}</title>",
    ]
    for i, ((name, count), colour) in enumerate(zip(rows, (_GREY, _ACCENT), strict=True)):
        y, width = 10 + 44 * i, 450 * count / asked
        parts += [
            f'<text x="76" y="{y + 21}" text-anchor="end">{name}</text>',
            f'<rect x="88" y="{y}" width="{width:.1f}" height="32" rx="4" style="fill: {colour}"/>',
            f'<text x="{96 + width:.1f}" y="{y + 21}" font-weight="700">{count:,}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def choices_granularity() -> str:
    """Bars: tokens that a chat must compute although they are known, and keys, by block size."""
    rows = [
        (size, counts.prompt_tokens - counts.found_tokens, counts.blocks_looked_up)
        for size, counts in ((size, replay(size)) for size in BLOCK_SIZES)
    ]
    most_computed = max(computed for _, computed, _ in rows)
    most_keys = max(keys for _, _, keys in rows)
    title = "By block size, tokens computed and keys made: " + "; ".join(
        f"{size}: {computed:,} and {keys:,}" for size, computed, keys in rows
    )
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 178" role="img"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="currentColor">',
        f"<title>{escape(title)}</title>",
        '<text x="76" y="20" text-anchor="end" font-weight="700">block size</text>',
        '<text x="88" y="20" font-weight="700">prompt tokens computed</text>',
        '<text x="372" y="20" font-weight="700">keys made and searched</text>',
    ]
    for i, (size, computed, keys) in enumerate(rows):
        y = 32 + 36 * i
        parts.append(f'<text x="76" y="{y + 18}" text-anchor="end">{size}</text>')
        for x, count, most, colour in (
            (88, computed, most_computed, _ACCENT),
            (372, keys, most_keys, _GREY),
        ):
            width = 200 * count / most
            parts += [
                f'<rect x="{x}" y="{y}" width="{width:.1f}" height="26" rx="4"'
                f' style="fill: {colour}"/>',
                f'<text x="{x + 8 + width:.1f}" y="{y + 18}" font-weight="700">{count:,}</text>',
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"


ALL: dict[str, Callable[[], str]] = {
    "six-people": six_people,
    "choices-granularity": choices_granularity,
}


def main(names: list[str]) -> int:
    """Draw the named figures, or all of them."""
    if unknown := [name for name in names if name not in ALL]:
        print(f"no figure {', '.join(unknown)}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    for name in names or ALL:
        write(FIGURES / f"{name}.svg", ALL[name]())
        write(
            FIGURES / f"{name}.made", f"Made by <code>make figures</code>: {escape(machine())}.\n"
        )
        print(f"docs/figures/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
