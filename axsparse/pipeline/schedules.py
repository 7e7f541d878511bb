"""Which policy a stage follows, and the static schedules GPipe and 1F1B as lists of actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from axsparse.pipeline.actions import Action, action
from axsparse.pipeline.policy import InOrder, MessageDriven, Policy, Preference
from axsparse.runtime.communication import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
ScheduleName = Literal["message-driven", "1f1b", "gpipe"]


@dataclass(frozen=True)
class Schedule:
    """In which order the stages of a pipeline work; makes the policy of each."""

    name: ScheduleName
    slack: int
    """message-driven, 1f1b: activations in flight beyond g_inter − stage."""
    prefer: Preference
    """message-driven: what runs when a forward and a backward have both arrived."""

    def policy(self, *, stage: int, g_inter: int, microbatches: int) -> Policy:
        """A new run of one stage."""
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
    """1F1B: some forwards to warm up, then a forward and a backward in turn, then the rest.

    The warm-up of g_inter − stage − 1 forwards is `slack` deeper, so that as many
    activations are in flight as message-driven may hold; the last stage has none, since
    it has nothing to wait for. (Narayanan et al., 2021, section 2.2.1, for slack 0.)
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

    The backwards run in microbatch order, as everywhere here, so that the gradients add
    up to the same bits. (Huang et al., 2019, section 2.3.)
    """
    return [action(d, microbatch) for d in Direction for microbatch in range(microbatches)]


def dry_run(stages: Sequence[Sequence[Action]]) -> list[int]:
    """Play the lists of all stages against each other, without times.

    Returns how many activations each stage holds at most. ValueError for a list that is
    no schedule (see `InOrder`), for lists of different lengths, and for lists that would
    wait for each other for ever, with what each stage waits for.
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
