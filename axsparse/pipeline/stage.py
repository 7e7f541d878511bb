"""One stage's layers: the forward and the backward of one microbatch, and nothing of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from axsparse.errors import ConfigError
from axsparse.models.layer import LossFunction
from axsparse.samo.construct import BuiltLayer
from axsparse.seeds import keyed_seed, preserved_rng

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Key:
    """What random numbers of a microbatch depend on, beside the seed and the layer's name."""

    step: int
    first_sample: int
    """Global number of the microbatch's first sample, whatever the layout."""


class Stage:
    """Runs the layers of one rank.

    A forward in training keeps what its backward needs under the microbatch's number.
    On the last stage the output is the microbatch's loss.
    """

    def __init__(
        self,
        layers: Sequence[BuiltLayer],
        *,
        loss: LossFunction | None,
        input_dtype: torch.dtype | None,
        seed: int,
        checkpoint_activations: int,
    ) -> None:
        """`loss` is given on the last stage only, `input_dtype` on the first: what
        floating-point samples are cast to. Every `checkpoint_activations`-th layer is
        recomputed in the backward; 0: none.
        """
        self._layers = [
            _RunningLayer(
                layer.spec.name,
                layer.module,
                is_random=layer.spec.random or _has_dropout(layer.module),
                is_recomputed=checkpoint_activations > 0 and number % checkpoint_activations == 0,
            )
            for number, layer in enumerate(layers)
        ]
        self._loss = loss
        self._input_dtype = input_dtype
        self._seed = seed
        self._live: dict[int, tuple[Tensors, Tensors]] = {}

    @property
    def live(self) -> int:
        """Microbatches whose activations are held."""
        return len(self._live)

    def forward(
        self, microbatch: int, inputs: Tensors, key: Key, targets: Tensor | None, divisor: float
    ) -> Tensors:
        """Outputs of the last layer; on the last stage (loss / divisor,), a scalar in fp32.

        `inputs` that require a gradient become leaves whose gradients `backward` returns.
        """
        outputs = self._cast(inputs)
        for layer in self._layers:
            outputs = layer.train(outputs, (self._seed, layer.name, key.step, key.first_sample))
        if self._loss is not None:
            outputs = (self._summed_loss(outputs, targets) / divisor,)
        self._live[microbatch] = (inputs, outputs)
        return outputs

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], loss_scale: float
    ) -> list[Tensor | None]:
        """Gradients of the inputs that required one, in order; None where there was none.

        `gradients` are those of the outputs that require one; empty on the last stage,
        whose output is the loss and whose backward starts from `loss_scale`.
        """
        inputs, outputs = self._live.pop(microbatch)
        roots = [output for output in outputs if output.requires_grad]
        if self._loss is not None:
            gradients = [torch.full_like(root, loss_scale) for root in roots]
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, gradients, strict=True)
            if gradient is not None
        ]
        if pairs:
            torch.autograd.backward(
                [root for root, _ in pairs], [gradient for _, gradient in pairs]
            )
        return [tensor.grad for tensor in inputs if tensor.requires_grad]

    @torch.no_grad()
    def evaluate(self, inputs: Tensors, targets: Tensor | None) -> Tensors:
        """Outputs without keeping anything; on the last stage the summed loss."""
        outputs = self._cast(inputs)
        for layer in self._layers:
            outputs = layer.evaluate(outputs)
        if self._loss is not None:
            outputs = (self._summed_loss(outputs, targets),)
        return outputs

    def _summed_loss(self, outputs: Tensors, targets: Tensor | None) -> Tensor:
        assert self._loss is not None
        loss = self._loss(*outputs, targets)
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            kind = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"loss: {kind}; it must be a scalar tensor of floating point")
        if loss.dim() != 0:
            raise ConfigError(
                f"loss: a tensor of shape {tuple(loss.shape)}; it must be the summed loss of a "
                "microbatch, a scalar"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError("loss: it does not depend on any trained weight; do not detach it")
        return loss.float()

    def _cast(self, inputs: Tensors) -> Tensors:
        dtype = self._input_dtype
        if dtype is None:
            return inputs
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)


@dataclass
class _RunningLayer:
    """One layer with what its calls need to know."""

    name: str
    module: nn.Module
    is_random: bool
    is_recomputed: bool
    is_proven: bool = False
    """Whether a first call has shown that a layer not known as random draws nothing."""

    def train(self, inputs: Tensors, key: tuple[int | str, ...]) -> Tensors:
        self.module.train()
        if not self.is_random and not self.is_proven:
            return self._prove(inputs)
        if self.is_recomputed and torch.is_grad_enabled():
            # The call seeds itself, so that the recomputation draws the same numbers.
            recomputed: Tensors = checkpoint(
                lambda *tensors: self._call(tensors, key),
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            return recomputed
        return self._call(inputs, key)

    def evaluate(self, inputs: Tensors) -> Tensors:
        self.module.eval()
        return _as_tuple(self.name, self.module(*inputs))

    def _call(self, inputs: Tensors, key: tuple[int | str, ...]) -> Tensors:
        if not self.is_random:
            return _as_tuple(self.name, self.module(*inputs))
        with preserved_rng():
            torch.manual_seed(keyed_seed(*key, "forward"))
            return _as_tuple(self.name, self.module(*inputs))

    def _prove(self, inputs: Tensors) -> Tensors:
        before = torch.get_rng_state()
        outputs = _as_tuple(self.name, self.module(*inputs))
        if not torch.equal(before, torch.get_rng_state()):
            raise ConfigError(
                f"layer {self.name}: its forward draws random numbers, which would depend on the "
                "layout; declare it with Layer(..., random=True)"
            )
        self.is_proven = True
        return outputs


def _has_dropout(module: nn.Module) -> bool:
    return any(isinstance(child, _DropoutNd) and child.p > 0 for child in module.modules())


def _as_tuple(name: str, output: object) -> Tensors:
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and all(isinstance(t, Tensor) for t in output):
        return tuple(output)
    raise ConfigError(
        f"layer {name}: its forward returned {type(output).__name__}; "
        "return a tensor or a tuple of tensors"
    )
