"""Which GPU a rank gets, what the table of all ranks says, and the transport that follows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from axsparse.runtime.errors import ConfigError
from axsparse.runtime.gpu.rank_gpus import (
    BLOCKING,
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


def rank_gpus(hosts: Sequence[int], gpus: int = 4, *, alone: bool = False) -> list[RankGpu]:
    """Ranks of hosts with so many ranks each, of `gpus` GPUs; `alone`: each sees only its own."""
    found: list[RankGpu] = []
    for host, ranks in enumerate(hosts):
        all_here = [Gpu(NAME, f"host {host} gpu {number}") for number in range(gpus)]
        for local in range(ranks):
            seen = [all_here[local % gpus]] if alone else all_here
            rank = len(found)
            found.append(
                rank_gpu(rank, f"n{host}", local, seen, nccl=True, environ={CONNECTIONS: "32"})
            )
    return found


@pytest.mark.parametrize("name", LOCAL_RANKS)
def test_the_launcher_says_which_of_its_hosts_ranks_this_is(name: str) -> None:
    assert local_rank({name: "3"}) == 3
    assert local_rank({name: "not a number"}) is None
    assert local_rank({}) is None


def test_a_daemons_number_counts_less_than_that_of_mpirun() -> None:
    assert local_rank({"MPI_LOCALRANKID": "2", "SLURM_LOCALID": "0"}) == 2


def test_cuda_gets_its_queues_before_it_starts_unless_somebody_chose() -> None:
    unset: dict[str, str] = {}
    chosen = {CONNECTIONS: "16"}

    bind_early(unset)
    bind_early(chosen)

    assert (unset[CONNECTIONS], chosen[CONNECTIONS]) == ("32", "16")


def test_the_gpu_is_the_local_rank_modulo_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)

    bind_early({"MPI_LOCALRANKID": "6"})
    bind_early({"HOME": "no launcher"})

    assert taken == [2]
    assert [one.number for one in rank_gpus([6])] == [0, 1, 2, 3, 0, 1]
    assert [one.number for one in rank_gpus([4], alone=True)] == [0, 0, 0, 0]


def test_a_gpu_that_cannot_be_used_ends_no_rank_before_mpi_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others would wait for it in the start of MPI."""

    def refuse(number: int) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", refuse)

    bind_early({"MPI_LOCALRANKID": "1"})


def test_slices_of_one_gpu_are_no_gpus_of_their_own_to_nccl() -> None:
    slices = [Gpu("H200 MIG 1g.18gb", f"MIG-{number}", "n0 [0, 5, 0]") for number in range(2)]
    table = [
        rank_gpu(rank, "n0", 0, [gpu], nccl=True, environ={CONNECTIONS: "32"})
        for rank, gpu in enumerate(slices)
    ]

    assert choose_gpu_transport("auto", "here", table) == "mpi"
    with pytest.raises(ConfigError, match="ranks 0 and 1 share GPU 0 of host n0"):
        choose_gpu_transport("nccl", "here", table)
    assert len(describe(table)) == 1, "they do not take turns"


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
    assert rank_gpu(3, "n0", 1, [], nccl=False, environ={}) == RankGpu(3, "n0")


def test_nccl_is_taken_where_every_rank_has_a_gpu_of_its_own() -> None:
    for table in (rank_gpus([4, 4]), rank_gpus([4, 3], alone=True), rank_gpus([1])):
        assert choose_gpu_transport("auto", "here", table) == "nccl"
        assert choose_gpu_transport("nccl", "here", table) == "nccl"
        assert choose_gpu_transport("mpi", "here", table) == "mpi"


def test_ranks_that_share_a_gpu_go_by_way_of_the_hosts() -> None:
    assert choose_gpu_transport("auto", "here", rank_gpus([4, 5])) == "mpi"
    assert choose_gpu_transport("auto", "here", rank_gpus([2], gpus=1, alone=True)) == "mpi"


def test_nccl_is_refused_where_ranks_share_a_gpu() -> None:
    said = (
        "gpt.yaml:9: transport: nccl: ranks 4 and 8 share GPU 0 of host n1; start no more ranks a "
        "host than it has GPUs, or choose transport: mpi"
    )

    with pytest.raises(ConfigError, match=re.escape(said)):
        choose_gpu_transport("nccl", "gpt.yaml:9: transport", rank_gpus([4, 5]))


def test_nccl_is_refused_where_torch_has_none() -> None:
    table = [
        *rank_gpus([1]),
        rank_gpu(1, "n1", 0, [Gpu(NAME, "x")], nccl=False, environ={CONNECTIONS: "32"}),
    ]

    assert choose_gpu_transport("auto", "here", table) == "mpi"
    with pytest.raises(
        ConfigError, match="here: nccl: the torch of rank 1 on host n1 is built without it"
    ):
        choose_gpu_transport("nccl", "here", table)


def test_nccl_is_refused_where_there_are_no_gpus() -> None:
    table = [RankGpu(0, "n0"), RankGpu(1, "n0")]

    assert choose_gpu_transport("auto", "here", table) is None
    assert choose_gpu_transport("mpi", "here", table) is None
    with pytest.raises(ConfigError, match="here: nccl is for GPUs, and no rank sees one"):
        choose_gpu_transport("nccl", "here", table)


def test_either_all_ranks_have_a_gpu_or_none() -> None:
    with pytest.raises(ConfigError, match="rank 2 on host n9 sees no GPU and rank 0 on host n0"):
        choose_gpu_transport("auto", "here", [*rank_gpus([2]), RankGpu(2, "n9")])


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({CONNECTIONS: "1"}, f"{CONNECTIONS}=1 is set, so that a receive could"),
        ({BLOCKING[0]: "1"}, "CUDA_LAUNCH_BLOCKING=1 is set, so that a rank that sends would"),
        ({BLOCKING[1]: "true"}, "TORCH_NCCL_BLOCKING_WAIT=true is set"),
    ],
)
def test_what_would_make_ranks_wait_for_each_other_is_refused(
    environ: dict[str, str], said: str
) -> None:
    hindered = rank_gpu(1, "n0", 1, [Gpu(NAME, "y")] * 2, nccl=True, environ=environ)
    table = [*rank_gpus([1]), hindered]

    with pytest.raises(
        ConfigError, match=f"transport: nccl: on rank 1 of host n0 {said}.*; unset it, or "
    ):
        choose_gpu_transport("auto", "here", table)
    assert choose_gpu_transport("mpi", "here", table) == "mpi"
    assert choose_gpu_transport("nccl", "here", [hindered]) == "nccl", "it sends to nobody"


def test_settings_that_are_off_hinder_nobody() -> None:
    environ = {BLOCKING[0]: "0", BLOCKING[1]: ""}

    assert rank_gpu(0, "n0", 0, [], nccl=True, environ=environ).hindrance is None


def test_the_table_has_a_line_a_host() -> None:
    assert describe(rank_gpus([2, 1])) == [
        "host n0: rank 0 → GPU 0, rank 1 → GPU 1 (H200)",
        "host n1: rank 2 → GPU 0 (H200)",
    ]
    assert describe([RankGpu(0, "n0")]) == []


def test_the_table_warns_of_more_ranks_than_gpus() -> None:
    assert describe(rank_gpus([4, 3], gpus=2))[2:] == [
        "warning: host n0 has 4 ranks on 2 GPUs, which take turns; start one rank a GPU",
        "warning: host n1 has 3 ranks on 2 GPUs, which take turns; start one rank a GPU",
    ]
    assert len(describe(rank_gpus([2], gpus=1))) == 2
    assert describe(rank_gpus([2], gpus=1))[1].startswith("warning: host n0 has 2 ranks on 1 GPU,")
