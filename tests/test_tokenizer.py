"""Text to ids and back, chat templates, and the default model's ids against a ground truth."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import regex
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from minivllm.errors import InvalidRequestError, ModelError
from minivllm.model.loader import resolve_model
from minivllm.tokenizer import Tokenizer, find_tokenizer

SPECIALS = ["<s>", "</s>", "<|user|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}!{% endif %}"
)


def write_tokenizer(folder, *, specials=SPECIALS, adds_bos=True, **config):
    """A byte-level tokenizer whose ids are those of SPECIALS + BYTES."""
    vocabulary = {token: i for i, token in enumerate(specials + BYTES)}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(specials)
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    raw.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids_of(text):
    return [len(SPECIALS) + BYTES.index(letter) for letter in text]


def test_encode_puts_the_folders_special_tokens_around_the_text(tmp_path):
    assert Tokenizer(write_tokenizer(tmp_path)).encode("ab") == [0, *ids_of("ab")]
    assert Tokenizer(write_tokenizer(tmp_path, adds_bos=False)).encode("ab") == ids_of("ab")


def test_a_special_token_in_the_text_is_one_id(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, adds_bos=False))
    assert tokenizer.encode("a</s>b") == [*ids_of("a"), 1, *ids_of("b")]


def test_decode_leaves_special_tokens_out_or_in(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    ids = [0, *ids_of("ab"), 1]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>ab</s>"


def test_half_a_character_decodes_to_the_replacement_character(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, adds_bos=False))
    ids = tokenizer.encode("\u00e4")
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode(ids) == "\u00e4"


def test_vocab_size_counts_added_tokens(tmp_path):
    assert Tokenizer(write_tokenizer(tmp_path)).vocab_size == 256 + len(SPECIALS)


def test_the_fingerprint_tells_tokenizers_apart_and_not_copies(tmp_path):
    folders = [tmp_path / name for name in ("a", "copy", "other")]
    for folder in folders:
        folder.mkdir()
    first = Tokenizer(write_tokenizer(folders[0]))
    copy = Tokenizer(write_tokenizer(folders[1]))
    other = Tokenizer(write_tokenizer(folders[2], specials=["<s>", "</s>", "<|system|>"]))
    assert first.fingerprint == copy.fingerprint
    assert first.fingerprint != other.fingerprint


def test_a_template_writes_special_tokens_as_single_ids_and_bos_once(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    messages = [{"role": "user", "content": "hi"}]
    prompt = [0, 2, *ids_of("hi")]
    assert tokenizer.apply_chat_template(messages) == [*prompt, *ids_of("!")]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == prompt


def test_a_special_token_may_be_an_object_with_its_content(tmp_path):
    write_tokenizer(tmp_path, bos_token={"content": "<s>", "lstrip": False})
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([], add_generation_prompt=False) == [0]


def test_chat_template_jinja_goes_before_the_field(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<|user|>")
    assert Tokenizer(tmp_path).apply_chat_template([]) == [2]


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "</s>"}]
    write_tokenizer(tmp_path, chat_template=named)
    assert Tokenizer(tmp_path).apply_chat_template([]) == [1]


@pytest.mark.parametrize("template", [None, [{"name": "tool_use", "template": "x"}]])
def test_a_folder_without_a_chat_template_is_named(tmp_path, template):
    write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(ModelError, match=r"no chat template.*chat_template\.jinja") as error:
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])
    assert str(tmp_path) in str(error.value)


def test_messages_that_the_template_refuses_are_an_invalid_request(tmp_path):
    write_tokenizer(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        Tokenizer(tmp_path).apply_chat_template([])


def test_a_broken_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_broken_config_file_is_named(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer_config\.json"):
        Tokenizer(tmp_path)


def test_a_folder_without_any_tokenizer_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"no tokenizer\.json") as error:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_is_found_only_where_there_is_a_file_of_one(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert find_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        find_tokenizer(tmp_path)
    found = find_tokenizer(write_tokenizer(tmp_path))
    assert found is not None
    assert found.encode("ab") == [0, *ids_of("ab")]


def test_a_config_file_that_holds_no_object_is_named(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer_config\.json"):
        Tokenizer(tmp_path)


def test_older_files_are_read_through_transformers(tmp_path):
    vocabulary = {token: i for i, token in enumerate([*BYTES, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("abc") == [vocabulary["ab"], vocabulary["c"]]
    assert tokenizer.decode([vocabulary["ab"], vocabulary["c"]]) == "abc"


def test_text_needs_neither_torch_nor_transformers(tmp_path):
    write_tokenizer(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from minivllm.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer({str(tmp_path)!r})\n"
        "print(tokenizer.decode(tokenizer.encode('ab')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "ab\n"


class GroundTruth:
    """The pre-tokenizer `smollm` and byte-level BPE, straight from their definitions.

    Split every digit off; split what is left as GPT-2 does; spell each piece in byte letters;
    join the pair that stands first in the list of merges until no pair stands in it.
    """

    DIGIT = regex.compile(r"\p{N}|\P{N}+")
    GPT2 = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, folder):
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        self.vocabulary = model["vocab"]
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        self.rank = {tuple(pair): i for i, pair in enumerate(merges)}
        # GPT-2's byte letters: printable bytes are themselves, the others follow from U+0100 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.letter = {byte: chr(byte) for byte in printable}
        self.letter |= {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode(self, text):
        pieces = [piece for part in self.DIGIT.findall(text) for piece in self.GPT2.findall(part)]
        return [token_id for piece in pieces for token_id in self._merge(piece)]

    def _merge(self, piece):
        parts = [self.letter[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.rank.get(pair, len(self.rank)))
            if best not in self.rank:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [self.vocabulary[part] for part in parts]


@pytest.fixture(scope="module")
def default_folder():
    return resolve_model("smollm2-135m")


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris.",
        "In 1984, 12 monkeys cost $3.50 each; 100% of them weren't sold.",
        "  two blanks before,   three between, and a tab\tand 7\n\n  lines\n",
        "x=1\ny = 22\n    return x**2 + y[10:20]",
        "Stra\u00dfe, na\u00efve caf\u00e9, \u4f60\u597d\u4e16\u754c 42",
        "half \u00bd, squared \u00b2, Roman \u2163, Arabic-Indic \u0663\u0664",
        "emoji \U0001f600\U0001f468\u200d\U0001f469 and blanks at the end   ",
    ],
)
def test_the_default_models_ids_equal_the_ground_truth(default_folder, text):
    tokenizer = Tokenizer(default_folder)
    assert tokenizer.encode(text) == GroundTruth(default_folder).encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_the_default_models_chat_prompt_has_its_known_ids(default_folder):
    tokenizer = Tokenizer(default_folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    # <|im_start|> is 1, <|im_end|> 2; the template adds a system message of its own.
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
