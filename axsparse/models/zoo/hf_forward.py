"""The own forward of a causal language model of transformers, run with stand-ins for its layers.

One such run shows where a model can be cut: which modules come before its layers and after them,
and that each layer gets the result of the one before. Later runs make the other arguments of layers
next to the hidden states, for every shape, and compute the parts before and after the layers where
no single module does. Shapes are as in `hf_models`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from axsparse.models.module_buffers import slots
from axsparse.models.stand_ins import Modules, Reached, StandIn, outermost_lists
from axsparse.runtime.errors import ConfigError

REMEMBERED = 4
"""Microbatches whose masks and positions are kept: with separate documents each has its own."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments that the model's forward passes to one layer after the hidden states."""


@dataclass
class _Watched:
    """A recording of one forward of the model between embeddings and head."""

    given: list[tuple[Tensor, Arguments]] = field(default_factory=list)
    """The arguments of each layer, in the order of the calls."""
    returned: list[Tensor] = field(default_factory=list)
    """The results of its stand-in."""
    calls: dict[str, list[tuple[int, Any, Any]]] = field(default_factory=dict)
    """The calls of other modules by name: number of layers before, first argument, and result."""
    output: Any = None


class Forward:
    """The own forward of a model on the meta device, with stand-ins in the list of its layers.

    ConfigError for a model whose forward is not embeddings, one layer after the other, a norm and a
    head.
    """

    def __init__(self, causal: Any) -> None:
        self._causal = causal
        self._lock = threading.Lock()
        self._bodies: dict[tuple[torch.device, torch.dtype], nn.Module] = {}
        self._remembered: dict[tuple[object, ...], list[Arguments]] = {}
        lists = outermost_lists(causal, nn.ModuleList)
        if len(lists) != 1:
            paths = ", ".join(lists) or "none"
            raise unfit(f"it has {len(lists)} lists of modules ({paths}), not one")
        self.layers: Any
        [(self.list_path, self.layers)] = lists.items()
        self.owner_path, _, self._list_name = self.list_path.rpartition(".")
        self.owner: Any = causal.get_submodule(self.owner_path)
        """The module that has the list of layers, and next to it embeddings and norm."""
        self._embedding_width = causal.get_input_embeddings().weight.shape[1]
        self.head: Any = causal.get_output_embeddings()
        names = [name for name, child in causal.named_children() if child is self.head]
        if not names:
            raise unfit("its output head is not a module beside the body")
        self.head_name = names[0]
        self._returns_tuples = False
        watched = self._watch()
        self.before, self.after = self._sides(watched)
        self.width: int = watched.given[0][0].shape[-1]
        self.head_width: int = watched.output.last_hidden_state.shape[-1]
        """Features of the hidden states that the head gets, which some models project."""
        self._output_type = type(watched.output)
        last = watched.returned[-1]
        self._embeds_directly = _is_alone(watched, self.before, watched.given[0][0])
        result = watched.output.last_hidden_state
        self._norms_directly = _is_alone(watched, self.after, result, last)
        if not self.after and result is not last:
            raise unfit("its forward computes with the last layer's result, by no module")
        self.head_is_plain = self._has_plain_head()

    # -- what it computes -----------------------------------------------------------------

    def embedded(self, modules: Modules, tokens: Tensor, starts: Tensor | None) -> Tensor:
        """The hidden states before the first layer."""
        if self._embeds_directly:
            [module] = modules.values()
            return cast(Tensor, module(tokens))
        weight = next(p for module in modules.values() for p in module.parameters())
        if tokens.is_meta:  # Masks look into positions, which have no contents there.
            shape = (*tokens.shape, self.width)
            return torch.empty(shape, dtype=weight.dtype, device="meta", requires_grad=True)

        def stop(hidden: Tensor, _: Arguments) -> None:
            raise Reached(hidden)

        training = next(iter(modules.values())).training
        body = self._body(weight.device, weight.dtype)
        view = self._view(body, modules, stop, training=training)
        try:
            view(input_ids=tokens, use_cache=False, **_positions(starts, tokens.device))
        except Reached as reached:
            return cast(Tensor, reached.given)
        raise AssertionError("the forward calls no layer")

    def normed(self, modules: Modules, hidden: Tensor) -> Tensor:
        """The hidden states behind the norm."""
        if self._norms_directly:
            [module] = modules.values()
            return cast(Tensor, module(hidden))
        if hidden.is_meta:
            shape = (*hidden.shape[:-1], self.head_width)
            return torch.empty(shape, dtype=hidden.dtype, device="meta", requires_grad=True)
        training = next(iter(modules.values())).training
        body, returned = self._body(hidden.device, hidden.dtype), self._returned(hidden)
        view = self._view(body, modules, lambda _, __: returned, training=training)
        output = view(inputs_embeds=self._embeds(hidden), use_cache=False)
        return cast(Tensor, output.last_hidden_state)

    def outputs(self, head: nn.Module, hidden: Tensor) -> Any:
        """The result of the model's own forward for these hidden states."""

        def body(*_: object, **__: object) -> Any:
            return self._output_type(last_hidden_state=hidden)

        # Copies of all modules above the stand-in, so that nothing is changed for others.
        child: nn.Module = StandIn(self.owner, body)
        path = self.owner_path.split(".")
        for depth in range(len(path) - 1, -1, -1):
            parent = copy.copy(self._causal.get_submodule(".".join(path[:depth])))
            vars(parent)["_modules"] = {**parent._modules, path[depth]: child}
            child = parent
        child._modules[self.head_name] = head
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        return child(input_ids=tokens, use_cache=False)

    def arguments(self, hidden: Tensor, starts: Tensor | None = None) -> list[Arguments]:
        """The arguments that the model's forward gives its layers next to these hidden states."""
        if hidden.is_meta:
            # Masks look into positions: they are made on the CPU, of documents half as long.
            real = torch.zeros(hidden.shape[:2], dtype=hidden.dtype).unsqueeze(-1)
            halves = None if starts is None else torch.zeros(starts.shape, dtype=starts.dtype)
            if halves is not None:
                half = halves.shape[1] // 2
                halves[:, half:] = half
            made: list[Arguments] = tree_map_only(
                Tensor, lambda tensor: tensor.to("meta"), self.arguments(real, halves)
            )
            return made
        content = None if starts is None else bytes(starts.cpu().contiguous().numpy().data)
        key = (tuple(hidden.shape[:2]), hidden.dtype, hidden.device, content)
        with self._lock:
            if key not in self._remembered:
                while len(self._remembered) >= REMEMBERED:
                    del self._remembered[next(iter(self._remembered))]
                self._remembered[key] = self._recorded(hidden, starts)
            return self._remembered[key]

    def check_separates(self) -> None:
        """ConfigError for a model whose forward does not separate documents by positions."""
        hidden = torch.zeros(1, 4, 1)
        try:
            both = [
                [_masks(each) for each in self._recorded(hidden, torch.tensor([starts]).int())]
                for starts in ([0, 0, 2, 2], [0, 0, 0, 0])
            ]
        except TypeError:  # it takes no positions
            both = [[[]], [[]]]
        for halves, whole in zip(*both, strict=True):
            pairs = zip(halves, whole, strict=False)
            if len(halves) == len(whole) and all(torch.equal(*pair) for pair in pairs):
                raise ConfigError(
                    "data.intra_document_attention: true, but the model's forward does not tell "
                    "documents apart by their positions; choose false"
                )

    # -- runs with stand-ins ----------------------------------------------------------------

    def _body(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The parent of the layers, whose parameters are zeros without memory, in a type."""
        key = (device, dtype)
        if key not in self._bodies:
            without = copy.copy(self.owner)
            vars(without)["_modules"] = {**self.owner._modules, self._list_name: None}
            zeros = {
                id(p): nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(p.shape))
                for p in without.parameters()
            }
            body = copy.deepcopy(without, {**zeros}).requires_grad_(requires_grad=False)
            for slot in slots(body):
                tensor = slot.tensor
                slot.put(
                    torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
                )
            self._bodies[key] = body.eval()
        return self._bodies[key]

    def _view(
        self,
        body: nn.Module,
        modules: Modules,
        run: Callable[[Tensor, Arguments], Any],
        *,
        training: bool = False,
    ) -> Any:
        """The body with these modules and stand-ins; modules without parameters are copies, since
        some rotary embeddings remember what they have seen."""
        own = {
            name: child
            if child is None or any(True for _ in child.parameters())
            else copy.deepcopy(child).train(training)
            for name, child in body._modules.items()
        }
        view = copy.copy(body)
        stand_ins = nn.ModuleList(StandIn(layer, partial(_by_hidden, run)) for layer in self.layers)
        vars(view)["_modules"] = {**own, **modules, self._list_name: stand_ins}
        view.training = training
        return view

    def _returned(self, hidden: Tensor) -> Any:
        """These hidden states as a layer returns them."""
        return (hidden,) if self._returns_tuples else hidden

    def _embeds(self, like: Tensor) -> Tensor:
        """Embeddings of zeros, (B, S, E), without memory."""
        return like.new_zeros(()).expand(*like.shape[:2], self._embedding_width)

    def _recorded(self, hidden: Tensor, starts: Tensor | None) -> list[Arguments]:
        given: list[Arguments] = []

        def record(hidden: Tensor, arguments: Arguments) -> Any:
            given.append(arguments)
            if len(given) == len(self.layers):
                raise Reached(hidden)
            return self._returned(hidden)

        # Its products are not a layer's: a mode that counts the first layer's does not see them.
        with _disable_current_modes(), torch.no_grad():
            view = self._view(self._body(hidden.device, hidden.dtype), {}, record)
            try:
                embeds = self._embeds(hidden)
                view(inputs_embeds=embeds, use_cache=False, **_positions(starts, hidden.device))
            except Reached:
                return given
        raise AssertionError("the forward calls fewer layers than it has")

    # -- what a run shows --------------------------------------------------------------------

    def _watch(self) -> _Watched:
        """A forward of two tokens, whose layers return tensors or else tuples; ConfigError if it is
        unfit."""
        problem = ""
        for self._returns_tuples in (False, True):
            try:
                watched = self._watched()
            except Exception as reason:
                told = " ".join(str(reason).split())
                problem = problem or f"its forward fails without its layers ({told[:200]})"
                continue
            found = _not_in_a_row(watched, len(self.layers))
            if not found:
                return watched
            problem = found if not problem or self._returns_tuples else problem
        raise unfit(problem)

    def _watched(self) -> _Watched:
        watched = _Watched()

        def run(hidden: Tensor, arguments: Arguments) -> Any:
            watched.given.append((hidden, arguments))
            watched.returned.append(torch.zeros_like(hidden).requires_grad_())
            return self._returned(watched.returned[-1])

        def note(name: str, _: object, args: Sequence[Any], output: Any) -> None:
            first = args[0] if args else None
            watched.calls.setdefault(name, []).append((len(watched.given), first, output))

        body = self._body(torch.device("cpu"), torch.float32)
        with torch.enable_grad():
            view = self._view(body, {}, run)
            hooks = [
                child.register_forward_hook(partial(note, name))
                for name, child in view._modules.items()
                if child is not None and name != self._list_name
            ]
            try:
                tokens = torch.zeros(1, 2, dtype=torch.long)
                watched.output = view(input_ids=tokens, use_cache=False)
            finally:
                for hook in hooks:
                    hook.remove()
        return watched

    def _sides(self, watched: _Watched) -> tuple[list[str], list[str]]:
        sides: dict[str, list[str]] = {"before": [], "after": []}
        for name, child in self.owner._modules.items():
            if child is None or name == self._list_name:
                continue
            places = {number for number, _, _ in watched.calls.get(name, [])}
            if places == {len(self.layers)}:
                sides["after"].append(name)
            elif not (
                any(True for _ in child.parameters()) or any(s.persists for s in slots(child))
            ):
                continue
            elif places == {0}:
                sides["before"].append(name)
            else:
                raise unfit(f"{name} is called neither before all layers nor behind them")
        if not sides["before"]:
            raise unfit("no module with parameters comes before its layers")
        return sides["before"], sides["after"]

    def _has_plain_head(self) -> bool:
        """Whether logits are the hidden states times the head's weight, and nothing else."""
        seen: list[tuple[Tensor, Tensor]] = []
        head, shape = self.head, (1, 2, self.head_width)
        hidden = torch.empty(shape, dtype=head.weight.dtype, device="meta")
        hook = head.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        with torch.no_grad():
            logits = self.outputs(head, hidden).logits
        hook.remove()
        is_linear = type(head).forward is nn.Linear.forward and head.bias is None
        return (
            is_linear
            and len(seen) == 1
            and seen[0][0].untyped_storage()._cdata == hidden.untyped_storage()._cdata
            and seen[0][0].shape == hidden.shape
            and seen[0][1] is logits
        )


def _by_hidden(run: Callable[[Tensor, Arguments], Any], *args: Any, **kwargs: Any) -> Any:
    """Call a stand-in's function with the hidden states and the other arguments of a layer."""
    if args:
        return run(args[0], _as_empty((args[1:], kwargs)))
    others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    return run(kwargs["hidden_states"], _as_empty(((), others)))


def _as_empty(arguments: Arguments) -> Arguments:
    """The same arguments, with empty mappings as ones that no layer can write to."""
    given: Arguments = tree_map_only(
        MutableMapping, lambda each: each or MappingProxyType({}), arguments
    )
    return given


def _positions(starts: Tensor | None, device: torch.device) -> dict[str, Tensor]:
    """The positions that begin anew with each document, as an argument of the model's forward."""
    if starts is None:
        return {}
    positions = torch.arange(starts.shape[1], device=device)
    return {"position_ids": positions - starts.to(device)}


def _not_in_a_row(watched: _Watched, layers: int) -> str:
    """Why a forward is not one layer after the other; empty if it is."""
    if len(watched.given) != layers:
        return f"its forward calls {len(watched.given)} layers, and it has {layers}"
    for number, (hidden, _) in enumerate(watched.given[1:]):
        if hidden is not watched.returned[number]:
            return f"its forward does more between layers {number} and {number + 1}"
    for number, (_, (args, kwargs)) in enumerate(watched.given):
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.requires_grad and number:
                return f"layer {number} gets more than one result of the layers before it"
            if not isinstance(value, (Tensor, bool, int, float, str, type(None), MappingProxyType)):
                return f"layer {number} is given a {type(value).__name__}, which others may change"
    output = watched.output.last_hidden_state
    if not isinstance(output, Tensor) or not output.requires_grad:
        return "its result does not depend on the last layer"
    used = torch.autograd.grad(output.sum(), watched.returned, allow_unused=True)
    for number, gradient in enumerate(used[:-1]):
        if gradient is not None:
            return f"its result depends on that of layer {number} by another way than the layers"
    return ""


def _is_alone(
    watched: _Watched, names: Sequence[str], result: Tensor, given: Tensor | None = None
) -> bool:
    """Whether one module, called once, makes `result`, of `given` if that matters."""
    if len(names) != 1 or len(watched.calls[names[0]]) != 1:
        return False
    [(_, first, output)] = watched.calls[names[0]]
    return output is result and (given is None or first is given)


def _masks(arguments: Arguments) -> list[Tensor]:
    """The masks among the arguments of a layer: of four dimensions are masks alone."""
    leaves = tree_leaves(arguments)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 4]


def unfit(why: str) -> ConfigError:
    """The error of a model that cannot be cut."""
    return ConfigError(
        f"model.hf: this model cannot be cut into layers: {why}; choose a decoder of embeddings, "
        "one list of layers, a norm and a head"
    )
