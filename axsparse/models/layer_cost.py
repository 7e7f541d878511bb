"""Measures the cost of each layer of a model for one sample, by running it on the meta device.

There nothing is computed and nothing is stored; flops and bytes are counted by shapes. A layer
whose shapes depend on values runs where it will train.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from axsparse.config.hf_config import CONFIG_FILE
from axsparse.models.layer import StartValues, as_arguments, as_tuple
from axsparse.models.module_buffers import set_mode
from axsparse.models.stand_ins import PartModule
from axsparse.runtime.communication import NO_SUM, Sums
from axsparse.runtime.errors import ConfigError, one_line
from axsparse.runtime.seeds import preserved_rng

SAMPLES = 2
"""Samples in the run. More than one, since batch normalisation refuses a single sample."""


LACKING = re.compile(
    "for '(BFloat16|Half)'|Low precision|(Unsupported dtype|type:) (BFloat16|Half)"
    "|[Ff]loat or [Dd]ouble"
)
"""An error of torch for an operation that half precision lacks."""
IN_FLOAT = "compute it in .float() and convert back, or set precision: fp32"


class CostError(ConfigError):
    """A layer that does not run where its cost is found."""


@dataclass(frozen=True)
class Activations:
    """Bytes that one sample's forward pass leaves in memory, in the precision of the run, and the
    bytes that its backward can defer."""

    inputs: int
    saved: int
    """Tensors that the backward needs, without inputs and weights."""
    outputs: int
    widest: int
    """The largest tensor among the saved ones and the outputs; its gradient is as large."""
    deferred: int = 0
    """Bytes that a split backward keeps for deferred weight gradients: inputs and output gradients
    of the linear and convolution calls whose weight nothing else uses."""
    weight_flops: float = 0.0
    """Flops of the gradients that a split backward puts off."""
    summing: int = 0
    """The largest buffer in which a rank exchanges a tensor with the ranks of other shards."""


class LayerSums(NamedTuple):
    """Sums over tensor-parallel ranks in a forward, in its backward, and the additional ones where
    the backward recomputes the layer: torch ends that as soon as it has what it needs."""

    forward: Sums
    backward: Sums
    again: Sums


NO_SUMS = LayerSums(NO_SUM, NO_SUM, NO_SUM)


class SumCounter(Protocol):
    """Counts the exchanges of tensor-parallel ranks while a layer runs."""

    @property
    def largest(self) -> int:
        """Bytes of the largest buffer since `begin`."""

    def begin(self) -> None:
        """Count from 0 again."""

    def summed(self) -> Sums:
        """Traffic since `begin`; bytes are per sample."""


GROUPED_PRODUCT = getattr(torch, "_grouped_mm", None)
"""Multiplies each group of tokens, which were routed to one expert, with the expert's matrix."""


class _Calls(TorchFunctionMode):
    """Notes the linear and convolution calls of a layer, by their weight, and makes attention on
    the meta device keep as much as the kernels of CPUs and GPUs.

    By default torch evaluates the formula of attention there and keeps the scores, sequence length
    squared for each head. The kernels keep one number for each row.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples
        self._products: dict[int, list[tuple[Tensor, Tensor, float]]] = {}
        """Input, output and flops of each call, by the weight's storage."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is GROUPED_PRODUCT:
            # On the meta device torch has it for bf16 alone. Each token is multiplied once.
            return args[0] @ args[1][0]
        result = func(*args, **kwargs)
        if func in (F.linear, F.conv1d, F.conv2d, F.conv3d):
            given = dict(zip(("input", "weight"), args, strict=False)) | dict(kwargs)
            weight = given["weight"]
            # Each output is the sum of as many products as a weight has entries for it.
            flops = 2.0 * result.numel() * weight[0].numel() / self._samples
            products = self._products.setdefault(_storage(weight), [])
            products.append((given["input"], result, flops))
        return result

    def deferrable(self, weights: Iterable[Tensor]) -> tuple[int, float]:
        """Bytes and flops of the gradients of weights with a single call, which can wait."""
        calls = [self._products.get(_storage(weight), []) for weight in weights]
        single = [of_weight[0] for of_weight in calls if len(of_weight) == 1]
        inputs = {_storage(given): given for given, _, _ in single}.values()
        # An input may be a view of more; only its own entries are read.
        kept = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        gradients = sum(output.numel() * output.element_size() for _, output, _ in single)
        return (kept + gradients) // self._samples, sum(flops for _, _, flops in single)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """Attention by the fused CPU kernel, or by torch where that does not apply."""
    # Keys and values may have fewer heads, which the kernel does not repeat in memory.
    own = slice(1) if others.get("enable_gqa") else slice(2)
    heads = {tensor.shape[own] + tensor.shape[3:] for tensor in (query, key, value)}
    is_fused = query.dim() == 4 and len(heads) == 1 and not dropout_p
    if not is_fused or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **others
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)  # as torch does
    outputs: Tensor
    outputs, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=others.get("scale")
    )
    return outputs


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    """The flops of the two products of attention, by shapes. Each head of the query has its own,
    while several may share a head of keys and values."""
    *batch, queries, width = query
    return 2 * math.prod(batch) * queries * key[-2] * (width + value[-1])


FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops
}
"""For torch's counter, whose own formula refuses shared heads in torch 2.11."""


class _NoModules(nullcontext[None]):
    """In the place of torch's module tracker, whose hooks need activations with gradients."""

    parents = ("Global",)


class Tracer:
    """Runs the layers of a model one after another; each gets the outputs of the one before."""

    def __init__(
        self,
        example: tuple[Tensor, ...],
        dtype: torch.dtype,
        counter: SumCounter | None = None,
        *,
        samples: int = SAMPLES,
        device: torch.device | None = None,
    ) -> None:
        """`example` is the input of the first layer, of as many samples. Floating-point tensors are
        cast to `dtype`. `counter` counts the sums over tensor-parallel ranks, if layers are
        sharded. With a `device` layers really run, there."""
        self._dtype, self._samples, self.device = dtype, samples, device
        self._counter = counter
        self._flow = tuple(map(self._input, example))
        self.start: StartValues | None = None
        """Start values of layers that really run, which replace the layers' initialisation."""
        self.sums = NO_SUMS
        """Sums over tensor-parallel ranks in the last layer that was run."""
        self.result_type: type = Tensor
        """The type of what the last layer that was run returns."""

    @property
    def shapes(self) -> list[tuple[torch.Size, torch.dtype]]:
        """The shapes and types of the inputs of the next layer."""
        return [(tensor.shape, tensor.dtype) for tensor in self._flow]

    def run(self, name: str, module: nn.Module) -> tuple[float, Activations]:
        """Flops and activations of one sample's forward through the next layer.

        Matrix products, convolutions and attention are counted. Raises CostError for a
        layer that does not run.
        """
        if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            try:
                module = copy.deepcopy(module)  # The module may be the user's.
            except Exception as reason:
                raise ConfigError(
                    f"layer {name}: a copy of its module has no copy ({one_line(reason)}); let "
                    "__getstate__ leave out what is there alone, as by state.pop(name, None)"
                ) from reason
        module = module.to(device=self.device or "meta", dtype=self._dtype)
        set_mode(module, training=True)
        weights = {_storage(p) for p in (*module.parameters(), *module.buffers())}
        inputs = {_storage(tensor) for tensor in self._flow}
        if self._counter is not None:
            self._counter.begin()
        # References keep every storage alive, so that no identity of a storage is used twice.
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept.setdefault(_storage(tensor), tensor)
            return tensor

        before = self._flow
        run: Callable[..., object] = partial(module, *as_arguments(module, before))
        calls, counter = _Calls(self._samples), FlopCounterMode(display=False, custom_mapping=FLOPS)
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        try:
            with preserved_rng(), counter, saved_tensors_hooks(keep, lambda tensor: tensor), calls:
                outputs = run()
        except Exception as reason:
            if self._counter is not None and isinstance(reason, ConfigError):
                raise  # it says what does not fit a shard
            raise self._fails(name, reason, module) from reason
        given = as_tuple(name, outputs)
        self.result_type = type(outputs)
        self.sums = self._layer_sums(name, given, run)
        self._flow = tuple(map(self._input, given))
        saved = {k: v for k, v in kept.items() if k not in weights and k not in inputs}
        own = {_storage(tensor): tensor for tensor in given if _storage(tensor) not in weights}
        trained = [p for p in module.parameters() if p.requires_grad]
        deferred, weight_flops = calls.deferrable(trained)
        activations = Activations(
            inputs=self._bytes(before),
            saved=self._bytes(saved.values()),
            outputs=self._bytes(own.values()),
            widest=max((self._bytes([t]) for t in (*saved.values(), *own.values())), default=0),
            deferred=deferred,
            weight_flops=weight_flops,
            summing=0 if self._counter is None else self._counter.largest // self._samples,
        )
        return counter.get_total_flops() / self._samples, activations

    def loss_sums(self, loss: Callable[..., Tensor]) -> LayerSums:
        """Sums over tensor-parallel ranks in the loss; the first output has a row per target."""
        assert self._counter is not None, "layers are sharded"
        self._counter.begin()
        with preserved_rng():
            targets = torch.empty(self._flow[0].shape[:-1], dtype=torch.int64, device="meta")
            total = loss(*self._flow, targets)
        forward = self._counter.summed()
        self._backward("loss", [total])
        return NO_SUMS._replace(forward=forward, backward=self._counter.summed() - forward)

    def _layer_sums(
        self, name: str, outputs: Sequence[Tensor], again: Callable[[], object]
    ) -> LayerSums:
        """Sums over tensor-parallel ranks in a forward, which `again` repeats, and a backward."""
        counter = self._counter
        if counter is None:
            return NO_SUMS
        forward = counter.summed()
        self._backward(name, outputs)
        both = counter.summed()
        if not forward.count:
            return LayerSums(forward, both - forward, Sums())

        def same_attention() -> object:
            with _Calls(self._samples):
                return again()

        with preserved_rng():
            repeated = checkpoint(same_attention, use_reentrant=False, preserve_rng_state=False)
            self._backward(name, as_tuple(name, repeated))
        return LayerSums(forward, both - forward, counter.summed() - both - both)

    def _backward(self, name: str, outputs: Sequence[Tensor]) -> None:
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        try:
            torch.autograd.backward(trained, [torch.empty_like(tensor) for tensor in trained])
        except Exception as reason:
            raise self._fails(name, reason) from reason

    def _input(self, tensor: Tensor) -> Tensor:
        """An activation as the next layer gets it."""
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        if self.device is None:
            found = torch.empty_like(tensor, device="meta", dtype=dtype)
        else:
            found = tensor.detach().to(self.device, dtype)
        if not tensor.is_floating_point():
            return found
        return found.requires_grad_().clone()  # no leaf, which a layer may not change in place

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors) // self._samples

    def _fails(self, name: str, reason: Exception, module: nn.Module | None = None) -> CostError:
        what = one_line(reason)
        given = ", ".join(str(tuple(shape)) for shape, _ in self.shapes)
        if self.device is None:
            is_part = isinstance(module, PartModule)  # whose example nobody wrote
            suggestion = "make its tensors on the device of its inputs"
            if self._counter is None and _is_of_sizes(what):
                suggestion = f"it gets {given}; correct its sizes"
                suggestion += f" (of a folder, those in {CONFIG_FILE})" if is_part else ""
            elif self._counter is None and is_part and _is_of_transformers(module):
                suggestion = "choose another model"
            elif self._counter is None and not is_part:
                suggestion += ", or leave Model.example out: then the first samples of the data run"
            return CostError(
                f"layer {name}: on the meta device, where its cost is found, {what}; {suggestion}"
            )
        if self._dtype != torch.float32 and LACKING.search(what):
            given += f"; {IN_FLOAT}"
        elif self._dtype != torch.float32 and " Float" in what:
            half = str(self._dtype).removeprefix("torch.")
            given += f" in {half}; set precision: fp32 for an operation that takes nothing else"
        return CostError(f"layer {name}: on the first samples of the data, {what}; it gets {given}")


def _is_of_transformers(module: nn.Module | None) -> bool:
    """Whether a module has modules of transformers, whose code the user does not write."""
    kinds = map(type, () if module is None else module.modules())
    return any(kind.__module__.startswith("transformers.") for kind in kinds)


def _is_of_sizes(what: str) -> bool:
    """Whether an error of torch speaks of sizes that do not fit, and of no device."""
    text = what.lower()
    return not any(word in text for word in ("meta", "device")) and any(
        word in text for word in ("size", "shape", "dim", "channel", "elements")
    )


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
