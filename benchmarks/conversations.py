"""A chat workload: several conversations on one system prompt, one turn after another.

Token ids are drawn from a seed, so any tokenizer and model will do; what an engine answers becomes
part of the next turn's prompt. All conversations take their first turn, then all their second: a
conversation's own history lies idle while the others speak.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class ChatShape:
    """How much text: counts of conversations and turns, lengths in tokens."""

    conversations: int
    turns: int
    system_tokens: int
    user_tokens: int
    answer_tokens: int

    @property
    def final_tokens(self) -> int:
        """Length of one conversation after its last answer."""
        return self.system_tokens + self.turns * (self.user_tokens + self.answer_tokens)

    def blocks_needed(self, block_size: int) -> int:
        """Blocks that hold every conversation to its end, the system prompt once."""
        shared = self.system_tokens // block_size
        own = -(-self.final_tokens // block_size) - shared
        return shared + self.conversations * own


class Chat:
    """The conversations, and what comes next in each."""

    def __init__(self, shape: ChatShape, vocab_size: int, seed: int = 0) -> None:
        draw = random.Random(seed)
        self.shape = shape
        self._text = [draw.randrange(vocab_size) for _ in range(shape.system_tokens)]
        self._histories = [list(self._text) for _ in range(shape.conversations)]
        self._questions = [
            [
                [draw.randrange(vocab_size) for _ in range(shape.user_tokens)]
                for _ in range(shape.conversations)
            ]
            for _ in range(shape.turns)
        ]

    def prompts(self, turn: int) -> list[list[int]]:
        """What each conversation sends in this turn: all that was said, and a new question."""
        for history, question in zip(self._histories, self._questions[turn], strict=True):
            history.extend(question)
        return [list(history) for history in self._histories]

    def answer(self, conversation: int, token_ids: list[int]) -> None:
        """What the engine said to it."""
        self._histories[conversation].extend(token_ids)
