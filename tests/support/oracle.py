"""The reference of numerics: plain torch, one process, dense; nothing of samo/ or pipeline/.

Gradients are masked before the norm, weights after each step. Microbatches are added in
order within a replica, replicas in order after that; or all as integers, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from axsparse.config.schema import Config, OptimizerConfig
from axsparse.data.dataset import Dataset
from axsparse.data.order import samples_of_step
from axsparse.models.layer import Model
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.optim.optimizer import learning_rate


def nearest_root(values: Tensor) -> Tensor:
    """The root in fp64 is near enough that rounding it once more gives the nearest number."""
    return values.double().sqrt_().to(values.dtype)


class RoundedAdamW(torch.optim.AdamW):
    """torch's AdamW with square roots that are rounded to the nearest number, as the package takes
    them. On CPUs torch has them from MKL, whose roots differ from these on some processors."""

    def step(self, closure: Any = None) -> Any:
        with mock.patch.object(Tensor, "sqrt", nearest_root):
            return super().step(closure)


class DenseLamb(torch.optim.Optimizer):
    """LAMB word for word from the paper (You et al. 2020, algorithm 2), in fp64.

    It knows nothing of masks: what is zero, with a zero gradient, stays so and adds to no norm.
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for x in group["params"]:
                state = self.state[x]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(x, dtype=torch.float64)
                    state["exp_avg_sq"] = torch.zeros_like(x, dtype=torch.float64)
                t = state["step"] = state["step"] + 1
                g = x.grad.double()
                m = state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * g
                v = state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * g**2
                m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
                r = m_hat / (v_hat**0.5 + group["eps"])
                u = r + decay * x.double()
                x_norm, u_norm = x.double().norm().item(), u.norm().item()
                ratio = x_norm / u_norm if x_norm and u_norm else 1.0
                x.copy_(x.double() - group["lr"] * ratio * u)


def lamb(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    return DenseLamb(groups, settings.learning_rate, settings.betas, settings.eps)


NONE: Mapping[str, tuple[float, float]] = {}
MULTIPLYING = (
    *(nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd),
    *(nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention),
)
"""Modules of blocks whose matrices are pruned by default."""


@dataclass
class Trace:
    """The results of a run, by global parameter name where there is one."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Dense, zero where pruned."""
    masters: dict[str, Tensor] = field(default_factory=dict)
    """Kept entries only; of runs, not of the oracle."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Positions of kept entries; the oracle has only pruned tensors'."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Of this rank's stage; the oracle's if all replicas have the same."""
    evaluation: object = None
    """The last one, of runs that evaluate."""


PLAIN: dict[str, Any] = {"foreach": False, "fused": False}


def adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    own = {"betas": settings.betas, "eps": settings.eps, **PLAIN}
    return RoundedAdamW(groups, settings.learning_rate, **own)


def sgd(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    own = {"momentum": settings.momentum, "nesterov": settings.nesterov, **PLAIN}
    return torch.optim.SGD(groups, settings.learning_rate, **own)


def keep_mask(config: Config, name: str, weight: Tensor) -> Tensor:
    """The kept entries by sorting: largest first, lower positions first among equals."""
    n = weight.numel()
    keep = n - round(config.pruning.sparsity * n)
    if config.pruning.method == "random":
        score = torch.rand(n, generator=keyed_generator(config.seed, name, "mask"))
    else:
        score = weight.reshape(-1).abs()
    return mask_of_largest(score, keep).view_as(weight)


def mask_of_largest(scores: Tensor, keep: int) -> Tensor:
    """The mask of the largest scores, of which there is one dimension."""
    order = torch.sort(scores, descending=True, stable=True).indices
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[order[:keep]] = True
    return mask


class Oracle:
    """Trains the full model densely, as if on one stage and `g_data` replicas."""

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
        self.exponents: dict[str, int] = {}
        """Of exact sums, by tensor: the base-2 logarithm of the unit of the coming step."""
        self.passes = 0
        """How often exact sums were computed, steps that are computed again included."""

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
        if self.g_data == 1 or self.config.samo.gradient == "exact":  # else each has its own
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
        cuts = [*range(0, size, per_microbatch), size]
        number = len(cuts) - 1
        total: dict[str, Tensor] = {}
        losses: list[float] = []
        parts: list[dict[str, list[Tensor]]] = []
        """Of each microbatch or replica, the gradients of each use of every tensor."""
        for replica in range(self.g_data):
            own = range(replica * number // self.g_data, (replica + 1) * number // self.g_data)
            for microbatch in own:
                if microbatch == own[0] or config.samo.gradient == "exact":
                    for parameter in self.parameters.values():
                        parameter.grad = None
                inputs, targets = self.data.read(samples[cuts[microbatch] : cuts[microbatch + 1]])
                outputs: Sequence[Tensor] = inputs
                for module in self.modules:
                    output = module(*outputs)
                    outputs = output if isinstance(output, tuple) else (output,)
                loss = self.loss(*outputs, targets) / divisor
                loss.backward()
                losses.append(loss.item())
                if microbatch == own[-1] or config.samo.gradient == "exact":
                    parts.append({name: self._uses(name) for name in self.owned})
        if config.samo.gradient == "exact":
            total = self._exact_sums(parts)
        else:
            total = {
                name: reduce(add, (reduce(add, part[name]) for part in parts))
                for name in self.owned
            }
        return math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses), total

    def _uses(self, name: str) -> list[Tensor]:
        names = [name, *(second for second, first in self.ties.items() if first == name)]
        gradients = [self.parameters[one].grad for one in names]
        assert gradients[0] is None or None not in gradients
        return [torch.zeros_like(self.parameters[name]) if g is None else g for g in gradients]

    def _exact_sums(self, parts: Sequence[Mapping[str, Sequence[Tensor]]]) -> dict[str, Tensor]:
        """The sums of all microbatches' gradients as integers, computed again until they fit."""
        room = 62 - math.ceil(math.log2(8 * len(parts)))
        while True:
            total: dict[str, Tensor] = {}
            again: dict[str, int] = {}
            after: dict[str, int] = {}
            for name in self.owned:
                mask = self.masks.get(name)
                grads = [g.double() for part in parts for g in part[name]]
                if mask is not None:
                    grads = [torch.where(mask, g, 0.0) for g in grads]
                if not all(g.isfinite().all() for g in grads):
                    return {name: torch.full_like(grads[0], math.nan)}
                now = self.exponents.get(name, 10 - room)
                largest = max(float(g.abs().max()) for g in grads)
                integers = [(g / 2.0**now).round().to(torch.int64) for g in grads]
                total[name] = (torch.stack(integers).sum(0).double() * 2.0**now).float()
                if largest > 2.0 ** (now + room):
                    again[name] = now + room - 30
                elif 0 < largest < 2.0 ** (now + 30):
                    again[name] = now - (room - 30)
                elif 0 < largest < 2.0 ** (now + room - 9):
                    after[name] = now - 1
            self.exponents.update(again or after)
            self.passes += 1
            if not again:
                return total

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


def torch_losses(
    module: nn.Module, loss: Callable[[Any, Tensor], Tensor], data: Dataset, config: Config
) -> Iterator[float]:
    """The loss of each step of a dense training as plain torch writes it, with torch's AdamW; only
    the order of the data is ours. `loss` sums over the targets of a microbatch."""
    module.train()
    batch, settings = config.batch, config.optimizer
    groups = [
        {
            "params": [p for p in module.parameters() if (p.dim() > 1) is is_matrix],
            "weight_decay": settings.weight_decay if is_matrix else 0.0,
        }
        for is_matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps
    )
    for step in range(config.train.steps):
        samples = samples_of_step(len(data), batch.global_batch_size, step, config.seed)
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, batch.global_batch_size, batch.microbatch_size):
            inputs, targets = data.read(samples[start : start + batch.microbatch_size])
            summed = loss(module(*inputs), targets)
            summed = summed / (batch.global_batch_size * targets[0].numel())
            summed.backward()
            total += summed.item()
        nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
        optimizer.step()
        yield total
