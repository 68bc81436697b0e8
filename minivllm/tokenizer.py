"""Text to token ids and back, and conversations to prompts, as a model folder's files say."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minivllm.errors import InvalidRequestError, ModelError

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant", "content": text}, and what else a template reads."""

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer:
    """The tokenizer of a Hugging Face folder. Needs neither torch nor, as a rule, transformers.

    vocab_size   ids are in [0, vocab_size), added tokens included
    fingerprint  differs between tokenizers that give a text different ids
    """

    def __init__(self, folder: str | Path) -> None:
        """Read tokenizer.json; without one, let transformers make it from older files.

        Raises ModelError that names the file or folder.
        """
        self._folder = Path(folder)
        self._tokenizer = _load(self._folder)
        self._config = _read_json(self._folder / "tokenizer_config.json")
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.fingerprint = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with the special tokens that the folder's tokenizer puts around it.

        A special token spelled out in `text` becomes its one id.
        """
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 (yet) become U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation, ready for the assistant's next turn.

        The template itself writes the special tokens, so none are put around the result.
        Raises ModelError if the folder has no chat template, InvalidRequestError if the template
        refuses the messages.
        """
        # transformers' rendering takes a second to import, and only a chat needs it.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: dict[str, Any] = {"conversations": [list(messages)], **self._special_tokens()}
        variables["chat_template"] = self._chat_template()
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            prompts: Any = render_jinja_template(**variables)[0]
        except (TemplateError, TypeError, KeyError) as error:
            raise InvalidRequestError(f"the chat template refuses the messages: {error}") from error
        return list(self._tokenizer.encode(prompts[0], add_special_tokens=False).ids)

    def _chat_template(self) -> str:
        """chat_template.jinja, or the field of tokenizer_config.json: a text, or named ones."""
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if not isinstance(template, str):
            files = f"{file.name} or tokenizer_config.json"
            raise ModelError(f"{self._folder} has no chat template in {files}; use generate")
        return template

    def _special_tokens(self) -> dict[str, str]:
        """The special tokens a template may name: each a text, or an object with its content."""
        return {
            name: token["content"] if isinstance(token, dict) else token
            for name in _SPECIAL_TOKEN_NAMES
            if (token := self._config.get(name)) is not None
        }


def find_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The folder's tokenizer; None if it has no file of one, as a folder of weights alone.

    Raises ModelError that names the file or folder if there is one that cannot be read.
    """
    has_one = any(Path(folder, name).is_file() for name in _FILES)
    return Tokenizer(folder) if has_one else None


def _load(folder: Path) -> tokenizers.Tokenizer:
    """From tokenizer.json; without one, from what transformers makes of older files."""
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:  # the one raises the bare class, the other one of many
        none = f"{folder} has no tokenizer.json, and transformers finds no tokenizer there"
        problem = f"cannot read {file}" if file.is_file() else none
        raise ModelError(f"{problem}: {str(error).strip()}".splitlines()[0]) from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty if there is no such file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (ValueError, TypeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
