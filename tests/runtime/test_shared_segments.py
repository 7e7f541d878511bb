"""Shared memory that killed jobs leave, and who removes it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from axsparse.runtime.shared_segments import (
    ALL_PROCESSES,
    STARTING_SECONDS,
    leftovers,
    remove_leftovers,
    remove_own,
)

MAPPED = "mpich_shm_1"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    for name in ("mpich_shm_1", "mpich_shm_2", "vader_segment.host.1", "somebody_elses"):
        (folder / name).write_bytes(b"x" * 4096)
    return folder


def process(folder: Path, *, maps: str = "", opened: Path | None = None) -> Path:
    """A /proc of one process."""
    (folder / "7" / "fd").mkdir(parents=True)
    (folder / "self" / "ns").mkdir(parents=True)
    (folder / "self" / "ns" / "pid").symlink_to(ALL_PROCESSES)
    (folder / "7" / "maps").write_text(maps)
    if opened is not None:
        (folder / "7" / "fd" / "3").symlink_to(opened)
    return folder


def test_what_no_process_holds_is_left_over(shared: Path, tmp_path: Path) -> None:
    # A name that begins alike holds nothing.
    maps = [f"7f00-7f01 rw-s 00000000 00:01 12 {shared}/{name}\n" for name in (MAPPED, "vader")]
    processes = process(tmp_path / "proc", maps="".join(maps), opened=shared / "mpich_shm_2")

    assert leftovers(shared, processes) == [str(shared / "vader_segment.host.1")]


def test_what_others_left_is_not_ours_to_judge(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert leftovers(tmp_path / "none", tmp_path / "none") == []
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    assert leftovers(shared, process(tmp_path / "proc")) == []


def test_a_start_removes_what_is_left_over_and_was_not_made_just_now(
    shared: Path, tmp_path: Path
) -> None:
    maps = f"7f00-7f01 rw-s 00000000 00:01 12 {shared}/mpich_shm_1\n"
    long_ago = time.time() - STARTING_SECONDS - 1
    for path in (*shared.iterdir(), shared / "mpich_shm_3"):
        path.write_bytes(b"x")
        os.utime(path, (long_ago, long_ago))
    os.utime(shared / "mpich_shm_2")

    remove_leftovers(shared, process(tmp_path / "proc", maps=maps))

    assert {path.name for path in shared.iterdir()} == {
        *("mpich_shm_1", "mpich_shm_2", "somebody_elses")
    }


@pytest.mark.parametrize("namespace", ["pid:[4026532201]", None])
def test_a_start_that_may_not_see_all_processes_removes_nothing(
    shared: Path, tmp_path: Path, namespace: str | None
) -> None:
    processes, before = process(tmp_path / "proc"), {*shared.iterdir()}
    link = processes / "self" / "ns" / "pid"
    link.unlink()
    if namespace is not None:
        link.symlink_to(namespace)
    for path in before:
        os.utime(path, (0, 0))

    remove_leftovers(shared, processes)

    assert {*shared.iterdir()} == before


def test_a_job_that_fails_removes_what_it_maps_itself(shared: Path, tmp_path: Path) -> None:
    processes = process(tmp_path / "proc")
    maps = [f"7f00-7f01 rw-s 00000000 00:01 12 {path}" for path in shared.iterdir()]
    maps = [line for line in maps if not line.endswith("mpich_shm_2")]
    elsewhere = tmp_path / "mpich_shm_1"
    elsewhere.touch()
    text = [
        *maps,
        f"7f00-7f01 rw-s 00000000 00:01 12 {elsewhere}",
        "7f00-7f01 rw-p 00000000 00:00 0",
    ]
    (processes / "self" / "maps").write_text("\n".join(text))

    remove_own(shared, processes)

    assert {path.name for path in shared.iterdir()} == {"mpich_shm_2", "somebody_elses"}
    assert elsewhere.exists()
