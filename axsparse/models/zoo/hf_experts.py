"""Mixtures of experts of transformers: which of their matrices are pruned."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


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
            parent.axsparse_multiplies, parent.axsparse_input_dim = True, 0  # type: ignore[assignment]
        if isinstance(parent, nn.Conv1d) and parent.groups == parent.in_channels > 1:
            parent.axsparse_multiplies = False  # type: ignore[assignment]
        for child, number in _experts_of(parent):
            child.axsparse_multiplies = True  # type: ignore[assignment]
            # Of a transposed stack (experts, inputs, outputs) transformers' decorator says so.
            transposed = getattr(child, "is_transposed", False)
            child.axsparse_input_dim = 1 if transposed else 2  # type: ignore[assignment]
            for gate in parent.children():
                if isinstance(gate, nn.Linear) and gate.out_features in (1, number):
                    gate.axsparse_multiplies = False  # type: ignore[assignment]


def _experts_of(parent: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    for child in parent.children():
        stacks = {len(p) for p in child.parameters(recurse=False) if p.dim() == 3}
        if len(stacks) == 1 and not isinstance(child, (nn.Conv1d, nn.ModuleList)):
            yield child, stacks.pop()
