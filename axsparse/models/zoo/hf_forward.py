"""The own forward of a causal language model of transformers, run with stand-ins for its layers.

One such run shows where a model can be cut: which modules come before its layers and after them,
and that each layer gets the result of the one before. Later runs make the other arguments of layers
next to the hidden states, for every shape, and compute the parts before and after the layers where
no single module does. Shapes are as in `hf_models`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only, tree_unflatten

from axsparse.models.module_buffers import slots
from axsparse.models.stand_ins import (
    Modules,
    Reached,
    StandIn,
    outermost_lists,
    run_until_reached,
    with_modules,
)
from axsparse.models.watched_forward import Apart, Arguments, Watch, as_constants
from axsparse.runtime.errors import ConfigError

REMEMBERED = 4
"""Microbatches whose masks and positions are kept: with separate documents each has its own."""

WIDEST = 2**22
"""Entries of a token's hidden state, at most; published models have some ten thousand."""


class Forward:
    """The own forward of a model on the meta device, with stand-ins in the list of its layers.

    ConfigError for a model whose forward is not embeddings, one layer after the other, a norm and a
    head.
    """

    def __init__(self, causal: Any) -> None:
        self._causal = causal
        self._bodies: dict[tuple[torch.device, torch.dtype], nn.Module] = {}
        self._remembered = lru_cache(REMEMBERED)(self._recorded)
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
        if self._embedding_width > WIDEST:
            raise ConfigError(
                f"model.hf: a token's hidden state has {self._embedding_width:,} entries, more "
                f"than the {WIDEST:,} of which a forward is tried; correct the model's sizes"
            )
        self.head: Any = causal.get_output_embeddings()
        names = [name for name, child in causal.named_children() if child is self.head]
        if not names:
            raise unfit("its output head is not a module beside the body")
        self.head_name = names[0]
        self._returns_tuples = False
        watch = self._watch()
        [name] = filter(None, watch.arguments[0])
        hidden = watch.calls[0].leaves[name[2]]
        [last], result = watch.calls[-1].outputs, watch.result.last_hidden_state
        self.before, self.after = (self._called(watch, at) for at in (0, len(self.layers)))
        if not self.before:
            raise unfit("no module with parameters comes before its layers")
        if not self.after and result is not last:
            raise unfit("its forward computes with the last layer's result, by no module")
        self._embeds_directly = _is_alone(watch, self.before, hidden)
        self._norms_directly = _is_alone(watch, self.after, result, last)
        self.width: int = hidden.shape[-1]
        self.head_width: int = result.shape[-1]
        """Features of the hidden states that the head gets, which some models project."""
        self._output_type = type(watch.result)
        self.head_is_plain = self._has_plain_head()

    def __deepcopy__(self, memo: object) -> Forward:
        """The modules of a model are copied for each stage, and share the search for inputs."""
        return self

    # -- what it computes -----------------------------------------------------------------

    def embed(self, modules: Modules, tokens: Tensor, *starts: Tensor) -> tuple[Tensor, ...]:
        """The hidden states before the first layer, and `starts`."""
        if self._embeds_directly:
            [module] = modules.values()
            return module(tokens), *starts
        weight = next(p for module in modules.values() for p in module.parameters())
        if tokens.is_meta:  # Masks look into positions, which have no contents there.
            shape = (*tokens.shape, self.width)
            empty = torch.empty(shape, dtype=weight.dtype, device="meta", requires_grad=True)
            return empty, *starts

        def stop(hidden: Tensor, _: Arguments) -> None:
            raise Reached(hidden)

        return _ran(self._view(weight, modules, stop), *starts, input_ids=tokens), *starts

    def layer(
        self, number: int, modules: Modules, hidden: Tensor, *starts: Tensor
    ) -> tuple[Tensor, ...]:
        """The hidden states behind a layer, and `starts`."""
        args, kwargs = self._arguments(hidden, *starts)[number]
        [layer] = modules.values()
        output = layer(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output, *starts

    # Nothing after the layers looks at documents.
    def norm(self, modules: Modules, hidden: Tensor, *_: Tensor) -> tuple[Tensor]:
        """The hidden states behind the norm."""
        if self._norms_directly:
            [module] = modules.values()
            return (module(hidden),)
        if hidden.is_meta:
            shape = (*hidden.shape[:-1], self.head_width)
            return (torch.empty(shape, dtype=hidden.dtype, device="meta", requires_grad=True),)
        view = self._view(hidden, modules, lambda _, __: self._returned(hidden))
        return (_ran(view, inputs_embeds=self._zeros(hidden)).last_hidden_state,)

    def logits(self, modules: Modules, hidden: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        """The logits; where they are plain products, the hidden states and the head's weight."""
        [head] = modules.values()
        if self.head_is_plain:
            return hidden, cast(Tensor, head.weight)
        return (self._outputs(head, hidden).logits,)

    def _arguments(self, hidden: Tensor, starts: Tensor | None = None) -> list[Arguments]:
        """The arguments that the model's forward gives its layers next to these hidden states."""
        if hidden.is_meta:
            # Masks look into positions: they are made on the CPU, of documents half as long.
            real = torch.zeros(hidden.shape[:2], dtype=hidden.dtype).unsqueeze(-1)
            halves = None if starts is None else torch.zeros(starts.shape, dtype=starts.dtype)
            if halves is not None:
                half = halves.shape[1] // 2
                halves[:, half:] = half
            made: list[Arguments] = tree_map_only(
                Tensor, lambda tensor: tensor.to("meta"), self._arguments(real, halves)
            )
            return made
        content = None if starts is None else bytes(starts.cpu().int().contiguous().numpy().data)
        return self._remembered(hidden.shape[:2], hidden.dtype, hidden.device, content)

    def check_separates(self) -> None:
        """ConfigError for a model whose forward does not separate documents by positions."""
        hidden = torch.zeros(1, 4, 1)
        try:
            both = [
                [_masks(each) for each in self._arguments(hidden, torch.tensor([starts]))]
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
            without = with_modules(self.owner, {self._list_name: None})
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

    def _view(self, like: Tensor, modules: Modules, run: Callable[[Tensor, Arguments], Any]) -> Any:
        """The body with these modules and stand-ins; modules without parameters are copies, since
        some rotary embeddings remember what they have seen."""
        body = self._body(like.device, like.dtype)
        training = any(module.training for module in modules.values())
        own = {
            name: copy.deepcopy(child).train(training)
            for name, child in body.named_children()
            if not any(True for _ in child.parameters())
        }
        stand_ins = nn.ModuleList(StandIn(layer, partial(_by_hidden, run)) for layer in self.layers)
        view = with_modules(body, {**own, **modules, self._list_name: stand_ins})
        view.training = training
        return view

    def _returned(self, hidden: Tensor) -> Any:
        """These hidden states as a layer returns them."""
        return (hidden,) if self._returns_tuples else hidden

    def _zeros(self, like: Tensor) -> Tensor:
        """Embeddings of zeros, (B, S, E), without memory."""
        return like.new_zeros(()).expand(*like.shape[:2], self._embedding_width)

    def _recorded(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, starts: bytes | None
    ) -> list[Arguments]:
        given: list[Arguments] = []

        def record(hidden: Tensor, arguments: Arguments) -> Any:
            given.append(arguments)
            if len(given) == len(self.layers):
                raise Reached(hidden)
            return self._returned(hidden)

        begins = None
        if starts is not None:
            begins = torch.frombuffer(bytearray(starts), dtype=torch.int32).view(shape).to(device)
        # Its products are not a layer's: a mode that counts the first layer's does not see them.
        with _disable_current_modes(), torch.no_grad():
            embeds = self._zeros(torch.empty((*shape, 0), dtype=dtype, device=device))
            _ran(self._view(embeds, {}, record), begins, inputs_embeds=embeds)
        return given

    def _outputs(self, head: nn.Module, hidden: Tensor) -> Any:
        """The result of the model's own forward for these hidden states."""
        body = self._output_type(last_hidden_state=hidden)
        child: nn.Module = StandIn(self.owner, lambda *_, **__: body)
        path = self.owner_path
        while path:
            path, _, name = path.rpartition(".")
            child = with_modules(self._causal.get_submodule(path), {name: child})
        child._modules[self.head_name] = head
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        return child(input_ids=tokens, use_cache=False)

    # -- what a run shows --------------------------------------------------------------------

    def _watch(self) -> Watch:
        """A forward of two tokens, whose layers return tensors or else tuples; or ConfigError."""
        like, tokens, problem = torch.empty(0), torch.zeros(1, 2, dtype=torch.long), ""
        self._body(like.device, like.dtype).requires_grad_()

        def run(hidden: Tensor, _: Arguments) -> Any:
            return self._returned(torch.zeros_like(hidden).requires_grad_())

        for self._returns_tuples in (False, True):
            try:
                with torch.enable_grad():
                    watch = Watch(
                        *(self._view(like, {}, run), [self._list_name]),
                        others=[""],
                        is_free=lambda tensor: not tensor.requires_grad,
                    ).run(input_ids=tokens, use_cache=False)
                _reject_other_order(watch)
            except Apart as apart:  # noqa: PERF203
                problem = apart.why if not problem or self._returns_tuples else problem
            except Exception as reason:
                told = " ".join(str(reason).split())
                problem = problem or f"its forward fails without its layers ({told[:200]})"
            else:
                self._bodies.clear()
                return watch
        raise unfit(problem)

    def _called(self, watch: Watch, at: int) -> list[str]:
        """The body's other modules that are called behind `at` layers, and nowhere else; before all
        layers, those with tensors of the state dict."""
        places = {
            name: {number for number, call in watch.others if call.name == name}
            for name, child in self.owner.named_children()
            if at or (name != self._list_name and child.state_dict())
        }
        return [name for name, numbers in places.items() if numbers == {at}]

    def _has_plain_head(self) -> bool:
        """Whether logits are the hidden states times the head's weight, and nothing else."""
        head, seen = self.head, list[tuple[Tensor, Tensor]]()
        hidden = torch.empty((1, 2, self.head_width), dtype=head.weight.dtype, device="meta")
        hook = head.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        with torch.no_grad():
            logits = self._outputs(head, hidden).logits
        hook.remove()
        if type(head).forward is not nn.Linear.forward or head.bias is not None or len(seen) != 1:
            return False
        [(given, output)] = seen
        is_hidden = given.untyped_storage()._cdata == hidden.untyped_storage()._cdata
        return is_hidden and given.shape == hidden.shape and output is logits


def _by_hidden(run: Callable[[Tensor, Arguments], Any], *args: Any, **kwargs: Any) -> Any:
    """Call a stand-in's function with the hidden states and the other arguments of a layer."""
    if args:
        return run(args[0], as_constants((args[1:], kwargs)))
    others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    return run(kwargs["hidden_states"], as_constants(((), others)))


def _ran(view: nn.Module, starts: Tensor | None = None, **given: Tensor) -> Any:
    """The result of a forward, or what it has `Reached`; positions begin anew by document."""
    if starts is not None:
        given["position_ids"] = torch.arange(starts.shape[1], device=starts.device) - starts
    result, _ = run_until_reached(view, use_cache=False, **given)
    return result


def _reject_other_order(watch: Watch) -> None:
    """`Apart` unless each layer gets what the one before returns, and nothing else that depends on
    tokens and parameters."""
    for number, (call, names) in enumerate(zip(watch.calls, watch.arguments, strict=True)):
        given = {name for name in names if name is not None}
        if number and ("output", number - 1, 0) not in given:
            raise Apart(f"its forward does more between layers {number - 1} and {number}")
        if len(given) != 1:
            raise Apart(f"{call.name} gets {len(given)} tensors of what is before it, not one")
    if ("output", len(watch.calls) - 1, 0) not in watch.used[-1]:
        raise Apart("its result does not depend on the last layer")


def _is_alone(
    watch: Watch, names: Sequence[str], result: Tensor, given: Tensor | None = None
) -> bool:
    """Whether one module, called once, makes `result`, of `given` if that matters."""
    calls = [call for _, call in watch.others if [call.name] == names]
    if len(calls) != 1 or tree_unflatten(calls[0].outputs, calls[0].output_spec) is not result:
        return False
    return given is None or calls[0].leaves[0] is given


def _masks(arguments: Arguments) -> list[Tensor]:
    """The masks among the arguments of a layer: of four dimensions are masks alone."""
    leaves = tree_leaves(arguments)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 4]


def unfit(why: str) -> ConfigError:
    return ConfigError(
        f"model.hf: this model cannot be cut into layers: {why}; choose a decoder of embeddings, "
        "one list of layers, a norm and a head"
    )
