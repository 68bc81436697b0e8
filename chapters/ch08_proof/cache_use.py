"""Given: random use of chapter 6's cache. It knows what may be asked for, not what must hold."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chapters.ch08_proof.search import FIELDS, PROMPTS
from chapters.ch08_proof.slots import Slots


class CacheUse(RuleBasedStateMachine):
    """Sequences come, compute in one go or in chunks, generate, and go; now and then all is reset.

    A subclass names the chapters' code, and says in the methods that begin with `check` what must
    hold. Here they hold of anything.

    ch01, ch06   the stages' modules
    pool         the CachingBlockManager
    slots        what stands in each of its slots
    running      sequences that hold blocks
    weak         its hash function has one or two values: collisions may cost hits, never a value
    """

    ch01: Any
    ch06: Any

    def published(self) -> dict[int, Any]:
        """Block -> the context of its last slot, for every cached block."""
        blocks = range(self.pool.num_blocks)
        return {b: self.slots.of_block(b)[-1] for b in blocks if self.pool.cached_at(b)}

    # What must hold

    def check_hits(self, sequence: Any, hits: list[int]) -> None:
        """match() of a new sequence found these blocks; its table is still empty."""

    def check_fit(self, sequence: Any, missing: int, hits: list[int]) -> None:
        """It is about to ask for `missing` blocks besides its hits."""

    def check_allocated(self, sequence: Any, missing: int, hits: list[int], done: bool) -> None:
        """It asked for them; `done` says whether it was given them or refused."""

    def check_committed(self, sequence: Any) -> None:
        """Its newly computed positions are written and committed."""

    def check_freed(self, only_cached: list[int]) -> None:
        """A sequence gave its blocks back; of those, only the cache held these, tail first."""

    def check_reset(self, done: bool) -> None:
        """reset() was called, and said `done`."""

    def check_everything(self) -> None:
        """Any of the above has happened."""

    # What happens

    @initialize(
        num_blocks=st.integers(2, 6),
        block_size=st.sampled_from([1, 2, 2, 3]),
        share=st.sampled_from([1.0, 1.0, 0.5, 0.2]),
        num_hashes=st.sampled_from([None, None, 1, 2]),
    )
    def make(self, num_blocks: int, block_size: int, share: float, num_hashes: int | None) -> None:
        """A pool of any size, and no sequence; its hash function may have few values."""
        self.weak = num_hashes is not None
        hashing = {"hash_function": lambda data: bytes([sum(data) % num_hashes])}
        self.pool = self.ch06.CachingBlockManager(
            num_blocks, block_size, share, **hashing if self.weak else {}
        )
        self.slots = Slots(self.pool)
        self.running: list[Any] = []
        self.texts: list[Any] = [([0, 257], ("",))]

    @rule(prompt=PROMPTS, fields=FIELDS, chunk=st.sampled_from([99, 99, 1, 3]))
    def start(self, prompt: list[int], fields: Any, chunk: int) -> None:
        """A request arrives and computes its first chunk, if there is room."""
        sequence = self.ch01.Sequence(f"r{len(self.texts)}", prompt, key_fields=fields)
        hits = self.pool.match(sequence)
        self.check_hits(sequence, hits)
        num_cached = len(hits) * self.pool.block_size
        if self._compute(sequence, min(chunk, sequence.num_tokens - num_cached), hits):
            self.running.append(sequence)

    @rule(which=st.integers(0, 9), more=st.lists(st.sampled_from([1, 257]), max_size=4))
    def continue_an_old_text(self, which: int, more: list[int]) -> None:
        """The next turn of a conversation."""
        text, fields = self.texts[which % len(self.texts)]
        self.start(text + more, fields, 99)

    @rule(which=st.integers(0, 5), token=st.integers(1, 2))
    def go_on(self, which: int, token: int) -> None:
        """A sequence computes what is left of its prompt, or the next token."""
        if self.running:
            sequence = self.running[which % len(self.running)]
            if sequence.num_computed_tokens == sequence.num_tokens:
                sequence.append_token(token)
            self._compute(sequence, sequence.num_tokens - sequence.num_computed_tokens, [])

    @rule(which=st.integers(0, 5))
    def free(self, which: int) -> None:
        """A sequence ends."""
        if self.running:
            sequence = self.running.pop(which % len(self.running))
            self.texts.append((list(sequence.token_ids), sequence.key_fields))
            held = {block for other in self.running for block in other.block_table}
            cached = [b for b in reversed(sequence.block_table) if self.pool.cached_at(b)]
            self.pool.free(sequence)
            assert sequence.block_table == [], "a freed table is not empty"
            self.check_freed([block for block in cached if block not in held])

    @rule()
    def reset(self) -> None:
        """Somebody wants the cache empty."""
        self.check_reset(self.pool.reset())

    @invariant()
    def everything(self) -> None:
        """After each rule."""
        if hasattr(self, "pool"):
            self.check_everything()

    @classmethod
    def play_rare_cases(cls) -> None:
        """What chance seldom brings, once."""
        # The hits are the oldest idle blocks, and room must be made; then a refusal with idle hits.
        cache = cls()
        cache.make(num_blocks=4, block_size=2, share=1.0, num_hashes=None)
        for prompt in ([1, 2, 3, 4], [5, 6, 7, 8]):
            cache.start(prompt, ("",), 99)
            cache.free(0)
        cache.start([1, 2, 3, 4, 9, 9, 9], ("",), 99)
        cache.everything()
        cache.free(0)
        cache.start([1, 2, 3, 4, *range(6)], ("",), 99)
        cache.everything()
        # Half of the pool may stay idle: of four full blocks two stay.
        cache = cls()
        cache.make(num_blocks=4, block_size=2, share=0.5, num_hashes=None)
        cache.start([1, 2, 3, 4, 5, 6, 7, 8], ("",), 99)
        cache.free(0)
        cache.everything()
        # Two compute the same prompt side by side: one of them publishes.
        cache = cls()
        cache.make(num_blocks=6, block_size=2, share=1.0, num_hashes=None)
        for _ in range(2):
            cache.start([1, 2, 3, 4, 5], ("",), 1)
        for which in (0, 1):
            cache.go_on(which, 1)
            cache.everything()
        # One of two readers of a prefix ends, then the other.
        cache = cls()
        cache.make(num_blocks=6, block_size=2, share=1.0, num_hashes=None)
        for _ in range(2):
            cache.start([1, 2, 3, 4, 5], ("",), 99)
        for _ in range(2):
            cache.free(0)
            cache.everything()
        # What only looks alike: other fields before the same tokens, tokens with the same last
        # byte, two tokens at another place. The second time all hashes are equal.
        for num_hashes in (None, 1):
            cache = cls()
            cache.make(num_blocks=12, block_size=2, share=1.0, num_hashes=num_hashes)
            for prompt in ([1, 2, 3], [257, 2, 3], [1, 2, 1, 2, 3]):
                for fields in (("a", "b"), ("ab",)):
                    cache.start(prompt, fields, 99)
                    cache.everything()
                    cache.reset()
                    cache.free(0)
        # The first block collides, the block behind it does not.
        for last in (1, 2):
            cache = cls()
            cache.make(num_blocks=6, block_size=2, share=1.0, num_hashes=2)
            for prompt in ([1, 2], [2, 1, 1, last]):
                cache.start(prompt, ("",), 99)
                cache.everything()

    def _compute(self, sequence: Any, num_new: int, hits: list[int]) -> bool:
        size = self.pool.block_size
        end = sequence.num_computed_tokens + len(hits) * size + num_new
        missing = -(-end // size) - len(sequence.block_table) - len(hits)
        self.check_fit(sequence, missing, hits)
        try:
            self.pool.allocate(sequence, num_new, hits)
        except self.ch06.BlockError:
            self.check_allocated(sequence, missing, hits, False)
            return False
        self.check_allocated(sequence, missing, hits, True)
        assert len(sequence.block_table) * size >= end, "I5: no block for the newest position"
        self.slots.write(sequence, sequence.num_computed_tokens, end)
        self.pool.commit(sequence, end)
        self.check_committed(sequence)
        return True
