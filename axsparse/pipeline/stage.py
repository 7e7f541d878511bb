"""The forward and the backward of one microbatch through the layers of one stage."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from axsparse.config.section import counted
from axsparse.models.layer import LossFunction, MetricFunction
from axsparse.pipeline.layer_runner import DrawKey, LayerRunner, Tensors, backward
from axsparse.pipeline.weight_gradients import DeferredGradients, StageProducts
from axsparse.runtime.canonical_form import canonical
from axsparse.runtime.errors import ConfigError, note_errors
from axsparse.runtime.seeds import preserved_rng, rng_state, seed_all
from axsparse.samo.expansion import Expansion


@dataclass(frozen=True)
class Key:
    """The key of a microbatch's random numbers, together with the seed and the layer's name."""

    step: int
    first_sample: int
    """Number of the microbatch's first sample in the global batch order, equal in every layout."""

    def of(self, seed: int, name: str) -> DrawKey:
        return seed, name, self.step, self.first_sample


@dataclass(frozen=True)
class StageTeacher:
    """The part of a teacher that runs next to the layers of a stage (`models/teacher.py`)."""

    layers: Sequence[LayerRunner]
    """Frozen layers; none where a teacher has fewer layers than the model."""
    loss: Callable[[Tensors, Tensors, Tensor | None], Tensor]
    """`loss(outputs, taught, targets)`, which replaces the loss in training: of the outputs of the
    last layers of the model and of the teacher."""


class Stage:
    """Runs the layers of one rank; it knows no messages and no neighbours.

    A forward in training keeps what its backward needs, under the microbatch's number. On the
    last stage the output is the microbatch's loss.
    """

    # Reason: the layers, and all that takes part in their forward and backward.
    def __init__(
        self,
        layers: Sequence[LayerRunner],
        *,
        loss: LossFunction | None,
        metrics: Mapping[str, MetricFunction],
        input_dtype: torch.dtype | None,
        seed: int,
        products: StageProducts | None = None,
        expansion: Expansion | None = None,
        teacher: StageTeacher | None = None,
        loss_is_known: bool = False,
    ) -> None:
        """The last stage has the model's `loss` (other stages: None) and `metrics` (other stages:
        none). A loss that is not known is tried: it has to be a sum, and to keep no state. On the
        first stage, floating-point samples are cast to `input_dtype`; None leaves them as they
        are. `seed` is the run's. `products` take part in what linear and convolution modules
        multiply; where backwards are split, they defer weight gradients to `weight_gradients`.
        `expansion` is the memory of weights that are sparse at rest. With a `teacher` each forward
        in training gets what `teach` returns.
        """
        self.layers, self.teacher = layers, teacher
        self._loss = loss
        self._loss_is_known = loss_is_known
        self._known_metrics = set[str]()
        self._leaves_are_known = False
        self._own = {id(weight) for layer in layers for weight in layer.parameters}
        self._metrics = metrics
        self._input_dtype = input_dtype
        self._seed = seed
        self._products = products
        self._expansion = expansion
        self._live: dict[int, tuple[Tensors, Tensors]] = {}
        """The inputs and outputs of each microbatch that waits for its backward."""

    @property
    def live(self) -> int:
        """How many microbatches wait for their backward, with their activations."""
        return len(self._live)

    @property
    def unfinished(self) -> int:
        """How many microbatches have begun their forward and lack their weight gradients."""
        return self.live + (0 if self._deferred is None else len(self._deferred))

    @property
    def _deferred(self) -> DeferredGradients | None:
        return None if self._products is None else self._products.deferred

    @torch.no_grad()
    def teach(self, taught: Tensors, key: Key) -> Tensors:
        """The outputs of the teacher's last layer here, of which nothing is kept. `taught` are its
        outputs on the stage before, and on the first stage the inputs. Empty without a teacher."""
        if self.teacher is None:
            return ()
        taught = self._cast(taught)
        with preserved_rng(is_seeded=True):
            for layer in self.teacher.layers:
                taught = layer.evaluate(taught, key.of(self._seed, layer.name))
        return taught

    # Reason: a microbatch, its teacher's activations, and what its loss needs.
    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        key: Key,
        targets: Tensor | None,
        divisor: float,
        taught: Tensors = (),
    ) -> Tensors:
        """The outputs of the last layer; on the last stage one fp32 scalar, loss / divisor.

        `backward` returns the gradients of those `inputs` that require one. `taught` is what
        `teach` has returned, which the loss takes.
        """
        outputs = self._cast(inputs)
        if self._products is not None and not self.unfinished:
            self._products.begin_step()
        products = nullcontext() if self._products is None else self._products.in_place()
        with preserved_rng(is_seeded=True), products, self._expanding():
            for layer in self.layers:
                before, outputs = outputs, layer.train(outputs, key.of(self._seed, layer.name))
            known = {output.grad_fn for output in outputs if self._leaves_are_known}
            if self._loss is not None:
                outputs = (self._summed_loss(before, outputs, targets, key, taught) / divisor,)
        self._reject_foreign(outputs, known)
        self._live[microbatch] = inputs, outputs
        return outputs

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], loss_scale: float
    ) -> list[Tensor | None]:
        """The gradients of the inputs that require one, in order; None for an input that got none.

        `gradients` has one for each output that requires one. On the last stage it is empty: its
        output is the loss, whose gradient is `loss_scale`.
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
        products = self._products
        deferring = nullcontext() if products is None else products.backward_of(microbatch)
        with deferring, self._expanding(is_backward=True):
            if pairs:
                backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        return [tensor.grad for tensor in inputs if tensor.requires_grad]

    def weight_gradients(self, microbatch: int) -> None:
        """Compute the weight gradients that the microbatch's backward has deferred."""
        assert self._deferred is not None, "backwards that are not split defer nothing"
        self._deferred.run(microbatch)

    def take_part(self, *, is_backward: bool) -> None:
        """Gather the weights of a forward or backward of which only other replicas have a
        microbatch."""
        with self._expanding(is_backward=is_backward):
            pass

    def _expanding(self, *, is_backward: bool = False) -> AbstractContextManager[None]:
        if self._expansion is None:
            return nullcontext()
        return self._expansion.in_use(is_backward=is_backward)

    # -- evaluation -----------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, inputs: Tensors, key: Key, targets: Tensor | None) -> Tensors:
        """The outputs of the last layer, of which nothing is kept; on the last stage the summed
        loss and the count of each metric, all scalars."""
        outputs = self._cast(inputs)
        with preserved_rng(is_seeded=True), self._expanding():
            for layer in self.layers:
                before, outputs = outputs, layer.evaluate(outputs, key.of(self._seed, layer.name))
            if self._loss is None:
                return outputs
            counts = [self._count(name, outputs, targets, key) for name in self._metrics]
            return self._summed_loss(before, outputs, targets, key), *counts

    def _count(self, name: str, outputs: Tensors, targets: Tensor | None, key: Key) -> Tensor:
        if name not in self._known_metrics:
            self._reject_mean(name, outputs, targets)
        seed_all(*key.of(self._seed, name), "metric")
        count = self._metrics[name](*outputs, targets)
        if not isinstance(count, Tensor) or count.dim() != 0:
            kind = tuple(count.shape) if isinstance(count, Tensor) else type(count).__name__
            raise ConfigError(
                f"metric {name}: {kind}; it must be a count of a microbatch's targets, a scalar "
                "tensor"
            )
        return count

    def _reject_mean(self, name: str, outputs: Tensors, targets: Tensor | None) -> None:
        """ConfigError if a metric that draws no random numbers is a real number other than zero,
        and the same for a sample given twice. A later microbatch tells where it is zero, as an
        accuracy may be, or no number."""
        each = {} if targets is None else _rows_of_sample(targets)
        if targets is None or all(_rows(output, each) is None for output in outputs):
            self._known_metrics.add(name)
            return
        counts = list[Tensor]()
        seed_all(0, name, "metric")
        before = rng_state()
        try:
            for copies in (1, 2):
                given, _ = _sample(outputs, each, 0, copies)
                given += (targets[:1].repeat_interleave(copies, 0),)
                counts.append(torch.as_tensor(self._metrics[name](*given)))
            once, twice = counts
            is_mean = once.is_floating_point() and torch.allclose(once, twice, rtol=1e-4, atol=0.0)
            is_mean = is_mean and rng_state() == before
            is_known = bool(once != 0.0) and bool(once.isfinite())
        except Exception:  # it may work for microbatches of one size only
            is_mean, is_known = False, True
        if is_known:
            self._known_metrics.add(name)
        if is_known and is_mean:
            raise ConfigError(
                f"metric {name}: the same for one sample as for it twice, so it is a mean; make it "
                "the sum over a microbatch, which evaluations divide by the targets"
            )

    def _summed_loss(
        self,
        before: Tensors,
        outputs: Tensors,
        targets: Tensor | None,
        key: Key,
        taught: Tensors = (),
    ) -> Tensor:
        """The loss of the outputs of the last layer, which got the tensors `before`."""
        assert self._loss is not None
        if not self._loss_is_known:
            self._reject_unfit(before, outputs, targets, key)
        seed_all(*key.of(self._seed, ""), "loss" if torch.is_grad_enabled() else "evaluated loss")
        if self.teacher is not None and taught:
            loss = self.teacher.loss(outputs, taught, targets)
        else:
            try:
                with note_errors("loss"):
                    loss = self._loss(*outputs, targets)
            except TypeError:
                _reject_other_arguments(self._loss, (*outputs, targets))
                raise
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

    @torch.enable_grad()  # an evaluation may come first
    def _reject_unfit(
        self, before: Tensors, outputs: Tensors, targets: Tensor | None, key: Key
    ) -> None:
        """ConfigError if a sample given twice has less than twice its gradient: the loss is a mean,
        and the trainer divides the sum of losses by the global count of targets. Where no output
        has rows of samples, the last layer runs again, and its loss counts. Also if a sample
        has another loss after other samples, with equal random numbers: the loss keeps state. A
        later microbatch tells where the loss of this sample is zero or none, as of ignored
        targets."""
        assert self._loss is not None
        each = {} if targets is None else _rows_of_sample(targets)
        runs_again = all(_rows(output, each) is None for output in outputs)
        if targets is None or (runs_again and all(_rows(one, each) is None for one in before)):
            self._loss_is_known = True
            return
        tried = list[tuple[float, float]]()
        try:
            for times, place in ((1, 0), (1, 0), (2, 0), (1, -1), (1, 0)):
                is_drawn = len(tried) > 1 and tried[0] != tried[1]
                copies = 4 if is_drawn and times == 2 else times
                given, parts = _sample(before if runs_again else outputs, each, place, copies)
                if len(tried) != 1:
                    seed_all(*key.of(self._seed, ""), "tried loss")
                if runs_again:
                    given, parts = self.layers[-1].run_again(given), []
                loss = self._loss(*given, torch.cat([targets[place, None]] * copies))
                tried.append((loss.item(), _size_of_gradients(loss, parts)))
        except Exception:  # the loss may work for microbatches of one size only
            self._loss_is_known = True
            return
        once, again, twice, _, later = tried
        # Tensor-parallel ranks have one loss, and gradients of their own: all try again, or none.
        self._loss_is_known = once[0] != 0 and math.isfinite(once[0])
        # A mean is the same but for rounding. One that draws random numbers differs by chance, as
        # a sum does: its value counts as well.
        grows = once != again and abs(twice[0]) >= 1.5 * abs(once[0])
        if twice[1] < 1.5 * once[1] and not grows:
            raise ConfigError(
                "loss: the same sample twice has less than twice its gradient, so it is a mean; "
                'make it the sum of a microbatch\'s losses (reduction="sum"), which the trainer '
                "divides"
            )
        tolerance = 1e-4 if loss.dtype.itemsize >= 4 else 5e-2  # Sums on GPUs differ by roundings.
        if abs(later[0] - once[0]) > tolerance * abs(once[0]):
            raise ConfigError(
                f"loss: a sample has a loss of {once[0]:.4g}, and of {later[0]:.4g} after other "
                "samples, so it keeps state, which is in no checkpoint; let the last layer keep it "
                "in a buffer and return it for the loss, or draw from the global random generators"
            )

    def _reject_foreign(self, outputs: Tensors, known: set[Node | None]) -> None:
        """ConfigError if a parameter that no layer has gets a gradient in the graph of the outputs,
        behind its `known` nodes. Other leaves may belong to the forward, as in a gradient penalty.
        """
        self._leaves_are_known = True
        ends = {output.grad_fn for output in outputs} - known
        nodes = [node for node in ends if node is not None]
        seen = known | ends
        while nodes:
            node = nodes.pop()
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self._own:
                named, more = self._named(leaf), ""
                if not named.startswith("loss"):
                    more = (
                        "; a function put in place of a forward has to take the module as its "
                        "argument (types.MethodType), also where it calls the one before it: "
                        "type(self).forward(self, …)"
                    )
                raise ConfigError(
                    f"{named} gets a gradient and would never be trained, since no "
                    "layer has it; make it a parameter of a layer's module, or freeze it "
                    f"(requires_grad_(False)){more}"
                )
            further = {other for other, _ in node.next_functions if other is not None} - seen
            seen |= further
            nodes.extend(further)

    def _named(self, leaf: Tensor) -> str:
        """A tensor in an error: by its name in the loss, if that is a module which has it."""
        if isinstance(self._loss, nn.Module):
            for name, parameter in self._loss.named_parameters():
                if parameter is leaf:
                    return f"loss: its parameter {name!r}"
        first, last, shape = self.layers[0].name, self.layers[-1].name, tuple(leaf.shape)
        return f"layers {first} to {last}: a parameter of shape {shape} that a forward or loss uses"

    def _cast(self, inputs: Tensors) -> Tensors:
        """The inputs in canonical form; floating-point samples in the precision of the run."""
        dtype = self._input_dtype
        if dtype is not None:
            inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)
        return tuple(map(canonical, inputs))


def _rows_of_sample(targets: Tensor) -> dict[int, int]:
    """How many rows are of one sample in tensors of some lengths, since rows may be tokens; other
    tensors, such as a weight or a scalar, belong to all samples."""
    if targets.dim() == 0 or not len(targets):
        return {}
    return {len(targets): 1, targets.numel(): targets[0].numel()}


def _rows(tensor: Tensor, each: Mapping[int, int]) -> int | None:
    """How many rows of a tensor are of one sample, by the length that tensors of samples have."""
    has_rows = tensor.dim() and not isinstance(tensor, nn.Parameter)
    return each.get(len(tensor)) if has_rows else None


def _sample(
    tensors: Tensors, each: Mapping[int, int], place: int, copies: int
) -> tuple[Tensors, list[Tensor]]:
    """The tensors with the rows of one sample alone, joined as often, and the leaves of them."""
    given, parts = list[Tensor](), list[Tensor]()
    for tensor in tensors:
        rows = _rows(tensor, each)
        if isinstance(tensor, nn.Parameter):
            given.append(tensor.detach())
        elif rows is None:
            given.append(tensor.detach().clone())
        else:
            part = tensor.detach().unflatten(0, (-1, rows))[place].clone()
            if part.is_floating_point():
                parts.append(part.requires_grad_())
            given.append(torch.cat([part] * copies))
    return tuple(given), parts


def _size_of_gradients(loss: Tensor, parts: Sequence[Tensor]) -> float:
    """The sum of the largest entries of the gradients of some tensors; without any, the loss."""
    if not parts:
        return abs(loss.item())
    with torch.autograd.set_multithreading_enabled(False):  # as in `backward`
        found = torch.autograd.grad(loss, parts, allow_unused=True)
    norms = [torch.linalg.vector_norm(each, math.inf) for each in found if each is not None]
    return float(sum(norm.item() for norm in norms))


def _reject_other_arguments(loss: LossFunction, given: Sequence[object]) -> None:
    """ConfigError for a loss that cannot be called with the outputs and the targets."""
    try:
        inspect.signature(loss).bind(*given)
    except TypeError as reason:
        raise ConfigError(
            f"loss: gets {counted(len(given) - 1, 'output')} of the last layer and the targets, "
            f"and cannot ({reason}); take as many arguments"
        ) from reason
