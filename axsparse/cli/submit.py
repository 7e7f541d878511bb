"""`axsparse submit`: fills in a job script for a cluster's scheduler, and prints or submits it.

The scripts are texts in `launch/`, which know their scheduler; this command knows the names of the
schedulers' commands. Only names and numbers go into directives; what goes into a shell command is
quoted.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from axsparse.cli.parser import (
    MOST,
    CommandParser,
    add_configuration,
    add_run,
    integer,
    overrides_of,
    require_configuration,
    say,
)
from axsparse.config.load import configure, packaged_folder
from axsparse.config.schema import Config
from axsparse.config.validate import check_batch, check_config, counted
from axsparse.runtime.errors import ConfigError, MissingInputError, writing
from axsparse.runtime.files.run_folder import automatic_run_dirs

SCHEDULERS = {
    "slurm": ("#SBATCH", ("sbatch",)),
    "lsf": ("#BSUB", ("bsub",)),
    "pbs": ("#PBS", ("qsub",)),
    "flux": ("#flux:", ("flux", "batch")),
}
"""How a directive begins, and the command that reads a script, by the name of a template."""
CORES_PER_GPU = 7
"""Cores that a rank asks for with each GPU that it has: for Python, the threads that fetch batches,
and the threads of NCCL and torch. Nodes such as Frontier's have 56 for 8 GPUs; where there are
fewer, --cpus-per-rank says so."""
DESCRIPTION = """\
Fill in a job script for a cluster's scheduler, to be read, edited and submitted.

  axsparse submit --slurm --nodes 2 --gpus-per-node 4 --time 2:00:00 --config my.yaml > job.sh
  axsparse submit --pbs --nodes 2 --gpus-per-node 4 --time 2:00:00 --account abc --queue prod \\
    --config my.yaml --now
  axsparse submit --flux --ranks 8 --time 0:30:00 --config quickstart.yaml

Before its time ends the job saves and submits itself again until training is done. Where ranks or
nodes fail it goes on from the last checkpoint, on the nodes that answer. Without --run-dir or
run_dir the run gets a new folder runs/<configuration>; with the --run-dir of an earlier job it goes
on from its last checkpoint.
"""


# --- the command line --------------------------------------------------------------------


def duration(text: str) -> int:
    """The seconds of "H:MM:SS" or "D-HH:MM:SS".

    Shorter forms are refused, since schedulers disagree: 2:00 is two minutes for SLURM and
    two hours for LSF.
    """
    parts = re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])", text)
    days, hours, minutes, rest = (int(part or 0) for part in parts.groups()) if parts else [0] * 4
    seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not 0 < seconds <= MOST * 10:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no time; write H:MM:SS or D-HH:MM:SS, such as 2:00:00"
        )
    return seconds


def name(text: str) -> str:
    """The name of a job, an account or a queue."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@:/+-]{0,199}", text) is None:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no name; use letters, digits and _ . @ : / + -, beginning with a "
            "letter or digit"
        )
    return text


def directive(text: str) -> str:
    """An option of a scheduler, as written after #SBATCH."""
    if not text.isprintable() or re.match(r"--?[A-Za-z]", text) is None:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no option of a scheduler; write it as in a job script, such as "
            "--directive=--constraint=gpu"
        )
    return text


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(_submit, prog="axsparse submit", description=DESCRIPTION)
    scheduler = arguments.add_mutually_exclusive_group(required=True)
    for one, (_, command) in SCHEDULERS.items():
        scheduler.add_argument(
            f"--{one}",
            dest="scheduler",
            action="store_const",
            const=one,
            help=f"for {' '.join(command)}",
        )
    arguments.add_argument(
        "--now",
        action="store_true",
        help="write the script beside the run directory and submit it, instead of printing it",
    )
    trained = arguments.add_argument_group("what is trained (as axsparse train)").add_argument
    add_configuration(trained)
    add_run(trained)
    _add_request(arguments.add_argument_group("what the job asks for").add_argument)
    return arguments


def _add_request(add: Callable[..., object]) -> None:
    """The options for the resources that the job requests from the scheduler."""
    add("--nodes", metavar="N", type=integer(), default="1", help="default %(default)s")
    add("--gpus-per-node", metavar="N", type=integer(0), default="0", help="default %(default)s")
    add("--ranks", metavar="N", type=integer(), help="over all nodes; by default one for each GPU")
    add(
        "--cpus-per-rank",
        metavar="N",
        type=integer(),
        help=f"cores of a rank (default 1; {CORES_PER_GPU} for each GPU of its own); "
        "train.threads says how many it computes with",
    )
    add(
        "--time",
        metavar="H:MM:SS",
        type=duration,
        required=True,
        help="limit of one job; or D-HH:MM:SS",
    )
    add(
        "--margin",
        metavar="H:MM:SS",
        type=duration,
        default="0:05:00",
        help="time before the limit at which the ranks begin to save; longer than a step and a "
        "save take (default %(default)s)",
    )
    add("--account", metavar="NAME", type=name, help="the account, project or bank that is charged")
    queue = "the queue that the job waits in"
    add("--partition", "--queue", metavar="NAME", type=name, dest="queue", help=queue)
    add("--job-name", metavar="NAME", type=name, help="by default the name of the configuration")
    add(
        "--directive",
        metavar="OPTION",
        type=directive,
        action="append",
        default=[],
        help="an option of the scheduler that is missing here, such as "
        "--directive=--constraint=gpu; may be repeated",
    )
    add(
        "--setup",
        metavar="FILE",
        type=Path,
        help="a file that the job's shell sources first: module load …, export …",
    )


# --- the script --------------------------------------------------------------------------


def script(job: argparse.Namespace, config: Config, run_dir: Path) -> str:
    """The script of a job that trains in `run_dir`; ConfigError for options that do not fit
    together."""
    ranks = job.ranks or job.nodes * job.gpus_per_node
    if not ranks:
        raise ConfigError("--ranks: not given, nor --gpus-per-node; say how many ranks to start")
    threads = config.train.threads
    of_gpus = CORES_PER_GPU * job.gpus_per_node * job.nodes // ranks
    cpus = job.cpus_per_rank or max(1, of_gpus, threads)
    _check_request(job, ranks, cpus, threads)
    check_ranks(config, ranks)
    return fill(
        f"{job.scheduler}.sh",
        {
            **_request(job, config, ranks, cpus),
            **_commands(job, run_dir),
            **_shape(config, ranks),
            "threads": threads,
        },
    )


def _check_request(job: argparse.Namespace, ranks: int, cpus: int, threads: int) -> None:
    """ConfigError for options that contradict each other."""
    rest = ranks % job.nodes
    if rest:
        choices = [n for n in (ranks - rest, ranks - rest + job.nodes) if n]
        raise ConfigError(
            f"--ranks: {ranks} does not spread evenly over {job.nodes} nodes; choose "
            f"{' or '.join(map(str, choices))}"
        )
    if threads > cpus:
        raise ConfigError(
            f"--cpus-per-rank: {cpus} is below train.threads {threads}; choose at least {threads}"
        )
    if job.margin >= job.time:
        raise ConfigError(
            f"--margin: {clock(job.margin)} before the end of a job of {clock(job.time)} is before "
            "its start; choose a shorter one, or a longer --time"
        )


def _request(job: argparse.Namespace, config: Config, ranks: int, cpus: int) -> dict[str, object]:
    """The values of directives."""
    usual = re.sub(r"[^A-Za-z0-9_.-]", "_", config.name).lstrip("_.-")[:200]
    prefix, _ = SCHEDULERS[job.scheduler]
    per_node = ranks // job.nodes
    return {
        "job_name": job.job_name or usual or "axsparse",
        "nodes": job.nodes,
        "per_node": per_node,
        "cpus": cpus,
        "cores": per_node * cpus,
        "all_cores": ranks * cpus,
        "gpus": job.gpus_per_node or None,
        "ngpus": f":ngpus={job.gpus_per_node}" if job.gpus_per_node else "",
        "time": clock(job.time),
        "minutes": -(-job.time // 60),
        "margin": job.margin,
        "save_at": job.time - job.margin,
        "account": job.account,
        "queue": job.queue,
        "directives": f"\n{prefix} ".join(job.directive) or None,
    }


def _commands(job: argparse.Namespace, run_dir: Path) -> dict[str, object]:
    """The values of shell commands, quoted."""
    setup = "# module load … # the site's MPI library, the one that mpi4py loads"
    if job.setup is not None:
        if not job.setup.is_file():
            raise MissingInputError(f"--setup: {str(job.setup)!r} is no file; name an existing one")
        setup = f". {shlex.quote(str(Path.cwd() / job.setup))} || exit 78"
    mpirun = Path(sys.executable).with_name("mpirun")
    config = [] if job.config is None else [f"--config={job.config}"]
    return {
        "folder": shlex.quote(str(Path.cwd())),
        "setup": setup,
        "script": shlex.quote(str(script_of(run_dir))),
        "run_dir": shlex.quote(str(run_dir)),
        "python": shlex.quote(sys.executable),
        "mpirun": shlex.quote(str(mpirun) if mpirun.is_file() else "mpirun"),
        "train": shlex.join([*config, *(f"--set={pair}" for pair in job.pairs)]),
    }


def _shape(config: Config, ranks: int) -> dict[str, object]:
    """The ranks of one replica as far as the configuration fixes its stages, and the options with
    which fewer ranks train fewer replicas of the same stages."""
    layout = config.layout
    stages = layout.g_inter
    if stages == "auto":
        stages = ranks // layout.g_data // layout.g_tensor if layout.g_data != "auto" else 1
    options = [f"--set=layout.g_inter={stages}", "--set=layout.g_data=auto"]
    return {
        "replica": stages * layout.g_tensor,
        "fewer": "" if layout.g_data == "auto" else shlex.join(options),
    }


def check_ranks(config: Config, ranks: int) -> None:
    """ConfigError if the configuration cannot be run on so many ranks.

    Training checks the same rules when it starts, which may be a night in the queue later.
    """
    # Imported late, so that --help does not load torch.
    from axsparse.models.zoo.model_registry import named_model
    from axsparse.planner.auto_layout import resolve_grid

    check_config(config)
    check_batch(config, resolve_grid(config, ranks, len(named_model(config).layers)))


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The text of a template, with `@name@` replaced by a value.

    A line with the name of a value that is None is left out. Placeholders within a value stay.
    """
    lines = []
    for line in (packaged_folder("launch") / template).read_text(encoding="utf-8").splitlines():
        found = [values[name] for name in re.findall(r"@([a-z_]+)@", line)]
        if None not in found:
            lines.append(re.sub(r"@([a-z_]+)@", lambda match: str(values[match[1]]), line))
    return "\n".join(lines) + "\n"


def clock(seconds: int) -> str:
    """Seconds as "H:MM:SS"."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


# --- printing and submitting -------------------------------------------------------------


def script_of(run_dir: Path) -> Path:
    """The script of a run: next to its directory, which belongs to the run alone."""
    return run_dir.with_name(f"{run_dir.name}.sh")


def _submit(job: argparse.Namespace) -> None:
    job.pairs = overrides_of(job)
    require_configuration(job, "submit")
    config = configure(job.config, job.pairs)
    run_dir = Path.cwd() / config.run_dir
    if config.run_dir == "auto":
        unused = (path for path in automatic_run_dirs(config.name) if not path.exists())
        run_dir = Path.cwd() / next(path for path in unused if not script_of(path).exists())
    text = script(job, config, run_dir).encode(errors="surrogateescape")
    if not job.now:
        say(text)
        return
    path = script_of(run_dir)
    with writing(f"{path}:", "choose another --run-dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    say(hand_over(text, SCHEDULERS[job.scheduler][1]))
    say(f"script → {path} · {counted(job.nodes, 'node')}, {clock(job.time)} at a time")


def hand_over(text: bytes, command: tuple[str, ...]) -> str:
    """Submit a script and return the scheduler's output; ConfigError if it rejects the script."""
    if shutil.which(command[0]) is None:
        raise MissingInputError(
            f"{command[0]}: no such command; submit from a login node of the cluster, or print "
            "the script without --now"
        )
    done = subprocess.run(command, input=text, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace")
        words = " ".join(said.split()) or f"exit code {done.returncode}"
        raise ConfigError(
            f"{' '.join(command)}: refuses the job: {words}; change what it names, "
            "see axsparse submit --help"
        )
    return done.stdout.decode(errors="replace").strip()
