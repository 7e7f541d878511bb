"""What a supervisor decides, as plain functions of what it knows: who is at fault, whether to go
on, and on which hosts with how many ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from axsparse.runtime.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_INTERRUPTED,
    EXIT_MISSING,
    EXIT_OUTPUT,
    EXIT_SAVED,
)
from axsparse.runtime.restarts.lifeline import (
    BEAT_SECONDS,
    ENDS,
    GONE,
    JOINS,
    STEPS,
    STOPPED,
    TRAINS,
    Beat,
)

FINAL = (
    *(0, EXIT_DATA, EXIT_MISSING, EXIT_OUTPUT),
    *(EXIT_SAVED, EXIT_CONFIG, EXIT_INTERRUPTED),
)
"""Exit codes of a run that is done or was told to stop, or of what no restart mends."""


LATELY = 2.5 * BEAT_SECONDS
"""Whoever has been heard of in so many seconds can be reached."""


# -- hosts and layouts ------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A host that ranks may be started on."""

    name: str
    slots: int
    """How many ranks it takes."""


@dataclass(frozen=True)
class Demand:
    """What the user asks for."""

    ranks: int
    """The most ranks that are started."""
    microbatches: int
    """The microbatches of a step: no more replicas can work."""
    g_inter: int | None = None
    """Stages; None if the configuration leaves them to the planner."""
    g_data: int | None = None
    """Replicas; None likewise."""
    g_tensor: int = 1
    """Members of each stage of each replica, which every start has."""

    @property
    def stages(self) -> int | None:
        """The stages that the user has chosen, by their number or by that of the replicas."""
        if self.g_inter is not None or self.g_data is None:
            return self.g_inter
        return max(1, self.ranks // self.g_data // self.g_tensor)


@dataclass(frozen=True)
class Placing:
    """Where an attempt runs."""

    hosts: tuple[Host, ...]
    """The hosts in the order of their ranks; the slots are the ranks that each gets."""
    settings: tuple[str, ...] = ()
    """Settings KEY=VALUE that take the place of a layout which does not fit these ranks."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def host_of(self) -> tuple[str, ...]:
        """The name of the host of each rank."""
        return tuple(host.name for host in self.hosts for _ in range(host.slots))


def place(demand: Demand, hosts: Sequence[Host], stages: int | None = None) -> Placing | None:
    """The ranks of the next attempt on these hosts, which come in order of preference.

    `stages` is the number of stages that the planner chose when all ranks were there. With fewer
    ranks, as many replicas of so many stages are started as fit; if that leaves none, the planner
    chooses from what there is. None if there is no host, or if the hosts together take fewer ranks
    than a stage has members.
    """
    slots = min(demand.ranks, sum(host.slots for host in hosts))
    groups = slots // demand.g_tensor  # of members of a stage
    if groups == 0:
        return None
    settings: list[str] = []
    ranks = slots
    wanted = demand.stages or stages
    if slots < demand.ranks:
        most = min(demand.microbatches, demand.g_data or demand.microbatches)
        replicas = 0 if wanted is None else min(groups // wanted, most)
        if wanted is not None and replicas:
            ranks = wanted * replicas * demand.g_tensor
            if demand.g_data is not None:
                settings = [f"layout.g_data={replicas}"]
        else:
            ranks = _most_groups(groups, demand.microbatches) * demand.g_tensor
            if wanted is not None:
                settings = [f"layout.{key}=auto" for key in ("g_inter", "g_data", "split")]
    return Placing(_filled(hosts, ranks), tuple(settings))


def _most_groups(groups: int, microbatches: int) -> int:
    """The most groups of members that the planner can arrange where nobody has chosen stages: it
    takes two stages of an even number and one of an odd number, and gives each replica a
    microbatch."""
    fitting = (n for n in range(groups, 0, -1) if n // (1 + (n % 2 == 0)) <= microbatches)
    return next(fitting, 1)


def _filled(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """The first hosts, with as many ranks together."""
    filled = []
    for host in hosts:
        taken = min(host.slots, ranks)
        if taken:
            filled.append(replace(host, slots=taken))
        ranks -= taken
    return tuple(filled)


def preferred(hosts: Sequence[Host], left_out: Sequence[str]) -> list[Host]:
    """The hosts without those that were at fault; all of them if no other is there."""
    return [host for host in hosts if host.name not in left_out] or list(hosts)


# -- who is at fault --------------------------------------------------------------------


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a rank; times are seconds of the supervisor's clock."""

    beat: Beat
    heard_at: float
    ran_at: float
    """When its process was last known to run."""

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return self.beat.process == GONE

    @property
    def has_left(self) -> bool:
        """Whether the rank left in order."""
        return self.is_gone and self.beat.phase == ENDS


@dataclass(frozen=True)
class Fault:
    """Why an attempt has to be ended."""

    text: str
    hosts: tuple[str, ...] = ()
    """The hosts that the next attempt leaves out."""


@dataclass(frozen=True)
class Patience:
    """How long a supervisor waits, in seconds."""

    silence: float = 5.0
    """For a sign of life of a host or rank."""
    start: float = 60.0
    """For the first sign of a rank, once another one has given one, now or in an earlier start."""
    join: float = 120.0
    """For MPI to start, once all ranks wait for it."""


def fault(
    host_of: Sequence[str], signs: Mapping[int, Sign], now: float, began: float, patience: Patience
) -> Fault | None:
    """What is wrong with an attempt that began at `began`, if anything is.

    `host_of` has the host of each rank, `signs` the ranks that have ever been heard of. Without a
    sign of any rank nothing is known: then the launcher's end decides alone.
    """
    if not signs:
        return None
    silent = _silent_hosts(host_of, signs, now, began, patience)
    if silent:
        names = ", ".join(silent)
        longest = max(silent.values())
        many = "hosts" if len(silent) > 1 else "host"
        return Fault(f"{many} {names} silent for {longest:.1f} s", tuple(silent))
    for rank, sign in sorted(signs.items()):
        if sign.is_gone:
            if not sign.has_left and now - sign.heard_at > patience.silence:
                return Fault(f"rank {rank} on host {host_of[rank]} has ended, and others wait")
            continue
        if now - sign.ran_at > patience.silence:
            host = host_of[rank]
            if sign.beat.process == STOPPED:
                return Fault(f"rank {rank} on host {host} is stopped by a signal")
            if any(now - signs[r].heard_at < LATELY for r in signs if host_of[r] == host):
                return Fault(f"rank {rank} on host {host} is silent, unlike others there")
    return None


def start_fault(
    ranks: int,
    signs: Mapping[int, Sign],
    patience: Patience,
    waited: float | None,
    joined_for: float | None,
) -> Fault | None:
    """What is wrong with a start that gets nowhere although its launcher lives.

    `waited` are the seconds since it began, None if ranks of this run were never heard of before;
    `joined_for` those since the last rank came to MPI, None if none did.
    """
    if not signs:
        if waited is not None and waited > patience.start:
            return Fault(f"no rank has started for {waited:.0f} s")
        return None
    joins = any(sign.beat.phase == JOINS for sign in signs.values())
    if joins and len(signs) == ranks and joined_for is not None and joined_for > patience.join:
        return Fault(f"MPI has not started for {joined_for:.0f} s")
    return None


def _silent_hosts(
    host_of: Sequence[str], signs: Mapping[int, Sign], now: float, began: float, patience: Patience
) -> dict[str, float]:
    """The hosts of which no rank gives a sign of life, and for how long."""
    told = {host_of[rank] for rank, sign in signs.items() if sign.is_gone}
    last: dict[str, float] = {}
    for rank, sign in signs.items():
        last[host_of[rank]] = max(sign.heard_at, last.get(host_of[rank], 0.0))
    return {
        host: now - last.get(host, began)
        for host in dict.fromkeys(host_of)
        if host not in told  # else somebody was there to tell
        and now - last.get(host, began) > (patience.silence if host in last else patience.start)
    }


def have_left(signs: Mapping[int, Sign]) -> bool:
    """Whether all ranks that were ever heard of have left in order."""
    return all(sign.beat.phase == ENDS for sign in signs.values())


def missing(host_of: Sequence[str], signs: Mapping[int, Sign]) -> list[str]:
    """The hosts of which no rank has said that it is gone, although the attempt is over.

    Hosts that were never heard of are not missing: the launcher may have ended before its ranks
    had begun. A host that is missing may be dead, or its system has ended all processes of the
    attempt at once.
    """
    heard = {host_of[rank] for rank in signs}
    told = {host_of[rank] for rank, sign in signs.items() if sign.is_gone}
    return [host for host in dict.fromkeys(host_of) if host in heard - told]


# -- whether to go on -------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    code: int
    step: int | None = None
    """Steps done when it ended; None if it did not train yet, or if nothing is known."""
    fault: Fault | None = None
    """Why the supervisor ended it; None if it ended by itself."""
    lost: tuple[str, ...] = ()
    """Hosts that are gone."""


def step_of(signs: Mapping[int, Sign]) -> int | None:
    """The steps that ranks have done; None if none trains."""
    steps = [sign.beat.step for sign in signs.values() if sign.beat.phase in (TRAINS, STEPS, ENDS)]
    return max(steps, default=None)


def refusal(end: End, before: End | None, left: int) -> str | None:
    """Why no restart follows an attempt; None if one does, and empty if it needs no words.

    `before` is the attempt before this one, and `left` the number of restarts that are left.
    """
    if end.code in FINAL and end.fault is None:
        return ""
    if before is not None and _own(end) is not None and _own(end) == _own(before):
        return f"the same happened before, after step {end.step}"
    if left <= 0:
        return "no restart is left"
    return None


def _own(end: End) -> tuple[int, int] | None:
    """Code and step of an end that may be the program's own doing; None for that of a host."""
    if end.step is None or end.fault is not None or end.lost:
        return None
    return end.code, end.step
