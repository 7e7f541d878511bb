"""The layer check: each distinct layer of a model, compared with plain torch before the first step.

One microbatch of the first step passes through the stages, forward and backward, as in training.
Each stage records the inputs, outputs and gradients of its distinct layers. Then the module as the
user gave it repeats each of these runs by itself: with full weights, its own hooks and modes,
without shards, recomputation, deferred gradients or sparse products. Outputs, buffers, gradients of
inputs and gradients of weights must agree.

The check leaves nothing behind: the microbatch works on copies of the buffers, attributes of
modules are put back, the first step draws the same random numbers again, and overwrites the
gradients.
"""

from __future__ import annotations

import copy
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from axsparse.data.batches import Batch
from axsparse.models.layer import Layer, Model, on_meta
from axsparse.models.layer_cost import IN_FLOAT, LACKING
from axsparse.models.module_buffers import (
    replaced,
    same_attributes,
    slots,
    start_training,
    types_of_statistics,
    version,
)
from axsparse.models.sequential import (
    OwnValues,
    copied_objects,
    given_module,
    is_in_evaluation,
)
from axsparse.models.stand_ins import PartModule, are_alike
from axsparse.models.watched_forward import tensors_of
from axsparse.pipeline.engine import Engine
from axsparse.pipeline.layer_runner import (
    LayerRunner,
    RecordedRun,
    Run,
    Tensors,
    forward_plainly,
    run_plainly,
)
from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import AxsparseError, ConfigError, one_line
from axsparse.runtime.exchange import gather_numbers, meet
from axsparse.runtime.seeds import preserved_rng, seed_all
from axsparse.samo.expansion import put_storage
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.layer_construction import BuiltLayer, full_weights
from axsparse.samo.layer_state import LayerState
from axsparse.samo.tensor_state import TensorState
from axsparse.training.plan import RunPlan

OWN_MODELS = "axsparse.models.zoo"
"""Models that build their modules here are not a user's."""
OWN_DECODER = f"{OWN_MODELS}.gpt"
"""The decoder's layers, whose every layout the tests compare with plain torch."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to a tensor's largest entry, by the precision of the run. Products
whose terms are added in another order differ by some roundings: 1e-7, 1e-3 and 8e-3 each. What a
layer does wrong differs by its own size."""
NOISE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference of a weight gradient relative to the largest entry of all weight gradients of
the layer: a gradient that is zero but for rounding (the bias of attention's keys) consists of such
noise."""
FIXED_POINT_UNIT = 2.0**-40
"""The unit of exact sums in the check: entries up to 2**20 fit, and 2e-12 is seen."""
AT_ONCE = 2
"""Layers compared after one pass, whose recording takes about a layer's activations each."""
ENTRIES_AT_ONCE = 1 << 22
"""Entries of two tensors compared at once, in fp32: copies of a vocabulary's weight, which the last
layer hands to the loss, would take more memory than a step does."""
SILENT_SECONDS = 1.0
"""A check that takes longer says so."""
SHARDED = (
    "between a colwise and a rowwise module each rank has some features, and draws the same random "
    "numbers for them: gather before what needs all of them (gather_output), make its module "
    '"replicated", or move it behind the rowwise module (Layer.tp_plan)'
)
"""The likely cause where tensor-parallel ranks compute something else than one."""
RECOMPUTED = (
    "a second forward of it, for the backward, may give something else: try "
    "pipeline.checkpoint_activations: 0"
)
TYPE_NAME = re.compile(
    r"(B?Float|Half|Double|Long|Int|Short|Char|Byte|Bool)(\d\w*|Tensor)?\b"
    r"|\b(b?float\d*|double|bool|u?int\d*)\b"
)
"""The name of a type of tensor in an error of torch."""
INTEGERS = re.compile(
    r"got (Byte|Char|Short|Int|Long|Bool) and |Input type \((?!float|double|c10)[\w ]+\) and bias"
)
"""The types of integers where a product takes the weights' type, in an error of torch."""
RUNNING = ("running_mean", "running_var")
DRAWN = "a backward must follow from its inputs alone: draw random numbers in the forward"


def is_checked(model: Model, setting: bool | str) -> bool:
    """Whether a run compares its layers before the first step: `auto` does so for all models but
    the package's own decoder."""
    if setting != "auto":
        return bool(setting)
    return not all(_module_of(layer).startswith(OWN_DECODER) for layer in model.layers)


# Reason: the parts of a rank that one microbatch passes through.
def check_layers(
    plan: RunPlan,
    layers: Sequence[BuiltLayer],
    engine: Engine,
    collector: GradientCollector,
    transport: Transport,
    batch: Batch,
) -> str:
    """Compare the distinct layers of this stage with plain torch, by a microbatch of `batch`;
    returns a line for the user, empty if the check was fast.

    All ranks call this together, before their first step. ConfigError on all ranks for the first
    layer that differs anywhere.
    """
    began = time.monotonic()
    chosen = _distinct(layers)
    live = [layer.module for layer in layers]
    shared = _shared_objects(plan.model.layers)

    def failure_of(here: Sequence[int]) -> AxsparseError | None:
        # What is recorded is freed on return, before the next layers need memory.
        buffers = [(slot, slot.tensor.clone()) for module in live for slot in slots(module)]
        runners = [engine.stage.layers[number] for number in here]
        with same_attributes(live), replaced(buffers):
            with (
                _first_run(plan, batch.microbatches[0].inputs),
                nullcontext() if plan.config.pipeline.compile else _GivenReads(plan.model),
                _recorded(layers, runners, collector) as records,
            ):
                engine.train(
                    replace(batch, microbatches=batch.microbatches[:1]),
                    1.0,  # The summed loss: its gradients fit every precision better than a mean's.
                    1.0,
                    # Never the last one: no sums over replicas begin.
                    lambda _: collector.microbatch(is_last=False),
                )
            pairs = [(layers[n], record) for n, record in zip(here, records, strict=True)]
            # The first layer of the model is the first that its stage compares.
            is_first = plan.coords.is_first and 0 in here
            samples = batch.microbatches[0].inputs if is_first else None
            return _first_failure(plan, pairs, samples, shared)

    counts = gather_numbers(transport, [len(chosen)])
    # Ranks that have no layers left to compare take part in the passes of the others.
    for first in range(0, int(max(count for [count] in counts)), AT_ONCE):
        failure = failure_of(chosen[first : first + AT_ONCE])
        meet(transport, "compares its layers", failure)
    seconds = time.monotonic() - began
    if seconds <= SILENT_SECONDS:
        return ""
    return (
        f"compared {len(chosen)} of {len(layers)} layers with plain torch in {seconds:.1f} s "
        "(train.check_layers)"
    )


@contextmanager
def _first_run(plan: RunPlan, inputs: Tensors) -> Iterator[None]:
    """ConfigError where torch says that types do not meet, in a layer or in the loss; `inputs` are
    the first layer's, where this stage has it."""
    precision = plan.config.precision
    try:
        yield
    except RuntimeError as reason:
        where = ", ".join(getattr(reason, "__notes__", ()))
        if precision != "fp32" and LACKING.search(str(reason)) and where:
            raise ConfigError(f"{where}: {one_line(reason)}; {IN_FLOAT}") from reason
        if "type" not in str(reason) or not TYPE_NAME.search(str(reason)) or not where:
            raise
        way = (
            f"outputs are in {precision}: convert them and the targets to the types that it takes, "
            "by .float() or .long()"
        )
        if where.startswith("layer"):
            way = (
                f"precision {precision} has the weights in {precision}: convert what it gets to "
                "the type that it takes, by x.to(weight.dtype) of a weight of it, or .long()"
            )
            is_first = where == f"layer {plan.model.layers[0].name}"
            if is_first and INTEGERS.search(str(reason)):
                kinds = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in inputs)
                way = f"its samples are in {kinds}: give real numbers, by .float()"
                raise ConfigError(f"{where}: {one_line(reason)}; {way}") from reason
        elif about_targets := re.search(r"target.*(Long\b|probabilities)", str(reason)):
            by = ".long()" if "be Long" in about_targets[0] else ".float()"
            raise ConfigError(
                f"{where}: {one_line(reason)}; convert the targets by {by}, in the data or for the "
                "loss"
            ) from reason
        fp32 = ", or set precision: fp32" * (precision != "fp32")
        raise ConfigError(f"{where}: {one_line(reason)}; {way}{fp32}") from reason


class _GivenReads(TorchDispatchMode):
    """ConfigError for a hook or a loss that reads a trained weight, or running statistics, of the
    given modules: copies of these are trained. Neither shapes nor views count as reads."""

    def __init__(self, model: Model) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = model.start.tensors if isinstance(model.start, OwnValues) else {}
        self._names = {
            tensor.untyped_storage().data_ptr(): name
            for name, tensor in tensors.items()
            if tensor.numel() and (tensor.requires_grad or name.endswith(RUNNING))
        }
        self._read = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        is_read = not (func.is_view or name.endswith("_like") or name.startswith("aten::new_"))
        for tensor in tensors_of((args, kwargs)) if is_read and self._names else ():
            is_dense = tensor.layout == torch.strided and not tensor.is_meta
            if is_dense and not self._read:
                self._read = self._names.get(tensor.untyped_storage().data_ptr(), "")
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, *error: Any) -> None:
        """The backward says more of a read whose gradient arrives at the weight."""
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        if self._read and kind is None:
            raise ConfigError(
                f"model: a hook or the loss reads {self._read} of the given module, which keeps "
                "its first value while a copy is trained; a forward hook gets the module that is "
                "trained, register_post_accumulate_grad_hook its parameter, and a loss the "
                "results of the last layer"
            )


@contextmanager
def _recorded(
    layers: Sequence[BuiltLayer], runners: Sequence[LayerRunner], collector: GradientCollector
) -> Iterator[list[RecordedRun]]:
    """Take down the runs of some layers in a microbatch, as in the first one of a step."""
    for runner in runners:
        runner.record = RecordedRun()
    collector.begin()
    for layer in layers:
        for tensor in layer.state.tensors:
            tensor.unit = FIXED_POINT_UNIT if layer.state.is_exact else tensor.unit
    try:
        yield [runner.record for runner in runners if runner.record is not None]
    finally:
        for runner in runners:
            runner.record = None


# -- the run of plain torch ---------------------------------------------------------------


def _first_failure(
    plan: RunPlan,
    pairs: Sequence[tuple[BuiltLayer, RecordedRun]],
    samples: Tensors | None,
    shared: Mapping[str, Sequence[Shared]],
) -> AxsparseError | None:
    """The error of the first layer that differs; `samples` are the inputs of the first pair as the
    data set has them, and `shared` the objects that a layer shares with others. Tensor-parallel
    ranks gather the weights of each layer together."""
    model, config = plan.model, plan.config
    trains_all = is_in_evaluation(model)
    first: AxsparseError | None = None
    for layer, record in pairs:
        with ExitStack() as kept:
            kept.enter_context(layer.state.expanded())
            _gather_handed_weights(layer, record)
            weights = dict(full_weights(layer))
            kept.enter_context(preserved_rng())
            module = kept.enter_context(_plain_module(layer, weights, record, config.seed))
            is_own = _module_of(layer.spec).startswith(OWN_MODELS)
            start_training(module, trains_all=trains_all or is_own)
            modes = {path: child.training for path, child in layer.module.named_modules()}
            for path, child in module.named_modules():  # The user may have set those of the copy.
                child.training = modes.get(path, child.training)
            try:
                comparison = _Comparison(plan, layer, record, module)
                comparison.reject_shared_write(shared.get(layer.spec.name, ()))
                comparison.reject_difference()
                if samples is not None:
                    comparison.reject_rounded(samples)
            except AxsparseError as error:
                first = first or type(error)(str(error))  # without the objects in its traceback
        samples = None
    return first


def _gather_handed_weights(layer: BuiltLayer, record: RecordedRun) -> None:
    """Gather the shards that a layer returns, as a weight for the loss, and their gradients."""
    outputs = list(record.outputs)
    for tensor in layer.state.tensors:
        for number, output in enumerate(outputs):
            if tensor.shard is None or not torch.equal(output, tensor.parameter):
                continue
            outputs[number] = layer.state.gathered(tensor, output)
            gradient = record.output_gradients[number]
            if gradient is not None:
                record.output_gradients[number] = layer.state.gathered(tensor, gradient)
    record.outputs = tuple(outputs)


@contextmanager
def _plain_module(
    layer: BuiltLayer, weights: Mapping[str, Tensor], record: RecordedRun, seed: int
) -> Iterator[nn.Module]:
    """The module of a layer as the user gave or declared it, with full weights and the recorded
    buffers; a module that the user holds has its own tensors again afterwards."""
    spec, given = layer.spec, given_module(layer.spec)
    if given is not None:
        module = given
    elif spec.init is not None:
        module = on_meta(spec)
    else:
        seed_all(seed, spec.name, "init")  # as when the stage built it
        module = spec.build()
    parameters = dict(module.named_parameters())
    places = slots(module)
    names = {slot.name for slot in places}
    if parameters.keys() != weights.keys() or record.buffers.keys() != names:
        raise ConfigError(
            f"layer {spec.name}: a second call of its build gives other parameters or "
            "buffers; build the same module in every call"
        )
    buffers = [(slot, record.buffers[slot.name].clone()) for slot in places]
    own = {} if given is None else {name: one.data for name, one in parameters.items()}
    with same_attributes([module]), replaced(buffers):
        try:
            types = types_of_statistics(module)  # as torch wants parameters of normalisations
            for name, parameter in parameters.items():
                put_storage(parameter, weights[name].to(types.get(name, weights[name].dtype)))
            yield module
        finally:
            for name, data in own.items():
                parameters[name].data = data


# -- the comparison -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Comparison:
    """One layer's run in the layout next to its run in plain torch."""

    plan: RunPlan
    layer: BuiltLayer
    record: RecordedRun
    module: nn.Module

    def reject_shared_write(self, shared: Sequence[Shared]) -> None:
        """ConfigError if a forward writes to an object that another layer has as well."""
        if not shared:
            return
        before, name = [_entries(value) for value, _ in shared], self.layer.spec.name
        with suppress(Exception):  # which the comparison names
            forward_plainly(name, self.module, self.record, self.record.leaves())
        self._reset_buffers()
        for (value, other), entries in zip(shared, before, strict=True):
            now = _entries(value)
            for key in {**entries, **now}:
                [one, count], [later, count_later] = (at.get(key, (at, 0)) for at in (entries, now))
                if one is not later or count != count_later:
                    place = f"{key!r} of a " if isinstance(key, str) else "a "
                    raise ConfigError(
                        f"layer {name}: its forward writes to {place}{type(value).__name__} that "
                        f"layer {other} has too, and they could stand on two stages; return it as "
                        f"a tensor with the output, which the layers up to {other} pass on; "
                        f"{self._suggestion()}"
                    )

    def reject_difference(self) -> None:
        """ConfigError for the first output or gradient that differs."""
        name = self.layer.spec.name
        try:
            plain = run_plainly(name, self.module, self.record)
        except AxsparseError:
            raise
        except Exception as reason:
            raise ConfigError(
                f"layer {name}: the module as it was given fails in plain torch with "
                f"{one_line(reason)}, and did not in the run; {self._suggestion()}"
            ) from reason
        found = self._difference(plain)
        if self._changes_from_call_to_call(plain):
            raise ConfigError(
                f"layer {name}: its result changes from call to call; draw from the global random "
                f"generators, and keep what changes in buffers; {self._suggestion()}"
            )
        if found is None:
            return
        what, difference, largest = found
        raise ConfigError(
            f"layer {name}: {what} differs from plain torch by {difference:.2g}, where the "
            f"largest entry is {largest:.2g}; {self._suggestion(what)}"
        )

    def reject_rounded(self, samples: Tensors) -> None:
        """ConfigError where rounding the samples to the run's precision changes the outputs."""
        record, name = self.record, self.layer.spec.name
        if all(one.dtype == other.dtype for one, other in zip(samples, record.inputs, strict=True)):
            return
        self._reset_buffers()
        inputs = [tensor.to(record.inputs[0].device) for tensor in samples]
        ours = record.outputs
        try:
            try:
                outputs = forward_plainly(name, self.module, record, inputs)
            except Exception:  # It takes no other type than its weights have.
                ours, outputs = (self._wide_outputs(each) for each in (record.inputs, inputs))
        except Exception:
            return
        for number, pair in enumerate(zip(ours, outputs, strict=False)):
            found = _difference(pair[0].detach(), pair[1].detach(), TOLERANCE[self.plan.dtype])
            if found is not None:
                precision = self.plan.config.precision
                fp32 = ", or set precision: fp32" * (precision != "fp32")
                raise ConfigError(
                    f"layer {name}: output {number} differs by {found[0]:.2g}, where the largest "
                    f"entry is {found[1]:.2g}, if its inputs are not rounded to {precision} "
                    f"before; shift and scale samples in the data set{fp32}; {self._suggestion()}"
                )

    def _wide_outputs(self, inputs: Sequence[Tensor]) -> Tensors:
        """The outputs in fp64 for some inputs."""
        self._reset_buffers()
        wide = copy.deepcopy(self.module).double()
        given = [each.double() if each.is_floating_point() else each for each in inputs]
        with torch.no_grad():
            return forward_plainly(self.layer.spec.name, wide, self.record, given)

    def _changes_from_call_to_call(self, plain: Run) -> bool:
        """Whether a second forward from the same state gives another result."""
        self._reset_buffers()
        name, record = self.layer.spec.name, self.record
        again = forward_plainly(name, self.module, record, record.leaves())
        return len(again) != len(plain.outputs) or any(
            _difference(one.detach(), other, TOLERANCE[self.plan.dtype]) is not None
            for one, other in zip(again, plain.outputs, strict=True)
        )

    def _reset_buffers(self) -> None:
        """Give the module the buffers that the recorded forward found."""
        for slot in slots(self.module):
            slot.put(self.record.buffers[slot.name].clone())

    def _difference(self, plain: Run) -> tuple[str, float, float] | None:
        """The first tensor that differs: its name, by how much, and its largest entry."""
        record, dtype = self.record, self.plan.dtype
        if len(plain.outputs) != len(record.outputs):
            return "the number of outputs", len(record.outputs), len(plain.outputs)
        outputs = zip(record.outputs, plain.outputs, strict=True)
        gradients = zip(record.input_gradients, plain.input_gradients, strict=True)
        for what, ours, theirs in [
            *((f"output {number}", *pair) for number, pair in enumerate(outputs)),
            *(
                (f"buffer {buffer} after the forward", ours, plain.buffers_after[buffer])
                for buffer, ours in record.buffers_after.items()
            ),
            *((f"the gradient of input {number}", *pair) for number, pair in enumerate(gradients)),
        ]:
            found = _difference(ours, theirs, TOLERANCE[dtype])
            if found is not None:
                return what, *found
        apart = self._weights_apart(plain.weight_gradients)
        noise = NOISE[dtype] * max((largest for _, largest in apart.values()), default=0.0)
        for name, (difference, largest) in apart.items():
            if difference > TOLERANCE[dtype] * largest + noise:
                return f"the gradient of parameter {name}", difference, largest
        return None

    def _weights_apart(
        self, gradients: Mapping[str, Tensor | None]
    ) -> dict[str, tuple[float, float]]:
        """`_apart` of the kept entries of the gradient of each trained parameter, block by block,
        since copies of all would take more memory than a step does."""
        state = self.layer.state
        apart: dict[str, tuple[float, float]] = {}
        for tensor in state.tensors:
            name = self.layer.spec.local_name(tensor.full_name)
            dense_D = gradients[name]
            if dense_D is not None:
                dense_D = dense_D if dense_D.layout == torch.strided else dense_D.to_dense()
                dense_D = tensor.of_full(dense_D.reshape(-1))
            difference = largest = 0.0
            for start, stop in tensor.blocks():
                ours = _summed(state, tensor, start, stop)
                plain = torch.zeros_like(ours)
                if dense_D is not None:
                    plain = tensor.index.gather(dense_D, start, stop)
                found = _apart(ours, plain)
                difference, largest = max(difference, found[0]), max(largest, found[1])
            apart[name] = difference, largest
        return apart

    def _suggestion(self, what: str = "") -> str:
        """How to run nevertheless, behind the likely cause of a difference in `what`."""
        ways = ["train.check_layers: false runs it nevertheless"]
        if what and any(tensor.shard is not None for tensor in self.layer.state.tensors):
            ways = [SHARDED, *ways]
        elif what.startswith("the gradient"):
            is_twice = self.plan.config.pipeline.checkpoint_activations
            ways = [RECOMPUTED if is_twice else DRAWN, *ways]
        return "; ".join(ways)


def _summed(state: LayerState, tensor: TensorState, start: int, stop: int) -> Tensor:
    """The kept entries [start, stop) of the gradient of one microbatch; zeros if it has none."""
    gradient_K = state.gradient_of(tensor)[start:stop]
    if not tensor.accumulated:
        return torch.zeros_like(gradient_K)
    return (
        state.sums_of(tensor)[start:stop].double() * tensor.unit if state.is_exact else gradient_K
    )


def _difference(
    ours: Tensor | None, plain: Tensor | None, tolerance: float
) -> tuple[float, float] | None:
    """The largest difference of two tensors, and the largest entry of plain torch's; None if these
    agree. No gradient agrees with one of zeros, NaN with NaN, and an infinity with the same one."""
    if ours is None or plain is None:
        there = _largest(plain if ours is None else ours)
        return None if there == 0.0 else (there, _largest(plain))
    if ours.shape != plain.shape:
        return float("inf"), _largest(plain)
    if not (ours.is_floating_point() and plain.is_floating_point()):
        # Torch compares some types, such as complex ones of half precision, by their bytes only.
        is_equal = ours.dtype == plain.dtype and torch.equal(bytes_of(ours), bytes_of(plain))
        number = plain.to(torch.complex128).abs() if plain.is_complex() else plain.double()
        return None if is_equal else (1.0, _largest(number))
    difference, largest = _apart(ours, plain)
    return None if difference <= tolerance * largest else (difference, largest)


def _apart(ours: Tensor, plain: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors of one shape, and the largest entry of the second."""
    wide = torch.float64 if torch.float64 in (ours.dtype, plain.dtype) else torch.float32
    difference = largest = 0.0
    parts = (tensor.flatten().split(ENTRIES_AT_ONCE) for tensor in (ours, plain))
    for part in zip(*parts, strict=True):
        one, other = (entries.to(wide) for entries in part)
        apart = (one - other).abs()
        apart.masked_fill_((one == other) | (one.isnan() & other.isnan()), 0.0)
        apart.nan_to_num_(nan=float("inf"))
        difference, largest = max(difference, _largest(apart)), max(largest, _largest(other))
    return difference, largest


def _largest(tensor: Tensor | None) -> float:
    """The largest absolute value that is a number; 0 if there is none."""
    if tensor is None or not tensor.numel():
        return 0.0
    values = tensor.abs().float() if tensor.dtype.itemsize < 4 else tensor.abs()
    return float(values.nan_to_num(nan=0.0, posinf=float("inf")).max())


# -- what layers share ---------------------------------------------------------------------

Shared = tuple[object, str]
"""An object that a layer shares with another one, and the name of that one."""


def _entries(value: object) -> dict[object, tuple[object, int]]:
    """The attributes and entries of an object, tensors with the number of writes to them."""
    entries = {**getattr(value, "__dict__", {})}
    if isinstance(value, (Mapping, list, set, deque)):
        entries.update(value.items() if isinstance(value, Mapping) else enumerate(value))
    return {
        key: (one, version(one) if isinstance(one, Tensor) else 0) for key, one in entries.items()
    }


def _shared_objects(layers: Sequence[Layer]) -> dict[str, list[Shared]]:
    """The objects that a user's layer shares with another one, each with one such layer, by the
    name of the layer. The segments of a module all run its forward, and share what it writes."""
    kept, users = dict[str, list[object]](), dict[int, list[str]]()
    segments = set[str]()
    for layer in layers:
        if _module_of(layer).startswith(OWN_MODELS):
            continue
        given = given_module(layer)
        if isinstance(given, PartModule) and not given.can_compile:
            segments.add(layer.name)
        kept[layer.name] = []
        with suppress(Exception):  # It cannot be copied, or built on the meta device.
            kept[layer.name] = copied_objects(on_meta(layer) if given is None else given)
        for each in kept[layer.name]:
            users.setdefault(id(each), []).append(layer.name)
    shared: dict[str, list[Shared]] = {}
    for name, objects in kept.items():
        # What has attributes is named before the dict that they are in.
        for each in sorted(objects, key=lambda each: not hasattr(each, "__dict__")):
            others = [one for one in users[id(each)] if one != name and not {one, name} <= segments]
            shared.setdefault(name, []).extend((each, one) for one in others[:1])
    return shared


# -- which layers are alike ---------------------------------------------------------------


def _module_of(layer: Layer) -> str:
    """The Python module that the function which builds a layer is of."""
    build: Any = layer.build.func if isinstance(layer.build, partial) else layer.build
    return str(getattr(build, "__module__", ""))


def _distinct(layers: Sequence[BuiltLayer]) -> list[int]:
    known: list[tuple[nn.Module, str]] = []
    distinct = []
    for number, layer in enumerate(layers):
        is_sharded = layer.state.group is not None and layer.spec.tp_plan
        given = given_module(layer.spec)
        if given is None:
            given = on_meta(layer.spec) if is_sharded else layer.module
        kind = given, str(layer.spec.tp_plan)
        if not any(are_alike(kind, other) for other in known):
            known.append(kind)
            distinct.append(number)
    return distinct
