"""Which weights of a stage have their gradients taken out of the backward, and which not.

The first microbatch of a run is trained whole. Its graph shows how each weight is used: those with
a single use, in a linear or convolution call, are split from the second microbatch on. `whole`
says why others are not.

Weights of linear modules with sparse products are taken out in every microbatch, the first
included, and whether or not backwards are split: their bits differ from those of dense products, so
no microbatch may be treated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from axsparse.pipeline.late_weights import LateWeights, SparseProducts
from axsparse.pipeline.weight_stand_in import StandIn, stand_in

_PRODUCTS = {"MmBackward0": 1, "AddmmBackward0": 2}
"""Autograd's nodes of a linear call, and which of their inputs is the transposed weight."""
_CONVOLUTION = "ConvolutionBackward0"
_CHEAP = ("Embedding", "EmbeddingBag", "Slice", "Select", "Index", "Add", "Mul", "Expand", "View")
"""Autograd's nodes, less "Backward0", of weights that are no factors of matrix products: their
gradients cost little, and nobody expects them to be split."""


@dataclass(frozen=True)
class Slot:
    """The place of one weight in a module, and who stands in for it."""

    owner: nn.Module
    key: str
    weight: nn.Parameter
    stand_in: StandIn


Plan = tuple[Slot, ...]
"""The weights that are split in one microbatch's forward and backward."""


class WeightSplit:
    """Finds the weights of a stage that can be split, and puts their stand-ins in place."""

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        sparse: Mapping[nn.Parameter, SparseProducts] | None = None,
        *,
        is_split: bool = True,
    ) -> None:
        """`modules` are those of the stage's layers, by name; `sparse` has the products of weights
        that may have sparse ones. Unless backwards are split (`is_split`), nothing else is taken
        out."""
        self.late = LateWeights(is_split=is_split)
        self.whole: dict[str, str] = {}
        """Why matrices are not split, by name; without those that are no factors of products."""
        self.plan: Plan = ()
        """What is split in the next microbatch."""
        self._modules = list(modules)
        self._is_split = is_split
        self._has_learned = not is_split
        self._sparse = self._slots_of(sparse or {})
        """The weights that may have sparse products."""
        self._split: Plan = ()
        """The others that are split."""

    def learn(self, outputs: Sequence[Tensor]) -> None:
        """Plan by the graph of a microbatch's outputs, whose forward ran without stand-ins."""
        if self._has_learned:
            return
        self._has_learned = True
        uses = _Uses(outputs)
        places, names = self._places()
        sparse = {slot.weight for slot in self._sparse}
        split: list[nn.Parameter] = []
        for weight, name in names.items():
            if weight.dim() < 2 or weight in sparse:
                continue
            owners = [owner for owner, _ in places[weight]]
            found = _why_whole(weight, owners, uses)
            if found is None:
                split.append(weight)
                split.extend(bias for bias in uses.biases_of(weight) if bias in places)
            elif found not in _CHEAP:
                self.whole[name] = found
        made = {weight: stand_in(names[weight], weight, self.late) for weight in split}
        for weight, name in names.items():
            if weight in made:
                self.late.watch(name, weight)
        self._split = tuple(
            Slot(owner, key, weight, made[weight])
            for weight in made
            for owner, key in places[weight]
        )
        self.plan = (*self.plan, *self._split)

    def begin_step(self) -> None:
        """Plan a step: see which weights are pruned enough for sparse products, and of the others
        give up those that were used otherwise than in the first microbatch.

        Called while nothing is in flight or waits, since the gradients of a weight have to stay in
        the order of the microbatches.
        """
        sparse = tuple(slot for slot in self._sparse if slot.stand_in.original.begin_step())
        others = (*self._sparse, *self._split) if self._is_split else ()
        split = tuple(slot for slot in others if slot not in sparse)
        for original in (slot.stand_in.original for slot in split):
            if original.is_used_otherwise:
                self.whole[original.name] = "used by more than a linear or convolution call"
            elif original.is_used_often:
                self.whole[original.name] = "used more than once by one microbatch"
        self.plan = (*sparse, *(slot for slot in split if not slot.stand_in.original.is_part))

    @contextmanager
    def in_place(self, plan: Plan) -> Iterator[None]:
        """Put the stand-ins of a plan into their modules, and the weights back at the end."""
        for slot in plan:
            slot.owner._parameters[slot.key] = slot.stand_in
            slot.stand_in.original.calls = 0
        try:
            yield
        finally:
            for slot in plan:
                slot.owner._parameters[slot.key] = slot.weight

    def _places(
        self,
    ) -> tuple[dict[nn.Parameter, list[tuple[nn.Module, str]]], dict[nn.Parameter, str]]:
        """Where each trained weight is, and its name."""
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        names: dict[nn.Parameter, str] = {}
        for layer, module in self._modules:
            for prefix, owner in module.named_modules():
                for key, weight in owner._parameters.items():
                    if weight is not None and weight.requires_grad:
                        places.setdefault(weight, []).append((owner, key))
                        names.setdefault(weight, ".".join(filter(None, (layer, prefix, key))))
        return places, names

    def _slots_of(self, sparse: Mapping[nn.Parameter, SparseProducts]) -> Plan:
        """Those weights that stand in one place, which is a linear module's."""
        places, names = self._places()
        compiled = {
            inner
            for _, module in self._modules
            for each in module.modules()
            if _is_compiled(each)
            for inner in each.modules()
        }
        slots = []
        for weight, products in sparse.items():
            [(owner, key), *others] = places[weight]
            is_plain = type(owner) is nn.Linear and type(weight) is nn.Parameter
            if is_plain and not others and owner not in compiled:
                self.late.watch(names[weight], weight)
                made = stand_in(names[weight], weight, self.late, products)
                slots.append(Slot(owner, key, weight, made))
        return tuple(slots)


def is_plain(module: nn.Module) -> bool:
    """Whether a layer consists of modules of the package and of torch, on which nobody has hooks.

    These call linear modules and do nothing else with their weights, which code of others might.
    """
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return all(
        type(each).__module__.partition(".")[0] in ("axsparse", "torch")
        and "forward" not in vars(each)
        and not any(getattr(each, kind) for kind in hooks)
        for each in module.modules()
    )


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile makes the module's backward."""
    has_compiled_call = getattr(module, "_compiled_call_impl", None) is not None
    return has_compiled_call or type(module).__name__ == "OptimizedModule"


def _why_whole(weight: nn.Parameter, owners: Sequence[nn.Module], uses: _Uses) -> str | None:
    """Why a weight is not split; None if it can be."""
    if type(weight) is not nn.Parameter:
        return f"it is a {type(weight).__name__}"
    if not all(isinstance(owner._parameters, dict) for owner in owners):
        return "its module is compiled or scripted"
    found = uses.of(weight)
    if not found:
        return "the first microbatch does not use it, or hides its use from autograd"
    if len(found) > 1:
        return f"one microbatch uses it {len(found)} times"
    [(node, place, is_transposed)] = found
    kind: str = node.name()
    if kind == _CONVOLUTION and place == 1:
        if node._saved_transposed:
            return "a transposed convolution"
        biases = uses.biases_of(weight)
        if any(len(uses.of(bias)) != 1 for bias in biases):
            return "its bias is used more than once"
        return None
    if is_transposed and _PRODUCTS.get(kind) == place:
        return None
    return kind.removesuffix("0").removesuffix("Backward")


class _Uses:
    """Where autograd's graph uses each leaf: which input of which node."""

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self._parents: dict[Any, list[tuple[Any, int]]] = {}
        self._leaves: dict[Tensor, Any] = {}
        waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
        seen: set[Any] = set(waiting)
        while waiting:
            node = waiting.pop()
            for place, (child, _) in enumerate(node.next_functions):
                if child is None:
                    continue
                self._parents.setdefault(child, []).append((node, place))
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
                    if hasattr(child, "variable"):
                        self._leaves[child.variable] = child

    def of(self, leaf: Tensor) -> list[tuple[Any, int, bool]]:
        """The uses of a leaf: node, which input of it, and whether it is the transposed leaf."""
        found = []
        for node, place in self._parents.get(self._leaves.get(leaf), []):
            if node.name() == "TBackward0":
                found += [(*use, True) for use in self._parents[node]]
            else:
                found.append((node, place, False))
        return found

    def biases_of(self, weight: Tensor) -> list[nn.Parameter]:
        """The bias of the convolution that uses a weight, if it is a leaf."""
        for node, _, _ in self.of(weight):
            if node.name() == _CONVOLUTION:
                leaf = getattr(node.next_functions[2][0], "variable", None)
                return [] if leaf is None else [leaf]
        return []
