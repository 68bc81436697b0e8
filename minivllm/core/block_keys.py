"""What a block of KV is computed from, as a key: parent, tokens, and everything else that counts.

The key and value at position p depend on all tokens 0..p, so a block is named by its own tokens
*and* by the key of the block before it. Two prompts that share a middle, but not a start, share
no key:

    prompt 1:  9 9 9 9 | 5 6 7 8        key(block 1) = H(key(block 0), 5 6 7 8)
    prompt 2:  5 6 7 8 | 3              key(block 0) = H(root, 5 6 7 8)         another key

The root is made from the key fields: tagged values under which the same tokens would give other
KV (weights version, tokenizer, position configuration, adapter) or must not be shared (salt).
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_128_digest

from minivllm.errors import InvalidRequestError

HashFunction = Callable[[bytes], Any]

# xxh3 is not a cryptographic hash: somebody could build a collision. It would cost a miss,
# never a wrong value, because a hit compares tokens, parent and fields exactly (I7).
default_hash: HashFunction = xxh3_128_digest


class BlockKey(NamedTuple):
    """One full block's key.

    hash    H(parent's hash + tokens): where to look
    tokens  the block's token ids as int32 bytes: what to compare
    """

    hash: Any
    tokens: bytes


class BlockKeyChain:
    """The keys of one sequence's full blocks, first to last, each computed once."""

    def __init__(self, block_size: int, fields: bytes, hash_function: HashFunction) -> None:
        self.fields = fields
        self.keys: list[BlockKey] = []
        self.block_size = block_size
        self._hash = hash_function
        self._last_hash = hash_function(b"root" + fields)

    def extend(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Add the keys of blocks that have become full, and return all keys.

        `token_ids` begin with the tokens of earlier calls: O(new blocks), not O(tokens).
        """
        size = self.block_size
        for start in range(len(self.keys) * size, len(token_ids) - size + 1, size):
            tokens = array("i", token_ids[start : start + size]).tobytes()
            self._last_hash = self._hash(_as_bytes(self._last_hash) + tokens)
            self.keys.append(BlockKey(self._last_hash, tokens))
        return self.keys


def encode_key_fields(fields: tuple[Any, ...]) -> bytes:
    """Return bytes that differ whenever the fields do.

    A field is a str, bytes, int, bool or None, or a tuple of these such as `("adapter", "a")`.
    `repr` keeps types apart ("1" and 1) and quotes what is inside, so no two different tuples
    are written alike. Raises InvalidRequestError for any other type, whose repr may not.
    """
    _check_fields(fields)
    return repr(fields).encode()


def _check_fields(value: Any) -> None:
    if type(value) is tuple:
        for item in value:
            _check_fields(item)
    elif value is not None and type(value) not in (str, bytes, int, bool):
        raise InvalidRequestError(
            f"key field {value!r} is a {type(value).__name__}; it must be a str, bytes, int, bool,"
            " None, or a tuple of these"
        )


def _as_bytes(value: Any) -> bytes:
    """Accept a hash function that returns an int, as Python's own `hash` does."""
    return value if isinstance(value, bytes) else repr(value).encode()
