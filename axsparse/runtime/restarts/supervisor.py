"""The supervisor of a run: starts its ranks, watches them, and starts again with whoever is left.

It runs outside of MPI, loads no torch, and has one thread. Ranks tell it by datagrams that they
live (`lifeline.py`); `decision.py` says what follows from that, and this file does it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from axsparse.runtime.errors import EXIT_INTERNAL, EXIT_SAVED
from axsparse.runtime.launcher import JOB_SIZE, write_line
from axsparse.runtime.process_exit import exit_process
from axsparse.runtime.restarts import decision
from axsparse.runtime.restarts.decision import (
    Demand,
    End,
    Fault,
    Host,
    Patience,
    Placing,
    Sign,
)
from axsparse.runtime.restarts.launchers import Command, command
from axsparse.runtime.restarts.lifeline import (
    BUILDS,
    GONE,
    JOINS,
    LEAVE,
    PHASES,
    RUNS,
    STARTS,
    STEPS,
    SUPERVISOR,
    TRAINS,
    Beat,
)
from axsparse.runtime.stop_signal import SIGNALS

RECORD_FILE = "restarts.jsonl"
"""The file in the run directory that has an object for each attempt."""
LOOK_SECONDS = 0.1
"""The time between two looks at an attempt."""
ENDING_SECONDS = 5.0
"""How long ranks and launcher have to end once they are told to; then the launcher is killed."""
FAREWELL_SECONDS = 1.0
"""How long ranks that end have to tell of it, before their hosts are asked."""
PROBE_SECONDS = 10.0
"""How long a probe of a host may take."""
PROBES_SECONDS = 5.0
"""The time between two looks for hosts where too few are left."""
ECHO_SECONDS = 0.5
"""How long after a signal another one is taken for the same one."""


@dataclass(frozen=True)
class Plan:
    """What a supervisor is asked to do."""

    demand: Demand
    hosts: tuple[Host, ...]
    """All hosts in order of preference, the spare ones last."""
    named: bool
    """Whether the launcher is told the hosts; otherwise there is one, which stands for all."""
    launcher: tuple[str, ...]
    """The launcher and its own options."""
    train: tuple[str, ...]
    """The command line of a rank, without what the supervisor adds."""
    run_dir: Path
    restarts: int
    probe: tuple[str, ...] = ()
    """The command line that succeeds if the host {host} can take ranks; empty asks nobody."""
    patience: Patience = field(default_factory=Patience)
    wait: float = 600.0
    """Seconds to wait for hosts where too few are left."""


@dataclass
class Attempt:
    """One start of all ranks."""

    number: int
    placing: Placing
    began: float
    signs: dict[int, Sign] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """When the last rank came to each phase."""
    first_step: int | None = None
    """The steps that were done when the ranks began to train."""
    is_told: bool = False
    """Whether it has been said how long it took until the first step."""
    died_at: float = 0.0
    """When the first rank, or the host that is at fault, was last heard of."""
    noticed_at: float = 0.0
    """When it was known that the attempt has to end, or has ended."""


class Supervisor:
    """Carries out a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._token = secrets.token_hex(8)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        local = not plan.named
        self._socket.bind(("127.0.0.1" if local else "", 0))
        self._name = "127.0.0.1" if local else socket.gethostname()
        self._addresses: dict[tuple[int, int], Any] = {}
        """Where the process beside each rank of each attempt listens."""
        self._has_heard = False
        """Whether datagrams of ranks arrive here at all."""
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._launched: subprocess.Popen[bytes] | None = None
        self._told: int | None = None
        """The signal by which this process was told to stop; None so far."""
        self._told_at = 0.0
        self._now, self._looked_at = 0.0, time.monotonic()
        self._stages = stages_of(plan.run_dir)
        """The stages that the planner has chosen when all ranks were there, as far as is known."""
        self._left_out: tuple[str, ...] = ()

    def run(self) -> int:
        """Train to the end, with as many restarts as it takes; the exit code of the run."""
        self._listen()
        (self._plan.run_dir / RECORD_FILE).unlink(missing_ok=True)
        before: End | None = None
        number, died_at = 0, None
        while True:
            placing = self._placing()
            if placing is None:
                return before.code if before is not None else EXIT_INTERNAL
            if self._told is not None:
                return EXIT_SAVED
            attempt = Attempt(number, placing, self._clock())
            if number:
                where = ", ".join(f"{host.slots} on {host.name}" for host in placing.hosts)
                on = where if self._plan.named else str(placing.ranks)
                write_line(f"restart {number} of {self._plan.restarts}: ranks {on}")
            end = self._attempt(attempt, died_at)
            self._record(attempt, end)
            if placing.ranks == self._plan.demand.ranks and TRAINS in attempt.phases:
                self._stages = stages_of(self._plan.run_dir)
            why = decision.refusal(end, before, self._plan.restarts - number)
            if self._told is not None or why is not None:
                if why:
                    write_line(f"error: {reason_of(end)}, and {why}")
                return end.code
            write_line(f"{reason_of(end)}; going on from the last checkpoint")
            before, died_at = end, attempt.died_at
            self._left_out = end.lost
            number += 1

    # -- signals and time ---------------------------------------------------------------

    def _listen(self) -> None:
        for number in (*SIGNALS, signal.SIGCHLD):
            signal.signal(number, self._hear)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def _hear(self, number: int, _: object) -> None:
        """Hand a signal on to the ranks as SIGUSR1, by which they save; a second one ends them."""
        if number == signal.SIGCHLD:
            return
        now = time.monotonic()
        if self._told is None:
            self._told, self._told_at = number, now
            if number == signal.SIGINT:
                write_line(
                    "stops after the step under way and saves; Ctrl-C once more leaves at once"
                )
            if self._launched is not None:
                with suppress(ProcessLookupError):
                    self._launched.send_signal(signal.SIGUSR1)
        elif now - self._told_at > ECHO_SECONDS and number != signal.SIGUSR1:
            self._dismiss_all()
            if self._launched is not None:
                self._kill(self._launched)
            exit_process(128 + number)

    def _clock(self) -> float:
        """Seconds, in which the time that a suspended job stood still does not count."""
        now = time.monotonic()
        self._now += min(now - self._looked_at, 10 * LOOK_SECONDS)
        self._looked_at = now
        return self._now

    def _pause(self, seconds: float, attempt: Attempt | None = None) -> None:
        """Wait for a signal, a datagram, or so long, and take what ranks of the attempt say; those
        of all others are told to end."""
        select.select([self._pipe[0], self._socket.fileno()], [], [], seconds)
        with suppress(BlockingIOError):
            while os.read(self._pipe[0], 512):
                pass
        self._receive(attempt)
        self._clock()

    # -- one attempt --------------------------------------------------------------------

    def _attempt(self, attempt: Attempt, died_at: float | None) -> End:
        """Start the ranks, and watch them until they have ended."""
        started = self._command(attempt)
        if started.code_file is not None:
            started.code_file.unlink(missing_ok=True)
        launched = self._launched = subprocess.Popen(  # noqa: S603 - no shell
            started.words,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **started.environment},
            start_new_session=True,
        )
        if self._told is not None:  # it came a moment before there was anybody to tell
            launched.send_signal(signal.SIGUSR1)
        found: Fault | None = None
        looked_at = self._clock()
        while launched.poll() is None and found is None:
            self._pause(LOOK_SECONDS, attempt)
            # Hundreds of ranks are looked at together, not at each datagram.
            if self._clock() - looked_at >= LOOK_SECONDS:
                looked_at = self._clock()
                self._tell_of_progress(attempt, died_at)
                found = self._fault(attempt)
        self._tell_of_progress(attempt, died_at)
        ended_at = attempt.noticed_at = self._clock()
        if found is not None:
            attempt.died_at = min(
                (sign.ran_at for sign in attempt.signs.values()), default=ended_at
            )
            self._end_ranks(attempt, launched)
        else:
            attempt.died_at = ended_at
        code = launched.wait()
        self._launched = None
        code = code if code >= 0 else 128 - code
        if started.code_file is not None and started.code_file.exists():
            code = int(started.code_file.read_text() or code)
            started.code_file.unlink()
        if code == 0 and not self._have_left(attempt):
            code = EXIT_INTERNAL  # Open MPI's mpirun ends with 0 where it has lost a host
        if found is not None:
            return End(EXIT_INTERNAL, decision.step_of(attempt.signs), found, found.hosts)
        if code in decision.FINAL or self._told is not None:
            return End(code, decision.step_of(attempt.signs))
        lost = tuple(self._missing(attempt)) if self._plan.named else ()
        return End(code, decision.step_of(attempt.signs), None, lost)

    def _fault(self, attempt: Attempt) -> Fault | None:
        """What is wrong with the attempt under way, as far as signs of life tell."""
        now, signs, patience = self._clock(), attempt.signs, self._plan.patience
        joined_at = attempt.phases.get(JOINS)
        return decision.fault(
            attempt.placing.host_of, signs, now, attempt.began, patience
        ) or decision.start_fault(
            attempt.placing.ranks,
            signs,
            patience,
            # A firewall that swallows every datagram is no fault of this start.
            now - attempt.began if self._has_heard else None,
            None if joined_at is None else now - joined_at,
        )

    def _command(self, attempt: Attempt) -> Command:
        plan, placing = self._plan, attempt.placing
        port = self._socket.getsockname()[1]
        rank = (
            "env",
            f"{SUPERVISOR}={self._name}/{port}/{self._token}/{attempt.number}",
            f"{JOB_SIZE}={placing.ranks}",
            f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '1')}",
            *plan.train,
            *(f"--set={setting}" for setting in placing.settings),
            f"--run-dir={plan.run_dir}",
            "--resume=auto",
        )
        # srun knows the nodes of its allocation, and is told some only where others are left out.
        is_all = len(placing.hosts) == len(plan.hosts)
        named = plan.named and not (is_all and Path(plan.launcher[0]).name == "srun")
        return command(plan.launcher, placing, rank, plan.run_dir, named=named)

    def _receive(self, attempt: Attempt | None) -> None:
        """Take all datagrams that have come, and tell ranks of other attempts to end."""
        while True:
            try:
                datagram, address = self._socket.recvfrom(512)
            except BlockingIOError:
                return
            except OSError:  # the process that an answer was for is gone
                continue
            beat = Beat.decode(datagram)
            if beat is None or beat.token != self._token:
                continue
            self._has_heard = True
            self._addresses[beat.attempt, beat.rank] = address
            if beat.process == GONE:
                del self._addresses[beat.attempt, beat.rank]
            if attempt is not None and beat.attempt == attempt.number:
                if 0 <= beat.rank < attempt.placing.ranks:
                    self._take(attempt, beat)
            elif beat.process != GONE:
                self._answer(address)

    def _take(self, attempt: Attempt, beat: Beat) -> None:
        now = self._clock()
        known = attempt.signs.get(beat.rank)
        ran_at = now if beat.process == RUNS or known is None else known.ran_at
        attempt.signs[beat.rank] = Sign(beat, now, ran_at)
        if known is None or known.beat.phase != beat.phase:
            attempt.phases[beat.phase] = now
        if beat.phase == TRAINS and attempt.first_step is None:
            attempt.first_step = beat.step

    def _end_ranks(self, attempt: Attempt, launched: subprocess.Popen[bytes]) -> None:
        """End all ranks that can be reached, then the launcher, which may wait for a dead host."""
        self._dismiss_all()
        began = self._clock()
        while launched.poll() is None and self._clock() - began < ENDING_SECONDS:
            self._pause(LOOK_SECONDS, attempt)
            reached = [
                sign for sign in attempt.signs.values() if began - sign.heard_at < decision.LATELY
            ]
            if all(sign.is_gone for sign in reached):
                break
        self._kill(launched)

    def _kill(self, launched: subprocess.Popen[bytes]) -> None:
        """Kill the launcher; its helpers on other hosts then end, with the ranks that they have."""
        with suppress(ProcessLookupError):
            launched.kill()
        launched.wait()
        time.sleep(LOOK_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)

    def _dismiss_all(self) -> None:
        """Tell every rank of every attempt that may still be there to end at once."""
        for address in self._addresses.values():
            self._answer(address)

    def _answer(self, address: Any) -> None:
        with suppress(OSError):
            self._socket.sendto(LEAVE + b" " + self._token.encode(), address)

    def _have_left(self, attempt: Attempt) -> bool:
        """Whether all ranks have left in order; what they said last may be on its way."""
        began = self._clock()
        while not decision.have_left(attempt.signs):
            if self._clock() - began > FAREWELL_SECONDS:
                return False
            self._pause(LOOK_SECONDS, attempt)
        return True

    def _missing(self, attempt: Attempt) -> list[str]:
        """The hosts that neither tell of the end of their ranks nor answer a probe."""
        began = self._clock()
        while lost := decision.missing(attempt.placing.host_of, attempt.signs):
            if self._clock() - began > FAREWELL_SECONDS:
                break
            self._pause(LOOK_SECONDS, attempt)
        there = self._answering(lost) if self._plan.probe and lost else set()
        return [host for host in lost if host not in there]

    # -- between two attempts -----------------------------------------------------------

    def _placing(self) -> Placing | None:
        """Where the next attempt runs; waits for hosts where there is none."""
        plan = self._plan
        began, is_told = self._clock(), False
        while self._told is None:
            there = self._answering([host.name for host in plan.hosts])
            hosts = [host for host in plan.hosts if host.name in there]
            # Those that were at fault are left out, unless the others cannot do without them.
            for each in (decision.preferred(hosts, self._left_out), hosts):
                placing = decision.place(plan.demand, each, self._stages)
                if placing is not None:
                    return placing
            missing = "no host answers" if not hosts else "too few hosts for a stage answer"
            if self._clock() - began >= plan.wait:
                write_line(f"error: {missing} for {plan.wait:.0f} s; mend one, or --wait")
                return None
            if not is_told:
                write_line(f"{missing}; waits up to {plan.wait:.0f} s for one")
                is_told = True
            self._wait(PROBES_SECONDS)
        return Placing(())

    def _wait(self, seconds: float) -> None:
        began = self._clock()
        while self._told is None and self._clock() - began < seconds:
            self._pause(LOOK_SECONDS)

    def _answering(self, names: Sequence[str]) -> set[str]:
        """The hosts that the probe finds fit for ranks; all of them without a probe."""
        plan = self._plan
        if not plan.probe:
            return set(names)
        asked = {
            name: subprocess.Popen(  # noqa: S603 - no shell
                [word.replace("{host}", name) for word in plan.probe],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for name in names
        }
        began = self._clock()
        while any(process.poll() is None for process in asked.values()):
            if self._clock() - began > PROBE_SECONDS:
                break
            self._pause(LOOK_SECONDS)
        for process in asked.values():
            if process.poll() is None:
                self._kill(process)
        return {name for name, process in asked.items() if process.returncode == 0}

    # -- what is told -------------------------------------------------------------------

    def _tell_of_progress(self, attempt: Attempt, died_at: float | None) -> None:
        """Say once how long it took until the first step."""
        if died_at is None or attempt.is_told or STEPS not in attempt.phases:
            return
        attempt.is_told = True
        seconds = phase_seconds(attempt, died_at)
        parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        write_line(f"goes on after step {attempt.first_step}: {parts}")

    def _record(self, attempt: Attempt, end: End) -> None:
        """Append what happened to the record of this run's attempts."""
        record = {
            "attempt": attempt.number,
            "hosts": {host.name: host.slots for host in attempt.placing.hosts},
            "began": attempt.began,
            "phases": {name: attempt.phases[name] for name in PHASES if name in attempt.phases},
            "first_step": attempt.first_step,
            "died": attempt.died_at,
            "noticed": attempt.noticed_at,
            "ended": self._clock(),
            **asdict(end),
        }
        with suppress(OSError), (self._plan.run_dir / RECORD_FILE).open("a") as file:
            file.write(json.dumps(record) + "\n")


def reason_of(end: End) -> str:
    """How an attempt ended, in words."""
    if end.fault is not None:
        return end.fault.text
    lost = f", and {', '.join(end.lost)} cannot be reached" if end.lost else ""
    return f"the ranks ended with {end.code}{lost}"


def phase_seconds(attempt: Attempt, died_at: float) -> dict[str, float]:
    """Seconds from a death to the next step, by what passed meanwhile; the last rank counts."""
    names = {
        STARTS: "first sign",
        JOINS: "libraries",
        BUILDS: "MPI",
        TRAINS: "checkpoint",
        STEPS: "step",
    }
    seconds, last = {"until the next start": attempt.began - died_at}, attempt.began
    for phase, name in names.items():
        now = max(last, attempt.phases.get(phase, last))
        seconds[name], last = now - last, now
    return seconds


def stages_of(run_dir: Path) -> int | None:
    """The stages that a run was arranged in, as its config.yaml says; None if it has none."""
    try:
        settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        return int(settings["layout"]["g_inter"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
