"""Token ids for prompts that share exactly what a test wants them to share."""

from __future__ import annotations

VOCAB_SIZE = 100_000


def text(name: int, num_tokens: int) -> list[int]:
    """Up to 1,000 tokens that no other `name` (0 to 99) uses; a longer text extends a shorter."""
    return list(range(1_000 * name, 1_000 * name + num_tokens))


COMMON = text(0, 48)
"""Three full blocks of 16."""
