"""Dynamic sparse training for tests: by a plain dense oracle, and switched on in a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from support.oracle import Oracle
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.data.dataset import Dataset
from axsparse.data_parallel.agreement import Verdict
from axsparse.models.layer import Model
from axsparse.pruning.methods.regrowth import GradientGrowth, RandomGrowth, Regrowth
from axsparse.runtime.seeds import keyed_generator
from axsparse.training.trainer import Trainer

EXACT = 1_000
"""Candidates a kept entry: all that there are."""


@dataclass(frozen=True)
class Plan:
    """When masks move, and how."""

    by: str
    """"gradient" or "chance"."""
    at: Collection[int] = (1, 3)
    """Steps done before the steps that are armed."""
    fraction: float = 0.3
    capacity: int = 1


def best(scores: Tensor, count: int) -> Tensor:
    """The places of the largest by sorting, lower ones first among equals."""
    return torch.sort(scores, descending=True, stable=True).indices[:count]


class MovingOracle(Oracle):
    """Keeps every dense gradient of a step, and sorts."""

    def __init__(
        self,
        model: Model,
        config: Config,
        data: Dataset,
        g_data: int = 1,
        *,
        plan: Plan,
        **others: Any,
    ) -> None:
        super().__init__(model, config, data, g_data, **others)
        self.plan = plan
        self.waits = False
        self.seen: dict[str, list[Tensor]] = {name: [] for name in self.parameters}
        for name, parameter in self.parameters.items():
            parameter.register_hook(partial(self._see, name))

    def _see(self, name: str, gradient: Tensor) -> None:
        self.seen[name].append(gradient.detach().clone().view(-1))

    def _finish_step(self, step: int, loss: float, gradients: dict[str, Tensor]) -> None:
        super()._finish_step(step, loss, gradients)
        self.waits = self.waits or step in self.plan.at
        if self.waits and self.trace.finite[-1]:
            self.waits = False
            for name in self.prunable:
                if name not in self.ties:
                    self._move(name, step + 1)
        for gradients_seen in self.seen.values():
            gradients_seen.clear()

    def _move(self, name: str, step: int) -> None:
        parameter, before = self.parameters[name], self.masks[name].view(-1)
        weight = parameter.detach().view(-1)
        kept, pruned = before.nonzero().view(-1), (~before).nonzero().view(-1)
        count = min(round(self.plan.fraction * len(kept)), len(pruned))
        if self.plan.by == "chance":
            generator = keyed_generator(self.config.seed, name, "grow", step)
            score = torch.rand(before.numel(), generator=generator)
        else:
            score = self._total(name, pruned, len(kept)).abs()
        after = torch.zeros_like(before)
        after[kept[best(weight[kept].abs(), len(kept) - count)]] = True
        stay = after.clone()
        after[pruned[best(score[pruned], count)]] = True
        weight.mul_(stay)
        for value in self._moments(parameter).values():
            value.view(-1).mul_(stay)
        uses = [name, *(second for second, first in self.ties.items() if first == name)]
        for use in uses:
            self.masks[use] = after.view_as(parameter)
            self.parameters[use].detach().copy_(parameter.detach())

    def _total(self, name: str, pruned: Tensor, kept: int) -> Tensor:
        """The gradient as candidates know it, dense: uses, then replicas are added."""
        uses = [name, *(second for second, first in self.ties.items() if first == name)]
        total = torch.zeros(self.parameters[name].numel())
        capacity = min(self.plan.capacity * kept, len(pruned))
        each = len(self.seen[name]) // self.g_data
        for replica in range(self.g_data):
            own = torch.zeros_like(total)
            for use in uses:
                listed = torch.zeros_like(total)
                for gradient in self.seen[use][replica * each : (replica + 1) * each]:
                    listed = self._truncated(listed + gradient, pruned, capacity)
                own += listed
            total += self._truncated(own, pruned, capacity)
        return total

    @staticmethod
    def _truncated(values: Tensor, pruned: Tensor, capacity: int) -> Tensor:
        places = pruned[best(values[pruned].abs(), capacity)]
        listed = torch.zeros_like(values)
        listed[places] = values[places]
        return listed


def moving(
    plan: Plan, note: Callable[[Trainer, dict[str, int]], None] = lambda trainer, counts: None
) -> Callable[[Trainer], None]:
    """Switches dynamic sparse training on in a trainer; `note` hears of every move."""

    def install(trainer: Trainer) -> None:
        parts, step = trainer.parts, trainer.step
        regrowth = Regrowth(
            [layer.state for layer in parts.layers],
            parts.sync._ties,
            parts.survey.ties,
            parts.replicas,
            GradientGrowth(parts.collector, plan.capacity)
            if plan.by == "gradient"
            else RandomGrowth(trainer.config.seed),
        )

        def moving_step() -> Verdict:
            if trainer.steps_done in plan.at:
                regrowth.arm(plan.fraction)
            verdict = step()
            if regrowth.fraction is not None and verdict.finite:
                note(trainer, regrowth.regrow(trainer.steps_done))
            return verdict

        vars(trainer)["step"] = moving_step

    return install


def masks_of(ranks: Sequence[tuple[Trainer, object]]) -> dict[str, Tensor]:
    """Kept positions by name over all ranks; replicas must agree."""
    found: dict[str, Tensor] = {}
    for trainer, _ in ranks:
        for layer in trainer.parts.layers:
            for tensor in layer.state.tensors:
                positions = tensor.index.positions()
                assert torch.equal(found.setdefault(tensor.name, positions), positions)
    return found
