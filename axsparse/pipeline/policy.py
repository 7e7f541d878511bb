"""The next action of a stage, decided by the messages that have arrived, and schedules by name.

A policy knows microbatch numbers only: no tensors, no links, no clock. So the same object drives
training (`pipeline.engine`) and simulations (`pipeline.simulator`). A schedule makes the policy of
every stage: `message-driven` decides while it runs, the others are lists of actions that are known
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Literal, Protocol

from axsparse.runtime.communication import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


class Kind(IntEnum):
    """The computation of an action.

    A full backward (BACKWARD alone) makes the gradients of its stage's inputs and weights. A split
    one is two actions: BACKWARD makes the gradients of the inputs, which the previous stage waits
    for; WEIGHT, at any later time, the gradients of the weights (Qi et al., 2024, section 2).
    """

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHT: "W"}


@dataclass(frozen=True)
class Action:
    """The forward, the backward or the weight gradients of one microbatch."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.microbatch}"

    @property
    def direction(self) -> Direction | None:
        """The direction of the result and of the input; None for weight gradients."""
        return None if self.kind is Kind.WEIGHT else Direction(self.kind)


@cache
def action(kind: Kind, microbatch: int) -> Action:
    """An `Action` that is made once and reused; a `Direction` will do as kind."""
    return Action(Kind(kind), microbatch)


class Policy(Protocol):
    """Chooses the actions of one stage, for the microbatches of one step or one evaluation.

    A policy is a pure state machine: arrivals of activations (FORWARD) and gradients (BACKWARD)
    come in, actions go out. Whoever drives it repeats:

        while not policy.finished:
            for direction, microbatch in <messages that came in, first come first>:
                policy.arrived(direction, microbatch)
            action = policy.next()
            if action is None: wait for a message
            else: run the action and send its result, if it has one, to the neighbour

    These rules hold for every policy:

    1. In training each forward and each backward is handed out exactly once, and so are the weight
       gradients of each microbatch if backwards are split; in an evaluation each forward once.
    2. Forwards are handed out in microbatch order, and so are backwards and weight gradients.
       Gradients then add up in the same order under every policy and layout, so that training is
       bitwise the same.
    3. An action is handed out only once its input is there. The first stage has the inputs of all
       forwards from the start. The last stage computes the loss, so that its own forward is the
       input of its backward; it receives no gradients. Weight gradients need their backward.
    4. Links deliver in the order of sending, so arrivals of one direction come in microbatch order.
       An arrival out of order, from a side without a neighbour or beyond the last microbatch is an
       error in the caller: an assertion.
    5. The policies of all stages together never wait for each other for ever.
    6. The answers depend on the arrivals and calls so far, and on nothing else.

    To add a policy, write a class with these four members here (an order that is known beforehand
    needs no class: see `Schedule`), and return it from `Schedule.policy`. It has to pass
    tests/pipeline/test_policy.py, tests/pipeline/test_simulator.py and
    tests/behavior/test_equivalence.py.
    """

    @property
    def finished(self) -> bool:
        """Whether every action has been handed out."""
        ...

    def expects(self, direction: Direction) -> bool:
        """Whether a further message of this direction belongs to this run.

        A neighbour that is ahead may already send messages of the next step; they stay with the
        caller until the next policy expects them.
        """
        ...

    def arrived(self, direction: Direction, microbatch: int) -> None:
        """Take note that the input of a microbatch's forward or backward has arrived."""
        ...

    def next(self) -> Action | None:
        """The action to run now, or None if the stage has to wait for an arrival.

        The caller must run what it is given: the action counts as begun.
        """
        ...


class Inputs:
    """How many inputs have arrived (`here`) and how many actions have begun, for each kind.

    Counts are enough, since every kind runs in microbatch order. The input of a WEIGHT action is
    what its BACKWARD has saved.
    """

    def __init__(self, stage: int, g_inter: int, forwards: int, backwards: int) -> None:
        self.is_last = stage == g_inter - 1
        self._wanted = forwards, 0 if self.is_last else backwards
        """How many messages of each direction belong to this run; the last stage makes its
        gradients itself."""
        self.here = [0 if stage else forwards, 0, 0]
        self.begun = [0, 0, 0]

    def has(self, kind: Kind) -> bool:
        return self.begun[kind] < self.here[kind]

    def expects(self, direction: Direction) -> bool:
        return self.here[direction] < self._wanted[direction]

    def arrived(self, direction: Direction, microbatch: int) -> None:
        arrival = Action(Kind(direction), microbatch)
        assert self.expects(direction), f"{arrival} was never asked"
        assert microbatch == self.here[direction], f"{arrival} arrived out of order"
        self.here[direction] += 1

    def begin(self, kind: Kind) -> Action:
        """Count the next action of this kind as begun, and return it."""
        microbatch = self.begun[kind]
        self.begun[kind] += 1
        if kind is Kind.BACKWARD:
            self.here[Kind.WEIGHT] += 1
        elif kind is Kind.FORWARD and self.is_last:
            self.here[Kind.BACKWARD] += 1
        return action(kind, microbatch)


class MessageDriven(Inputs):
    """AxoNN's policy: run the microbatches that have arrived, within a bound on the activations of
    a stage.

    A microbatch is in flight from its forward to its backward, when all its activations are kept,
    and with split backwards deferred from its backward to its weight gradients, for which the
    inputs and the output gradients of matrices are kept. As many may be deferred as in flight: both
    together are twice the bound at most.

    If a forward and a backward can both run, the kind runs that did not run last, because two
    backwards in a row starve the stages downstream. The last stage runs each backward directly
    after its forward.

    With split backwards, weight gradients run when neither a forward nor a backward can.
    """

    def __init__(
        self, *, stage: int, g_inter: int, microbatches: int, bound: int, is_split: bool = False
    ) -> None:
        if bound < 1:
            raise ValueError(f"bound: {bound}; a stage has to hold at least 1 microbatch")
        super().__init__(stage, g_inter, microbatches, microbatches)
        self._microbatches, self._bound, self._is_split = microbatches, bound, is_split
        self._last_run: Kind | None = None

    @property
    def in_flight(self) -> int:
        """How many microbatches have begun their forward and not their backward."""
        return self.begun[Kind.FORWARD] - self.begun[Kind.BACKWARD]

    @property
    def deferred(self) -> int:
        """How many microbatches have begun their backward and not their weight gradients."""
        return self.begun[Kind.BACKWARD] - self.begun[Kind.WEIGHT] if self._is_split else 0

    @property
    def finished(self) -> bool:
        last = Kind.WEIGHT if self._is_split else Kind.BACKWARD
        return self.begun[last] == self._microbatches

    def next(self) -> Action | None:
        in_flight, deferred, bound = self.in_flight, self.deferred, self._bound
        fits_budget = in_flight < bound and in_flight + deferred < 2 * bound
        forward = self.has(Kind.FORWARD) and fits_budget
        backward = self.has(Kind.BACKWARD)
        if forward and backward:
            forward = self._last_run is Kind.BACKWARD and not self.is_last
        if forward or backward:
            self._last_run = Kind.FORWARD if forward else Kind.BACKWARD
            return self.begin(self._last_run)
        return self.begin(Kind.WEIGHT) if deferred else None


class InOrder(Inputs):
    """A static schedule: the actions of a list, each as soon as its input has arrived."""

    def __init__(self, actions: Sequence[Action], *, stage: int, g_inter: int) -> None:
        """`actions` is everything that this stage does, by the rules of `Policy`."""
        self._actions, self._done = tuple(actions), 0
        kinds = [each.kind for each in actions]
        super().__init__(stage, g_inter, kinds.count(Kind.FORWARD), kinds.count(Kind.BACKWARD))

    @property
    def finished(self) -> bool:
        return self._done == len(self._actions)

    def next(self) -> Action | None:
        if self.finished or not self.has(self._actions[self._done].kind):
            return None
        self._done += 1
        return self.begin(self._actions[self._done - 1].kind)


ScheduleName = Literal["message-driven", "1f1b", "gpipe"]


@dataclass(frozen=True)
class Schedule:
    """In which order the stages of a pipeline work: one schedule makes the policy of each stage.

    To add a static schedule, write a function here that returns a stage's list of actions, as
    `gpipe` does, add its name to `ScheduleName`, to `order` below and to `pipeline.schedule` in
    config/schema.py, its bound to `planner.stage_memory.most_in_flight`, and the name to the
    schedules of the tests (`grep -rn gpipe tests`). A schedule that decides while it runs needs a
    new policy: see `Policy`.

    Example: `Schedule("1f1b", 0).policy(stage=0, g_inter=2, microbatches=4)`.
    """

    name: ScheduleName
    extra_in_flight: int
    """Activations that stage s may hold in flight beyond g_inter − s (not under gpipe)."""
    split_backward: bool = False
    """Whether backwards are split, so that the lists and policies have separate weight gradients
    (see `Kind`)."""

    def bound(self, stage: int, g_inter: int) -> int:
        """How many microbatches a stage may have in flight (not under gpipe)."""
        return g_inter - stage + self.extra_in_flight

    def policy(self, *, stage: int, g_inter: int, microbatches: int) -> Policy:
        if self.name == "message-driven":
            return MessageDriven(
                stage=stage,
                g_inter=g_inter,
                microbatches=microbatches,
                bound=self.bound(stage, g_inter),
                is_split=self.split_backward,
            )
        return InOrder(self.order(stage, g_inter, microbatches), stage=stage, g_inter=g_inter)

    def order(self, stage: int, g_inter: int, microbatches: int) -> Sequence[Action]:
        if self.name == "1f1b":
            actions = one_forward_one_backward(stage, g_inter, microbatches, self.extra_in_flight)
        else:
            actions = gpipe(microbatches)
        return with_weights(actions) if self.split_backward else actions


def one_forward_one_backward(
    stage: int, g_inter: int, microbatches: int, extra_in_flight: int
) -> list[Action]:
    """1F1B: forwards to warm up, then a forward and a backward in turn, then the other backwards
    (with none extra: Narayanan et al., 2021, section 2.2.1).

    A stage holds as many activations as under message-driven. The last stage has no warm-up.
    """
    warm_up = (
        0 if stage == g_inter - 1 else min(microbatches, g_inter - stage - 1 + extra_in_flight)
    )
    actions = [action(Kind.FORWARD, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches):
        if microbatch + warm_up < microbatches:
            actions.append(action(Kind.FORWARD, microbatch + warm_up))
        actions.append(action(Kind.BACKWARD, microbatch))
    return actions


def gpipe(microbatches: int) -> list[Action]:
    """GPipe: all forwards, then all backwards, in microbatch order (Huang et al., 2019, section
    2.3)."""
    backwards = [action(Kind.BACKWARD, microbatch) for microbatch in range(microbatches)]
    return [*forwards(microbatches), *backwards]


def forwards(microbatches: int) -> list[Action]:
    return [action(Kind.FORWARD, microbatch) for microbatch in range(microbatches)]


def with_weights(actions: Sequence[Action]) -> list[Action]:
    """A list of full backwards with each of them split in two that follow each other."""
    split = []
    for each in actions:
        split.append(each)
        if each.kind is Kind.BACKWARD:
            split.append(action(Kind.WEIGHT, each.microbatch))
    return split
