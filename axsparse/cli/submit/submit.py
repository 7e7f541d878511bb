"""`axsparse submit`: writes a job script for a cluster's scheduler, and submits it."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from axsparse.cli.parser import (
    CommandParser,
    add_configuration,
    add_run,
    overrides_of,
    require_configuration,
    run_command,
)
from axsparse.cli.submit import lsf, slurm
from axsparse.cli.submit.job_request import (
    JobRequest,
    check,
    clock,
    count,
    directive,
    duration,
    name,
)
from axsparse.config.load import LoadedConfig, load_config
from axsparse.config.validate import check_batch, check_config, counted
from axsparse.runtime.errors import (
    AxsparseError,
    ConfigError,
    MissingInputError,
    OutputError,
    writing,
)
from axsparse.runtime.grid import Grid
from axsparse.training.run_directory import automatic_run_dirs

SCRIPT = "job.sh"
"""Name of the script in the run directory."""
CORES_PER_GPU = 7
"""The cores that a rank asks for with each GPU that it has. Python, the threads that fetch batches,
those of NCCL and those of torch share them. As many are there on nodes such as Summit's, with 42
cores for 6 GPUs, and Frontier's, with 56 for 8; where they are not, --cpus-per-rank says less."""
TRAIN = ("-m", "axsparse.train")
"""The arguments of python that start training."""
DESCRIPTION = """\
Submit a training run to a cluster's scheduler.

  axsparse submit --slurm --nodes 2 --gpus-per-node 4 --time 2:00:00 --account abc --config my.yaml
  axsparse submit --lsf --nodes 2 --gpus-per-node 6 --cpus-per-rank 7 --time 2:00:00 \\
    --account abc --config my.yaml --set layout.g_inter=6
  axsparse submit --slurm --ranks 8 --time 0:30:00 --config quickstart.yaml --dry-run

Before its time ends the job saves, and the scheduler starts it again until it is done.
Without --run-dir or run_dir a new folder runs/<configuration> is made; submitting with the
--run-dir of an earlier job goes on from its last checkpoint.
"""
EPILOG = """\
what it leaves in the run directory:
  job.sh       the script, as submitted
  job-*.log    what the job printed

exit codes:
  0 submitted   66 input or command missing   74 the run directory cannot be written
  78 settings that cannot be run, or that the scheduler refuses
"""


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(
        prog="axsparse submit",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = arguments.add_argument
    scheduler = arguments.add_mutually_exclusive_group(required=True)
    scheduler.add_argument("--slurm", action="store_true", help="for sbatch")
    scheduler.add_argument("--lsf", action="store_true", help="for bsub")
    add("--dry-run", action="store_true", help="print the script; write and submit nothing")
    trained = arguments.add_argument_group("what is trained (as axsparse train)").add_argument
    add_configuration(trained)
    add_run(trained)
    _add_request(arguments.add_argument_group("what the job asks for").add_argument)
    _add_start(arguments.add_argument_group("how it starts").add_argument)
    return arguments


def _add_request(add: Callable[..., object]) -> None:
    """The options that say what the job asks the scheduler for."""
    add("--nodes", metavar="N", default="1", help="default %(default)s")
    add("--gpus-per-node", metavar="N", default="0", help="default %(default)s")
    add("--ranks", metavar="N", help="over all nodes; by default one for each GPU")
    add(
        "--cpus-per-rank",
        metavar="N",
        help=f"cores of a rank (default 1; {CORES_PER_GPU} for each GPU of its own); "
        "train.threads says how many it computes with",
    )
    add("--time", metavar="H:MM:SS", required=True, help="limit of one start; or D-HH:MM:SS")
    add(
        "--margin",
        metavar="H:MM:SS",
        default="0:05:00",
        help="time before the limit at which the ranks begin to save; longer than a step and a "
        "save take (default %(default)s)",
    )
    add("--account", metavar="NAME", help="the account that is charged")
    add(
        "--partition",
        "--queue",
        metavar="NAME",
        dest="queue",
        help="the queue that the job waits in",
    )
    add("--job-name", metavar="NAME", help="by default the name of the configuration")
    add(
        "--directive",
        metavar="OPTION",
        action="append",
        default=[],
        help="an option of the scheduler that is missing here, such as "
        "--directive=--constraint=gpu; may be repeated",
    )
    add(
        "--chain",
        metavar="K",
        default="1",
        help="submit K jobs that continue one another, instead of one that is restarted",
    )


def _add_start(add: Callable[..., object]) -> None:
    """The options that say how the ranks are started."""
    add(
        "--launcher",
        metavar="NAME",
        help="SLURM: mpirun (default) or srun; LSF: jsrun (default) or mpirun",
    )
    add("--mpi", metavar="TYPE", help="srun's --mpi, such as pmi2; by default the site's")
    add(
        "--setup",
        metavar="FILE",
        help="a file that the job's shell sources first: module load …, export …",
    )
    add(
        "--copy-environment",
        metavar="FOLDER",
        help="copy Python's environment into this folder of each node, and run it from there",
    )


def main(argv: Sequence[str]) -> NoReturn:
    """Submit a job, and end the process with its exit code; one of many ranks works."""
    run_command(lambda: _submit(parser().parse_args(argv)))


def _submit(arguments: argparse.Namespace) -> None:
    loaded = load_config(arguments.config, overrides_of(arguments))
    request = make_request(arguments, loaded)
    require_configuration(arguments, "submit")
    check_ranks(loaded, request.ranks)
    if arguments.dry_run:
        sys.stdout.buffer.write(script(request, lsf_job=arguments.lsf))
        sys.stdout.flush()
        return
    path = request.run_dir / SCRIPT
    made = _make(request.run_dir, must_be_new=loaded.config.run_dir == "auto")
    with writing(f"{path}:", "choose another --run-dir"):
        path.write_bytes(script(request, lsf_job=arguments.lsf))
        path.chmod(0o700)
    try:
        said = hand_over(path, lsf_job=arguments.lsf)
    except AxsparseError:
        path.unlink()
        if made:
            with contextlib.suppress(OSError):
                request.run_dir.rmdir()
        raise
    many = f" · up to {request.chain} jobs" if request.chain > 1 else ""
    print(said)
    print(
        f"{counted(request.ranks, 'rank')} on {counted(request.nodes, 'node')} · "
        f"{clock(request.seconds)} at a time{many} · log → {request.run_dir}/job-*.log"
    )


def make_request(arguments: argparse.Namespace, loaded: LoadedConfig) -> JobRequest:
    """The job that a command line asks for, checked except for the rules of the configuration.

    Raises ConfigError, and MissingInputError for a --setup that is not there.
    """
    nodes = count("--nodes", arguments.nodes)
    gpus = count("--gpus-per-node", arguments.gpus_per_node, least=0)
    if arguments.ranks is None and not gpus:
        raise ConfigError("--ranks: not given, nor --gpus-per-node; say how many ranks to start")
    ranks = nodes * gpus if arguments.ranks is None else count("--ranks", arguments.ranks)
    folder = Path.cwd()
    run_dir = folder / _run_dir(loaded, folder)
    # Otherwise every start would make a new folder.
    options = [f"--run-dir={run_dir}"] if loaded.config.run_dir == "auto" else []
    options += [] if arguments.config is None else [f"--config={arguments.config}"]
    options += [f"--set={pair}" for pair in overrides_of(arguments)]
    python = Path(sys.executable)
    beside = python.parent / "mpirun"
    launchers = lsf.LAUNCHERS if arguments.lsf else slurm.LAUNCHERS
    request = JobRequest(
        name=name("--job-name", arguments.job_name or _name_of(loaded)),
        nodes=nodes,
        ranks=ranks,
        cpus_per_rank=_cores(arguments.cpus_per_rank, gpus * nodes / ranks, loaded),
        threads=loaded.config.train.threads,
        gpus_per_node=gpus,
        seconds=duration("--time", arguments.time),
        margin=duration("--margin", arguments.margin),
        account=_optional_name("--account", arguments.account),
        queue=_optional_name("--partition, --queue", arguments.queue),
        directives=tuple(directive(text) for text in arguments.directive),
        chain=count("--chain", arguments.chain),
        launcher=_launcher(arguments.launcher or launchers[0], launchers),
        mpi=_optional_name("--mpi", arguments.mpi),
        mpirun=str(beside) if beside.is_file() else "mpirun",
        folder=folder,
        run_dir=run_dir,
        setup=None if arguments.setup is None else _existing(folder / arguments.setup),
        python=python,
        prefix=Path(sys.prefix),
        copy_to=None if arguments.copy_environment is None else Path(arguments.copy_environment),
        train=(*TRAIN, *options, "--resume=auto"),
    )
    check(request)
    if arguments.lsf:
        lsf.check_lsf(request)
    return request


def _cores(given: str | None, gpus: float, loaded: LoadedConfig) -> int:
    """The cores of a rank that has so many GPUs, or a share of one."""
    if given is not None:
        return count("--cpus-per-rank", given)
    if not gpus:
        return 1
    return max(1, int(CORES_PER_GPU * gpus), loaded.config.train.threads)


def check_ranks(loaded: LoadedConfig, ranks: int) -> Grid:
    """The grid of a run on `ranks` ranks; ConfigError if the configuration cannot be run on them.

    Training checks the same rules when it starts, which may be a night in the queue later.
    """
    # Imported late, so that --help does not load torch.
    from axsparse.models.zoo.model_registry import named_model
    from axsparse.planner.auto_layout import resolve_grid

    check_config(loaded)
    grid = resolve_grid(loaded, ranks, len(named_model(loaded).layers))
    check_batch(loaded, grid)
    return grid


def script(request: JobRequest, *, lsf_job: bool) -> bytes:
    """The job's script. Arguments keep their bytes, even if they are not UTF-8."""
    text = lsf.render(request) if lsf_job else slurm.render(request)
    return text.encode(errors="surrogateescape")


def hand_over(path: Path, *, lsf_job: bool) -> str:
    """Submit a script and return what the scheduler prints; ConfigError if it refuses."""
    command = ["bsub"] if lsf_job else ["sbatch", str(path)]
    if shutil.which(command[0]) is None:
        raise MissingInputError(
            f"{command[0]}: no such command; submit from a login node of the cluster, or print "
            "the script with --dry-run"
        )
    with path.open("rb") as text:
        done = subprocess.run(  # noqa: S603 - no shell
            command, stdin=text, capture_output=True, text=True, check=False
        )
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ConfigError(
            f"{command[0]}: refuses the job: {words}; change what it names, "
            "see axsparse submit --help"
        )
    return done.stdout.strip()


def _run_dir(loaded: LoadedConfig, folder: Path) -> Path:
    """The configured run directory, or the first free one of runs/<name>, runs/<name>-2, …"""
    if loaded.config.run_dir != "auto":
        return Path(loaded.config.run_dir)
    return next(path for path in automatic_run_dirs(loaded.name) if not (folder / path).exists())


def _make(run_dir: Path, *, must_be_new: bool) -> bool:
    """Make the run directory; False if it existed before, which `must_be_new` refuses."""
    if run_dir.is_dir() and not must_be_new:
        return False
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700)
    except OSError as reason:
        raise OutputError(
            f"run_dir: {run_dir} cannot be made ({reason.strerror}); choose another --run-dir"
        ) from reason
    return True


def _name_of(loaded: LoadedConfig) -> str:
    """The name of the configuration, in the letters that the name of a job may have."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", loaded.name).lstrip("_.-") or "axsparse"


def _launcher(wanted: str, known: Sequence[str]) -> str:
    if wanted not in known:
        raise ConfigError(
            f"--launcher: {wanted!r} does not start ranks under this scheduler; choose "
            f"{' or '.join(known)}"
        )
    return wanted


def _optional_name(flag: str, text: str | None) -> str | None:
    return None if text is None else name(flag, text)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingInputError(f"--setup: {str(path)!r} is no file; name an existing one")
    return path
