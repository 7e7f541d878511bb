"""The tokenizer of a run's data, for other libraries: the ids that the model was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.preparing import LINE, run

from axsparse.config.schema import DataConfig
from axsparse.data.preparation import Request
from axsparse.data.run_tokenizer import (
    ExportedTokenizer,
    byte_tokenizer,
    exported_tokenizer,
    run_tokenizer,
)
from axsparse.data.sources import token_datasets
from axsparse.data.tokenizers import ByteTokenizer
from axsparse.runtime.errors import DataError, MissingInputError

OF_STDLIB = ("stdlib train", "any")
"""Name and fingerprint of the training data."""


def opened(made: ExportedTokenizer) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'axsparse[text]'")
    return tokenizers.Tokenizer.from_str(json.dumps(made.files(64)["tokenizer.json"]))


BYTES = pytest.param(0, id="stdlib"), pytest.param(255, id="prepared")


@pytest.mark.parametrize("separator", BYTES)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0")))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_bytes_have_the_ids_of_training_and_come_back(separator: int, text: str) -> None:
    theirs = opened(byte_tokenizer(separator))

    ids = theirs.encode(text).ids

    assert ids == ByteTokenizer().encode(text).tolist()
    assert theirs.decode(ids) == text


@pytest.mark.parametrize("separator", BYTES)
def test_every_id_has_a_token_and_one_ends_a_text(separator: int) -> None:
    made = byte_tokenizer(separator)

    theirs = opened(made)

    assert theirs.get_vocab_size() == 256
    assert theirs.encode("a" + made.end + "b").ids == [97, separator, 98]
    assert theirs.decode([97, separator, 98]) == "ab"
    assert made.files(64)["generation_config.json"]["eos_token_id"] == separator


def prepared(folder: Path, **how: Any) -> tuple[DataConfig, str, str]:
    """Tokens of some text, and the name and fingerprint of a run's training data."""
    (folder / "text.txt").write_text(LINE * 300)
    run(Request(inputs=(folder / "text.txt",), out=folder / "tokens", **how))
    training, _ = token_datasets(folder / "tokens", 25, validate=False)
    data = DataConfig(source="tokens", path=str(folder / "tokens"))
    return data, training.name, training.fingerprint


@pytest.mark.parametrize("words", [None, 290])
def test_prepared_texts_have_the_ids_of_their_preparation(
    words: int | None, tmp_path: Path
) -> None:
    data, *training = prepared(tmp_path, train_bpe=words)
    made = exported_tokenizer(data, *training)
    assert made is not None
    ours, end = run_tokenizer(data)

    theirs = opened(made)

    assert theirs.encode(LINE).ids == ours.encode(LINE).tolist()
    assert theirs.encode(made.end).ids == [made.end_id] == [end]
    assert theirs.decode(theirs.encode(LINE).ids) == LINE


def test_data_of_ones_own_have_no_tokenizer(tmp_path: Path) -> None:
    data, name, _ = prepared(tmp_path)

    assert exported_tokenizer(data, name, "of other data") is None
    assert exported_tokenizer(DataConfig(), "random", "0") is None
    assert exported_tokenizer(DataConfig(), *OF_STDLIB) is not None


def test_a_tokenizer_that_is_gone_or_another_is_told(tmp_path: Path) -> None:
    data, *training = prepared(tmp_path, train_bpe=290)
    path = tmp_path / "tokens" / "tokenizer.json"

    path.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not the tokenizer that made the tok"):
        exported_tokenizer(data, *training)
    path.unlink()
    with pytest.raises(MissingInputError, match=r"data\.path: .*tokenizer\.json"):
        exported_tokenizer(data, *training)
