"""Mixtures of experts of transformers: which matrices are pruned, and how routers are balanced.

The balancing loss of a microbatch (Fedus et al. 2021, Switch Transformers, equations 4 to 6), over
all routers of the model and all of its E experts:

    coefficient · E · Σ_e (tokens that chose e / rows) · (Σ probabilities of e / rows)

where rows is routers times tokens. Both sums are over routers and tokens, so only three rows of E
numbers (`loads`), which each layer adds to, travel along the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axsparse.models.layer import LossFunction
from axsparse.runtime.targets import IGNORED

GATES = "router_logits"
"""The name of the outputs of routers in transformers, where it records them."""


def mark_what_multiplies(layers: nn.Module) -> None:
    """Mark the modules other than torch's own whose matrices are pruned by default: transposed
    linear layers, and experts, which are stacks of matrices.

    A linear layer next to experts that has an output for each of them is a router, and one with a
    single output is the gate of a shared expert; both stay dense, as does a convolution of each
    channel by itself.
    """
    from transformers.pytorch_utils import Conv1D

    for parent in layers.modules():
        if isinstance(parent, Conv1D):
            parent.multiplies, parent.input_dim = True, 0  # type: ignore[assignment]
        if isinstance(parent, nn.Conv1d) and parent.groups == parent.in_channels > 1:
            parent.multiplies = False  # type: ignore[assignment]
        for child, number in _experts_of(parent):
            child.multiplies = True  # type: ignore[assignment]
            # Of a transposed stack (experts, inputs, outputs) transformers' decorator says so.
            transposed = getattr(child, "is_transposed", False)
            child.input_dim = 1 if transposed else 2  # type: ignore[assignment]
            for gate in parent.children():
                if isinstance(gate, nn.Linear) and gate.out_features in (1, number):
                    gate.multiplies = False  # type: ignore[assignment]


def _experts_of(parent: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    for child in parent.children():
        stacks = {len(p) for p in child.parameters(recurse=False) if p.dim() == 3}
        if len(stacks) == 1 and not isinstance(child, (nn.Conv1d, nn.ModuleList)):
            yield child, stacks.pop()


@dataclass(frozen=True)
class Balance:
    """The balancing loss of a model."""

    coefficient: float
    chosen: int

    def begin(self, device: torch.device) -> Tensor:
        """The loads before the first layer, (3, 1), which the first router widens to (3, E)."""
        return torch.zeros(3, 1, device=device)

    def add(self, loads: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """The loads plus the loads of a layer's routers, whose outputs are `gates`, (tokens, E)."""
        for gate in gates:
            probabilities = gate.softmax(dim=-1)
            chosen = probabilities.topk(self.chosen, dim=-1).indices.flatten()
            ones = torch.ones(chosen.shape, device=gate.device)
            tokens = torch.zeros(gate.shape[-1], device=gate.device).scatter_add_(0, chosen, ones)
            rows = torch.full_like(tokens, len(gate))
            loads = loads + torch.stack([tokens, probabilities.float().sum(0), rows])
        return loads

    def penalty(self, loads: Tensor) -> Tensor:
        """The balancing loss of a microbatch from the loads of all layers, a scalar."""
        tokens, probabilities, rows = loads
        overall = ((tokens / rows[0]) * (probabilities / rows[0])).sum()
        penalty: Tensor = self.coefficient * (overall * len(tokens))
        return penalty


@dataclass(frozen=True)
class BalancedLoss:
    """A loss to which the balancing loss of a microbatch is added, as often as it has targets: the
    mean over the targets then equals transformers'. Evaluations have no balancing loss."""

    loss: LossFunction
    outputs: int
    """The number of outputs that `loss` takes in addition to the targets."""

    def __call__(self, *outputs: Tensor) -> Tensor:
        """The loss of the model's outputs and, as the last argument, its targets."""
        own, penalties, targets = outputs[: self.outputs], outputs[self.outputs : -1], outputs[-1]
        total: Tensor = self.loss(*own, targets)
        for penalty in penalties:
            total = total + penalty * (targets != IGNORED).sum()
        return total


def found_balance(
    causal: Any, layers: nn.Module, their_penalty: Callable[[tuple[Tensor, ...]], Tensor]
) -> Balance | None:
    """The balancing loss of a model; None where it is not the one above.

    `their_penalty` is what transformers adds to the loss for some outputs of routers. The number of
    chosen experts is the one by which both have the same bits.
    """
    coefficient = getattr(causal.config, "router_aux_loss_coef", None)
    numbers = {number for parent in layers.modules() for _, number in _experts_of(parent)}
    if len(numbers) != 1 or not isinstance(coefficient, (int, float)):
        return None
    [experts] = numbers
    generator = torch.Generator().manual_seed(0)
    gates = tuple(torch.randn(7, experts, generator=generator) for _ in range(2))
    theirs = their_penalty(gates)
    for chosen in range(1, experts + 1):
        balance = Balance(float(coefficient), chosen)
        loads = balance.add(balance.begin(torch.device("cpu")), gates)
        if torch.equal(balance.penalty(loads), theirs):
            return balance
    return None


def records_gates(owner: Any) -> bool:
    """Let transformers record the outputs of routers; False if it has none of this model."""
    if GATES not in (getattr(owner, "_can_record_outputs", None) or {}):
        return False
    from transformers.utils.output_capturing import install_all_output_capturing_hooks

    install_all_output_capturing_hooks(owner)
    return True


@contextmanager
def recorded_gates() -> Iterator[list[Tensor]]:
    """Collects the outputs of the routers that are called meanwhile in this thread."""
    from transformers.utils.output_capturing import _active_collector

    gates: list[Tensor] = []
    collector: Any = _active_collector
    token = collector.set({GATES: gates})
    try:
        yield gates
    finally:
        collector.reset(token)
