"""What is wrong, slow, absent or well, of facts that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from axsparse.cli.doctor.checkup import Finding, device_map, findings
from axsparse.cli.doctor.machine import MachineFacts

LAPTOP = MachineFacts(
    rank=0,
    size=1,
    host="one",
    python="3.11.7",
    axsparse="0.1.0",
    torch="2.9.0",
    mpi=None,
    mpi_problem=None,
    thread_level=None,
    cuda=None,
    gpus=(),
    uuids=(),
    nccl=None,
    cupy=None,
    cupy_cuda=None,
    cupy_nccl=None,
    threads_wanted=None,
    cores=(0, 1, 2, 3),
    locked_memory=8 << 20,
    infiniband=(),
    leftovers=(),
    room=10**11,
    writable=True,
    where="/runs",
)
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


def ranks(*each: dict[str, Any], **common: Any) -> list[MachineFacts]:
    """Facts of ranks: a laptop's, but for what is given."""
    return [
        MachineFacts(**{**vars(LAPTOP), "rank": rank, "size": len(each), **common, **own})
        for rank, own in enumerate(each)
    ]


def found(name: str, facts: list[MachineFacts]) -> Finding:
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
    assert str(Finding("ok", "torch", "2.9.0")) == "✓ torch          2.9.0"
    assert str(Finding("wrong", "disk", "full", "make room")) == "✗ disk           full → make room"


@pytest.mark.parametrize(
    ("name", "field"),
    [("Python", "python"), ("axsparse", "axsparse"), ("torch", "torch"), ("MPI", "mpi")],
)
def test_a_rank_of_another_environment_is_named(name: str, field: str) -> None:
    own: list[dict[str, Any]] = [{field: "1.0"}, {field: "1.0"}, {field: "0.9", "host": "two"}]

    finding = found(name, ranks(*own))

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
        ("shared memory", {"leftovers": ("/s/a", "/s/b")}, "wrong", "2 files of killed jobs on"),
        ("disk", {"writable": False}, "wrong", "/runs on host one cannot be written"),
        ("disk", {"room": 5 * 10**8}, "wrong", "500 MB free in /runs on host one"),
    ],
)
def test_one_rank_tells(name: str, own: dict[str, Any], mark: str, said: str) -> None:
    finding = found(name, ranks(own))

    assert finding.mark == mark
    assert finding.said.startswith(said)
    assert bool(finding.mend) == (mark in ("wrong", "slow"))


def test_gpus_that_are_missing_on_a_node_are_wrong() -> None:
    own: list[dict[str, Any]] = [{"gpus": ("H100",) * 4}, {"gpus": ("H100",) * 3, "host": "two"}]

    assert found("CUDA", ranks(*own, cuda="12.8")).said == (
        "rank 1 on host two has 3 devices, others 4 devices"
    )


def test_neighbours_on_different_hosts_are_wrong() -> None:
    cyclic = [{"host": host} for host in ("one", "two", "one", "two")]

    finding = found("placement", ranks(*cyclic))

    assert (finding.mark, finding.said) == (
        "wrong",
        "4 ranks on 2 hosts, neighbours on different hosts",
    )
    assert "--distribution=block" in finding.mend


def test_a_host_that_comes_twice_is_wrong() -> None:
    assert found("placement", ranks({"host": "a"}, {"host": "b"}, {"host": "a"})).mark == "wrong"


def test_a_rank_on_each_host_is_no_cyclic_placement() -> None:
    assert found("placement", ranks({"host": "one"}, {"host": "two"})).mark == "ok"


def test_ranks_that_share_gpus_are_slow() -> None:
    finding = found("devices", ranks({}, {}, {}, gpus=("H100",) * 2, uuids=("a", "b")))

    assert (finding.mark, finding.said) == ("slow", "3 ranks share 2 GPUs on host one")
    finding = found("devices", ranks({}, {}, gpus=("H100",), uuids=("a",)))
    assert (finding.mark, finding.said) == ("slow", "2 ranks share 1 GPU on host one")


def test_ranks_that_were_given_one_gpu_each_share_none() -> None:
    own = [{"uuids": ("a",)}, {"uuids": ("b",)}]

    assert found("devices", ranks(*own, gpus=("H100",))).mark == "ok"


def test_ranks_without_a_number_of_threads_take_all_cores() -> None:
    finding = found("threads", ranks({}, {}))

    assert (finding.mark, finding.mend) == ("wrong", "export OMP_NUM_THREADS=1")


def test_more_threads_than_cores_are_slow() -> None:
    finding = found("threads", ranks({}, {}, threads_wanted="4"))

    assert (finding.mark, finding.mend) == ("slow", "export OMP_NUM_THREADS=2")


def test_more_ranks_than_cores_are_slow() -> None:
    bound = ranks({}, {}, threads_wanted="1", cores=(0,))

    assert found("threads", bound).said == "2 ranks on 1 core of host one"
    assert (
        found("threads", ranks({"cores": (0,)}, {"cores": (1,)}, threads_wanted="1")).mark == "ok"
    )


def test_ranks_that_share_cores_have_a_part_of_them_each() -> None:
    finding = found("cores", ranks({}, {}, **{**GPUS, "cores": (0, 1, 2)}))

    assert (finding.mark, finding.said) == ("slow", "1.5 a rank with a GPU on host one")


def test_a_host_without_the_others_network_is_slow() -> None:
    own: list[dict[str, Any]] = [{"infiniband": ("mlx5_0",)}, {"host": "two"}]

    finding = found("InfiniBand", ranks(*own))

    assert (finding.mark, finding.said) == (
        "slow",
        "host two has no device, and host one has",
    )


def test_only_some_of_many_files_are_named() -> None:
    finding = found("shared memory", ranks({"leftovers": tuple("abcde")}))

    assert finding.mend == "rm a b c (and 2 more: --json)"


def test_the_map_says_which_rank_computes_where() -> None:
    own: list[dict[str, Any]] = [{"host": "one"}, {"host": "one"}, {"host": "two", "gpus": ()}]

    assert device_map(ranks(*own, **{**GPUS, "gpus": ("H100", "A100")})[:2]) == [
        "host one: rank 0 → cuda:0 (H100), 1 → cuda:1 (A100)"
    ]
    assert device_map(ranks(*own)) == ["host one: rank 0 → cpu, 1 → cpu", "host two: rank 2 → cpu"]
