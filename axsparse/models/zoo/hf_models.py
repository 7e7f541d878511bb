"""Causal language models of Hugging Face's transformers, by its own modules, cut into layers.

Any model that the installed transformers knows is taken, if it is embeddings, one list of layers, a
norm and a head. The cut is found by watching the model's own forward, never by its name
(`hf_forward`).

Of a model that also takes pictures, the text model is taken, and the folder's other tensors stay.

Names of parameters are as in transformers' state dict of the causal language model. Shapes: B
sequences of a microbatch, S tokens, E embedding width, H hidden size, V vocabulary.

Where the data separates documents, layers pass on `starts` next to the hidden states, (B, S)
integers: the position in the sequence at which the document of each token begins.
"""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from axsparse.config.hf_config import (
    CONFIG_FILE,
    HF,
    TEXT_CONFIG,
    folder_settings,
    has_others,
    is_headless,
    read_json,
    reject_other_heads,
    reject_other_settings,
)
from axsparse.config.model_config import HfConfig
from axsparse.models.layer import InitFunction, Kind, Layer, Model, Tie, TpStyle, on_meta
from axsparse.models.losses import linear_cross_entropy, logits_at_a_time, summed_cross_entropy
from axsparse.models.module_buffers import slots
from axsparse.models.stand_ins import Modules, PartModule, are_alike, tied_names
from axsparse.models.start_weights import WeightFile, is_left_over, open_weights, start_from
from axsparse.models.zoo.hf_experts import mark_what_multiplies
from axsparse.models.zoo.hf_forward import Forward, unfit
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError, one_line

PLANNED = {
    "colwise": TpStyle("colwise"),
    "rowwise": TpStyle("rowwise"),
    "colwise_gather_output": TpStyle("gather_output"),
    "rowwise_split_input": TpStyle("rowwise"),
    "replicated_with_grad_allreduce": TpStyle("replicated"),
    "packed_colwise": TpStyle("colwise", packed=2),
    "moe_tp_experts": TpStyle("experts"),
}
"""Our style of a module or a parameter, by the name that a plan of transformers has for it."""
OF_ALL_FEATURES = ("colwise_gather_output", "rowwise_split_input")
"""Plans around operations that need all features, so that heads may be divided."""

ROW = 8
"""Features of experts that stay together: torch multiplies by stacks of matrices only where their
rows are a multiple of 16 bytes long."""

MOST_COMPUTED = 2**27
"""Entries of a buffer of real numbers that is in no file, at most."""


def hf_model(config: HfConfig, sequence_length: int, *, separate: bool = False) -> Model:
    """The model of some settings of transformers.

    `sequence_length` is the data's, and `separate` says that its samples separate documents; the
    two decide only the layers' costs, and whether such samples are rejected.

    The model starts at the weights of `config`, or at random. Raises ConfigError for a model that
    cannot be cut into layers, and the errors of `open_weights` and `start_from`.
    """
    cut = SplitModel(config)
    if separate:
        cut.forward.check_separates()
    s, vocabulary = sequence_length, config.vocab_size
    path = config.from_ or config.weights
    inputs = (torch.long, torch.int32) if separate else (torch.long,)
    # The two uses of a tied weight start at the same values, so they need the same function.
    tied: InitFunction = cut.draw_tied
    used = {name.rpartition(".")[0] for pair in cut.ties for name in pair}
    head_flops, layers = 2 * s * cut.forward.head_width * vocabulary, []
    for part in cut.parts:
        has_tied = any(name.startswith(part.name) for name in used)
        loaded = partial(cut.draw, part) if path else None
        layers.append(
            Layer(
                part.name,
                partial(cut.build, part),
                kind=part.kind,
                init=tied if has_tied and part.kind != "block" else loaded,
                flops=head_flops if part is cut.parts[-1] else None,
                tp_plan=cut.tp_plan(part) if part.kind == "block" else {},
            )
        )
    plain = cut.forward.head_is_plain
    model = Model(
        layers=layers,
        loss=linear_cross_entropy if plain else summed_cross_entropy,
        loss_logits=(lambda samples: logits_at_a_time(samples * s, vocabulary)) if plain else None,
        example=lambda samples: tuple(
            torch.zeros(samples, s, dtype=dtype, device="meta") for dtype in inputs
        ),
        ties=[Tie(*pair) for pair in cut.ties],
        name=config.hf["model_type"],
        vocab_size=vocabulary,
        container=cut.causal,
    )
    if path is None:
        return model
    opened = open_weights(path)
    beside = opened.path.parent / CONFIG_FILE
    if beside.exists():
        settings = read_json(beside)
        reject_other_heads(beside, settings)
        reject_other_settings(beside, settings, config.hf, HF)
    file = HfFile(opened, cut.causal)
    depth = _depth_setting(cut, config)
    ignored = partial(is_left_over, file.shapes)
    return start_from(model, file, ignored=ignored, new=config.new, depth=depth)


def _depth_setting(cut: SplitModel, config: HfConfig) -> str:
    """Where the number of layers is set, under the model's own name for it, and the lists of a
    value for each layer."""
    settings, text = folder_settings(HF, config.hf), cut.causal.config
    section = TEXT_CONFIG if has_others(settings) else ""
    theirs = config.hf.get(section, {}) if section else config.hf
    place = "".join(f"{one}." for one in ("" if config.from_ else HF, section) if one)
    key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    lists = (
        f"the length of {place}{name}"
        for name, value in theirs.items()
        if "layer" in name and isinstance(value, list) and len(value) == text.num_hidden_layers
    )
    return f"{' and '.join((place + key, *lists))}{f' in {CONFIG_FILE}' if config.from_ else ''}"


Run: TypeAlias = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Part:
    """A layer of axsparse: some modules of the model, and the function that runs them."""

    group: int
    """Equal in parts of one model that have the same shapes and costs."""
    name: str = field(compare=False)
    """The path of the only module, or of the parent that all the modules have."""
    modules: Modules = field(compare=False)
    """The modules on the meta device."""
    kind: Kind = field(compare=False)
    run: Run = field(compare=False)
    """Of a `PartModule`."""

    def module(self, modules: Modules) -> PartModule:
        """The module of the layer that has copies of the part's modules."""
        return PartModule(modules, self.run, is_single=len(modules) == 1)


class SplitModel:
    """A causal language model of transformers on the meta device, and where it is cut.

    Embeddings are the model's forward up to its first layer; the norm is the forward after the last
    layer; a layer gets the hidden states and the other arguments of the model's forward, which a
    forward of stand-ins finds out once for every shape. Where a part is one module that is called
    alone, that module is called, with the same result.
    """

    def __init__(self, config: HfConfig) -> None:
        self.causal = empty_model(config.hf)
        self.forward = Forward(self.causal)
        mark_what_multiplies(self.forward.layers)
        self.parts = self._split()
        self.ties = tied_names(self.causal)
        self._reject_leftovers()

    # -- the parts ------------------------------------------------------------------------

    def _split(self) -> list[Part]:
        forward = self.forward
        parts = [self._part(forward.before, "embedding", forward.embed, 0)]
        kinds = getattr(self.causal.config, "layer_types", None)
        for number, layer in enumerate(forward.layers):
            is_like_last = (
                number > 0
                and are_alike(layer, forward.layers[number - 1])
                and (kinds is None or kinds[number] == kinds[number - 1])
            )
            group = parts[-1].group if is_like_last else len(parts)
            name, run = f"{forward.list_path}.{number}", partial(forward.layer, number)
            parts.append(Part(group, name, {str(number): layer}, "block", run))
        if forward.after:
            parts.append(self._part(forward.after, "head", forward.norm, len(parts)))
        head = {forward.head_name: forward.head}
        parts.append(Part(len(parts), forward.head_name, head, "head", forward.logits))
        if len({part.name for part in parts}) < len(parts):
            raise unfit(f"modules before and behind its layers are all of {parts[0].name}")
        return parts

    def _part(self, names: Sequence[str], kind: Kind, run: Run, group: int) -> Part:
        modules = {name: self.forward.owner._modules[name] for name in names}
        path = ".".join(
            filter(None, (self.forward.owner_path, *(names if len(names) == 1 else ())))
        )
        if not path:
            raise unfit("its embeddings have no parent below the model itself")
        return Part(group, path, modules, kind, run)

    def build(self, part: Part) -> nn.Module:
        """A new module of a part: on the meta device if that is torch's default, else with random
        values, as transformers draws them."""
        modules = {name: copy.deepcopy(module) for name, module in part.modules.items()}
        if not torch.empty(0).is_meta:
            for name, module in modules.items():
                self._start(f"{part.name}.{name}", module)
        return part.module(modules)

    def tp_plan(self, part: Part) -> dict[str, TpStyle | str]:
        """How a layer is sharded, by transformers' own plan. What we do not shard has the plan's
        own name, which is refused once the layer is to be sharded."""
        plan = getattr(self.causal.config, "base_model_tp_plan", None) or {}
        base, found = f"{self.causal.base_model_prefix}.", dict[str, TpStyle | str]()
        [layer] = part.modules.values()
        for path, _ in (*layer.named_modules(), *layer.named_parameters()):
            full = f"{part.name}.{path}".removeprefix(base)
            kinds = [kind for pattern, kind in plan.items() if fnmatchcase(full, pattern)]
            if not kinds:
                continue
            style = PLANNED.get(kinds[0])
            parent = layer.get_submodule(path.rpartition(".")[0])
            if style is not None and kinds[0] not in OF_ALL_FEATURES:
                sizes = (getattr(parent, name, None) for name in ("head_dim", "head_size"))
                of_experts = ROW if getattr(parent, "axsparse_input_dim", 0) else 1
                style = replace(style, unit=next(filter(None, sizes), of_experts))
            if getattr(parent, "is_transposed", False):
                style = None  # outputs and inputs are in other places than we shard
            found[path] = style or kinds[0]
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
                raise unfit(f"transformers draws no start values for {name}.{key}")

    def draw(self, part: Part, name: str, shape: tuple[int, ...], _: object) -> Tensor:
        """A `Layer.init` of a part; the global generators are seeded by the caller."""
        parameter = self.build(part).get_parameter(name)
        assert tuple(parameter.shape) == shape, name
        return parameter.detach()

    def draw_tied(self, name: str, shape: tuple[int, ...], generator: object) -> Tensor:
        """The `Layer.init` of embeddings and head, where both have one weight."""
        for part in (self.parts[0], *self.parts[-2:]):
            known = dict(part.module(part.modules).named_parameters())
            if name in known and tuple(known[name].shape) == shape:
                return self.draw(part, name, shape, generator)
        raise AssertionError(name)

    def _reject_leftovers(self) -> None:
        """ConfigError for tensors of the model that no part has."""
        have = {
            f"{part.name}.{name}"
            for part in self.parts
            for name in part.module(part.modules).state_dict()
        }
        for name in self.causal.state_dict():
            if name not in have:
                raise unfit(f"{name} is neither in its layers, before or behind them, nor a head")


def empty_model(theirs: Mapping[str, Any], dtype: torch.dtype | None = torch.float32) -> Any:
    """transformers' language model of some settings on the meta device; buffers that no file has
    are computed on the CPU. `surrounding` gives the model whose text model it is.

    `dtype` is the type of these buffers, such as a scale of embeddings; None takes the type in
    the settings.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    settings = folder_settings("model.hf", theirs)
    text, whole = settings.get_text_config(), None
    if has_others(settings):
        whole = _made(AutoModelForImageTextToText, settings, dtype)
        head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
        text.tie_word_embeddings = head.weight is embedding.weight
    causal = TextModel(whole) if is_headless(text) else _made(AutoModelForCausalLM, text, dtype)
    if whole is not None and not _score_alike(causal, whole):
        causal = TextModel(whole)
        if not _score_alike(causal, whole):
            raise unfit("its logits are not those of its text model")
    _with_buffers(causal)
    vars(causal)[SURROUNDING] = whole  # no child, whose parameters would be the model's
    return causal


class TextModel(nn.Module):
    """The language model in a model that also takes pictures, where transformers has no class of
    it: the text model and the head, as the causal language models of transformers have them."""

    base_model_prefix = "model"

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.model, self.lm_head = whole.get_decoder(), whole.get_output_embeddings()
        self.config = self.model.config
        self._init_weights = self.model._init_weights

    def get_decoder(self) -> Any:
        return self.model

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, **given: Any) -> SimpleNamespace:
        """The logits, (B, S, V), as an attribute."""
        return SimpleNamespace(logits=self.lm_head(self.model(**given).last_hidden_state))


class _Outputs(OrderedDict[str, Any]):
    """Outputs of layers without values: the first is a hidden state on the meta device."""

    def __init__(self, width: int) -> None:
        super().__init__(last_hidden_state=torch.empty(1, 1, width, device="meta"))

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__("last_hidden_state" if key == 0 else key)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def _scores(model: Any) -> Tensor | None:
    """The logits that a language model makes of fixed outputs of its head, which some scale or cap;
    None if the layers and the head belong to a model in it."""
    head, base = model.get_output_embeddings(), getattr(model, model.base_model_prefix, model)
    if base is model:
        return None
    given = _Outputs(head.weight.shape[1])
    base.forward = lambda *_, **__: given
    hook = head.register_forward_hook(lambda *_: torch.linspace(-50, 50, 8).view(1, 1, 8))
    try:
        logits: Tensor = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta")).logits
        return logits
    finally:
        hook.remove()
        del base.forward


def _score_alike(causal: Any, whole: Any) -> bool:
    """Whether a text model makes the same logits as the model around it of what its head puts out,
    or that model leaves them to it."""
    ours, wanted = _scores(causal), _scores(whole)
    return wanted is None or (ours is not None and torch.equal(ours, wanted))


def full_model(theirs: Mapping[str, Any]) -> Any:
    """transformers' model of all that a folder with these settings holds, on the meta device, such
    as a language model with the encoder of its pictures, in their type."""
    from transformers import AutoModelForImageTextToText

    settings = folder_settings("model.hf", theirs)
    if not has_others(settings):
        return empty_model(theirs, None)
    return _with_buffers(_made(AutoModelForImageTextToText, settings, None))


def _with_buffers(model: Any) -> Any:
    """The model with the values of the buffers that no file has, each as the model around it that
    is nearest says, such as an encoder of pictures."""
    lacking = [slot for slot in slots(model) if not slot.persists and slot.tensor.is_meta]
    for slot in lacking:
        if slot.tensor.is_floating_point() and slot.tensor.numel() > MOST_COMPUTED:
            raise ConfigError(
                f"model.hf: buffer {slot.name} has {slot.tensor.numel():,} entries, more than the "
                f"{MOST_COMPUTED:,} that are computed; correct the model's sizes"
            )
        empty = torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype)
        slot.put(empty.fill_(_undefined(empty.dtype)))
    for path, owner in model.named_modules():
        found = [slot for slot in lacking if slot.owner is owner]
        if not found:
            continue
        for parameter in owner.parameters():
            parameter._is_hf_initialized = True
        while not hasattr(nearest := model.get_submodule(path), "_init_weights"):
            path = path.rpartition(".")[0]
        try:
            with torch.no_grad():
                nearest._init_weights(owner)
        except Exception as reason:  # transformers' own errors, such as Gemma 3n's text alone
            raise unfit(
                f"transformers fails on buffer {found[0].name} ({one_line(reason)})"
            ) from None
    for slot in lacking:
        none = _undefined(slot.tensor.dtype)
        is_lacking = slot.tensor.isnan() if math.isnan(none) else slot.tensor == none
        if slot.tensor.dtype != torch.bool and is_lacking.any():
            raise unfit(f"transformers does not say how buffer {slot.name} is computed")
    return model


def _undefined(kind: torch.dtype) -> float | int:
    """A value that no buffer has; of truth values there is none."""
    if kind.is_floating_point or kind.is_complex:
        return math.nan
    return 0 if kind == torch.bool else torch.iinfo(kind).min


def _made(kind: Any, settings: Any, dtype: torch.dtype | None) -> Any:
    given = {} if dtype is None else {"dtype": dtype}
    try:
        return on_meta(Layer("hf", partial(kind.from_config, settings, **given)))
    except ImportError as reason:  # of its encoder of pictures
        raise MissingInputError(
            f"model.hf: transformers lacks a library for this model ({one_line(reason)[:200]}); "
            "install it"
        ) from reason
    except Exception as reason:
        raise ConfigError(
            f"model.hf: transformers cannot make this model ({one_line(reason)[:200]}); correct "
            "its settings"
        ) from reason


SURROUNDING = "axsparse_surrounding"
"""The attribute of a text model that has the model which it is a part of, or None."""


def surrounding(causal: Any) -> tuple[Any, dict[str, str]]:
    """The model that a folder holds, and its names of the tensors of the language model in it, by
    their names there; ConfigError if it lacks some. A language model alone is its own."""
    whole, names = vars(causal).get(SURROUNDING), {name: name for name in causal.state_dict()}
    if whole is None:
        return causal, names
    paths = [{id(module): path for path, module in m.named_modules()} for m in (causal, whole)]
    for here, there in (
        (causal.get_output_embeddings(), whole.get_output_embeddings()),
        (causal.get_decoder(), whole.get_decoder()),
    ):
        own, full = paths[0][id(here)], paths[1][id(there)]  # empty for the model itself
        names |= {
            f"{own}.{name}".lstrip("."): f"{full}.{name}".lstrip(".") for name in here.state_dict()
        }
    shapes = [{name: one.shape for name, one in m.state_dict().items()} for m in (causal, whole)]
    for name, there in names.items():
        if shapes[1].get(there) != shapes[0][name]:
            raise unfit(f"its text model has no {name} that is another name's")
    return whole, names


# -- files whose tensors have other names or shapes than the model has ------------------------


def _drafting(settings: Any) -> list[str]:
    """Patterns of the layers behind the last one that draft tokens, which transformers has not."""
    count = getattr(settings, "num_nextn_predict_layers", 0) or 0
    first = settings.num_hidden_layers if count else 0
    return [rf"\blayers\.{number}\." for number in range(first, first + count)]


class HfFile:
    """A `WeightFile` whose tensors have the names and shapes of the model's state dict.

    Some published files have others, such as a matrix for each expert where the model has one
    tensor of all; transformers says how the one is made of the other.
    """

    def __init__(self, file: WeightFile, causal: Any) -> None:
        """Raises DataError if two tensors would have one name, or do not fit together."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        self._file = file
        self._model, names = surrounding(causal)
        self.path, self.files = file.path, file.files
        transforms: list[Any] = list(get_model_conversion_mapping(self._model))
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
        self._converters = {pattern: one for one in converters for pattern in one.source_patterns}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        """By name in the model, the tensors that make it, each with the pattern of its place."""
        known = self._model.state_dict()
        for name in sorted(file.shapes, key=dot_natural_key):
            to, pattern = rename_source_key(
                name, renamings, converters, self._model.base_model_prefix, known
            )
            if pattern is None and to in self._sources:
                raise DataError(
                    f"{file.path}: {name!r} and another tensor are both {to}; get it anew"
                )
            self._sources.setdefault(to, []).append((name, pattern))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.others: list[str] = []
        """The names in the file of tensors of other parts than the language model, and of tensors
        ignored by transformers, such as layers to draft tokens."""
        self._made_with: dict[str, tuple[str, str]] = {}
        own = {there: name for name, there in names.items()}
        ignored = [
            *(self._model._keys_to_ignore_on_load_unexpected or ()),
            *_drafting(causal.config),
        ]
        decoder, modules = self._model.get_decoder(), self._model.named_modules()
        text = next(path for path, module in modules if module is decoder)
        for to, sources in self._sources.items():
            made = self._made(to, self._empty)
            is_ignored = to not in known and (
                any(re.search(each, to) for each in ignored)
                or (not to.startswith(text) and is_left_over(file.shapes, sources[0][0]))
            )
            if is_ignored or (not own.keys() & made and known.keys() >= made.keys()):
                self.others += [name for name, _ in sources]
                continue
            for there, tensor in made.items():
                name = own.get(there, there)
                self.shapes[name], self._made_with[name] = tuple(tensor.shape), (to, there)

    def named(self, name: str) -> str | None:
        """The name in the file of a tensor of the model that the file has in one piece."""
        (first, pattern), *_ = self._sources.get(self._made_with.get(name, ("", ""))[0], [("", "")])
        return first if pattern is None else None

    def dtype(self, name: str) -> torch.dtype:
        """The type in the file of the first tensor that a tensor of the model is made of."""
        to, _ = self._made_with[name]
        return self._file.dtype(self._sources[to][0][0])

    def read(self, name: str) -> Tensor:
        """The tensor of a name of the model."""
        to, there = self._made_with[name]
        return self._made(to, self._file.read)[there]

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self._file.shapes[name], device="meta")

    def _made(self, to: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        sources = self._sources[to]
        [(first, pattern), *_] = sources
        if pattern is None:
            return {to: read(first)}
        converter: Any = copy.deepcopy(self._converters[pattern])
        for name, place in sources:
            converter.add_tensor(to, name, place, partial(read, name))
        try:
            made: dict[str, Any] = converter.convert(
                to, model=self._model, config=self._model.config
            )
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as reason:
            raise DataError(
                f"{self.path}: {first!r} and others do not make {to} "
                f"({' '.join(str(reason).split())[:120]}); get it anew"
            ) from reason
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


class PublishedNames:
    """The tensors of a folder that tensors of a model are stored as, by transformers' own mapping:
    other names, or a matrix for each expert where the model has one tensor of all."""

    def __init__(self, causal: Any) -> None:
        """`causal` is the model, which may be on the meta device."""
        self._model, self._names = surrounding(causal)
        self._last: tuple[str, dict[str, Tensor]] = "", {}

    def tensors(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of a folder that hold a tensor of the model, by name."""
        from transformers.core_model_loading import revert_weight_conversion

        made: dict[str, Tensor] = revert_weight_conversion(
            self._model, {self._names.get(name, name): tensor}
        )
        return made

    def one(self, name: str, there: str, read: Callable[[], Tensor]) -> Tensor:
        """One of these tensors; `read` gives the model's, which is read once for all in turn."""
        if self._last[0] != name:
            self._last = name, self.tensors(name, read())
        return self._last[1][there].contiguous()
