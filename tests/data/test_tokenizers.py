"""Bytes and byte-pair encoding."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.preparing import LINE, run

from axsparse.config.load import configure
from axsparse.config.schema import DataConfig
from axsparse.data import tokenizers
from axsparse.data.preparation import Request
from axsparse.data.sources import token_datasets
from axsparse.data.token_file import TokenizerRecord
from axsparse.data.tokenizers import (
    SEPARATOR,
    ByteTokenizer,
    ExportedTokenizer,
    LongText,
    Subwords,
    byte_tokenizer,
    check_tokenizers,
    exported_tokenizer,
    given_tokenizer,
    import_tokenizers,
    train_bpe,
)
from axsparse.runtime.errors import ConfigError

WORDS = "the cat sat on the mat, the dog\n\n    did not (1,234 times)\tin its été "


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_bytes(train_bpe([WORDS * 20], 300))
    return path


def opened(path: Path, separator: str = SEPARATOR) -> Subwords:
    return Subwords(path, TokenizerRecord(kind="bpe"), separator)


@given(st.text())
@settings(derandomize=True)
def test_bytes_are_those_of_utf8_and_never_the_separator(text: str) -> None:
    ids = ByteTokenizer().encode(text)

    assert ids.tobytes().decode() == text
    assert ByteTokenizer.separator not in ids
    assert ByteTokenizer.separator < ByteTokenizer.vocab_size


@settings(max_examples=60, derandomize=True)
@given(st.text())
def test_byte_pairs_decode_to_the_text_with_the_special_tokens_in_it(
    trained: Path, text: str
) -> None:
    tokenizer = opened(trained)
    text += SEPARATOR

    ids = tokenizer.encode(text)

    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(trained))
    assert library.decode(list(ids), skip_special_tokens=False) == text
    assert ids.tolist() == library.encode(text).ids
    assert ids[-1] == tokenizer.separator
    assert ids.max(initial=0) < tokenizer.vocab_size <= 300


FOX = {"lstrip": True, "rstrip": True, "normalized": False}


def variants() -> dict[str, Callable[[Any], None]]:
    """What makes the ids of a text differ from those of its pieces, by name."""
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

    def with_normalizer(*parts: Any) -> Callable[[Any], None]:
        return lambda own: setattr(own, "normalizer", normalizers.Sequence(list(parts)))

    def with_words(*parts: Any) -> Callable[[Any], None]:
        return lambda own: setattr(own, "pre_tokenizer", pre_tokenizers.Sequence(list(parts)))

    def of_whole_words(own: Any) -> None:
        vocab = {SEPARATOR: 0, "[UNK]": 1, "c": 2, "##c": 3, "d": 4}
        own.model = models.WordPiece(vocab, **{"unk_token": "[UNK]"}, max_input_chars_per_word=100)
        own.pre_tokenizer = pre_tokenizers.Whitespace()

    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    newlines = Regex(r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    return {
        "plain": lambda own: None,
        "begin": with_normalizer(normalizers.Strip(), normalizers.Prepend("_")),
        "nfkc": with_normalizer(normalizers.NFKC(), normalizers.Replace(" ", "_")),
        "no words": lambda own: setattr(own, "pre_tokenizer", by_bytes),
        "punctuation": with_words(pre_tokenizers.Split(newlines, "isolated"), by_bytes),
        "token": lambda own: own.add_tokens([AddedToken("cat", **FOX), AddedToken("mat, the")]),
        "whole words": of_whole_words,
    }


TEXTS = {
    "words": WORDS * 40,
    "lines": "a = b;\n\n  c();\n" * 150,
    "run": "b" + "a" * 2_500,
    "blank": "x" + " " * 1_500 + "\n" * 999,
    "runs": (WORDS + "a" * 700) * 4,
    "letters": "e\u0301\ufb01\U0001f600" * 600,
    "long words": ("d " * 70 + "c" * 200 + " ") * 5,
    "short": "ab c",
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "variant", ["plain", "begin", "nfkc", "no words", "punctuation", "token", "whole words"]
)
def test_a_long_text_has_the_ids_of_the_whole(
    trained: Path, tmp_path: Path, variant: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer

    monkeypatch.setattr(tokenizers, "OVERLAP", 64)
    own = Tokenizer.from_file(str(trained))
    variants()[variant](own)
    own.save(str(tmp_path / "own.json"))
    tokenizer = opened(tmp_path / "own.json")
    pieces = [TEXTS[text][first : first + 190] for first in range(0, len(TEXTS[text]), 190)]

    long = LongText(tokenizer)
    found = [
        long.add(piece, *tokenizer.encode_batch([long.tail, long.tail + piece])) for piece in pieces
    ]
    early = sum(map(len, found))
    found.append(long.end())

    expected = own.encode(TEXTS[text], add_special_tokens=False).ids
    assert np.concatenate(found).tolist() == expected
    assert text != "words" or variant == "whole words" or early > 0.9 * len(expected)


def test_truncation_and_padding_of_a_given_tokenizer_are_taken_off(
    trained: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(trained))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "cut.json"))

    for text in (WORDS, "a"):
        np.testing.assert_array_equal(
            opened(tmp_path / "cut.json").encode(text), opened(trained).encode(text)
        )


def test_tokens_around_a_text_are_found_without_a_token_for_latin_letters(tmp_path: Path) -> None:
    """Of DNA, digits or music."""
    from tokenizers import Tokenizer, models, processors

    words = {"[CLS]": 0, "[SEP]": 1, "C": 2, "G": 3}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer.save(str(tmp_path / "dna.json"))

    ours = opened(tmp_path / "dna.json", "[SEP]")

    assert [*ours.encode("CG"), *ours.last] == tokenizer.encode("CG").ids == [0, 2, 3, 1]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'axsparse\[text\]', or prepare the data"):
        import_tokenizers()


def token(content: str, **values: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **flags, **values}


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {},
    "eos in the map": {"special_tokens_map.json": {"eos_token": "cat"}},
    "eos as a token": {
        "tokenizer_config.json": {"eos_token": {"__type": "AddedToken", **token("sat")}}
    },
    "eos null": {"tokenizer_config.json": {"eos_token": None}},
    "prefix": {
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    },
    "class of the model": {"config.json": {"model_type": "gpt2"}},
    "added": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"70": token("the", rstrip=True, special=True)},
            "extra_special_tokens": ["mat, the"],
        }
    },
    "additional": {"tokenizer_config.json": {"additional_special_tokens": ["did not"]}},
    "added file": {"added_tokens.json": {"été": 300}},
    "split": {"tokenizer_config.json": {"split_special_tokens": True, "bos_token": "the"}},
    "bos": {"tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": True}},
    "eos": {
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "on", "add_eos_token": True}
    },
    "length": {"tokenizer_config.json": {"model_max_length": 3, "truncation_side": "left"}},
    "llama": {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizerFast"}},
    "bert": {"tokenizer_config.json": {"tokenizer_class": "RobertaTokenizer"}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_next_to_a_tokenizer_have_the_effect_that_they_have_in_transformers(
    trained: Path, tmp_path: Path, name: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'axsparse[test]'")
    folder, out = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    shutil.copy(trained, folder)
    for file, content in SETTINGS[name].items():
        (folder / file).write_text(json.dumps(content))
    texts = [WORDS, f"the  été<s> {SEPARATOR}did not", "mat, the  cat", *TEXTS.values()]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    sidecar, _ = run(Request((source,), out, tokenizer=folder))

    judge: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
    end = judge.convert_tokens_to_ids(judge.eos_token or SEPARATOR)
    expected = [judge(text)["input_ids"] for text in texts]
    assert sidecar.separator == end
    ids = np.fromfile(out / "train.tokens", sidecar.dtype).tolist()
    assert ids == [id_ for one in expected for id_ in (one if one[-1] == end else [*one, end])]
    data = DataConfig(source="tokens", path=str(out))
    made = exported_tokenizer(data, "tokens", sidecar.train.digest)
    assert made is not None
    ours = Subwords(out / "tokenizer.json", sidecar.tokenizer, made.end)
    assert [*ours.encode(texts[1]), *ours.last] == expected[1]
    for file, content in made.files(64).items():
        (tmp_path / file).write_text(json.dumps(content))
    again = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert [again(text)["input_ids"] for text in texts] == expected


def test_settings_need_transformers(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(shutil.copy(trained, tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert given_tokenizer(file) == given_tokenizer(tmp_path)
    assert given_tokenizer(file).json == trained.read_bytes()
    (tmp_path / "config.json").write_text("{}")
    other = Path(shutil.copy(trained, tmp_path / "other.json"))
    assert given_tokenizer(other).json == trained.read_bytes()

    with pytest.raises(ConfigError) as caught:
        given_tokenizer(file)

    assert str(caught.value) == (
        f"--tokenizer: transformers, which is not installed, reads the settings in {tmp_path}; pip "
        "install 'axsparse[hf]' with Python 3.11 or newer, or name a copy of its tokenizer.json "
        "that lies alone"
    )


OF_STDLIB = ("stdlib train", "any")
"""Name and fingerprint of the training data."""


def opened_export(made: ExportedTokenizer) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'axsparse[text]'")
    return tokenizers.Tokenizer.from_str(json.dumps(made.files(64)["tokenizer.json"]))


BYTES = pytest.param(0, id="stdlib"), pytest.param(255, id="prepared")


@pytest.mark.parametrize("separator", BYTES)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0")))
@settings(max_examples=60, derandomize=True)
def test_bytes_have_the_ids_of_training_and_come_back(separator: int, text: str) -> None:
    theirs = opened_export(byte_tokenizer(separator))

    ids = theirs.encode(text).ids

    assert ids == ByteTokenizer().encode(text).tolist()
    assert theirs.decode(ids) == text


@pytest.mark.parametrize("separator", BYTES)
def test_every_id_has_a_token_and_one_ends_a_text(separator: int) -> None:
    made = byte_tokenizer(separator)

    theirs = opened_export(made)

    assert theirs.get_vocab_size() == 256
    assert theirs.encode("a" + made.end + "b").ids == [97, separator, 98]
    assert theirs.decode([97, separator, 98]) == "ab"
    assert made.files(64)["generation_config.json"]["eos_token_id"] == separator


def prepared(folder: Path, **how: Any) -> tuple[DataConfig, str, str]:
    """Tokens of some text, and the name and fingerprint of a run's training data."""
    (folder / "text.txt").write_text(LINE * 300)
    run(Request(inputs=(folder / "text.txt",), out=folder / "tokens", **how))
    training = token_datasets(folder / "tokens", 25)["train"]
    data = DataConfig(source="tokens", path=str(folder / "tokens"))
    return data, training.name, training.fingerprint


@pytest.mark.parametrize("words", [None, 290])
def test_prepared_texts_have_the_ids_of_their_preparation(
    words: int | None, tmp_path: Path
) -> None:
    data, *training = prepared(tmp_path, train_bpe=words)
    made = exported_tokenizer(data, *training)
    assert made is not None
    theirs = opened_export(made)

    ids = theirs.encode(LINE).ids
    length = len(ids) + 1
    assert words is None or length < len(LINE)
    there = np.fromfile(tmp_path / "tokens" / "train.tokens", np.uint16 if words else np.uint8)
    assert there[-length:].tolist() == [*ids, made.end_id]
    assert theirs.encode(made.end).ids == [made.end_id]
    assert theirs.decode(ids) == LINE
    blend = DataConfig(source="tokens", blend=(f"{tmp_path / 'tokens'}=1",))
    assert exported_tokenizer(blend, "blend of tokens 100.00%", "any") == made
    assert exported_tokenizer(blend, "custom", "any") is None


def test_data_of_ones_own_have_no_tokenizer(tmp_path: Path) -> None:
    data, name, _ = prepared(tmp_path)

    assert exported_tokenizer(data, name, "of other data") is None
    assert exported_tokenizer(DataConfig(), "random", "0") is None
    assert exported_tokenizer(DataConfig(), *OF_STDLIB) is not None


def tokenizer_json(words: Any, added: list[int]) -> str:
    return json.dumps({"model": {"vocab": words}, "added_tokens": [{"id": id_} for id_ in added]})


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (tokenizer_json([["a", -1.0], ["b", -2.0], ["<s>", 0.0]], []), True),
        (tokenizer_json({"a": 0, "b": 1, "<s>": 2, "c": 3}, []), True),
        (tokenizer_json({"a": 0, "b": 1}, []), True),
        (tokenizer_json({"a": 0, "b": 1, "<bos>": 2}, [2]), True),
        (tokenizer_json({"a": 0, "b": 1, "c": 2}, []), True),  # which the first one has renamed
        ('{"model": {"vocab": ["a"]}}', True),
        ("no tokenizer", True),
        (tokenizer_json({"b": 0, "a": 1}, []), False),
        (tokenizer_json([["a", -1.0], ["c", -2.0]], []), False),
        (tokenizer_json([["b", -1.0], ["a", -2.0], ["b", -3.0]], []), False),  # one word twice
        (tokenizer_json(byte_tokenizer(0).tokenizer["model"]["vocab"], [0]), False),
    ],
)
def test_tokens_are_of_another_tokenizer_if_an_ordinary_id_is_another_word(
    other: str, is_same: bool, tmp_path: Path
) -> None:
    for name, text in (("a", tokenizer_json({"a": 0, "b": 1, "<s>": 2}, [2])), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
    blend = f"data.blend=[{tmp_path / 'a'}=1, {tmp_path / 'b'}=1]"

    with nullcontext() if is_same else pytest.raises(ConfigError, match="has another tokenizer"):
        check_tokenizers(configure(None, ["data.source=tokens", blend]))


def test_a_model_with_new_tensors_may_learn_another_vocabulary(tmp_path: Path) -> None:
    for name, words in (("model", {"a": 0}), ("tokens", {"b": 0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(tokenizer_json(words, []))
    config = configure(None, ["data.source=tokens", f"data.path={tmp_path / 'tokens'}"])
    model = config.model.model_copy(update={"from_": str(tmp_path / "model")})

    with pytest.raises(ConfigError, match="has another tokenizer"):
        check_tokenizers(config.model_copy(update={"model": model}))

    model = model.model_copy(update={"new": ("embedding.*",)})
    check_tokenizers(config.model_copy(update={"model": model}))
