"""Mixtures of experts of transformers: which of their matrices are pruned."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

ROUTERS = {"router", "router_gate"}
"""Names of routers of which experts may be of another form than stacks of one length."""


def mark_what_multiplies(layers: nn.Module) -> None:
    """Mark the modules other than torch's own whose matrices are pruned by default: transposed
    linear layers, and experts, which are stacks of matrices.

    Routers and the gates of shared experts (`_gates_of`, `ROUTERS`) stay dense, as does a
    convolution of each channel by itself.
    """
    from transformers.pytorch_utils import Conv1D

    for path, parent in layers.named_modules():
        if isinstance(parent, nn.Linear) and ROUTERS & {*path.split(".")}:
            parent.axsparse_multiplies = False  # type: ignore[assignment]
        if isinstance(parent, Conv1D):
            parent.axsparse_multiplies, parent.axsparse_input_dim = True, 0  # type: ignore[assignment]
        if isinstance(parent, nn.Conv1d) and parent.groups == parent.in_channels > 1:
            parent.axsparse_multiplies = False  # type: ignore[assignment]
        for child, number in _experts_of(parent):
            child.axsparse_multiplies = True  # type: ignore[assignment]
            # Of a transposed stack (experts, inputs, outputs) transformers' decorator says so.
            transposed = getattr(child, "is_transposed", False)
            child.axsparse_input_dim = 1 if transposed else 2  # type: ignore[assignment]
            for gate in _gates_of(parent, number):
                gate.axsparse_multiplies = False  # type: ignore[assignment]


def _gates_of(parent: nn.Module, number: int) -> Iterator[nn.Module]:
    """The linear layers next to `number` experts that decide how much each counts: in a router the
    last one has an output for each expert, and some more where experts that do nothing are not
    among them; a single output is the gate of a shared expert."""
    for name, child in parent.named_children():
        products = [one for one in child.modules() if isinstance(one, nn.Linear)]
        outputs = products[-1].out_features if products else 0
        if name == "gate" or outputs == number or (products == [child] and outputs == 1):
            yield from products


def _experts_of(parent: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    for child in parent.children():
        stacks = {len(p) for p in child.parameters(recurse=False) if p.dim() == 3}
        if len(stacks) == 1 and not isinstance(child, (nn.Conv1d, nn.ModuleList)):
            yield child, stacks.pop()
