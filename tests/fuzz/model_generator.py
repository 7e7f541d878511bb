"""Draws models, settings and layouts at random; a case is plain values, and one line of JSON."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from fuzz.cut_pieces import ALL_PIECES, CUT_PIECES, WORDS, VocabularyHead
from fuzz.model_pieces import PIECES, Shape
from support.runs import random_init, tiny_config
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Kind, Layer, Model, Tie, TpStyle
from axsparse.models.losses import linear_cross_entropy
from axsparse.models.sequential import from_sequential

CLASSES, SAMPLES, TIED = 5, 24, 5
MOST_RANKS = (8, 4, 4)
"""Limits for a run with tensor-parallel ranks; ranks are threads, which take turns."""
GIVEN = (
    "count",
    "mask",
    "skip",
    "same",
    "half",
    "double",
    "aux",
    "empty",
    "small",
    "weight",
    "buffer",
    "strided",
    "row",
    "eight bits",
    "unsigned",
)
FRONTS = ("front", "cut front")
"""The first layers of models that take tokens."""
KINDS: dict[str, Kind] = {
    **dict.fromkeys(FRONTS, "embedding"),
    **dict.fromkeys(("head", "cut head"), "head"),
}
INPUTS = ("vector", "sequence", "odd sequence", "image", "tokens", "two")
METHODS = (
    "magnitude",
    "magnitude",
    "random",
    "snip",
    "early-bird",
    "gradual",
    "iterative",
)


@dataclass(frozen=True)
class Recipe:
    """One layer."""

    piece: str
    number: int = 0
    take: str = ""
    """The use of the last tensor next to the activations: "" leaves it, "use" adds it in, "end"
    adds it in and drops it, "drop" only drops it."""
    give: str = ""
    """One of `GIVEN` that is passed on next to the activations from here on; "" for none."""
    frozen: bool = False
    init: bool = False
    """Whether the layer has an `init`."""
    form: str = "tuple"
    """The form of the output: "tuple", "list", "named" (a named tuple), or "tensor" for one."""


@dataclass(frozen=True)
class Cut:
    """One layout, with what may differ between layouts."""

    split: tuple[int, ...]
    """Layers of each stage."""
    schedule: str = "message-driven"
    prefer: str = "alternate"
    extra_in_flight: int = 1
    recompute: int = 0
    index: str = "auto"
    shard: bool = False
    members: int = 1
    """Ranks that compute each stage together (`layout.g_tensor`)."""
    split_backward: bool = False
    order: int | None = None
    """Which order of arrivals is drawn; None leaves it as it comes."""

    def grid(self, replicas: int) -> tuple[int, int, int]:
        return len(self.split), replicas, self.members


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and two layouts of it."""

    inputs: str
    layers: tuple[Recipe, ...]
    start: str
    """"layers": each starts itself; "values": the model is made by `from_sequential`."""
    config: dict[str, Any]
    """Sections that differ from the defaults."""
    replicas: int
    cuts: tuple[Cut, Cut]
    stop_after: int

    @property
    def members(self) -> int:
        """Tensor-parallel ranks of each stage, as many in all layouts."""
        return int(self.config.get("layout", {}).get("g_tensor", 1))

    def line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def read(line: str) -> Case:
        raw = json.loads(line)
        raw["layers"] = tuple(Recipe(**recipe) for recipe in raw["layers"])
        raw["cuts"] = tuple(Cut(**{**cut, "split": tuple(cut["split"])}) for cut in raw["cuts"])
        return Case(**raw)


# -- modules ----------------------------------------------------------------------------------


class Tied(nn.Module):
    """A matrix of always the same shape, whatever the shape of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(TIED, TIED)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)[:, :TIED]
        flat = F.pad(flat, (0, TIED - flat.shape[1]))
        mean: Tensor = torch.tanh(self.inner(flat)).mean(1)
        return x + mean.view(-1, *[1] * (x.dim() - 1))


class Ends(nn.Module):
    """Tokens to activations at the front, or activations to classes at the end."""

    def __init__(self, shape: Shape, *, is_front: bool) -> None:
        super().__init__()
        self.inner = nn.Embedding(WORDS, 6) if is_front else nn.Linear(shape.numel(), CLASSES)  # type: ignore[attr-defined]
        self.is_front = is_front

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x if self.is_front else x.flatten(1))
        return out


class Wrapped(nn.Module):
    """A piece among tensors that are passed on next to the activations."""

    def __init__(self, core: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.core = core
        self.recipe = recipe
        if recipe.give == "weight":
            self.given = nn.Parameter(torch.ones(3))
        elif recipe.give == "buffer":
            self.register_buffer("given", torch.ones(3))
        if recipe.frozen:
            self.requires_grad_(False)

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        recipe, rest = self.recipe, list(others)
        if recipe.take and rest:
            other = rest[-1] if recipe.take == "use" else rest.pop()
            if recipe.take != "drop":
                x = x + 0.1 * other.to(x.dtype).sum() / max(other.numel(), 1)
        y = self.core(x)
        if recipe.give and isinstance(y, Tensor) and not y.is_complex() and not y.is_sparse:
            rest.append(self._passed_on(x, y))
        if not isinstance(y, Tensor):
            return y
        outputs = (y, *rest)
        if recipe.form == "list":
            return list(outputs)
        if recipe.form == "named":
            return namedtuple("Outputs", [f"t{number}" for number in range(len(outputs))])(*outputs)
        return outputs[0] if recipe.form == "tensor" and not rest else outputs

    def _passed_on(self, x: Tensor, y: Tensor) -> Tensor:
        given: Tensor
        match self.recipe.give:
            case "count":
                given = (y.detach() > 0).flatten(1).sum(1)
            case "mask":
                given = y.detach() > 0
            case "skip":
                given = x
            case "same":
                given = y
            case "half":
                given = y.to(torch.bfloat16)
            case "double":
                given = y.double()
            case "aux":
                given = y.float().square().mean()
            case "empty":
                given = y.detach().flatten(1)[:, :0].clone()
            case "small":
                given = (y.detach() * 3).clamp(-9, 9).to(torch.int8)
            case "strided":
                given = y.flatten(1)[:, ::2]
            case "eight bits":
                given = y.detach().to(torch.float8_e4m3fn)
            case "unsigned":
                given = y.detach().abs().clamp(0, 9).to(torch.int32).to(torch.uint16)
            case "row":
                given = y[:1]
            case _:
                given = self.given
        return given


def make_module(recipe: Recipe, shape: Shape) -> nn.Module:
    if recipe.piece == "tied":
        core: nn.Module = Tied()
    elif recipe.piece in (*FRONTS, "head"):
        core = Ends(torch.Size(shape), is_front=recipe.piece in FRONTS)
    elif recipe.piece == "cut head":
        core = VocabularyHead(shape)
    else:
        core = ALL_PIECES[recipe.piece].make(shape, recipe.number)
    return Wrapped(core, recipe)


def plan_of(recipe: Recipe, shape: Shape) -> dict[str, TpStyle | str]:
    """How the module of a recipe is sharded."""
    ends: dict[str, dict[str, TpStyle | str]] = {
        "cut front": {"inner": "vocabulary"},
        "cut head": {"weight": "vocabulary"},
    }
    found = ends.get(recipe.piece, {})
    if recipe.piece in ALL_PIECES:
        found = dict(ALL_PIECES[recipe.piece].splits(shape, recipe.number))
    return {f"core.{path}": split for path, split in found.items()}


def shape_after(recipe: Recipe, shape: Shape) -> Shape | None:
    """The shape of the layer's output; None if it cannot take the shape, or makes something too
    large."""
    piece = ALL_PIECES.get(recipe.piece)
    if piece is not None and len(shape) not in piece.ranks:
        return None
    if recipe.piece == "tied":
        return shape
    kind = torch.int64 if recipe.piece in FRONTS else torch.float32
    with torch.random.fork_rng(devices=[]):  # Whatever device a test has pretended.
        try:
            module = make_module(replace(recipe, give="", frozen=False), shape)
            x = torch.zeros(2, *shape, dtype=kind).requires_grad_(kind == torch.float32)
            out = module(x * 1)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return None
    out = out[0] if isinstance(out, (tuple, list)) else out
    after = tuple(out.shape[1:])
    if out.shape[0] != 2 or not 1 <= len(after) <= 3 or not 2 <= torch.Size(after).numel() <= 300:
        return None
    return after


# -- model, data and configuration ------------------------------------------------------------


def input_shape(case: Case) -> Shape:
    shapes: dict[str, Shape] = {
        **{"vector": (8,), "sequence": (4, 6), "odd sequence": (5, 6)},
        **{"image": (3, 5, 5), "tokens": (8,), "two": (6,)},
    }
    return shapes[case.inputs]


def shapes_of(case: Case) -> list[Shape] | None:
    """The input shape of each layer; None if the layers do not fit each other."""
    found = [input_shape(case)]
    for recipe in case.layers:
        after = shape_after(recipe, found[-1])
        if after is None:
            return None
        found.append(after)
    return found


def make_model(case: Case) -> Model:
    shapes = shapes_of(case)
    assert shapes is not None
    layers = []
    for number, (recipe, shape) in enumerate(zip(case.layers, shapes[:-1], strict=True)):
        layers.append(
            Layer(
                f"{number}",
                partial(make_module, recipe, shape),
                kind=KINDS.get(recipe.piece, "block"),
                init=random_init if recipe.init else None,
                tp_plan=plan_of(recipe, shape),
            )
        )
    ends: dict[str, Any] = {"loss": loss, "metrics": {"odd": odd}}
    if case.layers[-1].piece == "cut head":
        ends = {"loss": linear_cross_entropy}
    if case.start == "values":
        with torch.random.fork_rng(devices=[]):  # Whatever device a test has pretended.
            torch.manual_seed(case.config.get("seed", 0))
            made = from_sequential([layer.build() for layer in layers], loss)
        return replace(
            made,
            layers=[
                replace(one, kind=layer.kind, tp_plan=layer.tp_plan)
                for one, layer in zip(made.layers, layers, strict=True)
            ],
            **{**ends, "metrics": {}},
        )
    tied = [number for number, recipe in enumerate(case.layers) if recipe.piece == "tied"]
    ties = [
        Tie(f"{first}.core.inner.{name}", f"{second}.core.inner.{name}")
        for first, second in zip(tied[::2], tied[1::2], strict=False)
        for name in ("weight", "bias")
        if case.layers[first].frozen == case.layers[second].frozen
    ]
    first, last = case.layers[0], case.layers[-1]
    if last.piece == "cut head" and first.piece in FRONTS and first.init and last.init:
        ties.append(Tie("0.core.inner.weight", f"{len(layers) - 1}.core.weight"))
    return Model(layers, ties=ties, name="generated", **ends)


def loss(logits: Tensor, *others: Tensor) -> Tensor:
    *rest, targets = others
    total = F.cross_entropy(logits.float(), targets, reduction="sum")
    for other in rest:
        if other.is_floating_point():  # not requires_grad, which evaluations take away
            total = total + 0.01 * other.float().sum()
    return total


def odd(logits: Tensor, *others: Tensor) -> Tensor:
    return ((logits.argmax(-1) == others[-1]) & (others[-1] % 2 == 1)).sum()


def make_data(case: Case) -> ArrayDataset:
    generator = torch.Generator().manual_seed(5)
    shape = (SAMPLES, *input_shape(case))
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    if case.inputs == "tokens":
        return ArrayDataset(torch.randint(9, shape, generator=generator), targets)
    x = torch.randn(shape, generator=generator)
    return ArrayDataset((x, targets % 3) if case.inputs == "two" else x, targets)


def make_config(case: Case, cut: Cut | None = None) -> Config:
    sections = json.loads(json.dumps(case.config))
    sections["train"] = {"eval_every": 2, "eval_steps": 1, "log_every": 1000, **sections["train"]}
    sections["checkpoint"] = {"every": 0}
    sections["watchdog"] = {"timeout": 0.0}
    if cut is not None:
        sections["layout"] = {
            **sections.get("layout", {}),
            "split": list(cut.split),
            "g_tensor": cut.members,
        }
        sections["pipeline"] = {
            "schedule": cut.schedule,
            "prefer": cut.prefer,
            "extra_in_flight": cut.extra_in_flight,
            "checkpoint_activations": cut.recompute,
            "split_backward": cut.split_backward,
        }
        sections["samo"] = {
            "index": cut.index,
            "zero_stage": int(cut.shard),
            **sections.get("samo", {}),
        }
    return tiny_config(**sections)


# -- drawing ----------------------------------------------------------------------------------


def draw(rng: Random) -> Case:
    """One case; its layers fit each other."""
    precision = rng.choice(["fp32"] * 8 + ["bf16"] * 2 + ["fp16"])
    replicas = rng.choice([1, 1, 1, 2])
    members = rng.choice([1, 1, 1, 2, 2, 4])
    share = rng.choice([4, 6] if members > 1 else [4, 6, 8])
    microbatch = rng.choice([size for size in (1, 2, 3, 4) if share % size == 0])
    global_batch = share * replicas
    inputs = rng.choice(INPUTS)
    room = Room(precision, replicas, microbatch == 1, members)
    layers = _draw_layers(rng, inputs, room)
    steps = rng.choice([3, 4] if members > 1 else [3, 4, 5])
    pruning = _draw_pruning(rng, steps)
    steps = pruning.pop("steps", steps)
    return Case(
        inputs,
        layers,
        "values" if rng.random() < 0.15 and not any(r.init for r in layers) else "layers",
        {
            "batch": {"global_batch_size": global_batch, "microbatch_size": microbatch},
            "train": {"steps": steps, "compare_replicas_every": rng.choice([1, 100])},
            "precision": precision,
            "pruning": pruning,
            "optimizer": _draw_optimizer(rng),
            "schedule": {"warmup_steps": rng.choice([0, 1])},
            "samo": _draw_storage(rng, precision),
            "spikes": {
                "rule": rng.choice(["none"] * 5 + ["skip"]),
                "ratio": 1.01,
                "patience": 100,
                "window": 2,
            },
            "seed": rng.randrange(100),
            **({"layout": {"g_tensor": members}} if members > 1 else {}),
        },
        replicas,
        (_draw_cut(rng, len(layers), room, least=2), _draw_cut(rng, len(layers), room, least=1)),
        rng.randrange(1, steps),
    )


@dataclass(frozen=True)
class Room:
    """The limits of a case for its layers and layouts."""

    precision: str
    replicas: int
    is_small: bool
    """Whether microbatches are of one sample."""
    members: int


def _draw_layers(rng: Random, inputs: str, room: Room) -> tuple[Recipe, ...]:
    shape = input_shape(Case(inputs, (), "", {}, 1, (Cut((1,)), Cut((1,))), 1))
    layers: list[Recipe] = []
    is_cut = room.members > 1
    if inputs == "tokens":
        front = "cut front" if is_cut and rng.random() < 0.7 else "front"
        layers.append(Recipe(front, init=rng.random() < 0.5))
        shape = (8, 6)
    names = [*PIECES, "linear", "linear", "tied", "tied"]
    cut = list(CUT_PIECES)
    for _ in range(rng.randrange(2, 5 if is_cut else 8)):
        for _ in range(20):
            of_members = is_cut and rng.random() < 0.6
            recipe = _draw_recipe(rng, rng.choice(cut if of_members else names))
            if not _fits(recipe, room):
                continue
            after = shape_after(recipe, shape)
            if after is not None:
                layers.append(recipe)
                shape = after
                break
    take = rng.choice(["", "use", "end", "drop"])
    head = "cut head" if is_cut and rng.random() < 0.3 else "head"
    layers.append(Recipe(head, take=take, init=rng.random() < 0.5))
    if all(recipe.frozen for recipe in layers[:-1]):
        layers[0] = replace(layers[0], frozen=False)
    return tuple(layers)


def _fits(recipe: Recipe, room: Room) -> bool:
    """Whether torch can do it with these settings, and a resumption keeps its numbers."""
    piece = ALL_PIECES.get(recipe.piece)
    if piece is None:
        return True
    if piece.batches and room.is_small:
        return False
    # A resumption restores the statistics of replica 0 to all replicas: decision 16.
    if piece.moves and room.replicas > 1:
        return False
    return not (piece.fp32_only and room.precision != "fp32")


def _draw_recipe(rng: Random, name: str) -> Recipe:
    may_init = name == "tied" or not (name in PIECES and PIECES[name].itself)
    give = rng.choice(GIVEN) if rng.random() < 0.25 else ""
    number = rng.randrange(10_000 if name in CUT_PIECES else 60)
    take = rng.choice(["use", "end", "drop"]) if rng.random() < 0.4 else ""
    return Recipe(
        name,
        number,
        take=take,
        give=give,
        frozen=rng.random() < (0.02 if name in CUT_PIECES else 0.1),
        init=name == "tied" or (may_init and give != "buffer" and rng.random() < 0.3),
        form=rng.choice(["tuple", "list", "tensor", "named"]),
    )


def _draw_pruning(rng: Random, steps: int) -> dict[str, Any]:
    method = rng.choice(METHODS)
    found: dict[str, Any] = {
        "method": method,
        "sparsity": rng.choice([0.0, 0.3, 0.5, 0.8, 0.95]),
        "include": rng.choice(["blocks", "all"]),
        "distribution": rng.choice(["uniform", "uniform", "erk", "global"]),
    }
    if method in ("magnitude", "random", "snip"):
        found["at_step"] = rng.choice([0, 0, 1, 2])
        found["rewind_step"] = rng.choice(["auto", "auto", found["at_step"] // 2])
        found["rewarm_steps"] = rng.choice([0, 0, 1])
    elif method == "early-bird":
        found |= {
            "interval": 1,
            "on_no_convergence": "prune",
            "until_step": 7,
            "steps": 9,
            "threshold": 1.0,
        }
    else:
        found |= {"interval": 1, "until_step": steps - 1, "at_step": rng.choice([0, 1])}
        if found["at_step"] == 1 and steps == 3:
            found["at_step"] = 0
    return found


def _draw_optimizer(rng: Random) -> dict[str, Any]:
    name = rng.choice(["adamw", "adamw", "sgd", "lamb"])
    found: dict[str, Any] = {
        "name": name,
        "learning_rate": 1e-2,
        "clip_norm": rng.choice([0.0, 0.5, 5.0]),
    }
    if name == "sgd":
        found["momentum"] = rng.choice([0.0, 0.9])
        found["nesterov"] = found["momentum"] > 0 and rng.random() < 0.5
    return found


def _draw_storage(rng: Random, precision: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.1:
        found["enabled"] = False
    if precision != "fp32":
        found["gradient"] = rng.choice(["auto", "half", "fp32", "exact"])
    elif rng.random() < 0.15:
        found["gradient"] = "exact"
    return found


def _draw_cut(rng: Random, layers: int, room: Room, least: int) -> Cut:
    most = min(4, layers)
    if room.members > 1:
        most = min(most, max(least, rng.choice(MOST_RANKS) // room.replicas // room.members))
    stages = rng.randrange(min(least, layers), most + 1)
    at = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    return Cut(
        tuple(b - a for a, b in pairwise(at)),
        schedule=rng.choice(["message-driven", "message-driven", "1f1b", "gpipe"]),
        prefer=rng.choice(["alternate", "backward", "forward"]),
        extra_in_flight=rng.choice([0, 1, 2]),
        recompute=rng.choice([0, 0, 1, 2]),
        index=rng.choice(["auto", "int32", "mask"]),
        shard=rng.random() < 0.3,
        members=room.members,
        split_backward=rng.random() < 0.3,
        order=rng.randrange(100),
    )


# -- smaller cases ----------------------------------------------------------------------------


def smaller(case: Case) -> Iterable[Case]:
    """Cases with a little less in them, for finding what a failure needs."""
    for at in range(len(case.layers) - 1):
        layers = case.layers[:at] + case.layers[at + 1 :]
        cuts = (_without(case.cuts[0], at), _without(case.cuts[1], at))
        if all(cut.split for cut in cuts) and len(cuts[0].split) > 1:
            yield replace(case, layers=layers, cuts=cuts)
    for at, recipe in enumerate(case.layers):
        for change in (
            {"take": ""},
            {"give": ""},
            {"frozen": False},
            {"form": "tensor"},
            {"init": False} if recipe.piece != "tied" else {},
        ):
            changed = replace(recipe, **change)
            if changed != recipe:
                yield replace(case, layers=(*case.layers[:at], changed, *case.layers[at + 1 :]))
    yield replace(
        case,
        replicas=1,
        config=_with(
            case,
            "batch",
            {"global_batch_size": 4, "microbatch_size": case.config["batch"]["microbatch_size"]},
        ),
    )
    yield replace(case, config=_with(case, "pruning", {"method": "magnitude", "sparsity": 0.0}))
    yield replace(case, config=_with(case, "optimizer", {"name": "sgd", "momentum": 0.0}))
    yield replace(case, config={**case.config, "precision": "fp32", "samo": {}})
    yield replace(case, config=_with(case, "spikes", {"rule": "none"}))
    yield replace(case, start="layers")
    for at in (0, 1):
        plain = Cut(case.cuts[at].split, members=case.members)
        yield replace(case, cuts=(plain, case.cuts[1]) if at == 0 else (case.cuts[0], plain))
    yield replace(case, cuts=(case.cuts[0], Cut((len(case.layers),), members=case.members)))


def _with(case: Case, section: str, value: dict[str, Any]) -> dict[str, Any]:
    return {**case.config, section: value}


def _without(cut: Cut, layer: int) -> Cut:
    split, seen = list(cut.split), 0
    for stage, size in enumerate(split):
        seen += size
        if layer < seen:
            split[stage] -= 1
            break
    return replace(cut, split=tuple(size for size in split if size))
