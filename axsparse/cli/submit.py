"""`axsparse submit`: fills in a job script for a cluster's scheduler, and prints or submits it.

The scripts are texts in `launch/`, which know their scheduler; this command knows the names of the
schedulers' commands. Only names and numbers go into directives; what goes into a shell command is
quoted.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import count
from pathlib import Path

from axsparse.cli.parser import (
    CommandParser,
    add_configuration,
    add_run,
    integer,
    matching,
    overrides_of,
    require_configuration,
    say,
)
from axsparse.config.load import configure, packaged_folder
from axsparse.config.schema import Config
from axsparse.config.validate import check_batch, check_config
from axsparse.runtime.errors import ConfigError, MissingInputError, reading, writing
from axsparse.runtime.files.paths import kind_of, reject_foreign
from axsparse.runtime.files.run_folder import automatic_run_dirs

SCHEDULERS = {"slurm": ["sbatch"], "lsf": ["bsub"], "pbs": ["qsub"], "flux": ["flux", "batch"]}
"""The command that reads a script from its stdin, by the name of a template."""
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
run_dir the run gets a new folder runs/<configuration>, in printed scripts with a suffix of its own;
with the --run-dir of an earlier job it goes on from its last checkpoint.
"""


def duration(text: str) -> int:
    """The seconds of "H:MM:SS"; schedulers disagree about the shorter "2:00"."""
    parts = re.fullmatch(r"([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])", text)
    hours, minutes, rest = map(int, parts.groups()) if parts else (0, 0, 0)
    if seconds := hours * 3600 + minutes * 60 + rest:
        return seconds
    raise argparse.ArgumentTypeError(f"{text[:60]!r} is no time; write H:MM:SS, such as 2:00:00")


name = matching(
    r"[A-Za-z0-9][A-Za-z0-9_.@:/+-]{0,199}",
    "name; use letters, digits and _ . @ : / + -, beginning with a letter or digit",
)
"""The `type` of the name of an account or a queue."""
directive = matching(
    r"--?[A-Za-z][^\x00-\x1f\x7f-\x9f\u2028\u2029]*",
    "option of a scheduler; write it as in a job script, such as --directive=--constraint=gpu",
)
"""The `type` of an option of a scheduler, which is written after #SBATCH on one line."""


def parser() -> CommandParser:
    arguments = CommandParser(_submit, prog="axsparse submit", description=DESCRIPTION)
    scheduler = arguments.add_mutually_exclusive_group(required=True).add_argument
    for one, command in SCHEDULERS.items():
        text = f"for {' '.join(command)}"
        scheduler(f"--{one}", dest="scheduler", action="store_const", const=one, help=text)
    text = "write the script beside the run directory and submit it, instead of printing it"
    arguments.add_argument("--now", action="store_true", help=text)
    trained = arguments.add_argument_group("what is trained (as axsparse train)").add_argument
    add_configuration(trained)
    add_run(trained)
    _add_request(arguments.add_argument_group("what the job asks for").add_argument)
    return arguments


def _add_request(add: Callable[..., object]) -> None:
    clocked = {"metavar": "H:MM:SS", "type": duration}
    add("--nodes", metavar="N", type=integer(), default="1", help="default %(default)s")
    add("--gpus-per-node", metavar="N", type=integer(0), default="0", help="default %(default)s")
    add("--ranks", metavar="N", type=integer(), help="over all nodes; by default one for each GPU")
    text = f"of a rank (default: train.threads; {CORES_PER_GPU} for each GPU of its own)"
    add("--cpus-per-rank", metavar="N", type=integer(), help=text)
    add("--time", required=True, help="limit of one job", **clocked)
    text = "how long before it the ranks save; a step and a save are shorter (default %(default)s)"
    add("--margin", default="0:05:00", help=text, **clocked)
    add("--account", metavar="NAME", type=name, help="the account, project or bank that is charged")
    text = "the queue that the job waits in"
    add("--partition", "--queue", metavar="NAME", type=name, dest="queue", help=text)
    text = "one more option of the scheduler, as --directive=--constraint=gpu; may be repeated"
    add("--directive", metavar="OPTION", type=directive, action="append", default=[], help=text)
    text = "a file that the job's shell sources first: module load …, export …"
    add("--setup", metavar="FILE", type=Path, help=text)


def script(job: argparse.Namespace, config: Config, run_dir: Path) -> str:
    """The script of a job that trains in `run_dir`; ConfigError for options that do not fit
    together."""
    # Imported late, so that --help does not load torch.
    from axsparse.models.zoo.model_registry import named_model
    from axsparse.planner.auto_layout import resolve_grid

    ranks = job.ranks or job.nodes * job.gpus_per_node
    threads = config.train.threads
    of_gpus = CORES_PER_GPU * job.gpus_per_node * job.nodes // max(ranks, 1)
    cpus = job.cpus_per_rank or max(of_gpus, threads)
    _check_request(job, ranks, cpus, threads)
    # Training checks these rules, too, when it starts, which may be a night in the queue later.
    check_config(config)
    grid = resolve_grid(config, ranks, len(named_model(config).layers), way="ask for {}")
    check_batch(config, grid)
    layout, per_node = config.layout, ranks // job.nodes
    stages = layout.g_inter
    if stages == "auto" and (layout.g_data != "auto" or layout.split != "auto"):
        stages = grid.g_inter
    values = {
        "job_name": re.sub(r"[^A-Za-z0-9_.-]", "_", config.name).lstrip("_.-")[:200] or "axsparse",
        "nodes": job.nodes,
        "per_node": per_node,
        "cpus": cpus,
        "cores": per_node * cpus,
        "all_cores": ranks * cpus,
        "gpus": [job.gpus_per_node] if job.gpus_per_node else [],
        "ngpus": f":ngpus={job.gpus_per_node}" if job.gpus_per_node else "",
        "time": clock(job.time),
        "minutes": -(-job.time // 60),
        "margin": job.margin,
        "save_at": job.time - job.margin,
        "account": [job.account] if job.account else [],
        "queue": [job.queue] if job.queue else [],
        "directives": job.directive,
        "threads": threads,
        "replica": layout.g_tensor * (1 if stages == "auto" else stages),
        "fewer": f"--set=layout.g_inter={stages} --set=layout.g_data=auto",
    }
    return fill(f"{job.scheduler}.sh", {**values, **_commands(job, run_dir)})


def _check_request(job: argparse.Namespace, ranks: int, cpus: int, threads: int) -> None:
    if not ranks:
        raise ConfigError("--ranks: not given, nor --gpus-per-node; say how many ranks to start")
    if ranks % job.nodes:
        near = f"{ranks // job.nodes * job.nodes or ''} or {-(-ranks // job.nodes) * job.nodes}"
        raise ConfigError(
            f"--ranks: {ranks} does not spread evenly over {job.nodes} nodes; choose "
            f"{near.removeprefix(' or ')}"
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


def _commands(job: argparse.Namespace, run_dir: Path) -> dict[str, str]:
    setup = "# module load … # the site's MPI library, the one that mpi4py loads"
    if job.setup is not None:
        if kind_of(f"--setup: {job.setup}", job.setup) != "file":
            raise MissingInputError(f"--setup: {str(job.setup)!r} is no file; name an existing one")
        with reading(f"--setup: {job.setup}", "name another file"):
            has_returns = b"\r\n" in job.setup.read_bytes()
        if has_returns:
            raise ConfigError(
                f"--setup: {job.setup} has lines that end in CRLF, which a shell reads as part of "
                f"their last words; remove them: sed -i 's/\\r$//' {shlex.quote(str(job.setup))}"
            )
        setup = (
            "trap 'code=$?; echo \"axsparse: error: --setup ends the job: it has an exit, or its "
            "last command failed\" >&2; exit $((code ? code : 78))' EXIT; "
            f". {shlex.quote(str(Path.cwd() / job.setup))}; [ $? -eq 0 ] || exit 78; "
            "[[ $(trap -p EXIT) != *'--setup ends the job'* ]] || trap - EXIT"
        )
    mpirun = Path(sys.executable).with_name("mpirun")
    cwd = Path.cwd()  # the job's as well; a $ in its name is no variable for training
    own = f"./{run_dir.relative_to(cwd)}" if run_dir.is_relative_to(cwd) else str(run_dir)
    config = [] if job.config is None else [f"--config={job.config}"]
    # The scripts name the run directory themselves.
    pairs = [pair for pair in overrides_of(job) if pair.partition("=")[0].strip() != "run_dir"]
    return {
        "folder": shlex.quote(str(cwd)),
        "setup": setup,
        "script": shlex.quote(str(script_of(run_dir))),
        "run_dir": shlex.quote(own),
        "python": shlex.quote(sys.executable),
        "mpirun": shlex.quote(str(mpirun) if mpirun.is_file() else "mpirun"),
        "train": shlex.join([*config, *(f"--set={pair}" for pair in pairs)]),
    }


def fill(template: str, values: Mapping[str, object]) -> str:
    """The text of a template, with `@name@` replaced by a value; a line with the name of a list is
    there once for each value of it. Placeholders within a value stay."""
    lines = []
    for line in (packaged_folder("launch") / template).read_text(encoding="utf-8").splitlines():
        pieces = re.split(r"@([a-z_]+)@", line)  # texts, and names between them
        found = [values[name] for name in pieces[1::2]]
        for one in next((value for value in found if isinstance(value, list)), [None]):
            pieces[1::2] = [str(one if isinstance(value, list) else value) for value in found]
            lines.append("".join(pieces))
    return "\n".join(lines) + "\n"


def clock(seconds: int) -> str:
    """Seconds as "H:MM:SS"."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def script_of(run_dir: Path) -> Path:
    """The script of a run: next to its directory, which belongs to the run alone."""
    return run_dir.parent / f"{run_dir.name}.sh"  # "/" has no name


def _submit(job: argparse.Namespace) -> None:
    require_configuration(job, "submit")
    config = configure(job.config, overrides_of(job))
    run_dir = Path.cwd() / config.run_dir
    if config.run_dir == "auto":
        # A printed script leaves no trace by which another one could take another directory.
        asked = repr(config.model_dump(mode="json")).encode(errors="surrogateescape")
        digest = blake2b(asked, digest_size=3).hexdigest()
        name = config.name if job.now else f"{config.name}-{digest}"
        unused = (path for path in automatic_run_dirs(name) if not path.exists())
        run_dir = Path.cwd() / next(path for path in unused if not script_of(path).exists())
    text = script(job, config, run_dir).encode(errors="surrogateescape")
    if not job.now:
        say(text)
        return
    path, command = script_of(run_dir), SCHEDULERS[job.scheduler]
    with writing(f"{path}:", "choose another --run-dir"):
        reject_foreign("job script", path, "# `axsparse submit ")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_bytes() != text:
            names = (path.with_name(f"{path.name}.{number}") for number in count(1))
            former = next(name for name in names if not name.exists())
            path.rename(former)  # somebody may have edited it
            say(f"the earlier script → {former}")
        path.write_bytes(text)
    say(f"script → {path}")
    try:
        code = subprocess.run(command, input=text, check=False).returncode  # noqa: S603
    except FileNotFoundError:
        raise MissingInputError(
            f"{command[0]}: no such command; submit from a login node of the cluster, or print "
            "the script without --now"
        ) from None
    if code:
        raise ConfigError(
            f"{' '.join(command)}: exit code {code}; change what it names above, see axsparse "
            "submit --help"
        )
