"""Token ids to text while they arrive: never half a character, and the end at a stop string.

Two things keep text back. A token may end within a character (byte-level BPE cuts emoji and
Chinese into bytes), so a decoded text that ends in U+FFFD may still change. And text that could
be the beginning of a stop string must not be shown before it is clear that it is none.

A character here is a code point. A combining mark or an emoji joiner that comes as a token of
its own is text of its own: the base character before it has been given out already.
"""

from collections.abc import Callable

Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"
_LONGEST_WAIT = 8
"""Tokens without a settled end before the oldest are settled as they are. A character has at
most 4 bytes, so at most 3 tokens that are worth waiting for."""


class Detokenizer:
    """The text of one output.

    decode      token ids to text. It must not tidy up spaces: the text of some tokens has to be
                a prefix of the text of these and more (except for an unfinished character)
    stop        strings that end the text, none of them empty
    min_tokens  a stop string counts only if a token after the first `min_tokens` completes it;
                one that lies within the text of those ends nothing, then or later

    The caller appends each token of the output, but not an EOS or stop token, until `stopped`
    or until the output ends for another reason, and then calls finish().

    text         what has been given out so far: all that append() and finish() returned, joined
    stop_string  the stop string that ended the text, or None

    With a byte-level decoder `text` is decode(all ids) once finished, or what stands before the
    stop string. A ByteFallback decoder turns a whole run of byte tokens into U+FFFD if one of
    them is wrong; characters of the run that were complete before are out already and stay.
    """

    def __init__(self, decode: Decode, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self.text = ""
        self.stop_string: str | None = None
        self._settling = _SettlingText(decode)
        self._stop = stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""

    @property
    def stopped(self) -> bool:
        """True once a stop string has ended the text."""
        return self.stop_string is not None

    def append(self, token_id: int) -> str:
        """Take the next token; returns the text that it makes certain, often "".

        Raises RuntimeError after a stop string has ended the text.
        """
        if self.stopped:
            raise RuntimeError(f"the text has ended at the stop string {self.stop_string!r}")
        self._num_tokens += 1
        return self._give(self._settling.append(token_id))

    def finish(self) -> str:
        """Returns what was held back: no more tokens come. After a stop string that is "".

        Bytes that never became a character come out as U+FFFD.
        """
        return "" if self.stopped else self._give(self._settling.flush(), is_last=True)

    def _give(self, new: str, is_last: bool = False) -> str:
        """Add settled text; returns what may be shown of it and of what was held."""
        text = self._held + new
        match = self._first_match(text)
        if match and self._num_tokens > self._min_tokens:
            end, _, self.stop_string = match
            given, self._held = text[: end - len(self.stop_string)], ""
        else:
            held = max((_overlap(text, string) for string in self._stop), default=0)
            cut = len(text) if is_last else len(text) - held
            given, self._held = text[:cut], text[cut:]
        self.text += given
        return given

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """(end, -length, string) of the stop string that ends first: of those it starts first.

        One that ends within what was held already has been seen, and was too early.
        """
        matches = []
        for string in self._stop:
            start = text.find(string, max(0, len(self._held) - len(string) + 1))
            if start >= 0:
                matches.append((start + len(string), -len(string), string))
        return min(matches, default=None)


def _overlap(text: str, string: str) -> int:
    """Characters at the end of `text` that may be the beginning of `string`."""
    lengths = range(min(len(string) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(string[:n])), 0)


class _SettlingText:
    """Tokens to text that no later token changes, at a bounded cost for each token.

    Only a window of tokens is decoded: `context`, whose text is out, and `pending`, whose text
    is not, or not all. The context is there because a decoder may treat the first token
    differently (SentencePiece takes away its leading space).

        token    window           its text         settles
        " caf"   " caf"           " caf"           " caf"; now the context
        C3       " caf" C3        " caf", U+FFFD   nothing: the last character may still change
        A9 "!"   " caf" C3 A9"!"  " café!"         "é!"; C3 and A9"!" are the next context
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._num_settled = 0  # characters of the pending tokens' text that are out

    def append(self, token_id: int) -> str:
        """Returns the text that is settled now and was not before."""
        self._pending.append(token_id)
        text = self._text_of(self._pending)
        settled = text.rstrip(REPLACEMENT)
        new = self._settle(settled)
        if not text and self._context:
            # A token without text, a skipped special one: as if it had not come.
            self._pending.pop()
        elif text and settled == text:
            self._context, self._pending, self._num_settled = self._pending, [], 0
            self._context_text = self._decode(self._context)
        elif len(self._pending) > _LONGEST_WAIT:
            new += self._give_up_waiting()
        return new

    def flush(self) -> str:
        """Returns the rest: what stands at the end as U+FFFD is meant to stay."""
        return self._settle(self._text_of(self._pending))

    def _text_of(self, tokens: list[int]) -> str:
        """The text of `tokens` behind the context."""
        window_text = self._decode(self._context + tokens)
        if window_text.startswith(self._context_text):
            return window_text[len(self._context_text) :]
        # ByteFallback: the context's last bytes have become U+FFFD along with the new ones.
        return self._decode(tokens)

    def _settle(self, text: str) -> str:
        """Settle `text`, which begins the pending tokens' text; returns what was not out yet."""
        new = text[self._num_settled :]
        self._num_settled += len(new)
        return new

    def _give_up_waiting(self) -> str:
        """Settle the oldest pending tokens as they are, so that the window stays small."""
        num_old = self._last_boundary()
        old, self._pending = self._pending[:num_old], self._pending[num_old:]
        old_text = self._text_of(old)
        new = self._settle(old_text)
        self._num_settled -= len(old_text)
        self._context, self._context_text = old, self._decode(old)
        return new

    def _last_boundary(self) -> int:
        """How many pending tokens can go without tearing a character that may still come.

        Up to 3 bytes may be waiting for a fourth. A cut within a character shows: its halves
        decode to more U+FFFD than the whole.
        """
        text = self._decode(self._pending)
        for num_old in range(len(self._pending) - 3, len(self._pending)):
            old, young = self._pending[:num_old], self._pending[num_old:]
            if self._decode(old) + self._decode(young) == text:
                return num_old
        return len(self._pending)
