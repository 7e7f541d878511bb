"""Which GPU a rank gets, what the table of all ranks says, and the transport that follows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from axsparse.runtime.errors import ConfigError
from axsparse.runtime.gpu.rank_gpus import (
    BLOCKING,
    CONNECT_AT_ONCE,
    CONNECTIONS,
    LOCAL_RANKS,
    Gpu,
    RankGpu,
    bind_early,
    choose_gpu_transport,
    describe,
    local_rank,
    machine_name,
    rank_gpu,
    visible_gpus,
)

NAME = "H200"
SET = {CONNECTIONS: "32", CONNECT_AT_ONCE: "0"}
"""The variables that `bind_early` sets."""


def rank_of(
    rank: int,
    host: str,
    local: int,
    gpus: Sequence[Gpu],
    *,
    nccl: bool = True,
    environ: Mapping[str, str] = SET,
) -> RankGpu:
    return rank_gpu(rank, host, local, gpus, nccl=nccl, environ=environ)


def rank_gpus(hosts: Sequence[int], gpus: int = 4, *, alone: bool = False) -> list[RankGpu]:
    """Ranks of hosts with so many ranks each, of `gpus` GPUs; `alone`: each sees only its own."""
    made: list[RankGpu] = []
    for host, ranks in enumerate(hosts):
        all_here = [Gpu(NAME, f"host {host} gpu {number}") for number in range(gpus)]
        for local in range(ranks):
            seen = [all_here[local % gpus]] if alone else all_here
            made.append(rank_of(len(made), f"n{host}", local, seen))
    return made


NO_GPUS = [RankGpu(0, "n0"), RankGpu(1, "n0")]
SLICES = [
    rank_of(rank, "n0", 0, [Gpu("H200 MIG 1g.18gb", f"MIG-{rank}", "n0 [0, 5, 0]")])
    for rank in range(2)
]
WITHOUT_NCCL = [*rank_gpus([1]), rank_of(1, "n1", 0, [Gpu(NAME, "x")], nccl=False)]
SHARED = rank_gpus([4, 5])


@pytest.mark.parametrize("name", LOCAL_RANKS)
def test_the_launcher_says_which_of_its_hosts_ranks_this_is(name: str) -> None:
    assert local_rank({name: "3"}) == 3
    assert local_rank({name: "not a number"}) is None
    assert local_rank({}) is None
    # A daemon's number counts less than that of mpirun.
    assert local_rank({"MPI_LOCALRANKID": "2", "SLURM_LOCALID": "0"}) == 2


@pytest.mark.parametrize("has_gpu", [False, True])
def test_cuda_and_nccl_get_their_settings_before_they_start_unless_somebody_chose(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unset: dict[str, str] = {}
    chosen = {CONNECTIONS: "16", CONNECT_AT_ONCE: "1"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)

    bind_early(unset)
    bind_early(chosen)

    assert unset == (SET if has_gpu else {})
    assert chosen == {CONNECTIONS: "16", CONNECT_AT_ONCE: "1"}


def test_the_gpu_is_the_local_rank_modulo_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    def take(number: int) -> None:
        taken.append(number)
        # No rank may end before MPI has started, since others would wait for it in its start.
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", take)

    bind_early({"MPI_LOCALRANKID": "6"})
    bind_early({"HOME": "no launcher"})

    assert taken == [2]
    assert [one.number for one in rank_gpus([6])] == [0, 1, 2, 3, 0, 1]
    assert [one.number for one in rank_gpus([4], alone=True)] == [0, 0, 0, 0]


def test_gpus_are_told_apart_by_their_places_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(number: int) -> SimpleNamespace:
        bus = {"pci_domain_id": 0, "pci_bus_id": number, "pci_device_id": 0}
        return SimpleNamespace(name=NAME, uuid=f"u{number}", **(bus if number else {}))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)

    addresses = [gpu.bus_address for gpu in visible_gpus()]

    assert addresses[0] == "" and len(set(addresses)) == 3


def test_a_machine_is_told_from_others_of_its_name_by_when_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "n0")
    monkeypatch.setattr("axsparse.runtime.gpu.rank_gpus.BOOT", tmp_path / "boot_id")
    assert machine_name() == "n0/"

    (tmp_path / "boot_id").write_text("3e1d\n")

    assert machine_name() == "n0/3e1d"


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert visible_gpus() == []
    assert rank_of(3, "n0", 1, [], nccl=False) == RankGpu(3, "n0")


@pytest.mark.parametrize(
    ("table", "auto"),
    [
        (rank_gpus([4, 4]), "nccl"),
        (rank_gpus([4, 3], alone=True), "nccl"),
        (rank_gpus([1]), "nccl"),
        (SHARED, "mpi"),
        (rank_gpus([2], gpus=1, alone=True), "mpi"),
        (SLICES, "mpi"),
        (WITHOUT_NCCL, "mpi"),
        (NO_GPUS, None),
    ],
)
def test_auto_takes_nccl_where_every_rank_has_a_gpu_of_its_own(
    table: list[RankGpu], auto: str | None
) -> None:
    assert choose_gpu_transport("auto", "here", table) == auto
    assert choose_gpu_transport("mpi", "here", table) == (auto and "mpi")
    if auto == "nccl":
        assert choose_gpu_transport("nccl", "here", table) == "nccl"


@pytest.mark.parametrize(
    ("asked", "table", "said"),
    [
        (
            "nccl",
            SHARED,
            "here: nccl: ranks 4 and 8 share GPU 0 of host n1; start no more ranks a host than it "
            "has GPUs, or choose transport: mpi",
        ),
        ("nccl", SLICES, "here: nccl: ranks 0 and 1 share GPU 0 of host n0; start no more"),
        (
            "nccl",
            WITHOUT_NCCL,
            "here: nccl: the torch of rank 1 on host n1 is built without it; install torch with "
            "CUDA for Linux, or choose transport: mpi",
        ),
        (
            "auto",
            [*rank_gpus([2]), RankGpu(2, "n9")],
            "transport: rank 2 on host n9 sees no GPU and rank 0 on host n0 does; have the",
        ),
    ],
)
def test_what_ranks_cannot_work_with_is_refused(
    asked: str, table: list[RankGpu], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        choose_gpu_transport(asked, "here", table)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({CONNECTIONS: "1"}, f"{CONNECTIONS}=1 is set, so that a receive could"),
        ({BLOCKING[0]: "1"}, "CUDA_LAUNCH_BLOCKING=1 is set, so that a rank that sends would"),
        ({BLOCKING[1]: "true"}, "TORCH_NCCL_BLOCKING_WAIT=true is set"),
        ({CONNECT_AT_ONCE: "1"}, "NCCL_RUNTIME_CONNECT=1 is set"),
    ],
)
def test_what_would_make_ranks_wait_for_each_other_is_refused(
    environ: dict[str, str], said: str
) -> None:
    hindered = rank_of(1, "n0", 1, [Gpu(NAME, "y")] * 2, environ=environ)
    table = [*rank_gpus([1]), hindered]

    with pytest.raises(
        ConfigError, match=f"transport: nccl: on rank 1 of host n0 {said}.*; unset it, or "
    ):
        choose_gpu_transport("auto", "here", table)
    assert choose_gpu_transport("mpi", "here", table) == "mpi"
    assert choose_gpu_transport("nccl", "here", [hindered]) == "nccl", "it sends to nobody"


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        (
            rank_gpus([2, 1]),
            ["host n0: rank 0 → GPU 0, rank 1 → GPU 1 (H200)", "host n1: rank 2 → GPU 0 (H200)"],
        ),
        (NO_GPUS, []),
        (
            rank_gpus([2], gpus=1),
            [
                "host n0: rank 0 → GPU 0, rank 1 → GPU 0 (H200)",
                "warning: host n0 has 2 ranks on 1 GPU, which take turns; start one rank a GPU",
            ],
        ),
        # Slices of a GPU do not take turns.
        (SLICES, ["host n0: rank 0 → GPU 0, rank 1 → GPU 0 (H200 MIG 1g.18gb)"]),
    ],
)
def test_the_table_has_a_line_a_host_and_warns_of_more_ranks_than_gpus(
    table: list[RankGpu], lines: list[str]
) -> None:
    assert describe(table) == lines
