"""Layers that the ranks of a group compute together: each holds some chunks of their matrices.

A linear module that `Layer.tensor` names is cut into C chunks, each a plain `nn.Linear`. The T
members of a group hold C / T consecutive chunks each. A column split cuts outputs, and a row split
cuts inputs, so that

    y = Σ_c row_c(between(column_c(x))) + bias

where members have all of x and y, or each of them some tokens (`token_tensor.py`). The sum, and
that of the gradients of x, runs in one binary tree over the C chunks: first those of a member, then
those of two members, of four, and so on. So neither the shapes of the products nor the order of the
additions depends on T, if C does not.

Shapes: B sequences of a microbatch, S tokens of each, H hidden size; I inputs and O outputs of a
linear module; t a token, v a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from axsparse.models.chunked_tensor import ChunkedTensor, chunk_of, chunked, of_all_chunks
from axsparse.models.layer import Layer, Split, SplitKind
from axsparse.models.losses import most_logits, refuse_foreign_words
from axsparse.models.tensor_group import Cut, TensorGroup, gather, join, log_total, spread, take
from axsparse.models.token_tensor import TokenTensor, joined, whole_in
from axsparse.runtime.bounds import IGNORED
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.seeds import torch_state

MOST_CHUNKS = 8
"""Chunks under `layout.tensor_exact`: the highest degree, and not so many that products of degree
1 become small."""
WHOLE = ("shared", "summed")
"""Kinds of splits that name a module; parameters inside it are cut only where other splits name
them."""


def as_splits(layer: str, given: Mapping[str, Split | str]) -> dict[str, Split]:
    """`Layer.tensor` with a `Split` for each kind that is given by its name."""
    splits = {}
    for path, one in given.items():
        split = Split(one) if isinstance(one, str) else one  # type: ignore[arg-type]  # checked
        if not isinstance(split, Split) or split.kind not in get_args(SplitKind):
            raise ConfigError(
                f"layer {layer}: tensor has {one!r} for {path!r}, which is not known; give one of "
                f"{', '.join(get_args(SplitKind))}, a Split, or layout.g_tensor 1"
            )
        splits[path] = split
    return splits


def cuts_of(
    layer: str,
    splits: Mapping[str, Split | str],
    shapes: Mapping[str, tuple[int, ...]],
    chunks: int,
    key: str = "layout.g_tensor",
) -> dict[str, Cut]:
    """How each parameter of a layer is cut, by its name within the layer; only those that are.

    `shapes` has the layer's parameters. ConfigError for a module that the layer does not have or
    whose size the chunks do not divide; `key` is the setting from which their number follows.
    """
    cuts = {}
    for path, split in as_splits(layer, splits).items():
        names = [f"{path}.weight"] + [f"{path}.bias"] * (split.kind == "column")
        found = [name for name in (names if names[0] in shapes else [path]) if name in shapes]
        if split.kind in WHOLE and any(name.startswith(f"{path}.") for name in shapes):
            continue
        if not found:
            nearest = ", ".join(get_close_matches(path, [*shapes], n=2, cutoff=0))
            raise ConfigError(
                f"layer {layer}: tensor names {path!r}, which has no weight; nearest: {nearest}"
            )
        for name in found:
            cut = Cut(shapes[name], _dim_of(split, shapes[name]), split.groups, chunks)
            size = cut.shape[cut.dim]
            if not _can_be_cut(split, size, chunks) and split.kind == "vocabulary":
                raise ConfigError(
                    f"{key}: {chunks} chunks are more than the {size} words of {layer}.{name}; "
                    "choose a smaller power of two"
                )
            if not _can_be_cut(split, size, chunks):
                raise ConfigError(
                    f"{key}: {chunks} chunks do not divide the {size // split.groups} outputs or "
                    f"inputs of {layer}.{name}, of which {split.unit} stay together; choose a "
                    "power of two that does"
                )
            cuts[name] = cut
    return cuts


def _can_be_cut(split: Split, size: int, chunks: int) -> bool:
    """Whether so many outputs, inputs or words give chunks, those of words not all alike."""
    if split.kind == "vocabulary":
        return chunks <= size
    return size % (split.groups * split.unit * chunks) == 0


def _dim_of(split: Split, shape: tuple[int, ...]) -> int:
    """The dimension along which a parameter of this shape is cut."""
    last = len(shape) - 1
    return last if split.kind == "row" else max(last - 1, 0)


def most_chunks(
    layer: str, splits: Mapping[str, Split | str], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    """The largest power of two up to `MOST_CHUNKS` that divides all that a layer has cut."""
    chunks = MOST_CHUNKS
    for path, split in as_splits(layer, splits).items():
        shape = shapes.get(f"{path}.weight", shapes.get(path))
        if shape is not None and split.kind not in WHOLE:
            size = shape[_dim_of(split, shape)]
            while chunks > 1 and not _can_be_cut(split, size, chunks):
                chunks //= 2
    return chunks


def _features(like: Tensor, size: int, chunks: int, groups: int = 1) -> Cut:
    """How the last dimension of activations, of `size` features in all, is cut."""
    return Cut((*like.shape[:-1], size), like.dim() - 1, groups, chunks)


# -- modules ----------------------------------------------------------------------------


class Column(nn.Module):
    """A linear module whose outputs are cut: (…, I) to (…, O · own chunks / chunks), or to (…, O)
    if they are gathered."""

    def __init__(self, linear: nn.Linear, cut: Cut, group: TensorGroup, split: Split) -> None:
        super().__init__()
        self.group, self.groups, self.gathers = group, cut.groups, split.gathered
        self.features = linear.out_features
        has_bias = linear.bias is not None
        self.chunks = nn.ModuleList(
            nn.Linear(linear.in_features, cut.shape_of(chunk)[0], bias=has_bias, device="meta")
            for chunk in group.own
        )

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        split: Callable[[], tuple[Tensor, ...]] = partial(spread, group, x)
        if isinstance(x, TokenTensor):
            split, versions = x.for_chunks, x.versions
        else:
            versions = [x._version]
        each = zip(self.chunks, group.split_input(x, versions, split), strict=True)
        parts: list[Tensor] = [chunk(part) for chunk, part in each]
        if self.gathers:
            cut = _features(parts[0], self.features, group.chunks, self.groups)
            return gather(group, cut, parts)
        group.drawn = torch_state()
        return chunked(parts)


class Row(nn.Module):
    """A linear module whose inputs are cut: (…, I · own chunks / chunks), or (…, I) if they are
    gathered, to (…, O); each member gets some tokens of them if it `divides` them."""

    def __init__(
        self, linear: nn.Linear, cut: Cut, group: TensorGroup, split: Split, *, divides: bool
    ) -> None:
        super().__init__()
        self.group, self.groups, self.takes = group, cut.groups, split.gathered
        self.features, self.divides = linear.in_features, divides
        self.bias = linear.bias
        self.chunks = nn.ModuleList(
            nn.Linear(cut.shape_of(chunk)[1], linear.out_features, bias=False, device="meta")
            for chunk in group.own
        )

    def forward(self, x: Tensor) -> Tensor:
        group, parts = self.group, x.chunks if isinstance(x, ChunkedTensor) else (x,)
        if self.takes:
            x = whole_in(x)
            cut = _features(x, x.shape[-1], group.chunks, self.groups)
            parts = take(group, cut, x) if x.shape[-1] == self.features else ()
        elif group.drawn and not all(map(torch.equal, group.drawn, torch_state())):
            raise ConfigError(
                "layout.g_tensor: random numbers are drawn between a column and a row split, and "
                "would differ with the degree; move the dropout behind the row split"
            )
        group.drawn = ()
        if torch.is_grad_enabled() and not all(part.requires_grad for part in parts):
            raise ConfigError(
                "layout.g_tensor: what lies between a column and a row split passes no gradient "
                "on; gather both splits (Split.gathered), since an autograd.Function there does "
                "not see the chunks"
            )
        widths = [part.shape[-1] for part in parts]
        if isinstance(x, TokenTensor) or widths != [chunk.in_features for chunk in self.chunks]:
            raise ConfigError(
                f"layout.g_tensor: a row split of {self.features} features in {group.chunks} "
                f"chunks gets {tuple(x.shape)}; let what lies before it take the number of heads "
                "or features from the tensor, and gather both splits or neither (Split.gathered)"
            )
        outputs = [chunk(part) for chunk, part in zip(self.chunks, parts, strict=True)]
        total = joined(group, outputs) if self.divides else join(group, outputs)
        return total if self.bias is None else total + self.bias


class Shared(nn.Module):
    """A module that every chunk uses, each for its own heads or features: shapes are the module's.

    It has the module's own dictionaries of parameters and buffers, so that their names stay.
    """

    def __init__(self, module: nn.Module, group: TensorGroup) -> None:
        super().__init__()
        for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[kind] = vars(module)[kind]
        vars(self)["_module"] = module
        self.group = group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module, args, kwargs = vars(self)["_module"], whole_in(args), whole_in(kwargs)
        module.training = self.training
        # The chunks' gradients of a parameter are summed as those of an activation are.
        copies = {name: spread(self.group, p) for name, p in module.named_parameters()}
        with _steady_buffers(module):
            results = [
                functional_call(
                    module,
                    {name: each[number] for name, each in copies.items()},
                    chunk_of(args, number),
                    chunk_of(kwargs, number),
                )
                for number in range(len(self.group.own))
            ]
        return of_all_chunks(module, results)


class Summed(nn.Module):
    """A module of which every chunk runs all with its own chunks of the parameters: the outputs are
    added, and so are the gradients of the inputs."""

    def __init__(self, module: nn.Module, cuts: Mapping[str, Cut], group: TensorGroup) -> None:
        super().__init__()
        self.group, self.chunks = group, nn.ModuleList()
        for number in group.own:
            chunk = copy.copy(module)
            vars(chunk)["_parameters"] = {
                name: nn.Parameter(torch.empty(cut.shape_of(number), device="meta"))
                for name, cut in cuts.items()
            }
            self.chunks.append(chunk)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        inputs, named = whole_in(inputs), whole_in(named)
        each = {
            key: spread(self.group, x)
            if isinstance(x, Tensor) and x.is_floating_point()
            else (x,) * len(self.chunks)
            for key, x in (*enumerate(inputs), *named.items())
        }
        with _steady_buffers(self):
            parts = [
                chunk(
                    *(each[place][number] for place in range(len(inputs))),
                    **{name: each[name][number] for name in named},
                )
                for number, chunk in enumerate(self.chunks)
            ]
        return join(self.group, parts)


@contextmanager
def _steady_buffers(module: nn.Module) -> Iterator[None]:
    """ConfigError if calls of a module for each chunk change a buffer, which would then depend on
    how many chunks a member has."""
    before = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]
    yield
    for (name, now), (_, buffer, version) in zip(module.named_buffers(), before, strict=True):
        if now is not buffer or now._version != version:
            raise ConfigError(
                f"layout.g_tensor: a shared or summed module changes its buffer {name!r} once for "
                "each chunk; keep what it counts outside of what is cut"
            )


class Vocabulary(nn.Module):
    """An embedding whose words are cut: (B, S) integers to (B, S, H)."""

    def __init__(self, cut: Cut, group: TensorGroup) -> None:
        super().__init__()
        self.group, self.words = group, cut.shape[0]
        self.bounds = [cut.bounds(chunk) for chunk in group.own]
        self.chunks = nn.ModuleList(
            nn.Embedding(stop - start, cut.shape[1], device="meta") for start, stop in self.bounds
        )

    def forward(self, tokens: Tensor) -> Tensor:
        refuse_foreign_words(tokens, self.words)
        parts = []
        for chunk, (start, stop) in zip(self.chunks, self.bounds, strict=True):
            here = (tokens >= start) & (tokens < stop)
            rows = chunk((tokens - start).clamp(0, stop - start - 1))
            parts.append(rows.masked_fill(~here.unsqueeze(-1), 0))
        return joined(self.group, parts)


class Chunks(nn.Module):
    """The chunks of a parameter that the layer hands to the loss."""

    def __init__(self, cut: Cut, group: TensorGroup) -> None:
        super().__init__()
        self.chunks = nn.ParameterList(
            nn.Parameter(torch.empty(cut.shape_of(chunk), device="meta")) for chunk in group.own
        )


def chunk_modules(module: nn.Module) -> set[nn.Module]:
    """The linear modules inside a module that hold chunks of cut ones."""
    cut = (each for each in module.modules() if isinstance(each, (Column, Row)))
    return {chunk for each in cut for chunk in each.chunks}


def whole_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a layer that are not cut."""
    cut = {id(p) for chunk in chunk_modules(module) for p in chunk.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in cut]


def chunks_of(weight: nn.Parameter | Chunks) -> tuple[nn.Parameter, ...]:
    """The chunks of a weight that are here: the weight itself, where it is not cut."""
    return tuple(weight.chunks) if isinstance(weight, Chunks) else (weight,)


def cut_module(
    layer: Layer, module: nn.Module, cuts: Mapping[str, Cut], group: TensorGroup
) -> dict[str, tuple[str, int]]:
    """Cut the modules of a layer whose parameters `cuts` names; the chunks have no contents yet.

    Returns, by the name of each chunk's parameter within the layer, the name of the whole parameter
    and the number of the chunk. ConfigError for a module that cannot be cut.
    """
    found: dict[str, tuple[str, int]] = {}
    splits = as_splits(layer.name, layer.tensor)
    for name in cuts:
        path = name.rpartition(".")[0]
        replaced = module.get_submodule(path) if path in splits else None
        for what in _what_is_lost(replaced, module.get_parameter(name)):
            raise ConfigError(
                f"layer {layer.name}: {name} {what}, and is not cut; leave it out of tensor"
            )
    # Experts and their router need all tokens.
    divides = all(split.kind != "summed" for split in splits.values())
    for path, split in splits.items():
        owner = module.get_submodule(path) if split.kind in WHOLE else module
        if split.kind == "shared":
            _replace(module, path, Shared(owner, group))
        elif split.kind == "summed":
            inside = _cuts_inside(layer, path, owner, cuts)
            _replace(module, path, Summed(owner, inside, group))
    for name, cut in cuts.items():
        path, _, kind = name.rpartition(".")
        owner = module.get_submodule(path)
        own = enumerate(group.own)
        if isinstance(
            owner, (Column, Row, Summed)
        ):  # Replaced with the weight before this bias, or above.
            found |= {f"{path}.chunks.{n}.{kind}": (name, c) for n, c in own}
            continue
        if (
            name in splits and splits[name].kind == "vocabulary"
        ):  # A parameter that the layer hands to the loss, such as the head's weight.
            delattr(owner, kind)
            setattr(owner, kind, Chunks(cut, group))
            found |= {f"{name}.chunks.{n}": (name, c) for n, c in own}
            continue
        new: nn.Module
        if type(owner) is nn.Linear and path in splits:
            split = splits[path]
            new = Column(owner, cut, group, split)
            if cut.dim:
                new = Row(owner, cut, group, split, divides=divides)
        elif type(owner) is nn.Embedding and owner.padding_idx is None and not owner.max_norm:
            new = Vocabulary(cut, group)
        else:
            raise ConfigError(
                f"layer {layer.name}: {path} is {type(owner).__name__}, which is not cut by "
                f"{name!r}; name a plain nn.Linear or nn.Embedding in tensor, or leave it out"
            )
        _replace(module, path, new)
        found |= {f"{path}.chunks.{n}.{kind}": (name, c) for n, c in own}
    _refuse_halves(layer, splits)
    return found


def _refuse_halves(layer: Layer, splits: Mapping[str, Split]) -> None:
    """ConfigError for column splits without row splits, or the other way round."""
    kinds = {split.kind for split in splits.values() if not split.gathered}
    if len(kinds & {"column", "row"}) == 1:
        raise ConfigError(
            f"layer {layer.name}: tensor has column splits or row splits, and not both; what lies "
            'between "column" and "row" is cut, so name both, or gather (Split.gathered)'
        )


def _what_is_lost(replaced: nn.Module | None, parameter: nn.Parameter) -> Iterator[str]:
    """What a parameter has, or a module that is replaced, and their chunks would not have."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if not parameter.requires_grad:
        yield "is frozen"
    if replaced is not None and any(vars(replaced)[kind] for kind in hooks):
        yield "is of a module with hooks"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        yield "has hooks"


def is_cut(module: nn.Module) -> bool:
    """Whether any module in it is cut."""
    kinds = (Column, Row, Shared, Summed, Vocabulary, Chunks)
    return any(isinstance(child, kinds) for child in module.modules())


def _cuts_inside(
    layer: Layer, path: str, owner: nn.Module, cuts: Mapping[str, Cut]
) -> dict[str, Cut]:
    """How the parameters of a summed module are cut, by their names in it; ConfigError if one is
    not cut."""
    inside = {}
    for name, parameter in owner.named_parameters():
        if f"{path}.{name}" not in cuts or not parameter.requires_grad or "." in name:
            raise ConfigError(
                f"layer {layer.name}: {path} is summed over chunks, so that {path}.{name} has to "
                'be trained, its own, and cut; name it "column" or "row" in tensor, or leave '
                f"{path} out"
            )
        inside[name] = cuts[f"{path}.{name}"]
    return inside


def _replace(module: nn.Module, path: str, new: nn.Module) -> None:
    above, _, last = path.rpartition(".")
    setattr(module.get_submodule(above), last, new)


# -- the loss of a cut vocabulary -------------------------------------------------------


def vocabulary_cross_entropy(
    group: TensorGroup, words: int, hidden: Tensor, *weights_and_targets: Tensor
) -> Tensor:
    """`losses.linear_cross_entropy` with this member's chunks of the weight, of `words` rows.

    loss = Σ_t log Σ_c exp(log Σ_{v in c} exp z[t, v]) − Σ_c z[t, y[t]]
    """
    *weights, targets = weights_and_targets
    flat, rows = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    refuse_foreign_words(rows, words, ignored=IGNORED)
    totals, hits = [], []
    for chunk, part, weight in zip(group.own, spread(group, flat), weights, strict=True):
        start = chunk * words // group.chunks
        if len(rows) * len(weight) > most_logits(rows.device) and torch.is_grad_enabled():
            options: Any = {"use_reentrant": False, "preserve_rng_state": False}
            total, hit = checkpoint(_totals, part, weight, rows - start, **options)
        else:
            total, hit = _totals(part, weight, rows - start)
        totals.append(total)
        hits.append(hit)
    losses = log_total(group, totals) - join(group, hits)
    return torch.where(rows != IGNORED, losses, 0).sum()


def _totals(hidden: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ_v exp z[t, v] over the words of a chunk, and z at the target if it is one of them."""
    logits = F.linear(hidden, weight).float()
    here = (rows >= 0) & (rows < len(weight))
    columns = rows.clamp(0, len(weight) - 1).unsqueeze(1)
    return logits.logsumexp(1), here * logits.gather(1, columns).squeeze(1)
