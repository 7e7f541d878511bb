"""Causal language models of Hugging Face's transformers, by its own modules, cut into layers.

Any model that the installed transformers knows is taken, if it is embeddings, one list of layers, a
norm and a head. The cut is found by watching the model's own forward, never by its name: the list
of layers is replaced by stand-ins, which note what the forward gives to each layer (rotary
embeddings, masks, positions) and hand back what they are told. `Cut` has the three uses of this.

Names of parameters are those of transformers' state dict. Shapes: B sequences of a microbatch, S
tokens, E embedding width, H hidden size, V vocabulary.

Layers get `starts`, (B, S) integers, where the data tells documents apart: the position in the
sequence at which the document of each token begins. They pass them on to the next layer.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from axsparse.config.hf_config import (
    CONFIG_FILE,
    HF,
    hf_settings,
    read_json,
    refuse_other_settings,
)
from axsparse.config.model_config import HfConfig
from axsparse.models.layer import (
    InitFunction,
    Kind,
    Layer,
    Model,
    Split,
    SplitKind,
    Tie,
    on_meta,
)
from axsparse.models.losses import linear_cross_entropy, logits_at_a_time, summed_cross_entropy
from axsparse.models.module_buffers import slots
from axsparse.models.start_weights import open_weights, start_from
from axsparse.models.zoo.hf_file import HfFile
from axsparse.runtime.errors import ConfigError

PLANNED: Mapping[str, SplitKind] = {"colwise": "column", "rowwise": "row"}
"""How we cut a linear module, by the name that a plan of transformers has for it."""
REMEMBERED = 4
"""Microbatches whose masks and positions are kept: with documents told apart each has its own."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What the model's forward gives to one layer behind the hidden states."""


def hf_model(config: HfConfig, sequence_length: int, *, separate: bool = False) -> Model:
    """The model of some settings of transformers.

    `sequence_length` is that of the data, and `separate` says that its samples tell documents
    apart; only the layers' costs depend on the two, and whether such samples are refused.

    The model starts at the weights of `config`, or at random. Raises ConfigError for a model that
    cannot be cut into layers, and what `open_weights` and `start_from` raise.
    """
    cut = Cut(config)
    if separate:
        cut.check_separates()
    s, vocabulary = sequence_length, config.vocab_size
    path = config.from_ or config.weights
    inputs = (torch.long, torch.int32) if separate else (torch.long,)
    # The two uses of a tied weight start at the same values, so they need the same function.
    tied: InitFunction = cut.draw_tied
    used = {name.rpartition(".")[0] for pair in cut.ties for name in pair}
    layers = []
    for part in cut.parts:
        has_tied = any(name.startswith(part.name) for name in used)
        loaded = partial(cut.draw, part) if path else None
        layers.append(
            Layer(
                part.name,
                partial(cut.build, part),
                kind=part.kind,
                init=tied if has_tied and part.kind != "block" else loaded,
                flops=2 * s * cut.width * vocabulary if part is cut.parts[-1] else None,
                tensor=cut.splits(part) if part.kind == "block" else {},
            )
        )
    model = Model(
        layers=layers,
        loss=linear_cross_entropy if cut.head_is_plain else summed_cross_entropy,
        loss_logits=(
            (lambda samples: logits_at_a_time(samples * s, vocabulary))
            if cut.head_is_plain
            else None
        ),
        example=lambda samples: tuple(
            torch.zeros(samples, s, dtype=dtype, device="meta") for dtype in inputs
        ),
        ties=[Tie(*pair) for pair in cut.ties],
        name=config.hf["model_type"],
        vocab_size=vocabulary,
    )
    if path is None:
        return model
    opened = open_weights(path)
    beside = opened.path.parent / CONFIG_FILE
    if beside.exists():
        refuse_other_settings(beside, read_json(beside), config.hf, HF)
    file = HfFile(opened, cut.causal)
    return start_from(model, file, ignored=file.is_ignored, new=config.new)


@dataclass(frozen=True)
class Part:
    """A layer of axsparse: some modules of the model, and what it does with them."""

    name: str
    """The path of the module, or of the parent that all the modules have."""
    modules: Mapping[str, nn.Module]
    """The modules on the meta device, by their names in the parent."""
    is_single: bool
    """Whether `name` is the path of the only module."""
    kind: Kind
    forward: Callable[..., Any]
    """`forward(modules by name, inputs…)` returns the outputs of the layer."""


class PartModule(nn.Module):
    """The module of a part: it has the parameters and submodules of the part's own modules.

    Of a single module it shares the dictionaries of parameters, buffers and submodules, so that
    names stay those of transformers' state dict.
    """

    def __init__(self, part: Part, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if part.is_single:
            [module] = modules.values()
            for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                vars(self)[kind] = vars(module)[kind]
        else:
            for name, module in modules.items():
                self.add_module(name, module)
        vars(self)["_parts"] = dict(modules)
        vars(self)["_run"] = part.forward

    def forward(self, *inputs: Tensor) -> Any:
        """What the part makes of its inputs."""
        parts, run = vars(self)["_parts"], vars(self)["_run"]
        for module in parts.values():
            module.training = self.training
        return run(parts, *inputs)


class _Reached(Exception):  # noqa: N818 - it ends a forward, and is no error
    """The model's forward has come to its first layer, or behind its last one."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StandIn(nn.Module):
    """Stands in the list of layers in the place of one; other attributes are the layer's own."""

    def __init__(self, layer: nn.Module, run: Callable[[Tensor, Arguments], Any]) -> None:
        super().__init__()
        vars(self)["_layer"] = layer
        vars(self)["_run"] = run

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the hidden states and the other arguments to the function."""
        if args:
            return self._run(args[0], (args[1:], kwargs))
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return self._run(kwargs["hidden_states"], ((), others))


@dataclass
class _Watched:
    """What one forward of the model between embeddings and head has shown."""

    given: list[tuple[Tensor, Arguments]] = field(default_factory=list)
    """What each layer was given, in the order of the calls."""
    returned: list[Tensor] = field(default_factory=list)
    """What its stand-in returned."""
    calls: dict[str, list[tuple[int, Any, Any]]] = field(default_factory=dict)
    """The calls of the other modules, by name: how many layers had been called, the first argument,
    and the result."""
    output: Any = None


class Cut:
    """A causal language model of transformers on the meta device, and where it is cut.

    Embeddings are the model's forward up to its first layer; the norm is the forward behind the
    last layer; a layer gets what the forward gives it beside the hidden states, which a forward of
    stand-ins finds out once for every shape. Where a part is one module that is called alone, that
    module is called, with the same result.
    """

    def __init__(self, config: HfConfig) -> None:
        self.causal = _on_meta(config)
        self._lock = threading.Lock()
        self._bodies: dict[tuple[torch.device, torch.dtype], nn.Module] = {}
        self._remembered: dict[tuple[object, ...], list[Arguments]] = {}
        self._list_path, self._list = _only_list(self.causal)
        self._owner_path, _, self._list_name = self._list_path.rpartition(".")
        self._owner: Any = self.causal.get_submodule(self._owner_path)
        embedding = self.causal.get_input_embeddings()
        self._embedding_width = embedding.weight.shape[1]
        self._head_name, head = _head(self.causal)
        self._head: Any = head
        self._returns_tuples, watched = self._watch()
        before, after = self._sides(watched)
        self.width: int = watched.given[0][0].shape[-1]
        self._output_type = type(watched.output)
        last = watched.returned[-1]
        self._embeds_directly = _is_alone(watched, before, watched.given[0][0])
        self._norms_directly = _is_alone(watched, after, _hidden(watched.output), last)
        if not after and _hidden(watched.output) is not last:
            raise _unfit("its forward computes with the last layer's result, by no module")
        self.head_is_plain = self._has_plain_head()
        _mark_what_multiplies(self._list)
        self.parts = self._cut(before, after)
        self.ties = _tied(self.causal)
        self._refuse_what_is_left()

    def __deepcopy__(self, memo: object) -> Cut:
        """The modules of a model are copied for each stage, and share what finds their inputs."""
        return self

    # -- the parts ------------------------------------------------------------------------

    def _cut(self, before: Sequence[str], after: Sequence[str]) -> list[Part]:
        parts = [self._part(before, "embedding", self._embed)]
        for number, layer in enumerate(self._list):
            run = partial(self._layer, number)
            name = f"{self._list_path}.{number}"
            parts.append(Part(name, {str(number): layer}, True, "block", run))
        if after:
            parts.append(self._part(after, "head", self._norm))
        head = {self._head_name: self._head}
        parts.append(Part(self._head_name, head, True, "head", self._logits))
        if len({part.name for part in parts}) < len(parts):
            raise _unfit(f"modules before and behind its layers are all of {parts[0].name}")
        return parts

    def _part(self, names: Sequence[str], kind: Kind, run: Callable[..., Any]) -> Part:
        modules = {name: self._owner._modules[name] for name in names}
        is_single = len(names) == 1
        path = ".".join(filter(None, (self._owner_path, names[0] if is_single else "")))
        if not path:
            raise _unfit("its embeddings have no parent below the model itself")
        return Part(path, modules, is_single, kind, run)

    def build(self, part: Part) -> nn.Module:
        """A new module of a part: on the meta device if that is torch's default, else with random
        values, as transformers draws them."""
        modules = {name: copy.deepcopy(module) for name, module in part.modules.items()}
        if not torch.empty(0).is_meta:
            for name, module in modules.items():
                self._start(f"{part.name}.{name}", module)
        return PartModule(part, modules)

    def splits(self, part: Part) -> dict[str, Split | str]:
        """How a layer is cut where several ranks share it, by transformers' own plan; empty for a
        plan that does more than to cut outputs and inputs of linear modules."""
        plan = getattr(self.causal.config, "base_model_tp_plan", None) or {}
        base, found = f"{self.causal.base_model_prefix}.", dict[str, Split | str]()
        [layer] = part.modules.values()
        for path, module in layer.named_modules():
            full = f"{part.name}.{path}".removeprefix(base)
            kinds = [kind for pattern, kind in plan.items() if fnmatchcase(full, pattern)]
            if not kinds:
                continue
            if kinds[0] not in PLANNED or type(module) is not nn.Linear:
                return {}
            parent = layer.get_submodule(path.rpartition(".")[0])
            found[path] = Split(PLANNED[kinds[0]], unit=getattr(parent, "head_dim", 1))
        return found

    def _start(self, name: str, module: nn.Module) -> None:
        """Give the tensors of a module that are on the meta device their start values."""
        for child in module.modules():
            for key, tensor in child._parameters.items():
                if tensor is not None and tensor.is_meta:
                    empty = torch.full(tensor.shape, torch.nan)
                    child._parameters[key] = nn.Parameter(empty, tensor.requires_grad)
        for slot in slots(module):
            if slot.tensor.is_meta:
                slot.put(torch.zeros(slot.tensor.shape, dtype=slot.tensor.dtype))
        with torch.no_grad():
            for child in reversed(list(module.modules())):
                self.causal._init_weights(child)
        for key, parameter in module.named_parameters():
            if parameter.isnan().any():
                raise _unfit(f"transformers draws no start values for {name}.{key}")

    def draw(self, part: Part, name: str, shape: tuple[int, ...], _: object) -> Tensor:
        """A `Layer.init` of a part; the global generators are seeded by the caller."""
        parameter = self.build(part).get_parameter(name)
        assert tuple(parameter.shape) == shape, name
        return parameter.detach()

    def draw_tied(self, name: str, shape: tuple[int, ...], generator: object) -> Tensor:
        """The `Layer.init` of embeddings and head, where both have one weight."""
        for part in (self.parts[0], *self.parts[-2:]):
            known = dict(PartModule(part, part.modules).named_parameters())
            if name in known and tuple(known[name].shape) == shape:
                return self.draw(part, name, shape, generator)
        raise AssertionError(name)

    # -- what the parts do ----------------------------------------------------------------

    def _embed(
        self, modules: Mapping[str, nn.Module], tokens: Tensor, starts: Tensor | None = None
    ) -> Any:
        if self._embeds_directly:
            [module] = modules.values()
            hidden: Tensor = module(tokens)
        else:
            weight = next(p for module in modules.values() for p in module.parameters())
            if tokens.is_meta:  # Masks look into positions, which have no contents there.
                shape = (*tokens.shape, self.width)
                hidden = torch.empty(shape, dtype=weight.dtype, device="meta", requires_grad=True)
            else:
                hidden = self._embedded(modules, weight, tokens, starts)
        return hidden if starts is None else (hidden, starts)

    def _embedded(
        self,
        modules: Mapping[str, nn.Module],
        weight: Tensor,
        tokens: Tensor,
        starts: Tensor | None,
    ) -> Tensor:
        def stop(hidden: Tensor, _: Arguments) -> None:
            raise _Reached(hidden)

        training = next(iter(modules.values())).training
        body = self._body(weight.device, weight.dtype)
        view = self._view(body, modules, stop, training=training)
        try:
            view(input_ids=tokens, use_cache=False, **_positions(starts, tokens.device))
        except _Reached as reached:
            return reached.hidden
        raise AssertionError("the forward calls no layer")

    def _layer(
        self,
        number: int,
        modules: Mapping[str, nn.Module],
        hidden: Tensor,
        starts: Tensor | None = None,
    ) -> Any:
        args, kwargs = self._arguments(hidden, starts)[number]
        [layer] = modules.values()
        output = layer(hidden, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        return output if starts is None else (output, starts)

    def _norm(
        self, modules: Mapping[str, nn.Module], hidden: Tensor, starts: Tensor | None = None
    ) -> Tensor:
        del starts  # Nothing behind the layers looks at documents.
        if self._norms_directly:
            [module] = modules.values()
            normed: Tensor = module(hidden)
            return normed
        if hidden.is_meta:
            return torch.empty_like(hidden, requires_grad=True)
        training = next(iter(modules.values())).training
        body = self._body(hidden.device, hidden.dtype)
        view = self._view(body, modules, self._returning(hidden), training=training)
        output: Tensor = _hidden(view(inputs_embeds=self._embeds(hidden), use_cache=False))
        return output

    def _logits(
        self, modules: Mapping[str, nn.Module], hidden: Tensor, starts: Tensor | None = None
    ) -> Any:
        del starts
        [head] = modules.values()
        if self.head_is_plain:
            return hidden, head.weight
        return self._causal_forward(head, hidden).logits

    def _causal_forward(self, head: nn.Module, hidden: Tensor) -> Any:
        """What the model's own forward returns for these hidden states."""

        def body(*_: object, **__: object) -> Any:
            return self._output_type(last_hidden_state=hidden)

        # Copies of all modules above the stand-in, so that nothing is changed for others.
        child: nn.Module = _Function(body)
        path = self._owner_path.split(".")
        for depth in range(len(path) - 1, -1, -1):
            parent = copy.copy(self.causal.get_submodule(".".join(path[:depth])))
            vars(parent)["_modules"] = {**parent._modules, path[depth]: child}
            child = parent
        child._modules[self._head_name] = head
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        return child(input_ids=tokens, use_cache=False)

    # -- the model's own forward between embeddings and head ------------------------------

    def _body(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The parent of the layers, whose parameters are zeros without memory, in a type."""
        key = (device, dtype)
        if key not in self._bodies:
            without = copy.copy(self._owner)
            vars(without)["_modules"] = {**self._owner._modules, self._list_name: None}
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
        modules: Mapping[str, nn.Module],
        run: Callable[[Tensor, Arguments], Any],
        *,
        training: bool = False,
    ) -> Any:
        """The body with these modules and stand-ins; modules without parameters are copies, since
        some rotary embeddings remember the longest sequence that they have seen."""
        own = {
            name: child
            if child is None or any(True for _ in child.parameters())
            else copy.deepcopy(child).train(training)
            for name, child in body._modules.items()
        }
        view = copy.copy(body)
        stand_ins = nn.ModuleList(_StandIn(layer, run) for layer in self._list)
        vars(view)["_modules"] = {**own, **modules, self._list_name: stand_ins}
        view.training = training
        return view

    def _returning(self, hidden: Tensor) -> Callable[[Tensor, Arguments], Any]:
        """A stand-in's function that returns these hidden states, as a layer would."""
        returned = (hidden,) if self._returns_tuples else hidden
        return lambda _, __: returned

    def _embeds(self, like: Tensor) -> Tensor:
        """Embeddings of zeros, (B, S, E), without memory."""
        return like.new_zeros(()).expand(*like.shape[:2], self._embedding_width)

    def _arguments(self, hidden: Tensor, starts: Tensor | None) -> list[Arguments]:
        """What the model's forward gives to its layers beside these hidden states."""
        if hidden.is_meta:
            # Masks look into positions: they are made on the CPU, of documents half as long.
            real = torch.zeros(hidden.shape[:2], dtype=hidden.dtype).unsqueeze(-1)
            halves = None if starts is None else torch.zeros(starts.shape, dtype=starts.dtype)
            if halves is not None:
                half = halves.shape[1] // 2
                halves[:, half:] = half
            return [_moved(each) for each in self._arguments(real, halves)]
        content = None if starts is None else bytes(starts.cpu().contiguous().numpy().data)
        key = (tuple(hidden.shape[:2]), hidden.dtype, hidden.device, content)
        with self._lock:
            if key not in self._remembered:
                while len(self._remembered) >= REMEMBERED:
                    del self._remembered[next(iter(self._remembered))]
                self._remembered[key] = self._recorded(hidden, starts)
            return self._remembered[key]

    def _recorded(self, hidden: Tensor, starts: Tensor | None) -> list[Arguments]:
        given: list[Arguments] = []

        def record(hidden: Tensor, arguments: Arguments) -> Any:
            given.append(arguments)
            if len(given) == len(self._list):
                raise _Reached(hidden)
            return (hidden,) if self._returns_tuples else hidden

        with torch.no_grad():
            view = self._view(self._body(hidden.device, hidden.dtype), {}, record)
            try:
                embeds = self._embeds(hidden)
                view(inputs_embeds=embeds, use_cache=False, **_positions(starts, hidden.device))
            except _Reached:
                return given
        raise AssertionError("the forward calls fewer layers than it has")

    def check_separates(self) -> None:
        """ConfigError for a model whose forward does not tell documents apart by positions."""
        hidden = torch.zeros(1, 4, 1)
        try:
            halves = self._recorded(hidden, torch.tensor([[0, 0, 2, 2]], dtype=torch.int32))
        except TypeError as reason:
            raise _unseparated() from reason
        whole = self._recorded(hidden, torch.zeros(1, 4, dtype=torch.int32))
        for one, other in zip(halves, whole, strict=True):
            if not _masks_differ(one, other):
                raise _unseparated()

    # -- what the forward shows -----------------------------------------------------------

    def _watch(self) -> tuple[bool, _Watched]:
        """Whether layers return tuples, and what a forward of two tokens has shown.

        ConfigError if the forward is not one layer after the other.
        """
        problem = ""
        for returns_tuples in (False, True):
            try:
                watched = self._watched(returns_tuples=returns_tuples)
            except Exception as reason:
                told = " ".join(str(reason).split())
                problem = problem or f"its forward fails without its layers ({told[:200]})"
                continue
            found = _not_in_a_row(watched, len(self._list))
            if not found:
                return returns_tuples, watched
            problem = found if not problem or returns_tuples else problem
        raise _unfit(problem)

    def _watched(self, *, returns_tuples: bool) -> _Watched:
        watched = _Watched()

        def run(hidden: Tensor, arguments: Arguments) -> Any:
            watched.given.append((hidden, arguments))
            watched.returned.append(torch.zeros_like(hidden).requires_grad_())
            returned = watched.returned[-1]
            return (returned,) if returns_tuples else returned

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
        """The names of the modules with parameters that are called before the layers, and of all
        modules that are called behind them."""
        sides: dict[str, list[str]] = {"before": [], "after": []}
        for name, child in self._owner._modules.items():
            if child is None or name == self._list_name:
                continue
            places = {number for number, _, _ in watched.calls.get(name, [])}
            if places == {len(self._list)}:
                sides["after"].append(name)
            elif not _has_state(child):
                continue
            elif places == {0}:
                sides["before"].append(name)
            else:
                raise _unfit(f"{name} is called neither before all layers nor behind them")
        if not sides["before"]:
            raise _unfit("no module with parameters comes before its layers")
        return sides["before"], sides["after"]

    def _has_plain_head(self) -> bool:
        """Whether logits are the hidden states times the head's weight, and nothing else."""
        zeros = torch.zeros((), dtype=torch.float32).expand(self._head.weight.shape)
        seen: list[tuple[Tensor, Tensor]] = []
        head = copy.copy(self._head)
        vars(head)["_parameters"] = {
            name: None
            if p is None
            else nn.Parameter(zeros if name == "weight" else torch.zeros(p.shape), False)
            for name, p in self._head._parameters.items()
        }
        hidden = torch.zeros(1, 2, self.width)
        hook = head.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        with torch.no_grad():
            logits = self._causal_forward(head, hidden).logits
        hook.remove()
        is_linear = type(head).forward is nn.Linear.forward and head.bias is None
        return (
            is_linear
            and len(seen) == 1
            and seen[0][0].data_ptr() == hidden.data_ptr()
            and seen[0][0].shape == hidden.shape
            and seen[0][1] is logits
        )

    def _refuse_what_is_left(self) -> None:
        """ConfigError for parameters of the model that no part has."""
        have = {
            f"{part.name}.{name}"
            for part in self.parts
            for name, _ in PartModule(part, part.modules).named_parameters(remove_duplicate=False)
        }
        for name, _ in self.causal.named_parameters(remove_duplicate=False):
            if name not in have:
                raise _unfit(f"{name} is neither in its layers, before or behind them, nor a head")


class _Function(nn.Module):
    """A function in the place of a module."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        vars(self)["forward"] = run


def _on_meta(config: HfConfig) -> Any:
    """The model on the meta device; buffers that no file has are computed on the CPU."""
    from transformers import AutoModelForCausalLM

    settings = hf_settings("model.hf", config.hf)

    def build() -> nn.Module:
        from_config: Any = AutoModelForCausalLM.from_config
        made: nn.Module = from_config(settings)
        return made

    try:
        causal: Any = on_meta(Layer("hf", build))
    except Exception as reason:
        raise _unfit(
            f"transformers cannot make it ({' '.join(str(reason).split())[:200]})"
        ) from reason
    for slot in slots(causal):
        if not slot.persists and slot.tensor.is_meta:
            value = torch.zeros(slot.tensor.shape, dtype=slot.tensor.dtype)
            slot.put(value.fill_(torch.nan) if value.is_floating_point() else value)
            for parameter in slot.owner.parameters():
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            with torch.no_grad():
                causal._init_weights(slot.owner)
    for slot in slots(causal):
        if not slot.persists and slot.tensor.is_floating_point() and slot.tensor.isnan().any():
            raise _unfit(f"transformers does not say how buffer {slot.name} is computed")
    return causal


def _only_list(causal: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of layers and its path; ConfigError if there are several, or none."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in causal.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            found[path] = module
    if len(found) != 1:
        raise _unfit(
            f"it has {len(found)} lists of modules ({', '.join(found) or 'none'}), not one"
        )
    [(path, layers)] = found.items()
    return path, layers


def _head(causal: Any) -> tuple[str, nn.Module]:
    head = causal.get_output_embeddings()
    for name, child in causal.named_children():
        if child is head:
            return name, child
    raise _unfit("its output head is not a module beside the body")


def _mark_what_multiplies(layers: nn.Module) -> None:
    """Say which modules besides torch's own have matrices that are pruned by default: transposed
    linear layers, and experts, which are stacks of matrices. A linear layer beside experts that has
    an output for each of them is a router and stays dense."""
    from transformers.pytorch_utils import Conv1D

    for parent in layers.modules():
        if isinstance(parent, Conv1D):
            parent.multiplies = True  # type: ignore[assignment]
        for child in parent.children():
            stacks = {len(p) for p in child.parameters(recurse=False) if p.dim() == 3}
            if len(stacks) != 1 or isinstance(child, (nn.Conv1d, nn.ModuleList)):
                continue
            child.multiplies = True  # type: ignore[assignment]
            for router in parent.children():
                if isinstance(router, nn.Linear) and router.out_features in stacks:
                    router.multiplies = False  # type: ignore[assignment]


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(s.persists for s in slots(module))


def _hidden(output: Any) -> Any:
    return output.last_hidden_state


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
        for value in _leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.requires_grad and number:
                return f"layer {number} gets more than one result of the layers before it"
            if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
                return f"layer {number} is given a {type(value).__name__}, which others may change"
    output = _hidden(watched.output)
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


def _leaves(value: object) -> list[object]:
    """All values in tuples, and those of the keyword arguments themselves."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        return [leaf for each in (*value[0], *value[1].values()) for leaf in _leaves(each)]
    if isinstance(value, tuple):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def _moved(value: Any) -> Any:
    """The same arguments on the meta device."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple):
        return tuple(map(_moved, value))
    if isinstance(value, dict):
        return {name: _moved(each) for name, each in value.items()}
    return value


def _masks_differ(one: Arguments, other: Arguments) -> bool:
    """Whether two layers see other tokens: of four dimensions are masks alone."""
    masks = [
        [v for v in _leaves(each) if isinstance(v, Tensor) and v.dim() == 4]
        for each in (one, other)
    ]
    return len(masks[0]) != len(masks[1]) or any(
        not torch.equal(a, b) for a, b in zip(*masks, strict=True)
    )


def _tied(causal: nn.Module) -> list[tuple[str, str]]:
    """The names of each two parameters that are one weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in causal.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [(uses[0], later) for uses in names.values() for later in uses[1:]]


def _unfit(why: str) -> ConfigError:
    return ConfigError(
        f"model.hf: this model cannot be cut into layers: {why}; choose a decoder of embeddings, "
        "one list of layers, a norm and a head"
    )


def _unseparated() -> ConfigError:
    return ConfigError(
        "data.separate_documents: true, but the model's forward does not tell documents apart by "
        "their positions; choose false"
    )
