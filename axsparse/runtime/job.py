"""Runs a function on every rank and ends the job together: one line, one exit code, no hang.

A failure that all ranks know of (`together`) is printed once and every rank leaves. A
failure of one rank ends the others through the transport, since they may be waiting.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol, TextIO

import torch
from pydantic import ValidationError

from axsparse.runtime.communication import Op, Transport, wait
from axsparse.runtime.connection import connect
from axsparse.runtime.errors import (
    EXIT_CONFIG,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    AxsparseError,
    StoppedError,
)
from axsparse.runtime.launcher import speaks
from axsparse.runtime.stop_signal import StopRequest


class HasTransport(Protocol):
    """What a job knows of where its rank computes: the transport between such ranks."""

    @property
    def transport(self) -> Transport: ...


class Job:
    """What the last words of a failing rank need to know; filled in as the run learns it."""

    def __init__(self, transport: Transport, stop: StopRequest | None = None) -> None:
        self.transport = transport
        self.placement: HasTransport | None = None
        """Where this rank computes and by which transport, once a configuration has said so."""
        self.stop = stop or StopRequest()
        """Whether this rank was told to stop; listens once there is a place to save."""
        self.where = f"rank {transport.rank}"
        """Becomes "rank 3 (stage 1, replica 1)" once there is a grid."""
        self.run_dir: Path | None = None
        """Where tracebacks of internal errors go, once there is a run directory."""
        self._branches: list[tuple[Transport, Callable[[], object | None]]] = []
        """Transports of trainers, and what is None once nobody has that trainer any more."""

    def branch(self) -> Transport:
        """A transport for one more trainer; those of trainers that all ranks have let go of are
        closed, since MPI has some 2,000 communicators. All ranks call this together."""
        transport = (self.placement or self).transport
        if self._branches:
            gc.collect()  # the parts of a trainer refer to one another
            uses = [float(owner() is not None) for _, owner in self._branches]
            users = torch.tensor(uses, dtype=torch.float64)
            wait(transport.world.start(Op.ALL_REDUCE, users), transport.backoff)
            known, self._branches = self._branches, []
            for (branch, owner), count in zip(known, users.tolist(), strict=True):
                if count:
                    self._branches.append((branch, owner))
                else:
                    branch.close()
            torch.cuda.empty_cache()  # NCCL cannot connect with what torch keeps of freed memory
        branch = transport.branch()
        self._branches.append((branch, lambda: None))
        return branch

    def keep_branch(self, owner: object) -> None:
        """Leave the newest branch open as long as there is its owner."""
        branch, _ = self._branches[-1]
        self._branches[-1] = branch, weakref.ref(owner)


def run(main: Callable[[Job], None], stop: StopRequest | None = None) -> NoReturn:
    """Call `main` on this rank and end the process; never returns.

    Exit codes: 0; an error's own (see `axsparse.runtime.errors`); 70 for any other exception and
    for a rank that leaves by `sys.exit(0)`; the code of `sys.exit(code)`; 130 if interrupted.
    All ranks have to call the same things: if `main` returns on one rank while others
    still train, these wait for it. torch's generator starts `main` with the same seed on every
    rank, so that modules which are made there start alike. A `stop` may listen already.
    """
    _mend_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        transport = connect()
    except AxsparseError as error:
        # Without MPI every process is a rank 0.
        if speaks():
            print(f"axsparse: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    job = Job(transport, stop)
    threading.excepthook = lambda hook: _last_words(job, hook.exc_value or hook.exc_type())
    torch.manual_seed(0)
    try:
        main(job)
        (job.placement or job).transport.close()
    except BaseException as failure:
        if not (isinstance(failure, AxsparseError) and failure.on_all_ranks):
            _last_words(job, failure)
        if transport.rank == 0:
            what = "" if isinstance(failure, StoppedError) else "error: "
            print(f"axsparse: {what}{failure}", file=sys.stderr, flush=True)
        _leave(failure.exit_code)
    _leave(0)


def _mend_streams() -> None:
    """A closed stream, or a locale without "×", must not end a run."""
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    with contextlib.suppress(OSError):
        # What a reader that went away left in the buffer would fail once more at exit.
        sys.stdout = _nowhere()
    sys.exit(code)


def _last_words(job: Job, failure: BaseException) -> NoReturn:
    code, words = _describe(failure)
    if not isinstance(failure, (AxsparseError, ValidationError, KeyboardInterrupt, SystemExit)):
        words += _keep_traceback(job, failure)
    # In one piece, since other ranks may fail at the same moment; print ends a line by itself.
    sys.stderr.write(f"axsparse: error: {job.where}: {words}\n")
    sys.stderr.flush()
    job.transport.abort(code)


def _describe(failure: BaseException) -> tuple[int, str]:
    """Exit code and one line."""
    if isinstance(failure, AxsparseError):
        return failure.exit_code, str(failure)
    if isinstance(failure, ValidationError):  # a Config made by hand in Python
        return EXIT_CONFIG, " ".join(str(failure).split())
    if isinstance(failure, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if isinstance(failure, SystemExit):
        code = failure.code if isinstance(failure.code, int) and failure.code else EXIT_INTERNAL
        return code, f"left in the middle of the run (sys.exit({failure.code!r}))"
    text = " ".join(str(failure).split()) or "no message"
    notes = [note for note in getattr(failure, "__notes__", ()) if isinstance(note, str)]
    return EXIT_INTERNAL, ": ".join([*notes, type(failure).__name__, text])


def _keep_traceback(job: Job, failure: BaseException) -> str:
    """Write the traceback to the run directory, or to stderr ahead of the line without one."""
    text = "".join(traceback.format_exception(failure))
    if job.run_dir is not None:
        path = job.run_dir / f"traceback-rank-{job.transport.rank}.txt"
        try:
            path.write_text(text)
            return f"; traceback in {os.fspath(path)}"
        except OSError:
            pass  # the disk may be what failed; stderr is left
    sys.stderr.write(text)
    return ""
