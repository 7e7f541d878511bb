"""Preparing into a folder that is not empty: finished work is used again, and never overwritten."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mpirun import LONGEST_SECONDS
from support.preparing import LINE, make_library, outputs, requested, run

from axsparse.data.prepare.processes import apart
from axsparse.data.prepare.request import Request
from axsparse.data.prepare.vocabulary import BpeJob
from axsparse.data.prepare.whole_files import locked
from axsparse.runtime.errors import DataError, OutputError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return make_library(tmp_path / "library")


DEATHS = {
    # phase: the function that is replaced by one that kills its process, and at which call
    "before anything is made": ("preparation.cut", 1),
    "before the vocabulary is learnt": ("vocabulary.apart", 1),
    "after the vocabulary": ("vocabulary.describe", 1),
    "before the first part": ("part._Writer", 1),
    "in the fourth part": ("part.pieces_of", 9),
    "between a part and its record": ("part.PartRecord.model_dump_json", 4),
    "while parts are joined": ("merge._Merger.add", 6),
    "after the last part": ("merge._Merger.refuse_empty", 1),
    "before the sidecar": ("preparation.Sidecar", 1),
    "before parts are removed": ("preparation._rate", 1),
}
KILLED = """
import io, os, pickle, signal, sys
from importlib import import_module
from axsparse.data.prepare.preparation import prepare
from axsparse.runtime.console import Console
request, (place, call) = pickle.loads(bytes.fromhex(sys.argv[1]))
module, *owners, name = place.split(".")
owner = import_module(f"axsparse.data.prepare.{module}")
for step in owners:
    owner = getattr(owner, step)
real, calls = getattr(owner, name), 0
def dying(*args, **kwargs):
    global calls
    calls += 1
    if calls == call:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(owner, name, dying)
prepare(request, 1, Console(io.StringIO(), bar=False))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, bytes]]]:
    """A folder of text, and the files that an uninterrupted preparation makes of it."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "in").mkdir()
    for number in range(12):
        text = "".join(f"{number} {line} {LINE}" for line in range(40))
        (folder / "in" / str(number)).write_text(text)
    run(restartable(folder, folder / "whole"))
    yield folder, outputs(folder / "whole")
    shutil.rmtree(folder)


def restartable(folder: Path, out: Path) -> Request:
    return Request((folder / "in",), out, validation_fraction=0.2, train_bpe=300, part_bytes=4500)


@pytest.mark.parametrize("phase", DEATHS)
def test_a_killed_run_goes_on_where_it_was_and_ends_in_the_same_bytes(
    phase: str, shared: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    folder, expected = shared
    request = restartable(folder, tmp_path / "out")
    told = pickle.dumps((request, DEATHS[phase])).hex()
    died = subprocess.run(
        [sys.executable, "-c", KILLED, told], timeout=LONGEST_SECONDS, check=False
    )
    assert died.returncode == -9
    finished = {path.name: path.stat() for path in request.out.glob("parts-*/part-*.json")}

    _, screen = run(request)

    assert outputs(request.out) == expected
    if phase == "before parts are removed":
        assert "already prepared" in screen
    elif finished:
        assert f"going on with {len(finished)} of 6 parts from an earlier run" in screen


def test_finished_parts_are_not_made_again_unless_they_were_harmed(
    shared: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = shared
    request = restartable(folder, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("axsparse.data.prepare.preparation.SourceCounts", interrupting)
        with pytest.raises(KeyboardInterrupt):
            run(request)
    parts = sorted(request.out.glob("parts-*/part-*.tokens"))
    assert len(parts) == 6
    parts[1].write_bytes(parts[1].read_bytes()[:-2] + b"xy")
    parts[2].unlink()
    parts[3].with_suffix(".json").write_text("{")
    made: list[int] = []
    real = prepare_part_writer()

    def counting(job: Any, file: Any) -> Any:
        made.append(job.number)
        return real(job, file)

    monkeypatch.setattr("axsparse.data.prepare.part._Writer", counting)
    run(request)

    assert made == [1, 2, 3]
    assert outputs(request.out) == expected


def test_a_vocabulary_is_learnt_once_unless_it_was_harmed(
    shared: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = shared
    request = restartable(folder, tmp_path / "out")
    learnt: list[Path] = []

    def learn(work: Callable[[BpeJob], None], job: BpeJob) -> None:
        learnt.append(job.path)
        apart(work, job)

    monkeypatch.setattr("axsparse.data.prepare.vocabulary.apart", learn)
    for harm in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr("axsparse.data.prepare.preparation.SourceCounts", interrupting)
            with pytest.raises(KeyboardInterrupt):
                run(request)
        assert len(learnt) == 1
        (path,) = request.out.glob("parts-*/tokenizer-*.json")
        if harm:
            path.write_text("{}")
    run(request)

    assert len(learnt) == 2
    assert outputs(request.out) == expected


def prepare_part_writer() -> Callable[..., Any]:
    from axsparse.data.prepare import part as prepare_part

    return prepare_part._Writer


def interrupting(**_: object) -> None:
    raise KeyboardInterrupt


def test_parts_of_another_request_are_removed(library: Path, tmp_path: Path) -> None:
    (tmp_path / "o" / "parts-0").mkdir(parents=True)
    (tmp_path / "o" / "train.tokens.unfinished-1").write_text("half")

    _, screen = run(requested(library, tmp_path / "o"))

    assert "parts made from other files or with other settings were removed" in screen
    assert set(outputs(tmp_path / "o")) == {"train.tokens", "validation.tokens", "tokens.json"}


def test_a_second_run_says_that_all_is_done_and_touches_nothing(
    library: Path, tmp_path: Path
) -> None:
    first, _ = run(requested(library, tmp_path / "o"))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").glob("t*")}

    second, screen = run(requested(library, tmp_path / "o"))

    assert second == first
    assert f"{tmp_path}/o/tokens.json: already prepared from these files, and unharmed" in screen
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "o").glob("t*")} == times


def test_a_harmed_result_is_found_out(library: Path, tmp_path: Path) -> None:
    run(requested(library, tmp_path / "o"))
    path = tmp_path / "o" / "train.tokens"
    path.write_bytes(b"x" + path.read_bytes()[1:])

    with pytest.raises(DataError, match=r"train.tokens is not what was prepared; remove"):
        run(requested(library, tmp_path / "o"))


@pytest.mark.parametrize("change", ["settings", "contents", "another file"])
def test_a_folder_with_other_tokens_is_never_overwritten(
    change: str, library: Path, tmp_path: Path
) -> None:
    run(requested(library, tmp_path / "o"))
    values = {"validation_fraction": 0.2} if change == "settings" else {}
    if change == "contents":
        (library / "large.txt").write_text("other")
    if change == "another file":
        (library / "new.txt").write_text("new")

    with pytest.raises(OutputError, match="holds tokens of other files or settings; choose"):
        run(requested(library, tmp_path / "o", **values))


def test_two_runs_do_not_prepare_one_folder_at_once(library: Path, tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()

    with locked(tmp_path / "o"), pytest.raises(OutputError, match="is being prepared by another"):
        run(requested(library, tmp_path / "o"))
