"""Schedules by name: each makes the policy of every stage.

`message-driven` decides while it runs; GPipe and 1F1B are lists of actions that are known before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from axsparse.pipeline.actions import Action, action
from axsparse.pipeline.policy import (
    BACKWARD,
    FORWARD,
    InOrder,
    MessageDriven,
    Policy,
    Preference,
)
from axsparse.runtime.communication import Direction

ScheduleName = Literal["message-driven", "1f1b", "gpipe"]


@dataclass(frozen=True)
class Schedule:
    """In which order the stages of a pipeline work: one schedule makes the policy of each stage.

    Engine and simulator know schedules only by `policy`; the planner also asks how many
    activations a stage holds (`planner.stage_memory.most_in_flight`).

    To add a static schedule, write a function here that returns a stage's list of actions, as
    `gpipe` does, add its name to `ScheduleName`, to `policy` below and to `pipeline.schedule` in
    config/schema.py, and its bound to `most_in_flight`. `dry_run` tells whether the lists of all
    stages fit together. Then add the name to the schedules that are listed in
    tests/pipeline/test_schedules.py, tests/planner/test_simulator.py,
    tests/planner/test_stage_memory.py and tests/behavior/test_schedule_equivalence.py: it has to
    pass all of them. A schedule that decides while it runs needs a policy of its own: see `Policy`.

    Example: `Schedule("1f1b", 0, "alternate").policy(stage=0, g_inter=2, microbatches=4)`.
    """

    name: ScheduleName
    slack: int
    """Activations that stage s may hold in flight beyond g_inter − s (message-driven and 1f1b)."""
    prefer: Preference
    """What runs when a forward and a backward have both arrived (message-driven)."""

    def policy(self, *, stage: int, g_inter: int, microbatches: int) -> Policy:
        """A new policy for one stage of `g_inter` and one step of `microbatches`."""
        if self.name == "message-driven":
            return MessageDriven(
                stage=stage,
                g_inter=g_inter,
                microbatches=microbatches,
                slack=self.slack,
                prefer=self.prefer,
            )
        if self.name == "1f1b":
            actions = one_forward_one_backward(stage, g_inter, microbatches, self.slack)
        else:
            actions = gpipe(microbatches)
        return InOrder(actions, stage=stage, g_inter=g_inter)


def one_forward_one_backward(
    stage: int, g_inter: int, microbatches: int, slack: int
) -> list[Action]:
    """1F1B: forwards to warm up, then a forward and a backward in turn, then the other backwards.

    The warm-up has g_inter − stage − 1 + slack forwards, so that a stage holds as many
    activations as under message-driven. The last stage has no warm-up, since it has nothing to
    wait for. (With slack 0: Narayanan et al., 2021, section 2.2.1.)
    """
    warm_up = 0 if stage == g_inter - 1 else min(microbatches, g_inter - stage - 1 + slack)
    actions = [action(FORWARD, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches):
        if microbatch + warm_up < microbatches:
            actions.append(action(FORWARD, microbatch + warm_up))
        actions.append(action(BACKWARD, microbatch))
    return actions


def gpipe(microbatches: int) -> list[Action]:
    """GPipe: all forwards, then all backwards; every microbatch is in flight at once.

    The backwards run in microbatch order, as under every schedule here. (Huang et al., 2019,
    section 2.3.)
    """
    return [action(d, microbatch) for d in Direction for microbatch in range(microbatches)]


def dry_run(stages: Sequence[Sequence[Action]]) -> list[int]:
    """Play the action lists of all stages against each other, without times.

    Returns how many activations each stage holds at most. ValueError for a list that is no
    schedule (see `InOrder`), for lists of different lengths, and for a deadlock, with the action
    that each stage waits for.
    """
    if len({len(actions) for actions in stages}) > 1:
        counts = ", ".join(str(len(actions)) for actions in stages)
        raise ValueError(f"schedule: the stages have {counts} actions; all need the same")
    policies = [InOrder(a, stage=s, g_inter=len(stages)) for s, a in enumerate(stages)]
    done = [0] * len(stages)
    moved = True
    while moved:
        moved = False
        for stage, policy in enumerate(policies):
            while (run := policy.next()) is not None:
                moved = True
                done[stage] += 1
                target = stage + (1 if run.direction is FORWARD else -1)
                if 0 <= target < len(stages):
                    policies[target].arrived(run.direction, run.microbatch)
    if not all(policy.finished for policy in policies):
        waits = ", ".join(
            f"stage {stage} for {actions[at]}"
            for stage, (actions, at) in enumerate(zip(stages, done, strict=True))
            if at < len(actions)
        )
        raise ValueError(f"schedule: a deadlock; waiting are {waits}")
    return [_most_in_flight(actions) for actions in stages]


def _most_in_flight(actions: Sequence[Action]) -> int:
    held = most = 0
    for each in actions:
        held += 1 if each.direction is FORWARD else -1
        most = max(most, held)
    return most
