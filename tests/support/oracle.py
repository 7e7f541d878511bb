"""The judge of numerics: plain torch, one process, dense; nothing of samo/ or pipeline/.

Gradients are masked before the norm, weights after each step. Microbatches are added in
order within a replica, replicas in order after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support.dense_optimizers import RoundedAdamW
from torch import Tensor, nn

from axsparse.config.schema import Config, OptimizerConfig
from axsparse.data.dataset import Dataset
from axsparse.data.order import samples_of_step
from axsparse.models.layer import Model
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.optim.optimizer import learning_rate

NONE: Mapping[str, tuple[float, float]] = {}
MULTIPLYING = (
    *(nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd),
    *(nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention),
)
"""Modules of blocks whose matrices are pruned by default."""


@dataclass
class Trace:
    """What a run produced, by global parameter name where there is one."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Dense, zero where pruned."""
    masters: dict[str, Tensor] = field(default_factory=dict)
    """Kept entries only; of runs, not of the oracle."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Positions of kept entries; the oracle has those of pruned tensors."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Of this rank's stage; the oracle's if there is one replica."""
    evaluation: object = None
    """The last one, of runs that evaluate."""


def adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    return RoundedAdamW(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        foreach=False,
        fused=False,
    )


def sgd(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        groups,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        foreach=False,
        fused=False,
    )


def keep_mask(config: Config, name: str, weight: Tensor) -> Tensor:
    """The kept entries by sorting: largest first, lower positions first among equals."""
    n = weight.numel()
    keep = n - round(config.pruning.sparsity * n)
    if config.pruning.method == "random":
        score = torch.rand(n, generator=keyed_generator(config.seed, name, "mask"))
    else:
        score = weight.reshape(-1).abs()
    order = torch.sort(score, descending=True, stable=True).indices
    mask = torch.zeros(n, dtype=torch.bool)
    mask[order[:keep]] = True
    return mask.view_as(weight)


class Oracle:
    """Trains the whole model densely, as if on one stage and `g_data` replicas."""

    def __init__(
        self,
        model: Model,
        config: Config,
        data: Dataset,
        g_data: int = 1,
        optimizer: Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer] = adamw,
        own: Mapping[str, tuple[float, float]] = NONE,
    ) -> None:
        """`own` has the peak learning rate and weight decay of some parameters by name."""
        self.config, self.data, self.g_data = config, data, g_data
        self.loss = model.loss
        self.ties = {tie.second: tie.first for tie in model.ties}
        self.names = [layer.name for layer in model.layers]
        self.modules: list[nn.Module] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.masks: dict[str, Tensor] = {}
        self.schedule_start = 0
        """After which step the learning rate began anew."""
        self.prunable: list[str] = []
        for layer in model.layers:
            module = layer.build()
            for local, parameter in module.named_parameters():
                name = f"{layer.name}.{local}"
                assert layer.init is not None, "oracle models say how they start"
                generator = keyed_generator(config.seed, self.ties.get(name, name), "init")
                with torch.no_grad():
                    parameter.copy_(layer.init(local, tuple(parameter.shape), generator))
                if not parameter.requires_grad:
                    continue
                self.parameters[name] = parameter
                owner = module.get_submodule(local.rpartition(".")[0])
                multiplies = layer.kind == "block" and isinstance(owner, MULTIPLYING)
                is_wanted = multiplies or config.pruning.include == "all"
                if is_wanted and parameter.dim() >= 2 and config.pruning.sparsity > 0:
                    self.prunable.append(name)
            self.modules.append(module)
        owned = [name for name in self.parameters if name not in self.ties]
        self.owned = owned
        others = [n for n in owned if n not in own]
        decay = [self.parameters[n] for n in others if self.parameters[n].dim() >= 2]
        plain = [self.parameters[n] for n in others if self.parameters[n].dim() < 2]
        settings = config.optimizer
        groups = [
            {"params": decay, "weight_decay": settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
            *(
                {"params": [self.parameters[name]], "weight_decay": weight_decay, "peak": peak}
                for name, (peak, weight_decay) in own.items()
            ),
        ]
        self.optimizer = optimizer(groups, settings)
        self.trace = Trace()

    def prune(self) -> None:
        """Draw the masks from the weights of now and apply them, also to the moments."""
        for name in self.prunable:
            owner = self.ties.get(name, name)
            parameter = self.parameters[name]
            mask = self.masks[name] = keep_mask(self.config, owner, parameter.detach())
            with torch.no_grad():
                parameter.mul_(mask)
            for value in self._moments(parameter).values():
                value.mul_(mask)

    def run(self, steps: int) -> Trace:
        for step in range(steps):
            if self.config.samo.enabled and step == self.config.pruning.at_step:
                self.prune()
            self._step(step)
        return self._final_state()

    def _final_state(self) -> Trace:
        for name in self.owned:
            parameter = self.parameters[name]
            self.trace.weights[name] = parameter.detach().clone()
            moments = self._moments(parameter)
            self.trace.moments[name] = {moment: v.clone() for moment, v in moments.items()}
        for name, mask in self.masks.items():
            self.trace.kept[name] = mask.view(-1).nonzero().view(-1)
        if self.g_data == 1:  # Replicas have buffers of their own.
            for name, module in zip(self.names, self.modules, strict=True):
                for local, buffer in module.named_buffers():
                    self.trace.buffers[f"{name}.{local}"] = buffer.clone()
        return self.trace

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The states of a parameter's own shape, by our names."""
        return {
            "momentum" if name == "momentum_buffer" else name: value
            for name, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def _step(self, step: int) -> None:
        loss, total = self._gradients(step)
        for name, mask in self.masks.items():
            if name in total:
                total[name] = total[name] * mask
        self._finish_step(step, loss, total)

    def _gradients(self, step: int) -> tuple[float, dict[str, Tensor]]:
        """Loss and dense gradients of a step, in the order in which replicas are added."""
        config = self.config
        size, per_microbatch = config.batch.global_batch_size, config.batch.microbatch_size
        samples = samples_of_step(len(self.data), size, step, config.seed)
        _, all_targets = self.data.read(samples)
        divisor = self.data.count_targets(all_targets)
        share = size // self.g_data
        total: dict[str, Tensor] = {}
        loss_total = 0.0
        for replica in range(self.g_data):
            for parameter in self.parameters.values():
                parameter.grad = None
            replica_loss = 0.0
            for start in range(replica * share, (replica + 1) * share, per_microbatch):
                stop = min(start + per_microbatch, (replica + 1) * share)
                inputs, targets = self.data.read(samples[start:stop])
                outputs: Sequence[Tensor] = inputs
                for module in self.modules:
                    output = module(*outputs)
                    outputs = output if isinstance(output, tuple) else (output,)
                loss = self.loss(*outputs, targets) / divisor
                loss.backward()
                replica_loss += loss.item()
            loss_total += replica_loss
            for name in self.owned:
                grad = self.parameters[name].grad
                if grad is None:
                    grad = torch.zeros_like(self.parameters[name])
                for second, first in self.ties.items():
                    if first == name:
                        second_grad = self.parameters[second].grad
                        assert second_grad is not None
                        grad = grad + second_grad
                total[name] = total[name] + grad if name in total else grad.clone()
        return loss_total, total

    def _finish_step(self, step: int, loss: float, gradients: dict[str, Tensor]) -> None:
        config = self.config
        # Squares of fp32 numbers are exact in fp64, and fsum rounds their sum once.
        squares = [v for g in gradients.values() for v in g.double().square().flatten().tolist()]
        finite = math.isfinite(loss) and math.isfinite(sum(squares))
        norm = torch.tensor(math.sqrt(math.fsum(squares)) if finite else math.nan).float()
        self.trace.losses.append(loss)
        self.trace.norms.append(norm.item())
        self.trace.finite.append(finite)
        if not finite:
            return
        factor = torch.ones(())
        if config.optimizer.clip_norm:
            factor = torch.clamp(torch.tensor(config.optimizer.clip_norm) / (norm + 1e-6), max=1.0)
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient * factor
        schedule = config.schedule
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(
                step - self.schedule_start,
                schedule,
                peak=group.get("peak", config.optimizer.learning_rate),
                decay_steps=(
                    config.train.steps if schedule.decay_steps == "auto" else schedule.decay_steps
                )
                - self.schedule_start,
            )
        self.optimizer.step()
        with torch.no_grad():
            for name, mask in self.masks.items():
                self.parameters[name].mul_(mask)
            for second, first in self.ties.items():
                self.parameters[second].copy_(self.parameters[first])
