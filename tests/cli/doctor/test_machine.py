"""What is learnt of a machine."""

from __future__ import annotations

import os
import resource
import socket
import sys
import types
from pathlib import Path

import pytest
import torch

from axsparse.cli.doctor import machine
from axsparse.cli.doctor.machine import Mpi, look


def test_a_machine_without_gpus_has_none(tmp_path: Path) -> None:
    facts = look(2, 4, Mpi("MPICH 5", "multiple"), tmp_path / "runs" / "mine")

    assert (facts.rank, facts.size, facts.host) == (2, 4, socket.gethostname())
    assert (facts.torch, facts.cuda) == (torch.__version__, torch.version.cuda)
    assert facts.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert (facts.where, facts.writable) == (str(tmp_path), True)
    assert facts.room > 0


def test_infiniband_devices_are_those_that_the_kernel_shows(tmp_path: Path) -> None:
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "infiniband" / name).mkdir(parents=True)

    assert machine.infiniband(tmp_path / "infiniband") == ["mlx5_0", "mlx5_1"]
    assert machine.infiniband(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("limit", "said"), [(65_536, 65_536), (resource.RLIM_INFINITY, None)], ids=str
)
def test_the_limit_of_locked_memory_is_ulimit_l(
    limit: int, said: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limits(which: int) -> tuple[int, int]:
        return (limit, limit) if which == resource.RLIMIT_MEMLOCK else (0, 0)

    monkeypatch.setattr(resource, "getrlimit", limits)

    assert look(0, 1, Mpi(), tmp_path).locked_memory == said


def test_cupy_says_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins, since there is no CuPy without CUDA."""
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 12080)
    cupy = types.ModuleType("cupy")
    cupy.__dict__.update(__version__="13.4.1", cuda=types.SimpleNamespace(runtime=runtime))
    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.__dict__["get_version"] = lambda: 22703
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)

    assert machine._cupy() == ("13.4.1", "12.8", "2.27.3")


def test_a_cupy_that_finds_no_cuda_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = types.ModuleType("cupy")
    cupy.__dict__["__version__"] = "13.4.1"
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)

    assert machine._cupy() == ("13.4.1", None, None)
