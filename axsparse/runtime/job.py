"""Connects this process to the other ranks, and ends all together with one line and one exit code.

A failure that all ranks raise (`runtime.exchange.together`) is printed once, and every rank
leaves by itself. A failure of one rank ends the others through the transport, since they may be
waiting for it.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from pydantic import ValidationError

from axsparse.runtime.communication import Transport
from axsparse.runtime.connection import connect, connect_alone, end_mpi, mpi_has_ended
from axsparse.runtime.errors import (
    EXIT_CONFIG,
    EXIT_INTERNAL,
    AxsparseError,
    StoppedError,
    one_line,
)
from axsparse.runtime.exchange import leave_together, sum_of
from axsparse.runtime.files.run_folder import TRACEBACK_FILE
from axsparse.runtime.process import (
    ABORT_OF_MPI,
    EXIT_OF_C,
    code_of_interrupt,
    end_early,
    exit_in_c,
    exit_process,
    flush_streams,
    forget_ways_out,
    speaks,
    watch_ways_out,
    write_line,
)
from axsparse.runtime.seeds import seed_main
from axsparse.runtime.stop_signal import SIGNALS, StopRequest, handle_interrupt

ALIKE_SECONDS = 0.5
"""How long a rank that fails waits for rank 0 to fail likewise, and to speak for both."""
INTERRUPT_SECONDS = 0.05
"""How soon an interrupt comes again that Python has dropped."""
NOTHING_SAVED = "nothing was saved"


class HasTransport(Protocol):
    """A placement as a job sees it; the class itself belongs to training."""

    @property
    def transport(self) -> Transport: ...


class Run(Protocol):
    """A trainer in the middle of its run, as a job sees it."""

    is_idle: bool
    """Whether no loop is under way and the last call was no step."""
    run_dir: Path | None
    """The directory that it saves to; None of a quiet one, which no signal stops."""

    def close(self) -> None: ...


class Job:
    """The state of the job that one rank knows, filled in as the run proceeds. If the rank fails,
    its error message is made from this."""

    def __init__(self, transport: Transport, stop: StopRequest | None = None) -> None:
        """`transport` connects the hosts of the ranks."""
        self.transport = transport
        self.placement: HasTransport | None = None
        """The device of this rank and the transport between such devices; None until a
        configuration has been read that chooses them."""
        self.stop = stop or StopRequest()
        """Whether this rank was asked to stop; it listens to signals once a run can be saved."""
        self.where = f"rank {transport.rank}"
        """Names this rank in messages; "rank 3 (stage 1, replica 1)" once there is a grid."""
        self.run_dir: Path | None = None
        """The absolute path of the run directory, for tracebacks; None until there is one."""
        self.shown_run_dir: Path | None = None
        """The run directory as messages name it."""
        self.kept = ""
        """The work that an interruption of this command leaves, for its message."""
        self.saved = NOTHING_SAVED
        """The work that an interruption of the run leaves, where the command leaves none."""
        self.reworded: Callable[[str], str] = str
        """Has a line about this job name the options of the command that runs it."""
        self.in_progress: list[Run] = []
        self.calls = 0
        """How many calls of trainers, one within the other, are under way."""
        self.left: BaseException | None = None
        """The exception that has ended a call of a trainer and that Python passes to no hook."""
        self.hook: object = None
        """The `sys.excepthook` of this job; the program may put its own in place of it."""
        self.ending = threading.RLock()
        """Held by the thread that ends the job."""
        self.has_spoken = False
        """Whether this rank has written the line about an error of all ranks."""
        self.is_over = False
        """Whether this rank has left the others."""
        self.process = os.getpid()
        """The process of this rank; a fork of it has another one, and is no rank."""
        self._branches: list[tuple[Transport, Callable[[], object | None]]] = []
        """The transport of each trainer, and a function that returns the trainer while in use."""

    def branch(self) -> Transport:
        """Open a transport for one more trainer; all ranks call this together.

        The transports of trainers that no rank refers to any more are closed first, since MPI has
        only some 2,000 communicators.
        """
        transport = (self.placement or self).transport
        if self._branches:
            gc.collect()  # needed, since the parts of a trainer refer to one another in circles
            users = sum_of(transport, [owner() is not None for _, owner in self._branches])
            known, self._branches = self._branches, []
            for (branch, owner), count in zip(known, users, strict=True):
                if count:
                    self._branches.append((branch, owner))
                else:
                    branch.close()
            # NCCL needs memory to connect, which torch would otherwise keep for itself.
            torch.cuda.empty_cache()
        branch = transport.branch()
        self._branches.append((branch, lambda: None))
        return branch

    @property
    def trainers(self) -> list[object]:
        """The trainers that somebody refers to, if only the traceback of a failed cell."""
        return [one for _, owner in self._branches if (one := owner()) is not None]

    def note_left(self, failure: BaseException) -> None:
        """Have the process not end with 0 after a `sys.exit`, of which Python tells no hook."""
        if isinstance(failure, SystemExit):
            self.left = failure

    def keep_branch(self, owner: object) -> None:
        """Keep the newest branch open as long as somebody refers to its owner, a trainer."""
        branch, _ = self._branches[-1]
        self._branches[-1] = branch, weakref.ref(owner)


def own_job() -> Job:
    """The job of this process, which connects to the other ranks when it is first asked for.

    From then on an exception that nobody catches ends all ranks with one line, and the process ends
    as `_leave` does. A session that continues after an exception, such as a notebook's, is a job of
    one rank, and only gets the exception.
    """
    if not _own:
        if hasattr(sys, "ps1"):
            _own.append(Job(connect_alone()))
            _own[0].stop.idle = SIGNALS
            os.register_at_fork(after_in_child=_own[0].stop.release)
        else:
            job = _connected(None)
            if job.transport.size == 1:  # else other ranks may be within a call
                job.stop.idle = (signal.SIGINT,)
            own = sys.__excepthook__ if sys.excepthook is end_early else sys.excepthook
            job.hook = sys.excepthook = partial(_end_uncaught, job, own)
            atexit.register(_leave_at_exit, job)
            _own.append(job)
    return _own[0]


_own: list[Job] = []
"""The job of this process, once it is connected: MPI knows only one a process."""


def run(main: Callable[[Job], None], stop: StopRequest | None = None) -> NoReturn:
    """Call a command's `main` on this rank and end the process; never returns.

    The exit code is 0 if `main` returns, the error's own for an AxsparseError (see
    `axsparse.runtime.errors`), 130 if the job is interrupted, the code of `sys.exit(code)`, and 70
    for any other exception and for `sys.exit(0)`. The generators of torch, Python and numpy have
    the same seed on every rank when `main` begins. A caller that listens to signals already passes
    its `stop`.
    """
    job = _connected(stop)
    sys.unraisablehook = partial(_interrupt_again, sys.unraisablehook)
    seed_main()
    try:
        # Before, Ctrl-C does as the command said, such as to end the process silently.
        if stop is None or not stop.is_listening:
            handle_interrupt(signal.default_int_handler)
        main(job)
        if os.getpid() == job.process:
            _leave(job)
    except BaseException as failure:
        if os.getpid() != job.process:
            raise
        _end(job, failure)
    exit_process()


def _interrupt_again(own: Callable[..., object], hook: sys.UnraisableHookArgs) -> None:
    """Interrupt again where Python has dropped an interrupt, since it came while an object was
    deleted."""
    if not isinstance(hook.exc_value, KeyboardInterrupt):
        own(hook)
        return
    main = threading.main_thread().ident
    assert main is not None, "it runs"
    timer = threading.Timer(INTERRUPT_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
    timer.daemon = True
    timer.start()


def _connected(stop: StopRequest | None) -> Job:
    _reopen_streams()
    try:
        job = Job(connect(), stop)
    except AxsparseError as error:
        # Without MPI every process takes itself for rank 0, so `speaks` asks the launcher.
        exit_process(error.exit_code, f"error: {error}" if speaks() else None)
    hooks = sys.excepthook, threading.excepthook
    threading.excepthook = partial(_end_thread, job, threading.excepthook)
    watch_ways_out(partial(_leave_at_once, job))
    os.register_at_fork(after_in_child=partial(_forget, job, hooks))
    return job


def _end_thread(job: Job, own: Callable[..., object], hook: threading.ExceptHookArgs) -> None:
    """Call the program's own `threading.excepthook`, if it has one, and end the job after an
    exception in a thread, which `sys.exit` alone ends by itself; the main thread may be at its
    exit. What concerns the program alone ends nothing."""
    failure = hook.exc_value or hook.exc_type()
    if _is_of_program(job, failure):
        own(hook)
        return
    if own is not threading.__excepthook__:
        _call_own("threading.excepthook", own, hook)
    if not issubclass(hook.exc_type, SystemExit):
        job.left = failure
        _last_words(job, failure)


def _forget(job: Job, hooks: tuple[Callable[..., object], Callable[..., object]]) -> None:
    """Have a fork of this process, which is no rank, end as any other process of the program, whose
    own hooks for exceptions these are."""
    sys.excepthook, threading.excepthook = hooks
    atexit.unregister(_leave_at_exit)
    forget_ways_out()
    job.stop.release()


def _end_uncaught(job: Job, own: Callable[..., object], *raised: Any) -> None:
    """Call the program's own `sys.excepthook`, if it has one, and end this process; an exception
    that was caught is only printed, and so is one of a job of one rank outside of any run."""
    if not _is_uncaught(raised[1]) or _is_of_program(job, raised[1]):
        own(*raised)
        return
    if own is not sys.__excepthook__:
        _call_own("sys.excepthook", own, *raised)
    is_interrupt = isinstance(raised[1], KeyboardInterrupt)
    if is_interrupt and job.stop.idle and job.in_progress and not job.calls:
        job.stop.reason = signal.SIGINT.name
        return  # the exit saves
    _end(job, raised[1])


def _is_uncaught(failure: BaseException) -> bool:
    """Whether an exception has left the program's main module, or a caller of the hook handles it.
    Libraries in C++ print by the hook an exception that they have caught, such as a warning that is
    an error: then functions below its traceback still run."""
    trace = failure.__traceback__
    has_left = trace is not None and trace.tb_frame.f_back is None
    return has_left or sys.exc_info()[1] is failure


def _is_of_program(job: Job, failure: BaseException) -> bool:
    """Whether an exception concerns the program alone: no other rank waits for this one, no run is
    in progress, and no function of axsparse has raised it or passed it on."""
    frames = [frame for frame, _ in traceback.walk_tb(failure.__traceback__)]
    modules = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}
    is_alone = job.transport.size == 1 and not job.in_progress and not job.calls
    is_error = isinstance(failure, Exception)
    return is_alone and is_error and __name__.partition(".")[0] not in modules


def _call_own(name: str, hook: Callable[..., object], *raised: Any) -> None:
    try:
        hook(*raised)
    except BaseException as reason:
        write_line(f"{name}: {one_line(reason)}")


def _end(job: Job, failure: BaseException) -> NoReturn:
    """End this process after an exception; end the job, unless all ranks have raised it."""
    job.in_progress.clear()
    if not (isinstance(failure, AxsparseError) and failure.on_all_ranks):
        _last_words(job, failure)
    job.has_spoken = job.transport.rank == 0
    exit_process(failure.exit_code, _line_of_all(job, failure))


def _line_of_all(job: Job, failure: AxsparseError) -> str | None:
    """The line about an error that all ranks have raised; None but on rank 0."""
    what = "" if isinstance(failure, StoppedError) else "error: "
    return f"{what}{failure}" if job.transport.rank == 0 else None


def _leave(job: Job) -> None:
    """Close all resources, once all ranks have nothing left to do.

    If another rank makes a trainer, or a call of one, all end with ConfigError. What was left in
    the middle of its run is saved; then StoppedError if a signal came.
    """
    leave_together(job.transport, job.has_spoken)
    stopped: list[StoppedError] = []
    for trainer in [*job.in_progress]:
        try:
            trainer.close()
        except StoppedError as reason:  # noqa: PERF203
            stopped.append(reason)
    asked = job.stop.is_set and job.stop.is_listening  # not in the last step of the last run
    if not stopped and sum_of(job.transport, [float(asked)]) != [0.0]:
        stopped.append(StoppedError("stopped by a signal, with nothing to save; start it again"))
    if stopped:
        raise stopped[0]
    job.is_over = True
    (job.placement or job).transport.close()


def _leave_at_exit(job: Job) -> None:
    """`_leave`, where Python ignores exceptions."""
    if mpi_has_ended():
        if not job.in_progress:
            return
        write_line(
            f"error: {job.where}: MPI.Finalize() was called in the middle of a run, and nothing "
            "can be saved any more; call the trainer's close() before it"
        )
        flush_streams()
        exit_in_c(EXIT_CONFIG)
    if job.calls:
        job.left = job.left or SystemExit(0)
        job.left.__dict__["way"] = "the main thread has ended, and another one trains; join it"
    if sys.excepthook is not job.hook:
        last = getattr(sys, "last_value", None)  # which the program's hook has had
        is_lost = last and _is_uncaught(last) and not _is_of_program(job, last)
        job.left = job.left or (last if is_lost else None)
    if job.left is not None:
        _last_words(job, job.left)
    try:
        _leave(job)
    except BaseException as failure:
        if not (isinstance(failure, AxsparseError) and failure.on_all_ranks):
            _last_words(job, failure)
        if (line := _line_of_all(job, failure)) is not None:
            write_line(line)
            job.has_spoken = True
        # All come here; none ends before the line is written, if only by a rank that caught none.
        if not leave_together(job.transport, job.has_spoken):
            write_line(f"error: {failure}")
        flush_streams()
        job.transport.abort(failure.exit_code)


def _leave_at_once(job: Job, way: str, arguments: tuple[object, ...]) -> None:
    """Before a way out that runs no code, end the job in the middle of a run or call, and leave it
    as at the exit between them; C's exit, at which some libraries are gone already, and MPI's
    Abort are left alone between them."""
    if way in (EXIT_OF_C, ABORT_OF_MPI) and not job.in_progress and not job.calls:
        return
    is_main = threading.current_thread() is threading.main_thread()
    if not job.in_progress and not job.calls and is_main:
        atexit.unregister(_leave_at_exit)
        _leave_at_exit(job)
        flush_streams()
        end_mpi()
        if way == "os._exit":
            exit_in_c(*arguments)
    else:
        left = SystemExit(arguments[0] if arguments else None)
        left.__dict__["way"] = f"{way}({', '.join(map(repr, arguments[:1]))})"
        _last_words(job, left)


def _reopen_streams() -> None:
    """Replace closed streams, and replace characters that the locale lacks instead of failing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _last_words(job: Job, failure: BaseException) -> NoReturn:
    """Print why this rank fails and end the job; rank 0 comes first, for all that fail alike."""
    job.ending.acquire()  # for good: a second thread that fails has nothing to add
    if job.transport.rank:
        time.sleep(ALIKE_SECONDS)
    code, words = _describe(failure, job.kept or job.saved)
    if not isinstance(failure, (AxsparseError, ValidationError, KeyboardInterrupt, SystemExit)):
        words += _keep_traceback(job, failure)
    who = "" if isinstance(failure, KeyboardInterrupt) else f"{job.where}: "
    write_line(f"error: {who}{words}")
    job.transport.abort(code)


def _describe(failure: BaseException, kept: str = NOTHING_SAVED) -> tuple[int, str]:
    """The exit code of a failure, and one line about it; `kept` is what an interruption leaves."""
    if isinstance(failure, AxsparseError):
        return failure.exit_code, str(failure)
    if isinstance(failure, ValidationError):  # a Config made by hand in Python
        return EXIT_CONFIG, " ".join(str(failure).split())
    if isinstance(failure, KeyboardInterrupt):
        return code_of_interrupt(failure), f"interrupted; {kept}"
    if isinstance(failure, SystemExit):
        code = failure.code if isinstance(failure.code, int) and failure.code else EXIT_INTERNAL
        way = vars(failure).get("way", f"sys.exit({failure.code!r})")
        return code, f"left in the middle of the run ({way})"
    notes = [note for note in getattr(failure, "__notes__", ()) if isinstance(note, str)]
    return EXIT_INTERNAL, ": ".join([*notes, one_line(failure)])


def _keep_traceback(job: Job, failure: BaseException) -> str:
    """Write the traceback to the run directory and return words that name it, or to stderr."""
    text = "".join(traceback.format_exception(failure))
    if job.run_dir is not None and job.shown_run_dir is not None:
        name = TRACEBACK_FILE.format(job.transport.rank)
        try:
            (job.run_dir / name).write_text(text, encoding="utf-8", errors="replace")
            return f"; traceback in {os.fspath(job.shown_run_dir / name)}"
        except OSError:
            pass  # the disk may be what failed, so the traceback goes to stderr
    sys.stderr.write(text)
    return ""
