"""`axsparse submit`: writes a job script for a cluster's scheduler, and submits it.

The scripts are texts in `launch/`. A script is read twice: the scheduler reads its directives, a
shell its commands. What goes into a directive may hold only letters without a meaning for either;
what goes into a command is quoted.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from axsparse.cli.parser import (
    MOST,
    CommandParser,
    add_configuration,
    add_run,
    overrides_of,
    require_configuration,
    say,
    whole,
)
from axsparse.config.load import LoadedConfig, load_config, packaged_folder
from axsparse.config.validate import check_batch, check_config, counted
from axsparse.runtime.errors import (
    AxsparseError,
    ConfigError,
    MissingInputError,
    writing,
)

SCRIPT = "job.sh"
"""Name of the script in the run directory."""
LAUNCHERS = {"slurm": ("mpirun", "srun"), "lsf": ("jsrun", "mpirun")}
"""What starts ranks under each scheduler; the first is the usual one."""
CORES_PER_GPU = 7
"""The cores that a rank asks for with each GPU that it has. Python, the threads that fetch batches,
those of NCCL and those of torch share them. As many are there on nodes such as Summit's, with 42
cores for 6 GPUs, and Frontier's, with 56 for 8; where they are not, --cpus-per-rank says less."""
LIVE = "\"$%'\\`"
"""Letters that shells or schedulers replace in a directive, even between quotes."""
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
    """A directive, as written after #SBATCH or #BSUB."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words or not text.isprintable() or re.match(r"--?[A-Za-z]", words[0]) is None:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no option of a scheduler; write it as in a job script, such as "
            "--directive=--constraint=gpu"
        )
    if set("$`\\") & set(text):
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} holds $, ` or \\, which no scheduler replaces there; write the value "
            "itself"
        )
    return text


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(
        _submit, prog="axsparse submit", description=DESCRIPTION, epilog=EPILOG
    )
    scheduler = arguments.add_mutually_exclusive_group(required=True)
    for one, program in (("slurm", "sbatch"), ("lsf", "bsub")):
        scheduler.add_argument(
            f"--{one}",
            dest="scheduler",
            action="store_const",
            const=one,
            help=f"for {program}",
        )
    arguments.add_argument(
        "--dry-run", action="store_true", help="print the script; write and submit nothing"
    )
    trained = arguments.add_argument_group("what is trained (as axsparse train)").add_argument
    add_configuration(trained)
    add_run(trained)
    _add_request(arguments.add_argument_group("what the job asks for").add_argument)
    _add_start(arguments.add_argument_group("how it starts").add_argument)
    return arguments


def _add_request(add: Callable[..., object]) -> None:
    """The options that say what the job asks the scheduler for."""
    add("--nodes", metavar="N", type=whole(), default="1", help="default %(default)s")
    add("--gpus-per-node", metavar="N", type=whole(0), default="0", help="default %(default)s")
    add("--ranks", metavar="N", type=whole(), help="over all nodes; by default one for each GPU")
    add(
        "--cpus-per-rank",
        metavar="N",
        type=whole(),
        help=f"cores of a rank (default 1; {CORES_PER_GPU} for each GPU of its own); "
        "train.threads says how many it computes with",
    )
    add(
        "--time",
        metavar="H:MM:SS",
        type=duration,
        required=True,
        help="limit of one start; or D-HH:MM:SS",
    )
    add(
        "--margin",
        metavar="H:MM:SS",
        type=duration,
        default="0:05:00",
        help="time before the limit at which the ranks begin to save; longer than a step and a "
        "save take (default %(default)s)",
    )
    add("--account", metavar="NAME", type=name, help="the account that is charged")
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
        "--chain",
        metavar="K",
        type=whole(),
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
    add(
        "--mpi",
        metavar="TYPE",
        type=name,
        help="srun's --mpi, such as pmi2; by default the site's",
    )
    add(
        "--restarts",
        metavar="N",
        type=whole(0),
        default="3",
        help="how often the job itself starts the ranks again where one dies, on the nodes that "
        "are left (default %(default)s)",
    )
    add(
        "--setup",
        metavar="FILE",
        type=Path,
        help="a file that the job's shell sources first: module load …, export …, or python=…",
    )


# --- what may be asked for ---------------------------------------------------------------


def complete(job: argparse.Namespace, loaded: LoadedConfig) -> None:
    """Fill in what the command line leaves out; ConfigError for what does not fit together."""
    if job.ranks is None and not job.gpus_per_node:
        raise ConfigError("--ranks: not given, nor --gpus-per-node; say how many ranks to start")
    job.ranks = job.ranks or job.nodes * job.gpus_per_node
    threads = job.threads = loaded.config.train.threads
    if job.cpus_per_rank is None:
        gpus = job.gpus_per_node * job.nodes / job.ranks
        job.cpus_per_rank = max(1, int(CORES_PER_GPU * gpus), threads) if gpus else 1
    job.launcher = job.launcher or LAUNCHERS[job.scheduler][0]
    usual = re.sub(r"[^A-Za-z0-9_.-]", "_", loaded.name).lstrip("_.-")[:200]
    job.job_name = job.job_name or usual or "axsparse"
    here = Path.cwd()
    job.run_dir_given = loaded.config.run_dir != "auto"
    job.run_dir = here / (loaded.config.run_dir if job.run_dir_given else _free_run_dir(loaded))
    job.setup = None if job.setup is None else here / job.setup
    if job.setup is not None and not job.setup.is_file():
        raise MissingInputError(f"--setup: {str(job.setup)!r} is no file; name an existing one")
    # Otherwise every start would make a new folder.
    options = [] if job.run_dir_given else [f"--run-dir={job.run_dir}"]
    options += [] if job.config is None else [f"--config={job.config}"]
    options += [f"--set={pair}" for pair in job.pairs]
    job.train = options
    for said in _contradictions(job):
        raise ConfigError(said)


def _free_run_dir(loaded: LoadedConfig) -> Path:
    """The first of runs/<name>, runs/<name>-2, … that is not there."""
    from axsparse.runtime.files.run_folder import automatic_run_dirs

    return next(path for path in automatic_run_dirs(loaded.name) if not path.exists())


def _contradictions(job: argparse.Namespace) -> Iterator[str]:
    """What is wrong with a job, and its mend."""
    per_node, rest = divmod(job.ranks, job.nodes)
    if rest:
        choices = [n for n in (job.ranks - rest, job.ranks - rest + job.nodes) if n]
        yield (
            f"--ranks: {job.ranks} does not spread evenly over {job.nodes} nodes; choose "
            f"{' or '.join(map(str, choices))}"
        )
    if job.threads > job.cpus_per_rank:
        yield (
            f"--cpus-per-rank: {job.cpus_per_rank} is below train.threads {job.threads}; choose at "
            f"least {job.threads}"
        )
    if job.margin >= job.time:
        yield (
            f"--margin: {clock(job.margin)} before the end of a job of {clock(job.time)} is before "
            "its start; choose a shorter one, or a longer --time"
        )
    if job.launcher not in LAUNCHERS[job.scheduler]:
        yield (
            f"--launcher: {job.launcher!r} does not start ranks under this scheduler; choose "
            f"{' or '.join(LAUNCHERS[job.scheduler])}"
        )
    if job.mpi is not None and job.launcher != "srun":
        yield (
            f"--mpi: {job.mpi} is for srun, and the launcher is {job.launcher}; leave it out, or "
            "choose --launcher srun"
        )
    if job.launcher == "jsrun" and job.gpus_per_node not in (0, per_node):
        yield (
            f"--gpus-per-node: {job.gpus_per_node} for {per_node} ranks a node, but jsrun gives "
            f"each rank one; choose {per_node}, or --launcher mpirun"
        )
    if set(LIVE) & set(str(job.run_dir)):
        yield (
            f"run_dir: {str(job.run_dir)!r} holds one of {' '.join(LIVE)}, which schedulers "
            "replace in the name of the log; choose another --run-dir"
        )
    for word in (*job.train, *map(str, (Path.cwd(), job.run_dir, job.setup, sys.executable))):
        # Editors and terminals end a line at more characters than a shell does.
        if any(ord(letter) < 32 or letter in "\x7f\x85\u2028\u2029" for letter in word):
            yield f"{word[:60]!r} holds a line break or another control character; remove it"


def check_ranks(loaded: LoadedConfig, ranks: int) -> None:
    """ConfigError if the configuration cannot be run on so many ranks.

    Training checks the same rules when it starts, which may be a night in the queue later.
    """
    # Imported late, so that --help does not load torch.
    from axsparse.models.zoo.model_registry import named_model
    from axsparse.planner.auto_layout import resolve_grid

    check_config(loaded)
    check_batch(loaded, resolve_grid(loaded, ranks, len(named_model(loaded).layers)))


# --- the script --------------------------------------------------------------------------


def script(job: argparse.Namespace) -> bytes:
    """The script of a complete job. Arguments keep their bytes, even if they are not UTF-8."""
    chained = job.chain > 1
    number = {"slurm": ("%j", "%A_%a"), "lsf": ("%J", "%J_%I")}[job.scheduler][chained]
    python, mpirun = Path(sys.executable), Path(sys.executable).with_name("mpirun")
    values = {
        **vars(job),
        # Flags of lines that only some jobs have.
        "chained": chained,
        "requeued": not chained,
        "by_srun": job.launcher == "srun",
        "by_mpirun": job.launcher == "mpirun",
        "by_jsrun": job.launcher == "jsrun",
        "slots_with_gpus": job.launcher == "mpirun" and job.gpus_per_node,
        "directives": "\n".join(
            f"{'#SBATCH' if job.scheduler == 'slurm' else '#BSUB'} {one}" for one in job.directive
        ),
        # In directives.
        "ranks_per_node": job.ranks // job.nodes,
        "clock": clock(job.time),
        "limit": clock(-(-job.time // 60) * 60)[:-3],  # LSF has minutes only, rounded up
        "warning": -(-job.margin // 60),
        "log": _in_directive(f"{job.run_dir}/job-{number}.log"),
        # In commands.
        "folder": shlex.quote(str(Path.cwd())),
        "setup": job.setup and shlex.quote(str(job.setup)),
        "python": shlex.quote(str(python)),
        "mpirun": shlex.quote(shlex.quote(str(mpirun) if mpirun.is_file() else "mpirun")),
        "pmi": f" --mpi={job.mpi}" if job.mpi else "",
        "gpus_per_rank": int(bool(job.gpus_per_node)),
        "train": shlex.join(job.train),
    }
    return fill(f"{job.scheduler}.sh", values).encode(errors="surrogateescape")


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The text of a template, with `@name@` replaced by a value.

    A line that begins with `?name ` stays, without this word, where the value is neither None,
    False, 0 nor empty. Placeholders within a value are not replaced.
    """
    lines = []
    for line in (packaged_folder("launch") / template).read_text(encoding="utf-8").splitlines():
        if line.startswith("?"):
            flag, _, line = line[1:].partition(" ")
            if not values[flag]:
                continue
        lines.append(re.sub(r"@([a-z_]+)@", lambda match: str(values[match[1]]), line))
    return "\n".join(lines) + "\n"


def clock(seconds: int) -> str:
    """Seconds as "H:MM:SS"."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _in_directive(text: str) -> str:
    """A checked text as one word of a directive, whose readers know double quotes only."""
    return text if re.fullmatch(r"[\w./@:%+=-]+", text, re.ASCII) else f'"{text}"'


# --- submitting --------------------------------------------------------------------------


def _submit(job: argparse.Namespace) -> None:
    job.pairs = overrides_of(job)
    loaded = load_config(job.config, job.pairs)
    complete(job, loaded)
    require_configuration(job, "submit")
    check_ranks(loaded, job.ranks)
    if job.dry_run:
        sys.stdout.buffer.write(script(job))
        sys.stdout.flush()
        return
    path = job.run_dir / SCRIPT
    is_new = not (job.run_dir_given and job.run_dir.is_dir())
    with writing(f"run_dir: {job.run_dir}", "choose another --run-dir"):
        job.run_dir.mkdir(parents=True, exist_ok=not is_new)
    with writing(f"{path}:", "choose another --run-dir"):
        path.write_bytes(script(job))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    try:
        said = hand_over(path, ["bsub"] if job.scheduler == "lsf" else ["sbatch", str(path)])
    except AxsparseError:
        path.unlink()
        if is_new:
            with contextlib.suppress(OSError):
                job.run_dir.rmdir()
        raise
    many = f" · up to {job.chain} jobs" if job.chain > 1 else ""
    say(said)
    say(
        f"{counted(job.ranks, 'rank')} on {counted(job.nodes, 'node')} · {clock(job.time)} at a "
        f"time{many} · log → {job.run_dir}/job-*.log"
    )


def hand_over(path: Path, command: list[str]) -> str:
    """Submit a script and return what the scheduler prints; ConfigError if it refuses."""
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
