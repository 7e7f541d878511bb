"""`axsparse launch`: starts ranks, and again on whoever is left where a rank or host dies."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from axsparse.cli.parser import (
    CommandParser,
    add_configuration,
    add_run,
    overrides_of,
    require_configuration,
    whole,
)
from axsparse.config.load import LoadedConfig, load_config
from axsparse.config.schema import num_microbatches
from axsparse.config.validate import check_config
from axsparse.runtime.errors import ConfigError, writing
from axsparse.runtime.files.run_folder import automatic_run_dirs, last_run
from axsparse.runtime.files.run_lock import LOCK_FILE, OTHER_RUN_DIR, RunLock
from axsparse.runtime.process_exit import exit_process
from axsparse.runtime.restarts.decision import Demand, Host, Patience
from axsparse.runtime.restarts.launchers import (
    SSH_PROBE,
    allocated_hosts,
    parse_hosts,
    refuse_missing,
)
from axsparse.runtime.restarts.supervisor import RECORD_FILE, Plan, Supervisor

NO_PROBE = "none"
ANY_HOST = "this job"
"""Stands for all hosts where only the launcher knows them."""
DESCRIPTION = """\
Train on this machine, on hosts that mpirun reaches, or in a job of SLURM or LSF, and go on from the
last checkpoint when a rank or a host dies or hangs. Everything after the number of ranks is handed
to axsparse train:

  axsparse launch 8 --config my.yaml --set layout.g_inter=4 --run-dir runs/my
  axsparse launch --restarts 20 --hosts node1:4,node2:4,node3:4 8 --config my.yaml --run-dir runs/my

Hosts that are dead, hang or are drained are left out, spare ones take their place, and without any
the run goes on with fewer replicas. The next restart takes in again who has come back.
"""
EPILOG = """\
environment:
  MPIRUN     the launcher and its options (the mpirun beside this Python, else the first on PATH)
  PYTHON     the interpreter of the ranks (this one)
  RESTARTS   the default of --restarts (3)

kill -USR1 or -TERM of this process, and Ctrl-C, save and stop; a second Ctrl-C ends at once.
"""


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(
        _launch, prog="axsparse launch", description=DESCRIPTION, epilog=EPILOG
    )
    add = arguments.add_argument
    add(
        "--restarts",
        metavar="N",
        type=whole(0),
        default=os.environ.get("RESTARTS", "3"),
        help="how often to start again, at most (3)",
    )
    add(
        "--hosts",
        metavar="A:N,B:N,…",
        help="the hosts and how many ranks each takes, spare ones last; by default those of the "
        "scheduler's job, else the launcher's own",
    )
    add(
        "--silence",
        metavar="SECONDS",
        type=seconds(1.5),
        default="5",
        help="how long a host may give no sign of life (%(default)s)",
    )
    add(
        "--probe",
        metavar="COMMAND",
        help="succeeds if {host} can take ranks, before each start; none asks nobody (in a job the "
        f"scheduler's own, with --hosts {SSH_PROBE!r})",
    )
    add(
        "--wait",
        metavar="SECONDS",
        type=seconds(0.0),
        default="600",
        help="how long to wait for a host where none is left (%(default)s)",
    )
    add("ranks", metavar="RANKS", type=whole(), help="how many ranks to start, at most")
    add("train", metavar="...", nargs=argparse.REMAINDER, help="the options of axsparse train")
    return arguments


def seconds(least: float) -> Callable[[str], float]:
    """The `type` of an option that is a number of seconds, at least so many."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= 1e6:
            raise argparse.ArgumentTypeError(
                f"{text[:60]!r} is no number of seconds from {least:g} to 1000000; choose one"
            )
        return value

    return number


def _launch(arguments: argparse.Namespace) -> None:
    loaded = _configuration(arguments.train)
    plan = _plan(arguments, loaded)
    is_new = not plan.run_dir.exists()
    with writing(f"run_dir: {plan.run_dir}", OTHER_RUN_DIR):
        plan.run_dir.mkdir(parents=True, exist_ok=True)
    lock = RunLock(plan.run_dir)
    try:
        code = Supervisor(plan).run()
    finally:
        if is_new:
            _remove_empty(plan.run_dir)
        lock.release()
    exit_process(code)


def _configuration(words: Sequence[str]) -> LoadedConfig:
    """The configuration that the options of `axsparse train` name, checked as ranks check it."""
    options = CommandParser(prog="axsparse launch")
    add_configuration(options.add_argument)
    add_run(options.add_argument)
    options.add_argument("--resume", help=argparse.SUPPRESS)
    train = options.parse_args(words)
    require_configuration(train, "launch")
    loaded = load_config(train.config, overrides_of(train))
    check_config(loaded)
    return loaded


def _plan(arguments: argparse.Namespace, loaded: LoadedConfig) -> Plan:
    """What the supervisor is to do; ConfigError and MissingInputError for what cannot be done."""
    layout, ranks = loaded.config.layout, arguments.ranks
    launcher, python = _programs(os.environ)
    hosts, named, probe = _hosts(arguments, launcher)
    if sum(host.slots for host in hosts) < ranks:
        raise ConfigError(
            f"--hosts: {', '.join(f'{host.name}:{host.slots}' for host in hosts)} take fewer than "
            f"{ranks} ranks; name more, or start fewer ranks"
        )
    if named and Path(launcher[0]).name == "srun" and len({host.slots for host in hosts}) > 1:
        raise ConfigError(
            f"--hosts: {hosts[0].name}:{hosts[0].slots} and others differ, and srun starts as many "
            "ranks on each; give all hosts the same number, or take mpirun"
        )
    run_dir = last_run(loaded.config.run_dir, loaded.name)
    if run_dir is None:
        is_auto = loaded.config.run_dir == "auto"
        run_dir = next(automatic_run_dirs(loaded.name)) if is_auto else Path(loaded.config.run_dir)
    return Plan(
        demand=Demand(
            ranks,
            num_microbatches(loaded.config.batch),
            None if layout.g_inter == "auto" else layout.g_inter,
            None if layout.g_data == "auto" else layout.g_data,
            layout.g_tensor,
        ),
        hosts=tuple(hosts),
        named=named,
        launcher=launcher,
        train=(python, "-m", "axsparse.train", *arguments.train),
        run_dir=run_dir,
        restarts=arguments.restarts,
        probe=probe,
        patience=Patience(silence=arguments.silence),
        wait=arguments.wait,
    )


def _programs(environment: os._Environ[str]) -> tuple[tuple[str, ...], str]:
    """The launcher with its options, and the interpreter of the ranks."""
    beside = Path(sys.executable).parent / "mpirun"
    usual = shlex.quote(str(beside)) if beside.is_file() else "mpirun"
    launcher = tuple(shlex.split(environment.get("MPIRUN") or usual))
    refuse_missing(launcher, "MPIRUN")
    return launcher, environment.get("PYTHON") or sys.executable


def _hosts(
    arguments: argparse.Namespace, launcher: Sequence[str]
) -> tuple[list[Host], bool, tuple[str, ...]]:
    """The hosts, whether the launcher is told them, and the probe."""
    named = True
    if Path(launcher[0]).name == "jsrun":
        if arguments.hosts is not None:
            raise ConfigError("--hosts: jsrun cannot leave out hosts; take mpirun, or leave it out")
        hosts, probe, named = [Host(ANY_HOST, arguments.ranks)], NO_PROBE, False
    elif arguments.hosts is not None:
        hosts, probe = parse_hosts(arguments.hosts, arguments.ranks), SSH_PROBE
    elif (allocated := allocated_hosts(os.environ, arguments.ranks)) is not None:
        hosts, probe = allocated
    else:
        hosts, probe, named = [Host(ANY_HOST, arguments.ranks)], NO_PROBE, False
    probe = probe if arguments.probe is None else arguments.probe
    if probe == NO_PROBE:
        return hosts, named, ()
    words = tuple(shlex.split(probe))
    refuse_missing(words, "--probe")
    return hosts, named, words


def _remove_empty(run_dir: Path) -> None:
    """Remove the directory of a run that has left nothing there, since it has never begun."""
    paths = list(run_dir.iterdir())
    if {path.name for path in paths} <= {LOCK_FILE, RECORD_FILE}:
        for path in paths:
            path.unlink()
        run_dir.rmdir()
