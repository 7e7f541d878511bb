"""Bytes and byte-pair encoding."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.data import documents
from axsparse.data.token_file import TokenizerRecord
from axsparse.data.tokenizers import (
    SEPARATOR,
    ByteTokenizer,
    Subwords,
    import_tokenizers,
    in_folder,
    train_bpe,
)
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

WORDS = "the cat sat on the mat, the dog\n\n    did not (1,234 times)\tin its été "


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_bytes(train_bpe([WORDS * 20], 300))
    return path


def opened(path: Path, separator: str = SEPARATOR) -> Subwords:
    return Subwords(path, TokenizerRecord(kind="bpe"), separator)


@given(st.text())
@settings(deadline=None, derandomize=True)
def test_bytes_are_those_of_utf8_and_never_the_separator(text: str) -> None:
    ids = ByteTokenizer().encode(text)

    assert ids.tobytes().decode() == text
    assert ByteTokenizer.separator not in ids
    assert ByteTokenizer.separator < ByteTokenizer.vocab_size


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text())
def test_byte_pairs_decode_to_the_text_with_the_special_tokens_in_it(
    trained: Path, text: str
) -> None:
    import tokenizers

    tokenizer = opened(trained)
    text += SEPARATOR

    ids = tokenizer.encode(text)

    library = tokenizers.Tokenizer.from_file(str(trained))
    assert library.decode(list(ids), skip_special_tokens=False) == text
    assert ids.tolist() == library.encode(text).ids
    assert ids[-1] == tokenizer.separator
    assert ids.max(initial=0) < tokenizer.vocab_size <= 300


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    words=st.lists(
        st.tuples(
            st.text("ab1,'é\u3000", max_size=5).map("a".__add__),
            st.sampled_from([" ", "\n", "  \n", "\n\n    ", "\t\t", " \u3000"]),
        ),
        max_size=40,
    ),
    size=st.integers(1, 40),
)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    trained: Path, words: list[tuple[str, str]], size: int
) -> None:
    text = "".join(word + space for word, space in words)
    tokenizer = opened(trained)
    expected = tokenizer.encode(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", size)
        patch.setattr(documents, "SLACK", 24)  # there is a word's end within
        cut = list(documents.pieces(text))
    assert "".join(cut) == text
    assert all(len(piece) <= size + 24 for piece in cut)
    np.testing.assert_array_equal(np.concatenate(tokenizer.encode_batch(cut)), expected)


def test_truncation_and_padding_of_a_given_tokenizer_are_taken_off(
    trained: Path, tmp_path: Path
) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(trained))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "cut.json"))

    for text in (WORDS, "a"):
        np.testing.assert_array_equal(
            opened(tmp_path / "cut.json").encode(text), opened(trained).encode(text)
        )


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'axsparse\[text\]', or prepare the data"):
        import_tokenizers()


def test_a_folder_names_its_tokenizer_and_the_token_that_ends_a_text(tmp_path: Path) -> None:
    file, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    with pytest.raises(MissingInputError) as missing:
        in_folder(tmp_path)
    assert str(missing.value) == (
        f"--tokenizer: {tmp_path} has no tokenizer.json; name a folder that save_pretrained of a "
        "recent transformers wrote"
    )
    file.touch()

    assert in_folder(file) == (file, None)
    assert in_folder(tmp_path) == (file, None)
    for text, end in (
        ('{"eos_token": "</s>"}', "</s>"),
        ('{"eos_token": {"content": "<end>"}}', "<end>"),
        ('{"eos_token": null}', None),
    ):
        settings.write_text(text)
        assert in_folder(tmp_path) == (file, end)
    for text, problem in (
        ("[", "tokenizer_config.json: cannot be read as JSON"),
        ('{"eos_token": 5}', "eos_token is 5, not the text of a token; correct it"),
    ):
        settings.write_text(text)
        with pytest.raises(DataError, match=re.escape(problem)):
            in_folder(tmp_path)
