"""SGD, plain, with momentum or with Nesterov's momentum (Sutskever et al. 2013, in the form of
`torch.optim.SGD`).

    d ← g + λ θ
    v ← μ v + d
    θ ← θ − η d                without momentum, μ = 0
    θ ← θ − η v                with momentum
    θ ← θ − η (d + μ v)        with Nesterov's momentum

Weight decay λ is a part of the gradient, hence of the momentum, unlike AdamW's. The operations and
their order are as in `torch.optim.SGD` with `foreach=False`, `fused=False` and no dampening, so
that kept entries have the bits of a masked dense run (a zero of the first step's momentum may
differ in its sign, which no weight ever shows).
"""

from __future__ import annotations

from torch import Tensor

from axsparse.samo.optim.optimizer import Compiled, Hyper, Optimizer, StateBlock


def sgd(momentum: float, *, nesterov: bool) -> Optimizer:
    """The optimizer for one μ; with μ = 0 it has no moments."""

    def update_moments(block: StateBlock, hyper: Hyper) -> None:
        if momentum:
            block.moments["momentum"].mul_(momentum).add_(_decayed(block, hyper))

    def apply(block: StateBlock, statistics: Tensor | None, hyper: Hyper) -> None:
        assert statistics is None
        if not momentum:
            direction = _decayed(block, hyper)
        elif nesterov:
            direction = _decayed(block, hyper).add(block.moments["momentum"], alpha=momentum)
        else:
            direction = block.moments["momentum"]
        block.master.add_(direction, alpha=-hyper.learning_rate)

    def factors(hyper: Hyper) -> tuple[float, ...]:
        return hyper.weight_decay, momentum, -hyper.learning_rate, float(nesterov)

    variant = ("NESTEROV" if nesterov else "PLAIN") if momentum else "NONE"
    return Optimizer(
        moments=("momentum",) if momentum else (),
        update_moments=update_moments,
        statistics=None,
        apply=apply,
        compiled=Compiled("sgd", factors, variant),
    )


def _decayed(block: StateBlock, hyper: Hyper) -> Tensor:
    """d of the formula: the gradient plus weight decay."""
    if hyper.weight_decay == 0:
        return block.grad
    return block.grad.add(block.master, alpha=hyper.weight_decay)
