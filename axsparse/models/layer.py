"""`Model`, `Layer` and `Tie`: how a model is declared as a list of layers.

Every rank has the full list, and allocates only the layers of its stage. A custom model needs
layers and a loss, as in `examples/custom_model.py`; `models.sequential.from_sequential` makes one
of an `nn.Sequential`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from axsparse.runtime.errors import ConfigError, check_kind
from axsparse.runtime.files.safetensors import can_be_stored
from axsparse.runtime.host_channel import DTYPES

if TYPE_CHECKING:
    from axsparse.models.teacher import Teacher


TpKind = Literal["colwise", "rowwise", "replicated", "gather_output", "vocabulary", "experts"]
Kind = Literal["block", "embedding", "head"]
"""The kind of a layer: pruning treats blocks, embeddings and heads differently."""
LossFunction = Callable[..., Tensor]
"""`loss(*outputs of the last layer, targets)`; see `Model.loss`."""
MetricFunction = Callable[..., Tensor]
"""`metric(*outputs of the last layer, targets)`; see `Model.metrics`."""
InitFunction = Callable[[str, tuple[int, ...], torch.Generator], Tensor]
"""`init(parameter name, shape, generator)`; see `Layer.init`."""


@dataclass(frozen=True)
class TpStyle:
    """How a module of a layer is sharded over tensor-parallel ranks; a value of `Layer.tp_plan`,
    where its kind alone may stand for it."""

    kind: TpKind
    """`colwise` shards the outputs of a linear module, and `rowwise` its inputs, of which it takes
    its shard if it gets all. `gather_output` is colwise with all outputs gathered, for a module
    that needs all features, such as a norm over all heads. A `replicated` module computes every
    head or feature by itself between the two: its parameters are full, and their gradients summed
    over the ranks. `vocabulary` shards the words of an embedding, or of a weight that the layer
    hands to `linear_cross_entropy`. `experts` have separate sharded parameters, named by their
    paths: every rank runs all experts with its features, and the outputs are summed."""
    packed: int = 1
    """Number of equal matrices stacked by rows, as query, key and value are; each is sharded."""
    unit: int = 1
    """Number of consecutive outputs or inputs that stay together, as the features of a head."""


@dataclass(frozen=True)
class Layer:
    """One layer: how to build its module, and the facts that pruning and partitioning need.

    The module's forward takes the output of the layer before, a tensor or a tuple of tensors
    (passed as separate arguments, or as one to a forward of one argument), and returns a tensor or
    a tuple of tensors, dense and real or integer, which may travel to another rank. Stages are cut
    between layers only: a residual connection lies within one layer, or its tensor is passed on in
    the tuple.

    Parameters are real floating-point numbers, held in the precision of the run; those that require
    a gradient are trained. Buffers that are in the state dict are saved in checkpoints; a forward
    may change them in training, and must not in evaluation. Every replica updates running
    statistics (BatchNorm's) from its microbatches; evaluations use the first replica's, and so does
    a run that resumes. With `samo.gradient: exact` all replicas have the same statistics, which
    follow from all microbatches.

    A layer "block3" with a parameter "fc1.weight" gives the global name "block3.fc1.weight",
    which masks, checkpoints and ties use.
    """

    name: str
    """Unique in the model; letters, digits, '_', '-' and '.', since it becomes a file name."""
    build: Callable[[], nn.Module]
    """Returns the module; every call makes a new one, with new parameters.

    Every rank calls it for every layer, on torch's meta device, to learn the shapes. Without
    `init`, the stage that owns the layer calls it once more in earnest; with `init`, it is never
    called elsewhere than on the meta device, so that it allocates nothing.
    """
    kind: Kind = "block"
    """Blocks are pruned by default, embeddings and heads only on request."""
    init: InitFunction | None = None
    """`init(name, shape, generator)` returns the start values of one parameter, fp32 on the CPU.

    `name` is the parameter's name within the layer. Drawn from `generator`, which is seeded by run
    seed and global name, values do not depend on the layout; the global generators of torch, Python
    and numpy have that seed too, while `init` runs. It is called several times for a parameter and
    gives the same each time. Without `init`, `build` initialises the module
    itself; the global generators are then seeded by run seed and layer name, and restored
    afterwards. Buffers of a layer with `init` must be running statistics or come from
    `Model.start`, since the meta device holds no contents.
    """
    flops: float | None = None
    """Floating-point operations of one sample's forward pass; a multiply-add counts 2.

    None counts them on `Model.example`; without an example, 2 for each parameter are assumed.
    Stages are balanced by this number, and the model flops of a step are computed from it.
    """
    tp_plan: Mapping[str, TpStyle | str] = field(default_factory=dict, hash=False)
    """How modules of the layer are sharded where several ranks compute a stage
    (`layout.g_tensor`), by the path of the module: "colwise", "rowwise", "replicated",
    "gather_output", "vocabulary", "experts", or a `TpStyle`. What lies between a colwise and a
    rowwise module sees some heads or features only, so that it takes their number from the tensor;
    all else is alike on all ranks.
    """
    prefix: str | None = None
    """The beginning of the global names of the layer's tensors, where it is not "name."."""

    def full_name(self, local: str) -> str:
        """The global name of a parameter or buffer of the layer."""
        return (f"{self.name}." if self.prefix is None else self.prefix) + local

    def local_name(self, full: str) -> str:
        """The name within the layer of what has this global name."""
        return full[len(self.full_name("")) :]


@dataclass(frozen=True)
class Tie:
    """Declares two parameters, in two layers, to be one weight.

    Each use has a separate gradient. The two gradients are summed, first + second, before anything
    else, so that the result does not depend on the layout. If the layers stand on two stages, each
    stage makes the start values by itself: hence both layers need the same `Layer.init`, unless the
    model has a `start`. A weight has two uses at most.
    """

    first: str
    """Global name of the earlier use; it owns the master weights and the optimizer state."""
    second: str
    """Global name of the later use, a parameter of the same shape."""


Ties: TypeAlias = Mapping[str, str]
"""From the global name of each tied weight's second use to the name of its first."""


@dataclass(frozen=True)
class Model:
    """A list of layers, the loss, and further facts about the model.

    `models.model_profile.profile` checks the declaration and raises ConfigError if it does not fit.
    """

    layers: Sequence[Layer]
    """In the order of the forward pass; at least one. The first layer gets the inputs of the data,
    floating-point ones cast to the precision of the run."""
    loss: LossFunction
    """`loss(output, targets)` returns the *summed* loss of one microbatch, a scalar.

    The trainer divides it by the number of targets in the step. If the last layer returns a tuple,
    its tensors are passed separately: `loss(*outputs, targets)`. (So a large language model's head
    returns its hidden states and its weight, and `models.losses.linear_cross_entropy` computes the
    logits of some words at a time.) A loss that compares samples with each other sees only the
    samples of one microbatch.
    """
    ties: Sequence[Tie] = ()
    name: str = "custom"
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    """Metrics that an evaluation reports next to the loss, by name.

    `metric(output, targets)` returns a sum over the targets of one microbatch, a scalar, such as
    the number of those that are right (`count_top1`). Its mean over all targets is reported.
    """
    example: Callable[[int], tuple[Tensor, ...]] | None = None
    """`example(samples)` returns inputs of the first layer, for this many samples, of any values.

    With it, the layers are run on the meta device to count their flops and activations. Without
    it, layers count by `Layer.flops` or their parameters, and their activations are unknown.
    """
    loss_logits: Callable[[int], int] | None = None
    """`loss_logits(samples)` returns how many logits the loss holds at a time in a microbatch of so
    many samples, where it computes them itself; plans count their memory. None: it computes none.
    """
    start: StartValues | None = None
    """Start values of parameters and buffers; they take precedence over `Layer.init`."""
    vocab_size: int | None = None
    """The number of token ids of the model; data with more is refused. None checks nothing."""
    teacher: Teacher | None = None
    """A frozen model from which this one learns (`train.teacher`); None: the loss alone counts."""
    container: nn.Module | None = None
    """A module of the user's or transformers' class with the tensors of all layers, by their names;
    `Trainer.model` gives one of its kind. None: `Trainer.model` gives a `PlainModel`."""


def check_model(what: str, given: object) -> None:
    """ConfigError for an argument of the Python API that is no `Model`."""
    suggestion = "make it an ax.Model by ax.from_sequential, ax.from_module or ax.named_model"
    check_kind(f"{what}: model", given, Model, suggestion)


def mismatched_values(tensor: Tensor, *, trained: bool) -> str:
    """The reason why a tensor cannot be the start values of a parameter; empty if it can.

    Values that are not trained may be infinite, such as a mask of scores.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        return f"a {kind} tensor, not dense numbers"
    if not tensor.is_floating_point() or not can_be_stored(tensor):
        return f"{str(tensor.dtype).removeprefix('torch.')}, not real floating-point numbers"
    if not trained or not tensor.numel():
        return ""
    # NaN and infinities are among the smallest and the largest number.
    numbers = tensor if tensor.dtype.itemsize > 1 else tensor.float()
    if not all(extreme.float().isfinite() for extreme in numbers.aminmax()):
        return "not finite: it has NaN or infinities"
    return ""


@runtime_checkable
class StartValues(Protocol):
    """Start values for all parameters of a model, which replace the layers' drawn ones.

    `start_weights.FromFile` reads them from a file, `sequential.OwnValues` from modules in memory.
    For custom values, set `Model.start` to an object with these members. Every rank has one, and
    reads the tensors of its own stage.
    """

    @property
    def fingerprint(self) -> str:
        """A text that is equal if and only if the values are; ranks compare it at the start."""

    def read(self, name: str) -> Tensor | None:
        """The values of one parameter or buffer, by its global name; of its shape, on the CPU.

        Called several times for the same name; nothing is kept between the calls. A tied
        weight is read under the name of its first use. None is returned for a parameter or buffer
        that keeps the value which its layer gives it.
        """


def count_top1(logits: Tensor, targets: Tensor) -> Tensor:
    """How many samples have their largest logit at their class: (B, classes), (B,) to a scalar.

    Among equal logits only one is the largest. A sample with a logit that is not a number is
    never right.
    """
    for name, given in (("logits", logits), ("targets", targets)):
        check_kind(f"count_top1: {name}", given, Tensor, "give a tensor")
    numbers = ~logits.isnan().any(dim=-1)
    return ((logits.argmax(dim=-1) == targets) & numbers).sum()


class _NoDraws(TorchFunctionMode):
    """Skips normal distributions on the meta device, for which torch loads its compiler (2 s)."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def on_meta(layer: Layer) -> nn.Module:
    """The module of a layer on the meta device, without memory; raises the errors of `build`."""
    with torch.device("meta"), _NoDraws():
        return layer.build()


def as_tuple(name: str, output: object) -> tuple[Tensor, ...]:
    """The output of a layer's forward as a tuple; ConfigError unless it is a tensor, or a tuple of
    tensors, that travel between stages."""
    entries = output if isinstance(output, (tuple, list)) else (output,)
    for number, entry in enumerate(entries):
        what, way = type(entry).__name__, "return a tensor, or a tuple of tensors"
        if isinstance(entry, Tensor):
            is_dense = entry.layout == torch.strided and not entry.is_nested
            if is_dense and entry.dtype in DTYPES and not entry.is_inference():
                continue
            what = f"a tensor of {entry.dtype}, {entry.layout}".replace("torch.", "")
            way = (
                "return tensors that are dense, of real numbers (torch.view_as_real, to_dense) "
                "and outside inference mode"
            )
        if entries is output:
            what = f"{type(output).__name__} whose entry {number} is {what}"
        raise ConfigError(f"layer {name}: its forward returned {what}; {way}")
    return tuple(entries)


def takes(module: nn.Module, count: int) -> bool | None:
    """Whether the forward of a module takes `count` arguments; None if its signature is unknown."""
    try:
        inspect.signature(module.forward).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return None
    return True


def takes_tuple(module: nn.Module, count: int) -> bool:
    """Whether the module of a layer gets its `count` inputs as one tuple, as torch's
    `nn.Sequential` passes them: its forward takes one argument, and not `count`."""
    return count > 1 and takes(module, count) is False and bool(takes(module, 1))


def as_arguments(module: nn.Module, inputs: Sequence[Any]) -> Sequence[Any]:
    """The arguments for the module of a layer: its inputs, or one tuple of them (`takes_tuple`)."""
    return (tuple(inputs),) if takes_tuple(module, len(inputs)) else inputs


@dataclass(frozen=True)
class TensorShard:
    """The place of a shard in the full tensor: one of `count` consecutive parts of a dimension."""

    full_shape: tuple[int, ...]
    dim: int
    index: int
    count: int
    packed: int = 1
    """How many matrices stand one above the other in the dimension; each of them is sharded."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The bounds of the shard in each packed matrix."""
        size = self.full_shape[self.dim] // self.packed
        return self.index * size // self.count, (self.index + 1) * size // self.count

    @property
    def shape(self) -> tuple[int, ...]:
        before, after = self._around
        start, stop = self.bounds
        return (*before, self.packed * (stop - start), *after)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def numels(self) -> list[int]:
        """The number of entries of each rank's shard."""
        return [replace(self, index=index).numel for index in range(self.count)]

    @property
    def full_numel(self) -> int:
        return math.prod(self.full_shape)

    def take(self, full: Tensor) -> Tensor:
        """The shard of the full tensor, which may be flat; contiguous."""
        before, after = self._around
        start, stop = self.bounds
        grouped = full.reshape(*before, self.packed, -1, *after)
        part = grouped.narrow(self.dim + 1, start, stop - start)
        return part.reshape(self.shape).contiguous()

    def assemble(self, flat: Tensor) -> Tensor:
        """The full tensor, from the shards of all ranks one after the other."""
        before, after = self._around
        if self.packed == 1 and math.prod(before) == 1:
            return flat.view(self.full_shape)
        parts = flat.split(self.numels)
        grouped = [part.view(*before, self.packed, -1, *after) for part in parts]
        return torch.cat(grouped, self.dim + 1).view(self.full_shape)

    @property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes of the dimensions before and after the sharded one."""
        return self.full_shape[: self.dim], self.full_shape[self.dim + 1 :]


class ShardGroup(Protocol):
    """The ranks that hold the shards of the same tensors; all of them call each method together."""

    @property
    def rank(self) -> int:
        """The index of this rank's shards."""

    def gather(self, shard: TensorShard, part: Tensor) -> Tensor:
        """The full tensor, from the shard of this rank, which may be flat."""

    def gather_rows(self, row: Tensor) -> Tensor:
        """The flat tensors of all ranks, alike in size, as the rows of a matrix."""


class LayerSharding(Protocol):
    """How the layers of one stage are sharded over tensor-parallel ranks."""

    @property
    def group(self) -> ShardGroup:
        """The ranks that have the shards."""

    def shard(self, layer: Layer, module: nn.Module) -> Mapping[str, TensorShard]:
        """Replace the sharded parameters of a layer's module by this rank's shards, which have no
        contents yet; returns the shards by the names of the parameters, which stay."""
