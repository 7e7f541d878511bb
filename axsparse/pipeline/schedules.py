"""Schedules by name: each makes the policy of every stage.

`message-driven` decides while it runs; the others are lists of actions that are known before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from axsparse.pipeline.policy import (
    Action,
    InOrder,
    Kind,
    MessageDriven,
    Policy,
    Preference,
    action,
)

ScheduleName = Literal["message-driven", "1f1b", "gpipe"]


@dataclass(frozen=True)
class Schedule:
    """In which order the stages of a pipeline work: one schedule makes the policy of each stage.

    Engine and simulator know schedules only by `policy`; the planner also asks how many
    activations a stage holds (`planner.stage_memory.most_in_flight`).

    To add a static schedule, write a function here that returns a stage's list of actions, as
    `gpipe` does, add its name to `ScheduleName`, to `policy` below and to `pipeline.schedule` in
    config/schema.py, and its bound to `most_in_flight`. Then add the name to the schedules that are
    listed in tests/pipeline/test_schedules.py, tests/pipeline/test_simulator.py,
    tests/planner/test_stage_memory.py and tests/support/cases.py (`SCHEDULES`): it has to pass all
    of them. A schedule that decides while it runs needs a new policy: see `Policy`.

    Example: `Schedule("1f1b", 0, "alternate").policy(stage=0, g_inter=2, microbatches=4)`.
    """

    name: ScheduleName
    extra_in_flight: int
    """Activations that stage s may hold in flight beyond g_inter − s (not under gpipe)."""
    prefer: Preference
    """The action that runs first when a forward and a backward have both arrived
    (message-driven)."""
    split_backward: bool = False
    """Whether backwards are split, so that the lists and policies have separate weight gradients
    (see `Kind`)."""

    def bound(self, stage: int, g_inter: int) -> int:
        """How many microbatches a stage may have in flight (not under gpipe)."""
        return g_inter - stage + self.extra_in_flight

    def policy(self, *, stage: int, g_inter: int, microbatches: int) -> Policy:
        """A new policy for one stage of `g_inter` and one step of `microbatches`."""
        if self.name == "message-driven":
            return MessageDriven(
                stage=stage,
                g_inter=g_inter,
                microbatches=microbatches,
                bound=self.bound(stage, g_inter),
                prefer=self.prefer,
                is_split=self.split_backward,
            )
        return InOrder(self.order(stage, g_inter, microbatches), stage=stage, g_inter=g_inter)

    def order(self, stage: int, g_inter: int, microbatches: int) -> Sequence[Action]:
        """The actions of a stage in a step under a static schedule."""
        if self.name == "1f1b":
            actions = one_forward_one_backward(stage, g_inter, microbatches, self.extra_in_flight)
        else:
            actions = gpipe(microbatches)
        return with_weights(actions) if self.split_backward else actions


def one_forward_one_backward(
    stage: int, g_inter: int, microbatches: int, extra_in_flight: int
) -> list[Action]:
    """1F1B: forwards to warm up, then a forward and a backward in turn, then the other backwards.

    The warm-up has g_inter − stage − 1 + extra_in_flight forwards, so that a stage holds as many
    activations as under message-driven. The last stage has no warm-up, since it has nothing to
    wait for. (With none extra: Narayanan et al., 2021, section 2.2.1.)
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
    """GPipe: all forwards, then all backwards; every microbatch is in flight at once.

    The backwards run in microbatch order, as under every schedule here. (Huang et al., 2019,
    section 2.3.)
    """
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [action(kind, microbatch) for kind in kinds for microbatch in range(microbatches)]


def with_weights(actions: Sequence[Action]) -> list[Action]:
    """A list of full backwards with each of them split in two that follow each other."""
    split = []
    for each in actions:
        split.append(each)
        if each.kind is Kind.BACKWARD:
            split.append(action(Kind.WEIGHT, each.microbatch))
    return split
