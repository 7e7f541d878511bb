"""Code that somebody planted where a file is read does not run: no source reads files in ways that
would run it, and what is private stays so.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import ran
from support.runs import tiny_config

import axsparse
from axsparse.models.start_weights import open_weights
from axsparse.runtime.errors import DataError
from axsparse.training.checkpoint.checkpoint_folder import manifest_bytes
from axsparse.training.checkpoint.verification import open_checkpoint, read_entry

CONFIG = tiny_config(train={"steps": 2}, checkpoint={"every": 1})


class Planted:
    """An object that makes a file once it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self._mark),)


@pytest.fixture
def planted(tmp_path: Path) -> bytes:
    """A pickle that makes tmp_path/ran, as this shows."""
    mark = tmp_path / "ran"
    pickled = pickle.dumps(Planted(mark))
    pickle.loads(pickled)  # noqa: S301  # our own
    mark.rmdir()
    return pickled


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("original") / "run"
    ran((1, 1), CONFIG, run)
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.mark.parametrize("name", ["weights.pt", "weights.bin", "weights.safetensors"])
@pytest.mark.parametrize("packed", [True, False], ids=["torch.save", "pickle"])
def test_a_pickle_given_as_weights_does_not_run(
    name: str, packed: bool, planted: bytes, tmp_path: Path
) -> None:
    path = tmp_path / name
    if packed:
        torch.save({"weight": Planted(tmp_path / "ran")}, path)
    else:
        path.write_bytes(planted)

    with pytest.raises(DataError):
        open_weights(path)

    assert not (tmp_path / "ran").exists()


def test_a_pickle_in_a_checkpoint_does_not_run(planted: bytes, run: Path, tmp_path: Path) -> None:
    """Not even with the size and hash that the manifest says, which anybody can compute."""
    folder = run / "checkpoints" / "step-2"
    name = "0001-block0.safetensors"
    (folder / name).write_bytes(planted)
    manifest = open_checkpoint(folder).manifest
    entries = {**manifest.files, name: read_entry(folder, name)}
    forged = manifest.model_copy(update={"files": entries})
    (folder / "manifest.json").write_bytes(manifest_bytes(forged))

    with pytest.raises(DataError):
        ran((1, 1), CONFIG, run, resume="auto")

    assert not (tmp_path / "ran").exists()


def test_a_pickle_as_manifest_is_passed_over_and_does_not_run(
    planted: bytes, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-2" / "manifest.json").write_bytes(planted)

    resumed = ran((1, 1), CONFIG, run, resume="auto")

    assert "step-2: manifest.json is cut short, or no manifest" in capsys.readouterr().out
    assert list(resumed.losses) == [2]
    assert not (tmp_path / "ran").exists()


# -- what others may see --------------------------------------------------------------------


def test_a_run_is_open_to_whom_the_umask_lets_in_and_has_the_environment_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SITE_TOKEN", "hunter2-of-the-site")
    run = tmp_path / "new" / "run"

    before = os.umask(0o027)
    try:
        ran((2, 1), CONFIG, run)
    finally:
        os.umask(before)

    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    assert len(folders) == 4
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o750}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}
    written = b"".join(path.read_bytes() for path in files)
    assert b"global_batch_size" in written
    said = capfd.readouterr()
    for name in (b"SITE_TOKEN", b"hunter2-of-the-site"):
        assert name not in written + said.out.encode() + said.err.encode()


PACKAGE = Path(axsparse.__file__).parent
PICKLING = re.compile(
    r"comm\w*\.(bcast|allgather|gather|scatter|alltoall|isend|irecv|ssend|sendrecv)\("
    r"|allow_pickle=True"
)
"""Calls that no rule of the linter knows: mpi4py's methods with small letters send pickles."""


def test_no_module_sends_pickles_or_reads_them_in_arrays() -> None:
    """The linter's rules (S) see the other ways to run what is read."""
    found = {
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if PICKLING.search(line)
    }

    assert not found
