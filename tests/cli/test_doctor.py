"""`axsparse doctor`: what it learns of a machine, and what it concludes from made-up facts."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Axsparse
from support.mpirun import LONGEST_SECONDS, run_mpirun

from axsparse.cli import doctor
from axsparse.cli.doctor import Facts, Finding, device_map, findings, look
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld

# --- the command -------------------------------------------------------------------------


def test_one_process_looks_at_its_machine(tmp_path: Path) -> None:
    """In a terminal without signs, which gets the rest."""
    said = subprocess.run(
        [sys.executable, "-m", "axsparse", "doctor", "--run-dir", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"},
        check=False,
    )

    lines = said.stdout.splitlines()
    assert (said.returncode, said.stderr) == (0, "")
    assert lines[0] == f"? Python         {sys.version.split()[0]}"
    assert any(line.startswith("? MPI            ") for line in lines)
    assert lines[-1].startswith("  host ") and "rank 0 ? " in lines[-1]


def test_under_mpirun_one_rank_speaks_for_all(tmp_path: Path) -> None:
    job = run_mpirun(2, ["-m", "axsparse", "doctor", "--json", "--run-dir", str(tmp_path)])

    told = json.loads(job.stdout)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1], str(job)
    assert {rank["size"] for rank in told["ranks"]} == {2}
    assert {rank["thread_level"] for rank in told["ranks"]} == {"multiple"}
    names = {finding["name"]: finding["mark"] for finding in told["findings"]}
    assert names["placement"] == names["MPI"] == names["disk"] == "ok"
    # Their own shared memory is in use.
    assert job.returncode == ("wrong" in names.values())


def test_ranks_that_do_not_find_each_other_are_wrong_and_one_says_so(
    axsparse: Axsparse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")

    code, screen, _ = axsparse("doctor", "--json", "--run-dir", tmp_path)
    [mpi] = [one for one in json.loads(screen)["findings"] if one["name"] == "MPI"]
    assert (code, mpi["mark"]) == (1, "wrong")
    assert mpi["said"].startswith("size 1, but SLURM_STEP_NUM_TASKS is 4: ")

    monkeypatch.setenv("SLURM_PROCID", "1")
    assert axsparse("doctor", "--json", "--run-dir", tmp_path) == (1, "", "")


def test_a_rank_that_cannot_look_ends_all(
    axsparse: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such machine")

    monkeypatch.setattr(doctor, "look", fail)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")  # so that this process stays by itself

    assert axsparse("doctor") == (70, "", "axsparse: error: doctor: rank 0: no such machine\n")


# --- facts -------------------------------------------------------------------------------

ALONE = LocalTransport(LocalWorld[None](1), 0)


def test_a_machine_without_gpus_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "infiniband" / name).mkdir(parents=True)
    monkeypatch.setattr(doctor, "INFINIBAND", tmp_path / "infiniband")

    facts = look(ALONE, tmp_path / "runs" / "mine")

    assert (facts["rank"], facts["size"], facts["host"]) == (0, 1, socket.gethostname())
    assert (facts["torch"], facts["cuda"]) == (torch.__version__, torch.version.cuda)
    assert facts["cores"] == sorted(os.sched_getaffinity(0))
    assert (facts["where"], facts["writable"]) == (str(tmp_path), True)
    assert facts["room"] > 0
    assert facts["infiniband"] == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    ("limit", "said"), [(65_536, 65_536), (resource.RLIM_INFINITY, None)], ids=str
)
def test_the_limit_of_locked_memory_is_ulimit_l(
    limit: int, said: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limits(which: int) -> tuple[int, int]:
        return (limit, limit) if which == resource.RLIMIT_MEMLOCK else (0, 0)

    monkeypatch.setattr(resource, "getrlimit", limits)

    assert look(ALONE, tmp_path)["locked_memory"] == said


def test_cupy_says_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins, since there is no CuPy without CUDA."""
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 12080)
    cupy = types.ModuleType("cupy")
    cupy.__dict__.update(__version__="13.4.1", cuda=types.SimpleNamespace(runtime=runtime))
    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.__dict__["get_version"] = lambda: 22703
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)

    assert list(doctor._cupy().values()) == ["13.4.1", "12.8", "2.27.3"]
    # One that finds no CUDA says its version.
    del cupy.__dict__["cuda"], nccl.__dict__["get_version"]
    assert list(doctor._cupy().values()) == ["13.4.1", None, None]


# --- findings ----------------------------------------------------------------------------

LAPTOP: Facts = {
    "rank": 0,
    "size": 1,
    "host": "one",
    "python": "3.11.7",
    "axsparse": "0.1.0",
    "torch": "2.9.0",
    "mpi": None,
    "mpi_problem": None,
    "thread_level": None,
    "cuda": None,
    "gpus": (),
    "uuids": (),
    "nccl": None,
    "cupy": None,
    "cupy_cuda": None,
    "cupy_nccl": None,
    "threads_wanted": None,
    "cores": (0, 1, 2, 3),
    "locked_memory": 8 << 20,
    "infiniband": (),
    "leftovers": (),
    "room": 10**11,
    "writable": True,
    "where": "/runs",
}
GPUS: dict[str, Any] = {
    "mpi": "MPICH 5.0.2",
    "thread_level": "multiple",
    "cuda": "12.8",
    "gpus": ("H100",) * 2,
    "nccl": "2.27.3",
    "cupy": "14.2.0",
    "cupy_cuda": "12.6",
    "cupy_nccl": "2.27.3",
    "threads_wanted": "1",
    "cores": tuple(range(8)),
    "infiniband": ("mlx5_0",),
    "locked_memory": None,
}


def ranks(*each: dict[str, Any], **common: Any) -> list[Facts]:
    """Facts of ranks: a laptop's, but for what is given."""
    return [
        {**LAPTOP, "rank": rank, "size": len(each), **common, **own}
        for rank, own in enumerate(each)
    ]


def finding_of(name: str, facts: list[Facts]) -> Finding:
    [finding] = [finding for finding in findings(facts) if finding.name == name]
    return finding


def test_on_a_laptop_nothing_is_wrong() -> None:
    told = {finding.name: finding.mark for finding in findings([LAPTOP])}

    assert {name for name, mark in told.items() if mark == "absent"} == {
        *("MPI", "MPI threads", "CUDA", "NCCL", "CuPy", "devices"),
        *("cores", "InfiniBand"),
    }
    assert {mark for mark in told.values() if mark != "absent"} == {"ok"}


def test_on_a_cluster_nothing_is_wrong() -> None:
    hosts = [{"host": "one"}, {"host": "one"}, {"host": "two"}, {"host": "two"}]

    told = findings(ranks(*hosts, **GPUS))

    assert {finding.mark for finding in told} == {"ok"}


def test_each_line_has_a_sign_and_what_is_wrong_a_mend() -> None:
    assert str(Finding("torch", "ok", "2.9.0")) == "✓ torch          2.9.0"
    assert str(Finding("disk", "wrong", "full", "make room")) == "✗ disk           full → make room"


@pytest.mark.parametrize(
    ("name", "field"),
    [("Python", "python"), ("axsparse", "axsparse"), ("torch", "torch"), ("MPI", "mpi")],
)
def test_a_rank_of_another_environment_is_named(name: str, field: str) -> None:
    own: list[dict[str, Any]] = [{field: "1.0"}, {field: "1.0"}, {field: "0.9", "host": "two"}]

    finding = finding_of(name, ranks(*own))

    assert (finding.mark, finding.said) == ("wrong", "rank 2 on host two has 0.9, others 1.0")
    assert finding.mend == "start all ranks from one environment"


@pytest.mark.parametrize(
    ("name", "own", "mark", "said"),
    [
        ("MPI", {"mpi_problem": "MPI: size 1, but 4; try"}, "wrong", "size 1, but 4"),
        ("MPI threads", {"thread_level": "serialized"}, "slow", "serialized"),
        ("CUDA", {"cuda": "12.8"}, "absent", "12.8, but no device"),
        ("CUDA", {"cuda": "12.8", "gpus": ("H100", "H100")}, "ok", "12.8 · H100"),
        ("CuPy", {"cupy": "14.2.0"}, "ok", "14.2.0"),
        (
            "CuPy",
            {**GPUS, "cupy": None, "cupy_cuda": None, "cupy_nccl": None},
            "wrong",
            "cannot be imported, and runs the kernels of GPUs",
        ),
        (
            "CuPy",
            {**GPUS, "cupy_cuda": "11.8"},
            "wrong",
            "14.2.0 with CUDA 11, torch with CUDA 12, on host one",
        ),
        (
            "CuPy",
            {**GPUS, "cupy_nccl": "2.19.3"},
            "wrong",
            "14.2.0 with NCCL 2.19.3, torch with NCCL 2.27.3, on host one",
        ),
        (
            "CuPy",
            {**GPUS, "cupy": "13.4.1"},
            "wrong",
            "13.4.1 cannot take torch's streams",
        ),
        ("NCCL", GPUS, "ok", "2.27.3"),
        ("cores", GPUS, "ok", "8 a rank with a GPU"),
        ("cores", {**GPUS, "cores": (0,)}, "slow", "1 a rank with a GPU on host one"),
        ("InfiniBand", {"infiniband": ("mlx5_0", "mlx5_1")}, "ok", "mlx5_0, mlx5_1"),
        ("locked memory", {}, "ok", "8.4 MB"),
        ("locked memory", {"locked_memory": None, **GPUS}, "ok", "no limit"),
        (
            "locked memory",
            {"locked_memory": 65_536, "infiniband": ("mlx5_0",)},
            "slow",
            "65.5 kB on rank 0 of host one, too little for InfiniBand",
        ),
        ("threads", {"threads_wanted": "4"}, "ok", "OMP_NUM_THREADS 4, 1 rank on 4 cores"),
        (
            "threads",
            {"threads_wanted": "8"},
            "slow",
            "OMP_NUM_THREADS is 8, 1 rank on 4 cores of host one",
        ),
        (
            "threads",
            {"threads_wanted": "many"},
            "wrong",
            "OMP_NUM_THREADS is 'many', no number of threads",
        ),
        ("shared memory", {"leftovers": ("/s/a", "/s/b")}, "ok", "2 files on host one of jobs"),
        ("disk", {"writable": False}, "wrong", "/runs on host one cannot be written"),
        ("disk", {"room": 5 * 10**8}, "wrong", "500 MB free in /runs on host one"),
    ],
)
def test_one_rank_tells(name: str, own: dict[str, Any], mark: str, said: str) -> None:
    finding = finding_of(name, ranks(own))

    assert finding.mark == mark
    assert finding.said.startswith(said)
    assert bool(finding.mend) == (mark in ("wrong", "slow"))


@pytest.mark.parametrize(
    ("name", "own", "common", "mark", "said"),
    [
        (
            "CUDA",
            [{"gpus": ("H100",) * 4}, {"gpus": ("H100",) * 3, "host": "two"}],
            {"cuda": "12.8"},
            *("wrong", "rank 1 on host two has 3 devices, others 4 devices"),
        ),
        (
            "placement",
            [{"host": host} for host in ("one", "two", "one", "two")],
            {},
            *("wrong", "4 ranks on 2 hosts, neighbours on different hosts"),
        ),
        (
            "placement",
            [{"host": host} for host in ("a", "b", "a")],
            {},
            *("wrong", "3 ranks on 2 hosts, neighbours on different hosts"),
        ),
        ("placement", [{}, {"host": "two"}], {}, "ok", "2 ranks on 2 hosts"),
        (
            "devices",
            [{}, {}, {}],
            {"gpus": ("H100",) * 2, "uuids": ("a", "b")},
            *("slow", "3 ranks share 2 GPUs on host one"),
        ),
        ("devices", [{"uuids": ("a",)}, {"uuids": ("b",)}], {"gpus": ("H100",)}, "ok", "1 a rank"),
        ("threads", [{}, {}], {}, "wrong", "OMP_NUM_THREADS is not set, 2 ranks on 4 cores of"),
        ("threads", [{}, {}], {"threads_wanted": "4"}, "slow", "OMP_NUM_THREADS is 4, 2 ranks on"),
        (
            "threads",
            [{}, {}],
            {"threads_wanted": "1", "cores": (0,)},
            *("slow", "2 ranks on 1 core of host one"),
        ),
        (
            "threads",
            [{"cores": (0,)}, {"cores": (1,)}],
            {"threads_wanted": "1"},
            *("ok", "OMP_NUM_THREADS 1, 2 ranks on 2 cores"),
        ),
        (
            "cores",
            [{}, {}],
            {**GPUS, "cores": (0, 1, 2)},
            *("slow", "1.5 a rank with a GPU on host one"),
        ),
        (
            "InfiniBand",
            [{"infiniband": ("mlx5_0",)}, {"host": "two"}],
            {},
            *("slow", "host two has no device, and host one has"),
        ),
    ],
)
def test_several_ranks_tell(
    name: str, own: list[dict[str, Any]], common: dict[str, Any], mark: str, said: str
) -> None:
    finding = finding_of(name, ranks(*own, **common))

    assert finding.mark == mark
    assert finding.said.startswith(said)


def test_a_mend_can_be_typed() -> None:
    assert "--distribution=block" in finding_of("placement", ranks({}, {"host": "b"}, {})).mend
    assert finding_of("threads", ranks({}, {})).mend == "export OMP_NUM_THREADS=1"
    assert (
        finding_of("threads", ranks({}, {}, threads_wanted="4")).mend == "export OMP_NUM_THREADS=2"
    )
    assert (
        finding_of("devices", ranks({}, {}, gpus=("a",), uuids=("a",))).mend == "start 1 rank there"
    )


def test_the_map_says_which_rank_computes_where() -> None:
    own: list[dict[str, Any]] = [{"host": "one"}, {"host": "one"}, {"host": "two", "gpus": ()}]

    assert list(device_map(ranks(*own, **{**GPUS, "gpus": ("H100", "A100")})[:2])) == [
        "host one: rank 0 → cuda:0 (H100), 1 → cuda:1 (A100)"
    ]
    assert list(device_map(ranks(*own))) == [
        "host one: rank 0 → cpu, 1 → cpu",
        "host two: rank 2 → cpu",
    ]
