"""Prepared tokens as data sets, and the damage that is found when they are opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axsparse.data.sources import token_datasets
from axsparse.data.token_file import (
    SAMPLED_BYTES,
    DtypeName,
    digest_of,
    dtype_for,
    sample_digest,
    stored,
)
from axsparse.runtime.errors import DataError, MissingInputError


def write(folder: Path, tokens: int = 400, dtype: DtypeName = "uint16", vocab: int = 300) -> Path:
    """A folder as `prepare` writes it; token n is n modulo the vocabulary."""
    folder.mkdir()
    splits: dict[str, Any] = {}
    for split, count in (("train", tokens), ("validation", tokens // 4)):
        path = folder / f"{split}.tokens"
        (np.arange(count) % vocab).astype(stored(dtype)).tofile(path)
        splits[split] = {
            "documents": 1,
            "tokens": count,
            "digest": digest_of(path),
            "sample_digest": sample_digest(path),
        }
    sidecar = {
        **{"format": "axsparse tokens", "version": 1, "axsparse": "0", "request": ""},
        **{"tokenizer": {"kind": "bytes"}, "vocab_size": vocab, "separator": 0, "dtype": dtype},
        **{"sources": {"files": 1, "bytes": 1, "left_out": {}, "examples": []}, "settings": {}},
        **splits,
    }
    (folder / "tokens.json").write_text(json.dumps(sidecar))
    return folder


def change(folder: Path, **values: Any) -> Path:
    path = folder / "tokens.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize(("dtype", "vocab"), [("uint8", 256), ("uint16", 300), ("uint32", 100_000)])
def test_samples_are_windows_of_the_mapped_file(
    dtype: DtypeName, vocab: int, tmp_path: Path
) -> None:
    folder = write(tmp_path / "data", 400, dtype, vocab)

    training, validation = token_datasets(folder, 16, validate=True)

    assert isinstance(training.tokens, np.memmap)
    assert (len(training), training.vocab_size, training.name) == (24, vocab, "tokens data train")
    (inputs,), targets = training.read(np.array([3, 17]))
    expected = (np.array([[48], [272]]) + np.arange(17)) % vocab
    np.testing.assert_array_equal(inputs, expected[:, :-1])
    np.testing.assert_array_equal(targets, expected[:, 1:])
    assert validation is not None
    assert (len(validation), validation.name) == (6, "tokens data validation")
    separate = token_datasets(folder, 16, validate=True, separate=True)
    assert [dataset and dataset.separator for dataset in separate] == [0, 0]
    assert training.separator is None
    assert training.fingerprint == digest_of(folder / "train.tokens") != validation.fingerprint


def test_the_type_is_the_smallest_that_holds_the_vocabulary() -> None:
    sizes = {256: "uint8", 257: "uint16", 65536: "uint16", 65537: "uint32"}

    assert {size: dtype_for(size) for size in sizes} == sizes
    marked = {128: "uint8", 129: "uint16", 2**15: "uint16", 2**15 + 1: "uint32"}
    assert {size: dtype_for(size, marked=True) for size in marked} == marked


def test_a_sample_covers_size_beginning_and_end(tmp_path: Path) -> None:
    data = bytearray(SAMPLED_BYTES * 200)
    path = tmp_path / "a"
    digests = set()
    for at in (None, 0, len(data) - 1, len(data) // 2 // SAMPLED_BYTES * SAMPLED_BYTES):
        changed = bytearray(data)
        if at is not None:
            changed[at] = 1
        path.write_bytes(changed)
        digests.add(sample_digest(path))
    path.write_bytes(data[:-1])
    digests.add(sample_digest(path))

    assert len(digests) >= 4


def test_a_validation_part_is_opened_only_where_it_is_used(tmp_path: Path) -> None:
    folder = change(write(tmp_path / "data"), validation=None)

    assert token_datasets(folder, 16, validate=True)[1] is None
    assert token_datasets(write(tmp_path / "other"), 16, validate=False)[1] is None


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (lambda data: data[:-2], "has 798 bytes, tokens.json says 800; copy it again, or prep"),
        (lambda data: b"\1" + data[1:], "does not have the contents that tokens.json says; copy"),
    ],
    ids=["size", "contents"],
)
def test_a_file_that_was_changed_is_refused(
    contents: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "data") / "train.tokens"
    path.write_bytes(contents(path.read_bytes()))

    with pytest.raises(DataError, match=f"^data.path: {path} {message}"):
        token_datasets(tmp_path / "data", 16, validate=False)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    (folder / "train.tokens").unlink()

    with pytest.raises(MissingInputError) as caught:
        token_datasets(folder, 16, validate=False)
    assert str(caught.value) == (
        f"data.path: {folder}/train.tokens cannot be read (No such file or directory); copy it "
        "again, or prepare the data again"
    )
    with pytest.raises(
        MissingInputError, match=r"tokens.json cannot be read \(\S.+\); name a fold"
    ):
        token_datasets(tmp_path / "missing", 16, validate=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, r"does not describe tokens \(the whole file: Invalid JSON"),
        ({"version": 2, "new": 1}, r"tokens.json has version 2, this axsparse reads 1; prepare"),
        ({"format": "x"}, r"tokens.json does not describe tokens \(format: .+\); prepare the data"),
        ({"dtype": "int8"}, r"does not describe tokens \(dtype: "),
        ({"extra": 1}, r"does not describe tokens \(extra: "),
    ],
)
def test_a_sidecar_that_is_none_is_refused(
    values: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    folder = change(write(tmp_path / "data"), **(values or {}))
    if values is None:
        (folder / "tokens.json").write_text("{")

    with pytest.raises(DataError, match=message):
        token_datasets(folder, 16, validate=False)
