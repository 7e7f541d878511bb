"""Every pruning method, and masks that move, by plain dense oracles: whole tensors, sorted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from support.oracle import Oracle, Trace
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.data.dataset import Dataset
from axsparse.data_parallel.agreement import Verdict
from axsparse.models.layer import Model
from axsparse.pruning.distribution import kept_counts
from axsparse.pruning.methods.regrowth import GradientGrowth, RandomGrowth, Regrowth
from axsparse.runtime.seeds import keyed_generator
from axsparse.training.trainer import Trainer


class MethodOracle(Oracle):
    """Draws the masks that `pruning.method` asks for, in one process, from dense tensors."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.noted: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.queue: deque[float] = deque(maxlen=5)
        self.drawn_at: int | None = None
        self.changes: list[int] = []

    def run(self, steps: int) -> Trace:
        step_back = self.config.pruning.rewind_step
        for step in range(steps):
            if step == step_back and step > 0:
                self.noted = {name: p.detach().clone() for name, p in self.parameters.items()}
            if self.config.pruning.method != "early-bird":
                self._on_time(step)
            elif self.drawn_at is None:
                self._look(step)
            self._step(step)
        return self._final_state()

    def prunes(self) -> list[str]:
        """Weights that are pruned, in model order, a tied one once."""
        return [name for name in self.prunable if name not in self.ties]

    # -- when -------------------------------------------------------------------------------

    def _on_time(self, step: int) -> None:
        pruning = self.config.pruning
        if pruning.method in ("gradual", "iterative"):
            assert pruning.until_step != "auto"
            rounds = (pruning.until_step - pruning.at_step) // pruning.interval
            number, rest = divmod(step - pruning.at_step, pruning.interval)
            if rest or not 1 <= number <= rounds:
                return
            final = pruning.sparsity
            if pruning.method == "gradual":
                sparsity = final * (1 - (1 - number / rounds) ** 3)
            else:
                sparsity = 1 - (1 - final) ** (number / rounds)
            self._apply(self._draw(self._scores(step), sparsity), step)
        elif step == pruning.at_step:
            self._apply(self._draw(self._scores(step), pruning.sparsity), step)

    def _look(self, step: int) -> None:
        pruning = self.config.pruning
        since = step - max(pruning.at_step, self.config.schedule.warmup_steps)
        if since < 0 or since % pruning.interval:
            return
        masks = self._draw(self._scores(step), pruning.sparsity)
        if self.last:
            changed = sum(int((masks[name] != self.last[name]).sum()) for name in masks)
            of = 2 * sum(int(mask.sum()) for mask in masks.values())
            if pruning.metric == "hamming":
                of = sum(mask.numel() for mask in masks.values())
            self.queue.append(changed / of)
        self.last = masks
        if len(self.queue) == 5 and max(self.queue) < pruning.threshold:
            self.drawn_at = step
            self._apply(masks, step)

    # -- which ------------------------------------------------------------------------------

    def _scores(self, step: int) -> dict[str, Tensor]:
        names, method = self.prunes(), self.config.pruning.method
        weights = {name: self.parameters[name].detach() for name in names}
        if method == "random":
            return {
                name: torch.rand(
                    weight.numel(), generator=keyed_generator(self.config.seed, name, "mask")
                ).view_as(weight)
                for name, weight in weights.items()
            }
        if method == "snip":
            _, gradients = self._gradients(step)
            return {name: (weight * gradients[name]).abs() for name, weight in weights.items()}
        return {name: weight.abs() for name, weight in weights.items()}

    def _draw(self, scores: dict[str, Tensor], sparsity: float) -> dict[str, Tensor]:
        flat = {
            name: torch.where(self.masks[name], score, -1.0).view(-1)
            if name in self.masks
            else score.reshape(-1)
            for name, score in scores.items()
        }
        distribution = self.config.pruning.distribution
        if distribution == "global":
            every = torch.cat(list(flat.values()))
            keep = every.numel() - round(sparsity * every.numel())
            mask = _best(every, keep)
            parts = mask.split([one.numel() for one in flat.values()])
            return {n: m.view_as(scores[n]) for n, m in zip(flat, parts, strict=True)}
        shapes = {name: tuple(score.shape) for name, score in scores.items()}
        keeps = kept_counts(shapes, sparsity, distribution=distribution)
        return {name: _best(flat[name], keeps[name]).view_as(scores[name]) for name in flat}

    def _apply(self, masks: dict[str, Tensor], step: int) -> None:
        self.changes.append(step)
        for name in self.prunable:
            self.masks[name] = masks[self.ties.get(name, name)]
        back = self.config.pruning.rewind_step
        rewinds = back != "never" and (back != "auto" or self.config.pruning.method == "iterative")
        for name, parameter in self.parameters.items():
            with torch.no_grad():
                if rewinds:
                    source = self.noted if isinstance(back, int) and back > 0 else self.start
                    parameter.copy_(source[name])
                parameter.mul_(self.masks.get(name, torch.ones(())))
            for value in self._moments(parameter).values():
                value.mul_(0.0 if rewinds else self.masks.get(name, torch.ones(())))
        if rewinds:
            self.schedule_start = step
            self.optimizer.state.clear()


def _best(scores: Tensor, keep: int) -> Tensor:
    order = torch.sort(scores, descending=True, stable=True).indices
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[order[:keep]] = True
    return mask


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
    warm: bool = False


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
        for moment, value in self._moments(parameter).items():
            usual = value.view(-1)[kept].double().mean()
            value.view(-1).mul_(stay)
            if self.plan.warm and moment == "exp_avg_sq":
                value.view(-1)[after & ~stay] = usual.float()
        uses = [name, *(second for second, first in self.ties.items() if first == name)]
        for use in uses:
            self.masks[use] = after.view_as(parameter)
            self.parameters[use].detach().copy_(parameter.detach())

    def _total(self, name: str, pruned: Tensor, kept: int) -> Tensor:
        """The gradient as candidates know it, dense: uses, then replicas are added. Where sums are
        exact it is that of the step's first microbatch."""
        uses = [name, *(second for second, first in self.ties.items() if first == name)]
        total = torch.zeros(self.parameters[name].numel())
        capacity = min(self.plan.capacity * kept, len(pruned))
        replicas, each = self.g_data, len(self.seen[name]) // self.g_data
        if self.config.samo.gradient == "exact":
            replicas, each = 1, 1
        for replica in range(replicas):
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
            warm=plan.warm,
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
