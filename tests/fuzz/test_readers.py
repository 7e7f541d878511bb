"""Whatever is in a file: it is read, or refused in one line; nothing hangs, nothing leaks out.

`AXSPARSE_FUZZ=100000 python -m pytest tests/fuzz -s` (`make fuzz`) tries so many inputs; the
suite tries some hundreds.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import xxhash
from fuzz.guard import read_or_rejected
from fuzz.mutations import bytes_changed, json_changed, json_text, odd_yaml, yaml_changed
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.mask_files import small_mask_file
from support.resuming import ran, signed
from support.runs import mlp, tiny_config, vector_data

import axsparse
from axsparse.config.load import configure, to_yaml
from axsparse.config.schema import FIELDS, Config
from axsparse.config.validate import check_config
from axsparse.data.token_file import TokenizerRecord
from axsparse.data.tokenizers import SEPARATOR, Subwords, train_bpe
from axsparse.planner.cluster import load_cluster
from axsparse.pruning.mask_file import open_masks
from axsparse.runtime.errors import AxsparseError, OutputError
from axsparse.runtime.files.safetensors import SafetensorsFile, SafetensorsIndex
from axsparse.training.checkpoint.verification import open_checkpoint, reject_other_settings, verify
from axsparse.training.export import export

INPUTS = int(os.environ.get("AXSPARSE_FUZZ", "600"))
PACKAGE = Path(axsparse.__file__).parent
SEEDS = st.randoms(use_true_random=True)
DEFAULTS = configure(None)
with contextlib.suppress(AxsparseError):
    check_config(configure("llama3_8b"))  # imports transformers, whose imports write caches


def inputs(share: float) -> Callable[[Any], Any]:
    """A share of all inputs; the same at each call."""
    return settings(
        max_examples=max(1, round(share * INPUTS)),
        deadline=None,
        derandomize=True,
        database=None,
        # To make a failing input smaller takes minutes, and one is small as it is.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


# -- checkpoints ----------------------------------------------------------------------------


class Restored:
    """A folder whose files are put back before each input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self._changed: set[str] = set()

    def put(self, name: str, data: bytes) -> None:
        self._changed.add(name)
        (self.folder / name).write_bytes(data)

    def replace(self, name: str, kind: str, outside: Path) -> None:
        """Something else of this name."""
        self._changed.add(name)
        path = self.folder / name
        path.unlink()
        match kind:
            case "link":
                path.symlink_to(outside)
            case "folder":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)

    def restore(self) -> None:
        for name in self._changed:
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            path.write_bytes(self.files[name])
        self._changed.clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Restored:
    run = tmp_path_factory.mktemp("run")
    config = tiny_config(train={"steps": 1}, pruning={"include": "all"})
    ran((1, 1), config, run, model=lambda _: mlp(2, 6), data=vector_data(width=6))
    return Restored(run / "checkpoints" / "step-1")


def forge_checkpoint(rng: Random, checkpoint: Restored, outside: Path) -> None:
    manifest = json.loads(checkpoint.files["manifest.json"])
    del manifest["sha256"]
    match rng.randrange(6):
        case 0:
            checkpoint.put("manifest.json", bytes_changed(rng, checkpoint.files["manifest.json"]))
        case 1:
            raw = bytes_changed(rng, json.dumps(manifest).encode())
            checkpoint.put("manifest.json", signed(raw.decode(errors="replace")))
        case 2:
            name = rng.choice(sorted(checkpoint.files))
            kind = rng.choice(["link", "folder", "pipe", "gone"])
            checkpoint.replace(name, kind, outside)
        case 3:
            # A file of a layer, with the size and hash that belong to it.
            name = rng.choice(sorted(manifest["files"]))
            data = safetensors_changed(rng, checkpoint.files[name])
            entry = {"bytes": len(data), "xxh3": xxhash.xxh3_128(data).hexdigest()}
            manifest["files"][name] = entry
            checkpoint.put(name, data)
            checkpoint.put("manifest.json", signed(json.dumps(manifest)))
        case _:
            changed = json_changed(rng, manifest)
            checkpoint.put("manifest.json", signed(json_text(rng, changed)))


@given(SEEDS)
@inputs(0.3)
def test_checkpoints(checkpoint: Restored, tmp_path: Path, rng: Random) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(b"not yours")
    checkpoint.restore()
    forge_checkpoint(rng, checkpoint, outside)
    folder = checkpoint.folder

    def read() -> None:
        found = open_checkpoint(folder)
        verify(found)
        with contextlib.suppress(OutputError):
            export(folder, "torch", folder.parent / "out.safetensors", force=True)
        reject_other_settings(found, DEFAULTS, DEFAULTS)

    read_or_rejected(read, folder.parent)
    assert outside.read_bytes() == b"not yours"


# -- mask files and safetensors -------------------------------------------------------------


def safetensors_changed(rng: Random, data: bytes) -> bytes:
    """A safetensors file with other bytes, or with another header of the right length."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    match rng.randrange(4):
        case 0:
            return bytes_changed(rng, data)
        case 1:
            text = bytes_changed(rng, data[8:start])
        case _:
            text = json_text(rng, json_changed(rng, header)).encode()
    return len(text).to_bytes(8, "little") + text + data[start:]


@given(SEEDS)
@inputs(0.2)
def test_mask_files(tmp_path: Path, rng: Random) -> None:
    path = tmp_path / "mask.safetensors"
    whole = tmp_path / "whole.safetensors"
    if not whole.exists():
        small_mask_file(tmp_path).rename(whole)
    contents = whole.read_bytes()
    if rng.random() < 0.5:
        start = 8 + int.from_bytes(contents[:8], "little")
        header = json.loads(contents[8:start])
        metadata = header["__metadata__"]
        if rng.randrange(4):
            text = json_text(rng, json_changed(rng, json.loads(metadata["masks"])))
        else:
            raw = bytes_changed(rng, metadata["masks"].encode())
            text = raw.decode(errors="replace")
        metadata["masks"] = text
        encoded = json.dumps(header).encode()
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + contents[start:])
    else:
        path.write_bytes(safetensors_changed(rng, contents))

    def read() -> None:
        masks = open_masks(path)
        for name, entry in masks.entries.items():
            masks.mask(name, entry.shape)

    read_or_rejected(read, tmp_path)


@given(SEEDS)
@inputs(0.15)
def test_safetensors(checkpoint: Restored, tmp_path: Path, rng: Random) -> None:
    name = next(name for name in checkpoint.files if name.endswith(".safetensors"))
    part = tmp_path / "part.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    part.write_bytes(checkpoint.files[name])
    places = dict.fromkeys(SafetensorsFile(part).shapes, "part.safetensors")
    if rng.random() < 0.5:
        text = json_text(rng, json_changed(rng, {"weight_map": places}))
        index.write_text(text, encoding="utf-8")
    else:
        index.write_text(json.dumps({"weight_map": places}))
        part.write_bytes(safetensors_changed(rng, checkpoint.files[name]))

    def read() -> None:
        files: list[SafetensorsIndex | SafetensorsFile] = [
            SafetensorsIndex(index),
            SafetensorsFile(part),
        ]
        for file in files:
            for key in file.shapes:
                file.read(key)

    read_or_rejected(read, tmp_path)


@pytest.fixture(scope="session")
def tokenizer() -> bytes:
    """A tokenizer.json of a few words."""
    pytest.importorskip("tokenizers")
    return train_bpe(["the cat sat on the mat " * 9], 300)


@given(SEEDS)
@inputs(0.05)
def test_tokenizer_files(tokenizer: bytes, tmp_path: Path, rng: Random) -> None:
    path = tmp_path / "tokenizer.json"
    if rng.random() < 0.3:
        path.write_bytes(bytes_changed(rng, tokenizer))
    else:
        path.write_text(json_text(rng, json_changed(rng, json.loads(tokenizer))))

    def read() -> None:
        found = Subwords(path, TokenizerRecord(kind="file"), SEPARATOR)
        found.decode([int(token) for token in found.encode("the cat é\n")])

    read_or_rejected(read, tmp_path)


# -- settings -------------------------------------------------------------------------------


def yaml_bytes(rng: Random, text: str) -> bytes:
    if rng.randrange(4) == 0:
        return bytes_changed(rng, text.encode())
    return yaml_changed(rng, text).encode(errors="surrogatepass")


CONFIGS = [
    to_yaml(Config()),
    *(path.read_text() for path in sorted((PACKAGE.parent / "configs").glob("*.yaml"))),
]


@given(SEEDS)
@inputs(0.1)
def test_overrides(tmp_path: Path, rng: Random) -> None:
    key = rng.choice(list(FIELDS))
    value = odd_yaml(rng)
    override = rng.choice([f"{key}={value}", f"{key}{value}", f"{value}={key}"])

    read_or_rejected(lambda: check_config(configure(None, [override])), tmp_path)


CLUSTERS = [path.read_text() for path in sorted((PACKAGE / "planner" / "clusters").glob("*.yaml"))]
YAMLS: dict[str, tuple[list[str], Callable[[str], object]]] = {
    "configurations": (CONFIGS, lambda path: check_config(configure(path))),
    "clusters": (CLUSTERS, load_cluster),
}


@pytest.mark.parametrize("kind", YAMLS)
@given(SEEDS)
@inputs(0.15)
def test_yaml_files(kind: str, tmp_path: Path, rng: Random) -> None:
    texts, read = YAMLS[kind]
    path = tmp_path / "a.yaml"
    path.write_bytes(yaml_bytes(rng, rng.choice(texts)))

    read_or_rejected(lambda: read(str(path)), tmp_path)
