"""Faults of a run while it trains and saves, on real ranks: line, code, what is left."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.mpirun import KILLED, TESTS, Finished, run_mpirun
from support.resuming import records_of
from support.warm_python import warm_python

from axsparse.runtime.files.run_folder import RESUME_AUTO
from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, saved_steps, unfinished
from axsparse.training.checkpoint.verification import is_complete

REPLICAS_TOLERANCE = 2e-6
"""Other orders of fp32 sums over replicas, as in tests/behavior/test_equivalence.py."""


IN_LIBRARIES = ("lib*/faketime/libfaketimeMT.so.1", "lib*/*/faketime/libfaketimeMT.so.1")
FAKETIME = next((str(at) for place in IN_LIBRARIES for at in Path("/usr").glob(place)), None)


def train(run_dir: Path, fault: str, *, grid: str = "1x2", steps: int = 10) -> Finished:
    g_inter, g_data = map(int, grid.split("x"))
    script = str(TESTS / "faults" / "breaking.py")
    return run_mpirun(g_inter * g_data, [script, str(run_dir), grid, str(steps), fault, "auto"])


def losses(run_dir: Path) -> dict[int, float]:
    found = [(record["step"], record["loss"]) for record in records_of(run_dir, "loss")]
    assert len(found) == len(dict(found)), "a step is recorded twice"
    return dict(found)


def files(run_dir: Path, step: int) -> dict[str, bytes]:
    folder = run_dir / CHECKPOINTS / f"step-{step}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = train(run_dir, "none")
    assert done.returncode == 0, str(done)
    return run_dir


@pytest.mark.fault(1, 2, 4, 18)
@pytest.mark.launcher
def test_a_run_outlives_everything_that_happens_while_it_saves(tmp_path: Path, whole: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "run" / CHECKPOINTS

    done = train(run, "kill-write:4")
    assert done.returncode in KILLED, str(done)
    assert "there is no run to go on with; starts from the beginning" in done.stdout
    assert saved_steps(folder) == [2] and is_complete(folder / "step-2")

    done = train(run, "limit:3", grid="2x2")
    assert done.returncode == 74, str(done)
    skipped = f"passed over: checkpoint {folder}/step-4.tmp: was not finished"
    assert skipped in done.stdout
    assert f"goes on from {folder}/step-2, after step 2" in done.stdout
    assert done.errors == [
        f"axsparse: error: rank 1 (stage 1, replica 0): checkpoint {folder}/step-4.tmp: cannot be "
        "written (File too large); free space there, or choose another --run-dir (in Python "
        "run_dir=); checkpoints before it are still there"
    ]
    assert saved_steps(folder) == [2] and unfinished(folder) == []

    done = train(run, "kill-commit:6")
    assert done.returncode in KILLED, str(done)
    assert f"goes on from {folder}/step-2, after step 2" in done.stdout
    assert saved_steps(folder) == [4, 2]
    assert [path.name for path in unfinished(folder)] == ["step-6.tmp"]

    done = train(run, "kill-remove:4")
    assert done.returncode in KILLED, str(done)
    assert f"passed over: checkpoint {folder}/step-6.tmp" in done.stdout
    assert saved_steps(folder) == [8, 6] and is_complete(folder / "step-8")
    assert [path.name for path in unfinished(folder)] == ["step-4.old"]

    done = train(run, "kill-step:9")
    assert done.returncode in KILLED, str(done)
    assert f"goes on from {folder}/step-8" in done.stdout

    done = train(run, "none", grid="2x2")
    assert done.returncode == 0, str(done)
    assert losses(run) == losses(whole)
    assert list(losses(run)) == list(range(1, 11))
    assert files(run, 10) == files(whole, 10) != {}
    assert saved_steps(folder) == [10, 8] and unfinished(folder) == []


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[None]:
    path.mkdir()
    command = ["mount", *options, str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.fault(3)
def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "-t", "tmpfs", "-o", "size=72k", "tmpfs"):
        done = train(disk, "none", grid="1x1")

        line = done.error(74)
        assert "checkpoint " in line and "cannot be written (No space left on device)" in line
        newest, *_ = saved_steps(disk / CHECKPOINTS)
        assert is_complete(disk / CHECKPOINTS / f"step-{newest}")


@pytest.mark.fault(5)
def test_a_place_that_is_read_only_is_refused_before_the_first_step(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with mounted(place, "--bind", str(place)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        done = train(place, "none", grid="1x1")

        said = "cannot be written (Read-only file system); choose another --run-dir"
        assert said in done.error(74)
        assert "step 1/" not in done.stdout


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A run of 2 stages × 2 replicas that was asked to stop while it saved."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    return run, train(run, "signal-save:4", grid="2x2")


@pytest.mark.fault(20)
@pytest.mark.launcher
def test_a_signal_to_the_launcher_saves_and_ends_with_75_also_while_it_saves(
    stopped: tuple[Path, Finished], whole: Path
) -> None:
    run, done = stopped
    folder = run / CHECKPOINTS

    assert done.returncode == 75, str(done)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("axsparse:")]
    at = int(line.removeprefix("axsparse: stopped after step ").split(",")[0])
    assert line == f"axsparse: stopped after step {at}, saved in {folder}; {RESUME_AUTO} goes on"
    assert saved_steps(folder)[0] == at
    assert all(is_complete(folder / f"step-{step}") for step in saved_steps(folder))
    assert losses(run) == {step: loss for step, loss in losses(whole).items() if step <= at}


@pytest.mark.fault(20)
def test_ranks_whose_clocks_are_a_day_apart_save_and_go_on_by_step(
    tmp_path: Path, whole: Path
) -> None:
    if FAKETIME is None:
        pytest.skip("needs libfaketime, which changes a process's clock (Debian: libfaketime)")
    run = tmp_path / "run"
    tomorrow = {"LD_PRELOAD": FAKETIME, "FAKETIME": "+1d"}
    script = [str(TESTS / "faults" / "breaking.py"), str(run), "1x2"]

    def skewed(fault: str, env: Mapping[str, str], other: Sequence[str]) -> Finished:
        words = [*script, "10", fault, "auto"]
        return run_mpirun(1, [*words, ":", "-n", "1", "env", *other, warm_python(), *words], env)

    first = skewed("signal:5", tomorrow, ["-u", "LD_PRELOAD"])
    words = [f"{name}={value}" for name, value in {**tomorrow, "FAKETIME": "-1d"}.items()]
    at, *_ = saved_steps(run / CHECKPOINTS)
    done = skewed("none", {}, words)

    assert first.returncode == 75, str(first)
    assert done.returncode == 0, str(done)
    assert f"goes on from {run / CHECKPOINTS}/step-{at}, after step {at}" in done.stdout
    assert losses(run) == losses(whole)
    assert saved_steps(run / CHECKPOINTS) == [10, 8]


@pytest.mark.fault(9)
def test_another_layout_goes_on(
    stopped: tuple[Path, Finished], whole: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(stopped[0], tmp_path / "run"))
    at = saved_steps(run / CHECKPOINTS)[0]

    done = train(run, "none", grid="4x1")

    assert done.returncode == 0, str(done)
    assert f"goes on from {run / CHECKPOINTS}/step-{at}, after step {at}" in done.stdout
    assert losses(run) == pytest.approx(losses(whole), rel=REPLICAS_TOLERANCE)


@pytest.mark.fault(14)
def test_a_second_job_in_the_same_directory_is_told_who_has_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    os.mkfifo(tmp_path / "held")
    os.mkfifo(tmp_path / "go")

    with ThreadPoolExecutor() as pool, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "4711")
        first = pool.submit(train, run, "hold:3")
        holder = (tmp_path / "held").read_text()
        patch.setenv("SLURM_JOB_ID", "4712")
        second = train(run, "none")
        (tmp_path / "go").write_text("")

    assert second.returncode == 73, str(second)
    assert second.errors == [
        f"axsparse: error: {run}: is in use by job 4711, process {holder} on "
        f"{socket.gethostname()}; wait for its end, or choose another --run-dir (in Python "
        "run_dir=)"
    ]
    assert first.result().returncode == 0, str(first.result())
    assert list(losses(run)) == list(range(1, 11))


# -- a gradient that is not a number on one rank: skipped by all, or the end ----------------


@pytest.mark.fault(15)
def test_a_nan_on_one_rank_is_skipped_by_all_and_replicas_stay_equal(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "nan:4", steps=12)

    assert done.returncode == 0, str(done)
    what = "rank 1 (stage 0, replica 1): the gradient of hidden2.0.weight is not finite"
    assert f"step 5: {what}; no rank updated its weights" in done.stdout
    assert "of 12 steps: 1 skipped with numbers that were not finite" in done.stdout
    steps = records_of(tmp_path / "run", "loss")
    assert [record["skip_reason"] for record in steps] == [None] * 4 + [what] + [None] * 7
    one, other = ((tmp_path / "run" / f"weights-{rank}").read_text() for rank in range(2))
    assert one == other != ""


@pytest.mark.fault(15)
def test_nans_that_stay_end_the_run_and_name_rank_parameter_and_first_step(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "nans:1", steps=12)

    assert done.returncode == 70, str(done)
    assert done.errors == [
        "axsparse: error: step 2: rank 1 (stage 0, replica 1): the gradient of hidden2.0.weight is "
        "not finite, and no step could update for 10 in a row, up to step 11; "
        "lower optimizer.learning_rate, or look at the data"
    ]
