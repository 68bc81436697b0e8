import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.core.block_keys import BlockKeyChain, default_hash, encode_key_fields, name_of
from minivllm.errors import InvalidRequestError

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)
field = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary())
fields = st.lists(st.one_of(field, st.tuples(field, field)), max_size=3).map(tuple)


def chain(token_ids, key_fields=(), block_size=4):
    keys = BlockKeyChain(block_size, encode_key_fields(key_fields), default_hash)
    keys.extend(token_ids)
    return pairs(keys)


def pairs(keys):
    """(hash, content) of each block."""
    return list(zip(keys.hashes, keys.contents, strict=True))


def test_only_full_blocks_have_a_key():
    assert [len(chain(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_the_same_tokens_behind_another_start_have_another_key():
    assert chain([9, 9, 9, 9, 5, 6, 7, 8])[1] != chain([5, 6, 7, 8])[0]


def test_token_ids_above_255_and_60000_make_a_difference():
    assert chain([256, 1, 1, 1]) != chain([0, 1, 1, 1])
    assert chain([65536, 1, 1, 1]) != chain([0, 1, 1, 1])


@given(tokens, st.integers(1, 7), st.data())
def test_keys_do_not_depend_on_how_the_tokens_arrived(token_ids, size, data):
    whole = chain(token_ids, block_size=size)
    grown = BlockKeyChain(size, encode_key_fields(()), default_hash)
    for cut in sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4))):
        grown.extend(token_ids[:cut])
    grown.extend(token_ids)
    assert pairs(grown) == whole


@given(st.one_of(st.binary(), st.integers()), st.one_of(st.binary(), st.integers()), fields)
def test_no_two_parents_have_one_name(one, other, key_fields):
    assert (name_of(one) == name_of(other)) == (one == other)
    assert name_of(one)[:1] != encode_key_fields(key_fields)[:1]


@pytest.mark.parametrize("value", [b"()", b"same", "()", 0])
def test_a_block_behind_another_is_no_first_block_whatever_the_hash_says(value):
    keys = BlockKeyChain(1, encode_key_fields(()), lambda data: value)
    keys.extend([7, 7, 7])
    first, second, third = keys.contents
    assert first != second == third, "one hash is one parent"


@given(tokens, tokens)
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(one, other):
    equal_blocks = 0
    while (
        len(one) >= (equal_blocks + 1) * 4
        and one[: (equal_blocks + 1) * 4] == other[: (equal_blocks + 1) * 4]
    ):
        equal_blocks += 1
    keys = zip(chain(one), chain(other), strict=False)
    assert [a == b for a, b in keys] == [
        i < equal_blocks for i in range(min(len(one), len(other)) // 4)
    ]


@given(fields, fields)
def test_different_fields_give_different_bytes(one, other):
    # bool and int compare equal in Python, but are different fields
    same = repr(one) == repr(other)
    assert (encode_key_fields(one) == encode_key_fields(other)) == same


@given(fields, fields)
def test_different_fields_change_every_key(one, other):
    token_ids = list(range(8))
    if repr(one) != repr(other):
        keys = zip(chain(token_ids, one), chain(token_ids, other), strict=True)
        assert all(a[0] != b[0] and a[1] != b[1] for a, b in keys)


def test_a_field_cannot_imitate_two_fields():
    assert encode_key_fields(("a', 'b",)) != encode_key_fields(("a", "b"))


@pytest.mark.parametrize("value", [1.5, ["a"], {"a": 1}, object()])
def test_a_field_of_another_type_is_refused_by_name(value):
    with pytest.raises(InvalidRequestError, match=type(value).__name__):
        encode_key_fields((("tag", value),))
