"""The data sets that a configuration names: prepared tokens, and the standard library."""

from __future__ import annotations

import itertools
import json
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.preparing import write_tokens

from axsparse.config.load import configure
from axsparse.data.dataset import TokenDataset
from axsparse.data.sources import open_datasets, source_tokens, stdlib_dataset, token_datasets
from axsparse.data.token_file import (
    SAMPLED_BLOCKS,
    SAMPLED_BYTES,
    DtypeName,
    Split,
    digest_of,
    dtype_for,
    id_facts,
    mark_of,
    sample_digest,
    sampled,
    stored,
)
from axsparse.models.zoo.model_registry import named_model


def test_marks_are_no_part_of_ids(tmp_path: Path) -> None:
    kind = stored("uint16")
    np.array([7, 5 | mark_of(kind), 9 | mark_of(kind)], kind).tofile(tmp_path / "ids")

    assert id_facts(tmp_path / "ids", kind, mark_of(kind), 5) == (9, 1)


def change(folder: Path, **values: Any) -> Path:
    path = folder / "tokens.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize(("dtype", "vocab"), [("uint8", 256), ("uint16", 300), ("uint32", 100_000)])
def test_samples_are_windows_of_the_mapped_file(
    dtype: DtypeName, vocab: int, tmp_path: Path
) -> None:
    folder = write_tokens(tmp_path / "data", 400, dtype, vocab)

    training, validation = token_datasets(folder, 16).values()

    assert isinstance(training.tokens, np.memmap)
    assert (len(training), training.name) == (24, "data train")
    assert training.vocab_size == min(400, vocab)
    (inputs,), targets = training.read(np.array([3, 17]))
    expected = (np.array([[48], [272]]) + np.arange(17)) % vocab
    np.testing.assert_array_equal(inputs, expected[:, :-1])
    np.testing.assert_array_equal(targets, expected[:, 1:])
    assert inputs.dtype == targets.dtype == torch.int64
    assert (training.targets_per_sample, training.count_targets(targets)) == (16, 32)
    assert (len(validation), validation.name) == (6, "data validation")
    separate = token_datasets(folder, 16, separate=True)
    assert [part.separator for part in separate.values()] == [0, 0]
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
    folder = change(write_tokens(tmp_path / "data"), validation=None)

    assert token_datasets(folder, 16).keys() == {"train"}
    assert token_datasets(write_tokens(tmp_path / "other"), 16, ("train",)).keys() == {"train"}


def test_a_file_that_is_moved_while_it_is_mapped_can_be_read(tmp_path: Path) -> None:
    training = token_datasets(write_tokens(tmp_path / "data"), 16)["train"]
    (tmp_path / "data" / "train.tokens").rename(tmp_path / "moved")

    assert training.read(np.array([0]))[1][0, 0] == 1


def test_files_are_told_apart_for_a_model_that_separates_them() -> None:
    pytest.importorskip("transformers", reason="no transformers: pip install 'axsparse[test]'")
    tiny = "model_type: llama, hidden_size: 8, num_attention_heads: 1, num_hidden_layers: 1"
    asked = ["model.name=hf", f"model.hf={{{tiny}, vocab_size: 256, max_position_embeddings: 64}}"]
    for settings, inputs in (([*asked, "data.intra_document_attention=true"], 2), (asked, 1)):
        loaded = configure(None, settings)
        datasets, example = open_datasets(loaded), named_model(loaded).example
        assert example is not None
        assert len(example(1)) == inputs
        for dataset in (datasets.training, datasets.validation):
            assert isinstance(dataset, TokenDataset)
            assert len(dataset.read(np.arange(1))[0]) == inputs


@pytest.mark.parametrize("size", [0, 1, SAMPLED_BYTES, SAMPLED_BYTES + 1, 40 * SAMPLED_BYTES - 1])
def test_small_files_are_sampled_entirely(size: int) -> None:
    begins = sampled(size, SAMPLED_BYTES)

    assert (begins[:1], begins[-1:]) == (
        ([0], [max(0, size - SAMPLED_BYTES)]) if size else ([], [])
    )
    assert all(0 <= b - a <= SAMPLED_BYTES for a, b in itertools.pairwise(begins))
    assert len(sampled(1 << 40, SAMPLED_BYTES)) == SAMPLED_BLOCKS


# The CRC of their paths makes all of these training files.
FILES = {"a.py": b"x = 1\n", "b.py": b"", "c/a.py": "é = 2\n".encode(), "c.py": b"pass"}


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_a_file_is_validation_iff_ten_divides_the_crc_of_its_path(tmp_path: Path) -> None:
    files = {f"package/module{number}.py": b"%d" % number for number in range(200)}
    names = [name for name in files if zlib.crc32(name.encode()) % 10 == 0]

    tokens, _ = source_tokens(write_files(tmp_path, files), "validation")

    assert tokens.tobytes() == b"".join(files[name] + b"\0" for name in sorted(names))


def test_only_the_librarys_own_sources_count(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    before = source_tokens(tmp_path, "train")
    others = ("site-packages", "dist-packages", "lib-dynload", "test", "c/tests", "c/idle_test")
    for folder in (*others, "__pycache__"):
        # Ten files, so that some of them would be training files.
        write_files(tmp_path, {f"{folder}/sub/{number}.py": b"other" for number in range(10)})
    write_files(tmp_path, {"c/notes.txt": b"other", "c/x.pyc": b"other"})
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)

    after = source_tokens(tmp_path, "train")

    assert after[0].tobytes() == before[0].tobytes()
    assert after[1] == before[1]


@pytest.mark.parametrize(
    ("name", "content", "removed"),
    [("c.py", b"Pass", ""), ("d.py", b"", ""), ("bc.py", b"pass", "c.py"), ("c.py", b"", "")],
    ids=["a letter", "an empty file more", "a new name", "nothing left"],
)
def test_the_fingerprint_covers_paths_and_contents(
    tmp_path: Path, name: str, content: bytes, removed: str
) -> None:
    original = source_tokens(write_files(tmp_path / "original", FILES), "train")[1]
    copy = source_tokens(write_files(tmp_path / "copy", FILES), "train")[1]
    files = {name: content for name, content in FILES.items() if name != removed}
    changed = source_tokens(write_files(tmp_path / "changed", files | {name: content}), "train")[1]

    assert copy == original
    assert changed != original


def test_the_running_pythons_library_is_there_and_its_two_splits_share_no_file() -> None:
    documents: list[set[bytes]] = []
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        tokens, fingerprint = source_tokens(Path(sysconfig.get_path("stdlib")), split)
        dataset = stdlib_dataset(split, sequence_length=128)
        assert (dataset.fingerprint, dataset.name) == (fingerprint, f"stdlib {split}")
        assert dataset.vocab_size == 256
        assert len(dataset) == (tokens.size - 1) // 128 > 1000
        documents.append({*tokens.tobytes().split(b"\0")})
        assert any(b"\ndef " in document for document in documents[-1])

    assert documents[0] & documents[1] <= {b""}
