"""The command lines by which mpirun, srun and jsrun start ranks, on hosts of our choice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from axsparse.runtime.errors import ConfigError, MissingInputError
from axsparse.runtime.restarts.decision import FINAL, Host, Placing

CODE_FILE = "left"
"""The file in the run directory by which ranks under srun tell their exit code."""
MAPPING_POLICY = "PRTE_MCA_rmaps_default_mapping_policy"
"""Where Open MPI's mpirun is told to fill one host after the other, as MPICH's does anyway: from
the number of a rank follows its host."""
OVERLAP = {"SLURM_OVERLAP": "1"}
"""Lets srun, also the one that mpirun calls, start ranks on nodes where an earlier start has not
ended as far as SLURM knows: of a node that died it hears only after minutes."""
_RANK = """trap : USR1; "$@"; code=$?
case "$code" in {codes}) echo "$code" >"$0" && code=0 ;; esac; exit "$code\""""
"""Runs a rank under srun, which kills the ranks that still run at the first code that is not 0.
Codes that all ranks exit with go by a file instead."""
SLURM_PROBE = (
    "sh -c 'state=$(sinfo --noheader --nodes={host} --format=%t | head -n 1); "
    'case "$state" in "" | *\\* | *down* | *drain* | drng* | *fail* | maint*) exit 1 ;; esac; '
    "exec srun --quiet --overlap --mpi=none --nodes=1 --ntasks=1 --ntasks-per-node=1 "
    "--cpus-per-task=1 --nodelist={host} true'"
)
"""Succeeds for a node that SLURM does not drain and that starts a process of this job at once. Of
a node that has died SLURM itself hears only after minutes (SlurmdTimeout), and one that has come
back belongs to the job no longer."""
LSF_PROBE = "sh -c 'bhosts {host} | grep -q -e ok -e closed_Full -e closed_Excl'"
"""Succeeds for a host that LSF neither has lost nor has closed for repair."""
SSH_PROBE = "ssh -o BatchMode=yes -o ConnectTimeout=5 {host} true"


@dataclass(frozen=True)
class Command:
    """What is to be run."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is added to the environment of the launcher."""
    code_file: Path | None = None
    """Has the exit code of ranks that left together, if it exists in the end."""


def command(
    launcher: Sequence[str], placing: Placing, rank: Sequence[str], run_dir: Path, *, named: bool
) -> Command:
    """The command line that starts each rank as `rank` by a launcher, which has its own options.

    If `named`, the ranks are started on the hosts of `placing` and nowhere else. Otherwise the
    launcher itself knows where, such as srun in its whole allocation. jsrun cannot leave out hosts.
    """
    ranks, name = placing.ranks, Path(launcher[0]).name
    if name == "srun":
        code_file = run_dir / f"{CODE_FILE}-{os.environ.get('SLURM_JOB_ID', os.getpid())}"
        codes = " | ".join(str(code) for code in FINAL if code)
        words = (*launcher, "-K1", f"--ntasks={ranks}")
        if named:
            # All hosts but the last one have as many ranks, and SLURM keeps its own order of hosts.
            words += (
                *("--distribution=block", "--no-kill", f"--nodes={len(placing.hosts)}"),
                f"--ntasks-per-node={placing.hosts[0].slots}",
                f"--nodelist={','.join(host.name for host in placing.hosts)}",
            )
        wrapped = ("sh", "-c", _RANK.format(codes=codes), str(code_file), *rank)
        return Command((*words, *wrapped), OVERLAP, code_file)
    if not named or name == "jsrun":
        return Command((*launcher, "-n", str(ranks), *rank), OVERLAP)
    hosts_of = ",".join(f"{host.name}:{host.slots}" for host in placing.hosts)
    policy = os.environ.get(MAPPING_POLICY, "").partition(":")
    return Command(
        (*launcher, "--host", hosts_of, "-n", str(ranks), *rank),
        {**OVERLAP, MAPPING_POLICY: f"slot{''.join(policy[1:])}"},
    )


def parse_hosts(text: str, ranks: int) -> list[Host]:
    """The hosts of "a:4,b:4", or of "a,b" where they share the ranks evenly; ConfigError."""
    found = [re.fullmatch(r"(\w[\w.-]*)(?::([1-9][0-9]{0,4}))?", word) for word in text.split(",")]
    names = [match[1] for match in found if match]
    if None in found or len(set(names)) < len(names):
        raise ConfigError(
            f"--hosts: {text[:60]!r} is no list of different hosts; write it like node1:4,node2:4"
        )
    share, rest = divmod(ranks, len(names))
    if rest and not all(match[2] for match in found if match):
        raise ConfigError(
            f"--hosts: {ranks} ranks do not spread evenly over {len(names)} hosts; say how many "
            f"each takes, like {names[0]}:{share + 1}"
        )
    return [Host(match[1], int(match[2] or share)) for match in found if match]


def allocated_hosts(environment: Mapping[str, str], ranks: int) -> tuple[list[Host], str] | None:
    """The hosts of the job that a scheduler gave to this process, and a command that asks about
    one; None outside of a job, and where the hosts are not known."""
    names: list[str] = []
    probe = SLURM_PROBE
    if (listed := environment.get("SLURM_JOB_NODELIST")) and shutil.which("scontrol"):
        done = subprocess.run(  # noqa: S603 - no shell
            ["scontrol", "show", "hostnames", listed],  # noqa: S607 - SLURM's, wherever it is
            capture_output=True,
            text=True,
            check=False,
        )
        names = done.stdout.split() if done.returncode == 0 else []
    elif counted := environment.get("LSB_MCPU_HOSTS", "").split():
        slots = dict(zip(counted[::2], map(int, counted[1::2]), strict=False))
        # Under jsrun the first host only runs the script, with one slot.
        names = [name for name, count in slots.items() if count > 1 or max(slots.values()) == 1]
        probe = LSF_PROBE
    if not names or ranks % len(names):
        return None
    return [Host(name, ranks // len(names)) for name in names], probe


def refuse_missing(words: Sequence[str], what: str) -> None:
    """MissingInputError if the program of a command line is not there."""
    if not words or shutil.which(words[0]) is None:
        name = words[0] if words else ""
        raise MissingInputError(f"{what}: no command {name!r}; install it, or name another one")
