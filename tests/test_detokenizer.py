"""Text while it arrives, against decoding everything at once, with real decoders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minivllm.detokenizer import Detokenizer

REPLACEMENT = "\ufffd"
FAMILY = "👩\u200d👩\u200d👧\u200d👦"
ACCENTS = "e\u0301 a\u0308o\u0302"
SAMPLES = [FAMILY, "👍🏽", "🇫🇷", "你好，世界", "नमस्ते", ACCENTS, "naïve café", "the end\n", "a b"]


def byte_level_tokenizer():
    """Byte-level BPE: all 256 bytes, merges that also join bytes across characters' borders."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    return tokenizer


def byte_fallback_tokenizer():
    """As Llama 2 has it: pieces with a mark for the space, and a token for each byte."""
    pieces = ["<s>", "▁", "▁the", "▁cat", "s", "the", "a", "中", "▁a"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    vocab |= {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
END = BYTE_LEVEL.token_to_id("<end>")
FALLBACK_BYTE = BYTE_FALLBACK.token_to_id("<0x00>")


def byte_names():
    """How a byte-level vocabulary spells each byte: printable ones as themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


BYTE_TOKENS = {byte: BYTE_LEVEL.token_to_id(name) for byte, name in byte_names().items()}


def byte_tokens(data):
    """One byte-level token for each byte."""
    return [BYTE_TOKENS[byte] for byte in data]


def fallback_ids(text):
    """Each character as its piece, or as its bytes."""
    ids = []
    for character in text.replace(" ", "▁"):
        piece = BYTE_FALLBACK.token_to_id(character)
        data = character.encode()
        ids += [piece] if piece is not None else [FALLBACK_BYTE + byte for byte in data]
    return ids


def run(tokenizer, ids, stop=(), min_tokens=0):
    """Feed `ids` until the text stops, then finish. Returns the detokenizer and the parts."""
    detokenizer = Detokenizer(tokenizer.decode, stop, min_tokens)
    parts = []
    for token_id in ids:
        parts.append(detokenizer.append(token_id))
        if detokenizer.stopped:
            break
    parts.append(detokenizer.finish())
    return detokenizer, parts


class Chunks:
    """A byte-level decoder whose tokens are the given bytes."""

    def __init__(self, *chunks):
        self.chunks = chunks

    def decode(self, ids):
        return b"".join(self.chunks[i] for i in ids).decode(errors="replace")


class Pieces:
    """A decoder whose tokens are the given strings: for the stop strings alone."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


any_text = st.lists(
    st.one_of(st.sampled_from(SAMPLES), st.text(max_size=4), st.characters(min_codepoint=0x1F300,
              max_codepoint=0x1FAFF)),
    max_size=6,
).map("".join).filter(lambda text: REPLACEMENT not in text)  # fmt: skip
byte_level_ids = st.lists(
    st.one_of(
        st.integers(0, BYTE_LEVEL.get_vocab_size() - 1),
        st.binary(min_size=1, max_size=1).map(lambda data: byte_tokens(data)[0]),
        st.sampled_from(byte_tokens(bytes([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xFF]))),
    ),
    max_size=40,
)


# Never half a character


@settings(deadline=None)
@given(text=any_text)
def test_valid_text_comes_as_soon_as_its_characters_are_whole(text):
    detokenizer = Detokenizer(BYTE_LEVEL.decode)
    ids = BYTE_LEVEL.encode(text).ids
    for count, token_id in enumerate(ids, start=1):
        detokenizer.append(token_id)
        assert detokenizer.text == BYTE_LEVEL.decode(ids[:count]).rstrip(REPLACEMENT)
    assert detokenizer.text == text
    assert detokenizer.finish() == ""


@settings(deadline=None, max_examples=300)
@given(ids=byte_level_ids)
def test_the_parts_of_any_bytes_joined_are_the_text_decoded_at_once(ids):
    detokenizer, parts = run(BYTE_LEVEL, ids)
    assert "".join(parts) == detokenizer.text == BYTE_LEVEL.decode(ids)


@settings(deadline=None)
@given(data=st.binary(max_size=60))
def test_single_bytes_come_out_as_python_decodes_them(data):
    detokenizer, _ = run(BYTE_LEVEL, byte_tokens(data))
    assert detokenizer.text == data.decode(errors="replace")


@settings(deadline=None)
@given(text=any_text)
def test_with_byte_fallback_valid_text_comes_whole_and_on_time(text):
    ids = fallback_ids(text)
    detokenizer = Detokenizer(BYTE_FALLBACK.decode)
    for count, token_id in enumerate(ids, start=1):
        detokenizer.append(token_id)
        assert REPLACEMENT not in detokenizer.text
        so_far = BYTE_FALLBACK.decode(ids[:count])
        if REPLACEMENT not in so_far:
            assert detokenizer.text == so_far
    detokenizer.finish()
    assert detokenizer.text == BYTE_FALLBACK.decode(ids) == text.removeprefix(" ")


@settings(deadline=None, max_examples=200)
@given(
    ids=st.lists(
        st.one_of(
            st.integers(0, FALLBACK_BYTE - 1),
            # Bytes of which no run is valid, so that none is out before the run turns bad.
            st.sampled_from([FALLBACK_BYTE + byte for byte in (0xFF, 0xC0, 0x80)]),
        ),
        max_size=40,
    )
)
def test_with_byte_fallback_invalid_bytes_joined_are_the_text_decoded_at_once(ids):
    detokenizer, parts = run(BYTE_FALLBACK, ids)
    assert "".join(parts) == detokenizer.text == BYTE_FALLBACK.decode(ids)


@settings(deadline=None, max_examples=200)
@given(data=st.lists(st.one_of(st.binary(max_size=3), st.sampled_from(["中", "\n", "😀"]))))
def test_with_byte_fallback_text_behind_a_bad_run_of_bytes_is_not_lost(data):
    run_of_bytes = b"".join(item.encode() if isinstance(item, str) else item for item in data)
    ids = [FALLBACK_BYTE + byte for byte in run_of_bytes] + [BYTE_FALLBACK.token_to_id("▁cat")]
    detokenizer = Detokenizer(BYTE_FALLBACK.decode)
    for token_id in ids:
        detokenizer.append(token_id)
    assert detokenizer.text.endswith("cat")


def test_a_whole_character_stays_although_byte_fallback_later_spoils_its_run():
    ids = [*fallback_ids("😀"), FALLBACK_BYTE + 0xFF, *fallback_ids("s")]
    assert BYTE_FALLBACK.decode(ids) == REPLACEMENT * 5 + "s"
    _, parts = run(BYTE_FALLBACK, ids)
    assert parts == ["", "", "", "😀", "", REPLACEMENT + "s", ""]


def test_the_space_that_a_decoder_takes_from_the_first_token_is_kept_in_the_middle():
    ids = [BYTE_FALLBACK.token_to_id(piece) for piece in ("<s>", "▁the", "▁cat", "s", "▁", "▁a")]
    _, parts = run(BYTE_FALLBACK, ids)
    assert parts == ["", "the", " cat", "s", " ", " a", ""]


def test_tokens_without_text_change_nothing_wherever_they_come():
    ids = [END] * 30 + byte_tokens(b"a") + [END] * 30 + byte_tokens("é".encode())
    detokenizer, _ = run(BYTE_LEVEL, ids)
    assert detokenizer.text == "aé"


def test_tokens_without_text_do_not_cost_the_next_word_its_space():
    the, cat, skipped = (BYTE_FALLBACK.token_to_id(piece) for piece in ("▁the", "▁cat", "<s>"))
    assert run(BYTE_FALLBACK, [the, *[skipped] * 30, cat])[0].text == "the cat"


def test_a_skipped_token_within_a_character_does_not_break_it():
    first, second = byte_tokens("é".encode())
    detokenizer, _ = run(BYTE_LEVEL, [*byte_tokens(b"a"), first, END, second])
    assert detokenizer.text == "aé"


def test_a_combining_mark_that_comes_as_a_token_is_given_out_after_its_letter():
    assert run(Pieces("e", "\u0301"), [0, 1])[1] == ["e", "\u0301", ""]


def test_bytes_that_never_become_a_character_come_at_the_end_as_replacement_characters():
    _, parts = run(BYTE_LEVEL, byte_tokens(b"ok\xf0\x9f\x98"))
    assert parts == ["o", "k", "", "", "", REPLACEMENT]


@pytest.mark.parametrize("num_invalid", range(20))
def test_a_character_behind_a_run_of_invalid_bytes_of_any_length_is_whole(num_invalid):
    for text in ("😀", "中", "é", "😀中é"):
        detokenizer, _ = run(BYTE_LEVEL, byte_tokens(b"\xff" * num_invalid + text.encode()))
        assert detokenizer.text == REPLACEMENT * num_invalid + text


@pytest.mark.parametrize("num_invalid", range(12))
def test_a_token_that_ends_one_character_and_begins_a_bad_one_tears_neither(num_invalid):
    chunks = [b"\xff"] * num_invalid + [b"\xf0", b"\x9f", b"\x98", b"\x80\xff"] + [b"\xff"] * 12
    detokenizer, _ = run(Chunks(*chunks), range(len(chunks)))
    assert detokenizer.text == b"".join(chunks).decode(errors="replace")


def test_text_behind_an_invalid_byte_comes_at_once():
    _, parts = run(BYTE_LEVEL, byte_tokens(b"\xffok"))
    assert parts == ["", REPLACEMENT + "o", "k", ""]


# Bounded cost


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        pytest.param(BYTE_LEVEL, byte_tokens(b"\xff") * 3_000, id="invalid bytes"),
        pytest.param(BYTE_LEVEL, byte_tokens(b"\xf0\x9f\x98") * 1_000, id="unfinished characters"),
        pytest.param(BYTE_LEVEL, byte_tokens("😀中".encode() + b"\xe4") * 375, id="mixed"),
        pytest.param(BYTE_LEVEL, byte_tokens(b"hello ") * 500, id="plain"),
        pytest.param(BYTE_LEVEL, [END] * 3_000, id="no text"),
        pytest.param(BYTE_LEVEL, byte_tokens(b"a") + [END] * 2_999, id="then none"),
        pytest.param(BYTE_FALLBACK, [FALLBACK_BYTE + 0xFF] * 3_000, id="fallback, invalid"),
        pytest.param(BYTE_FALLBACK, fallback_ids("😀") * 750, id="fallback, valid"),
    ],
)
def test_a_long_output_costs_a_bounded_number_of_decoded_tokens_each(tokenizer, ids):
    decoded = 0

    def decode(window):
        nonlocal decoded
        decoded += len(window)
        assert len(window) <= 20
        return tokenizer.decode(window)

    detokenizer = Detokenizer(decode)
    num_silent = 0
    for token_id in ids:
        num_silent = 0 if detokenizer.append(token_id) or token_id == END else num_silent + 1
        assert num_silent <= 8  # nothing blocks the text behind it for long
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(ids)
    assert decoded <= 40 * len(ids)


# Stop strings


def expected_end(tokenizer, ids, stop, min_tokens):
    """The smallest prefix of tokens whose text contains a stop string, by trying them all."""
    texts = [tokenizer.decode(ids[:count]).rstrip(REPLACEMENT) for count in range(len(ids) + 1)]
    too_early = len(texts[min(min_tokens, len(ids))])
    for count, text in enumerate(texts):
        found = [
            (start + len(string), start, string)
            for string in stop
            for start in range(len(text))
            if text.startswith(string, start) and start + len(string) > too_early
        ]
        if found:
            _, start, string = min(found)
            return count, text[:start], string
    return len(ids), tokenizer.decode(ids), None


@settings(deadline=None, max_examples=300)
@given(ids=byte_level_ids, min_tokens=st.integers(0, 8), data=st.data())
def test_the_first_stop_string_to_end_cuts_the_text_before_it(ids, min_tokens, data):
    whole = BYTE_LEVEL.decode(ids)
    inside = st.integers(0, len(whole)).flatmap(
        lambda start: st.integers(start, start + 6).map(lambda end: whole[start:end])
    )
    stop = data.draw(st.lists(st.one_of(inside, st.text(max_size=3)), max_size=3).map(
        lambda strings: tuple(s for s in strings if s and REPLACEMENT not in s)
    ))  # fmt: skip
    detokenizer = Detokenizer(BYTE_LEVEL.decode, stop, min_tokens)
    joined, count = "", 0
    for token_id in ids:
        joined += detokenizer.append(token_id)
        count += 1
        if detokenizer.stopped:
            break
    joined += detokenizer.finish()
    expected = expected_end(BYTE_LEVEL, ids, stop, min_tokens)
    assert (count, detokenizer.text, detokenizer.stop_string) == expected
    assert joined == detokenizer.text


ab_pieces = st.lists(st.text("ab", min_size=1, max_size=3), max_size=12)
ab_stops = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4).map(tuple)


@settings(deadline=None, max_examples=300)
@given(pieces=ab_pieces, stop=ab_stops, min_tokens=st.integers(0, 5))
def test_overlapping_stop_strings_are_found_where_brute_force_finds_them(pieces, stop, min_tokens):
    tokenizer, ids = Pieces(*pieces), list(range(len(pieces)))
    detokenizer, parts = run(tokenizer, ids, stop, min_tokens)
    found = (len(parts) - 1, detokenizer.text, detokenizer.stop_string)
    assert found == expected_end(tokenizer, ids, stop, min_tokens)


@settings(deadline=None, max_examples=300)
@given(pieces=ab_pieces, stop=ab_stops)
def test_just_the_text_that_could_begin_a_stop_string_is_held_back(pieces, stop):
    tokenizer, whole = Pieces(*pieces), ""
    detokenizer = Detokenizer(tokenizer.decode, stop)
    for token_id, piece in enumerate(pieces):
        whole += piece
        detokenizer.append(token_id)
        if detokenizer.stopped:
            break
        beginnings = {string[:n] for string in stop for n in range(len(string))} | {""}
        held = max((b for b in beginnings if whole.endswith(b)), key=len)
        assert detokenizer.text == whole[: len(whole) - len(held)]


def test_a_stop_string_across_tokens_is_held_back_and_never_shown():
    detokenizer, parts = run(Pieces("Hi <", "en", "d> more"), [0, 1, 2], ("<end>",))
    assert parts == ["Hi ", "", "", ""]
    assert (detokenizer.text, detokenizer.stop_string) == ("Hi ", "<end>")


def test_held_text_comes_once_it_cannot_be_a_stop_string_and_at_the_end():
    _, parts = run(Pieces("a <", "en", "ough", " <e"), [0, 1, 2, 3], ("<end>",))
    assert parts == ["a ", "", "<enough", " ", "<e"]


def test_of_stop_strings_that_end_together_the_longest_wins():
    for stop in (("cd", "bcd", "d"), ("d", "bcd", "cd")):
        detokenizer, _ = run(Pieces("abcde"), [0], stop)
        assert (detokenizer.text, detokenizer.stop_string) == ("a", "bcd")


def test_the_stop_string_that_ends_first_wins_over_one_that_starts_first():
    detokenizer, _ = run(Pieces("abcde"), [0], ("abcd", "bc"))
    assert (detokenizer.text, detokenizer.stop_string) == ("a", "bc")


def test_a_stop_string_within_a_part_of_a_character_waits_for_the_whole():
    detokenizer, parts = run(BYTE_LEVEL, byte_tokens("a😀b".encode()), ("😀",))
    assert parts == ["a", "", "", "", "", ""]
    assert detokenizer.stop_string == "😀"


def test_a_stop_string_before_an_unfinished_character_of_the_same_token_stops_at_once():
    # One token: "d", then the first byte of two.
    detokenizer = Detokenizer(Chunks(b"en", b"d\xc3").decode, ("end",))
    assert [detokenizer.append(0), detokenizer.append(1)] == ["", ""]
    assert (detokenizer.text, detokenizer.stopped) == ("", True)


def test_a_stop_string_within_the_first_min_tokens_tokens_ends_nothing():
    detokenizer, _ = run(Pieces("x", "END", "y", "END"), [0, 1, 2, 3], ("END",), min_tokens=2)
    assert (detokenizer.text, detokenizer.stop_string) == ("xENDy", "END")
    detokenizer, _ = run(Pieces("x", "END", "y"), [0, 1, 2], ("END",), min_tokens=2)
    assert (detokenizer.text, detokenizer.stopped) == ("xENDy", False)


def test_a_stop_string_that_a_token_after_min_tokens_completes_ends_the_text():
    detokenizer, _ = run(Pieces("x", "EN", "Dy"), [0, 1, 2], ("END",), min_tokens=2)
    assert (detokenizer.text, detokenizer.stop_string) == ("x", "END")


def test_replacement_characters_that_become_certain_at_the_end_can_complete_a_stop_string():
    detokenizer, _ = run(BYTE_LEVEL, byte_tokens(b"ok\xff"), ("k" + REPLACEMENT,))
    assert (detokenizer.text, detokenizer.stopped) == ("o", True)


def test_after_a_stop_string_no_token_is_taken_and_nothing_is_left():
    detokenizer, _ = run(Pieces("a.b"), [0], (".",))
    assert detokenizer.finish() == ""
    with pytest.raises(RuntimeError, match="ended at the stop string '\\.'"):
        detokenizer.append(0)
    assert detokenizer.text == "a"


def test_finishing_twice_gives_nothing_more():
    detokenizer, _ = run(BYTE_LEVEL, byte_tokens(b"a\xff"), ("no",))
    assert detokenizer.finish() == ""
    assert detokenizer.text == "a" + REPLACEMENT
