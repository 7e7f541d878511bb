"""A run whose hosts die, hang and come back ends in the same bits as one that was left alone.

`tests/soak/restarting.py` does the same at random, and longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS, mpirun_path, run_alone
from support.pretend_hosts import NETWORK, PretendHosts

CONFIG = """\
model: {name: gpt, num_layers: 2, hidden_size: 32, num_heads: 2, sequence_length: 32,
        vocab_size: 256}
data: {source: stdlib}
batch: {global_batch_size: 12, microbatch_size: 1}
precision: fp32
samo: {gradient: exact}
pruning: {method: magnitude, sparsity: 0.9}
train: {steps: 60, log_every: 60, eval_every: 20, eval_steps: 1}
checkpoint: {every: 7}
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[PretendHosts]:
    (tmp_path / "hosts").mkdir()
    (tmp_path / "my.yaml").write_text(CONFIG)
    pretended = PretendHosts(tmp_path / "hosts")
    yield pretended
    for name in ("a", "b"):
        pretended.die(name)


def start(hosts: PretendHosts, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "axsparse", "launch", "--restarts", "9"),
            *("--hosts", "a:2,b:2", "--probe", hosts.probe(), "4"),
            *("--config", "my.yaml", "--run-dir", "restarted", *words),
        ],
        cwd=hosts.folder.parent,
        env={**os.environ, **ENVIRONMENT, **NETWORK, "MPIRUN": hosts.launcher(mpirun_path())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until(has_come: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LONGEST_SECONDS
    while not has_come():
        assert job.poll() is None and time.monotonic() < end, job.communicate()[0]
        time.sleep(0.01)


def compared(folder: Path, one: str, other: str) -> str:
    """What `axsparse compare` says of two runs that have to be the same."""
    done = run_alone(["-m", "axsparse", "compare", one, other], cwd=folder)
    assert done.returncode == 0, done
    return done.stdout


MEMBERS = ("--set", "layout.g_tensor=2", "--set", "layout.tensor_exact=true")


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [(), MEMBERS], ids=["", "members"])
def test_a_run_whose_hosts_die_hang_and_return_is_the_run_that_was_left_alone(
    words: tuple[str, ...], hosts: PretendHosts, tmp_path: Path
) -> None:
    run_dir = tmp_path / "restarted"
    checkpoints = run_dir / "checkpoints"

    def has_saved(step: int) -> bool:
        return any(int(p.name[5:]) >= step for p in checkpoints.glob("step-*") if p.suffix == "")

    job = start(hosts, *words)
    wait_until(lambda: has_saved(7), job)
    hosts.die("a")  # with rank 0, and half of the state
    wait_until(lambda: has_saved(21), job)
    hosts.come_back("a")
    hosts.hang("b")
    wait_until(lambda: len((run_dir / "restarts.jsonl").read_text().splitlines()) == 2, job)
    hosts.come_back("b")  # in the middle of an attempt, which ends the ranks that stood still
    wait_until(lambda: not hosts.ranks("b"), job)
    # Dies while it saves, or soon after.
    wait_until(lambda: has_saved(35) or bool(list(checkpoints.glob("step-35.tmp"))), job)
    hosts.die("a")
    said, _ = job.communicate(timeout=LONGEST_SECONDS)
    assert job.returncode == 0, said

    lines = map(json.loads, (run_dir / "restarts.jsonl").read_text().splitlines())
    shapes = [line["hosts"] for line in lines]
    assert shapes == [{"a": 2, "b": 2}, {"b": 2}, {"a": 2}, {"b": 2}]
    train = ["-m", "axsparse.train", "--config", "my.yaml", "--run-dir", "alone"]
    alone = (*words, "--set", "layout.g_tensor=1")
    assert run_alone([*train, *alone], cwd=tmp_path).returncode == 0
    same = compared(tmp_path, "restarted", "alone")
    assert same.startswith("the same: 63 records and 3 checkpoints (steps 49, 56, 60)")


@pytest.mark.exhaustive
def test_how_often_to_save_is_measured_and_changes_no_bit(
    hosts: PretendHosts, tmp_path: Path
) -> None:
    """With a failure every few seconds."""
    often = ("--set", "checkpoint.every=auto", "--set", "checkpoint.mtbf_hours=0.0001")
    for name, words in (("often", often), ("alone", ())):
        train = ["-m", "axsparse.train", "--config", "my.yaml", "--run-dir", name, *words]
        done = run_alone(train, cwd=tmp_path)
        assert done.returncode == 0, done
        if words:
            told = "with a failure every 0.0001 h (checkpoint.mtbf_hours) one every"
            assert told in done.stdout
    saved = [path.name for path in (tmp_path / "often" / "checkpoints").iterdir()]
    assert "step-60" in saved and len(saved) > 1
    assert compared(tmp_path, "often", "alone").startswith("the same: 63 records")
