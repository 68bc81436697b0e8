"""What a block of KV is computed from, as a key: parent, tokens, and everything else that counts.

The key and value at position p depend on all tokens 0..p, so a block is named by its own tokens
*and* by the key of the block before it. Two prompts that share a middle, but not a start, share
no key:

    prompt 1:  9 9 9 9 | 5 6 7 8        key(block 1) = H(key(block 0), 5 6 7 8)
    prompt 2:  5 6 7 8 | 3              key(block 0) = H(key fields, 5 6 7 8)   another key

The first block stands behind the key fields: tagged values under which the same tokens would give
other KV (weights version, tokenizer, position configuration, adapter) or must not be shared (salt).
"""

from collections.abc import Callable, Sequence
from struct import Struct, calcsize
from typing import Any

from xxhash import xxh3_128_digest

from minivllm.errors import InvalidRequestError

HashFunction = Callable[[bytes], Any]
TOKEN_BYTES = calcsize("i")

# xxh3 is not a cryptographic hash: somebody could build a collision. It would cost a miss,
# never a wrong value, because a hit compares tokens, parent and fields exactly (I7).
default_hash: HashFunction = xxh3_128_digest


class BlockKeyChain:
    """The keys of one sequence's full blocks, first to last, each computed once.

    hashes    hashes[i] = H(contents[i]): where to look for block i
    contents  contents[i] = what block i stands behind + its token ids as int32: what to compare

    Block size 4, no key fields, tokens 9 9 9 9 5 6 7 8 3; seven of them make one block:

        i   contents[i]                   stands behind
        0   "()"           + 9 9 9 9      the key fields
        1   "#" + hash(0)  + 5 6 7 8      block 0, by name; see name_of()

    Two lists of bytes, because a prompt of 50,000 tokens has 3,125 blocks: an object for each
    would cost more than all of their hashes.
    """

    def __init__(self, block_size: int, fields: bytes, hash_function: HashFunction) -> None:
        self.block_size = block_size
        self.hashes: list[Any] = []
        self.contents: list[bytes] = []
        self._hash = hash_function
        self._parent = fields

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the keys of blocks that have become full.

        `token_ids` begin with the tokens of earlier calls: O(new blocks), not O(tokens).
        """
        size = self.block_size
        start, end = len(self.hashes) * size, len(token_ids) // size * size
        # A third of the time that array("i", ...) takes.
        tokens = Struct(f"{end - start}i").pack(*token_ids[start:end])
        width = size * TOKEN_BYTES
        for first in range(0, len(tokens), width):
            content = self._parent + tokens[first : first + width]
            block_hash = self._hash(content)
            self._parent = name_of(block_hash)
            self.contents.append(content)
            self.hashes.append(block_hash)


def name_of(block_hash: Any) -> bytes:
    """The bytes with which the contents of a block's children begin.

    A hash function returns bytes, or an int as Python's own `hash` does. Different hashes have
    different names, and none begins as key fields do, which are the repr of a tuple.

    >>> name_of(b"12"), name_of(12)
    (b'#12', b'=12')
    """
    return b"#" + block_hash if isinstance(block_hash, bytes) else f"={block_hash!r}".encode()


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
