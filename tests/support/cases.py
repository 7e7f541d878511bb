"""The table of equivalences: the run, its layout, and its reference.

A row names settings, a layout, and a reference. There are four references:

- `TORCH`: the dense masked oracle in plain torch, which adds in the order of the replicas;
- `ONE_STAGE`: the same replicas with one stage each, without the row's free settings;
- `ONE_RANK`: one process, likewise, for sums that no number of replicas changes;
- `SAME_LAYOUT`: the same layout without the row's free settings.

Free settings say how a model is trained, and have no effect on the result: none of them may change
a bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import pytest
import torch
from support.methods import MethodOracle
from support.oracle import Oracle, Trace, adamw, lamb, sgd
from support.runs import (
    assert_bitwise,
    assert_same_steps,
    mlp,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)

from axsparse.config.schema import Config
from axsparse.data.dataset import Dataset
from axsparse.models.layer import Model
from axsparse.training.trainer import Trainer

Layout = tuple[int, int]
Settings = Mapping[str, Any]
Judge = Literal["torch", "one stage", "one rank", "same layout"]
Ranks = Sequence[tuple[Trainer, Trace]]
TORCH: Judge = "torch"
ONE_STAGE: Judge = "one stage"
ONE_RANK: Judge = "one rank"
SAME_LAYOUT: Judge = "same layout"

SCHEDULES = ("message-driven", "1f1b", "gpipe")
INDICES = ("int32", "mask", "auto")

PRUNING: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "magnitude later": {"method": "magnitude", "at_step": 3},
    "magnitude, rewound": {"method": "magnitude", "at_step": 3, "rewind_step": 0},
    "magnitude, rewound to step 2": {"method": "magnitude", "at_step": 4, "rewind_step": 2},
    "random": {"method": "random", "at_step": 2},
    "snip": {"method": "snip"},
    "snip later": {"method": "snip", "at_step": 2},
    "gradual": {"method": "gradual", "at_step": 1, "interval": 2, "until_step": 7},
    "iterative": {"method": "iterative", "interval": 2, "until_step": 6},
    "iterative to step 1": {
        **{"method": "iterative", "at_step": 1, "interval": 2, "until_step": 6},
        "rewind_step": 1,
    },
    "early-bird": {"method": "early-bird", "interval": 1, "until_step": 8, "threshold": 0.4},
    "early-bird, rewound": {
        **{"method": "early-bird", "interval": 1, "until_step": 8, "threshold": 0.4},
        **{"rewind_step": 0},
    },
}
"""Every pruning method, in runs of ten steps that change their masks."""


@dataclass(frozen=True)
class PlannedModel:
    """A model and its data."""

    name: str
    model: Callable[[Config], Model]
    data: Callable[[], Dataset]
    validation: Callable[[], Dataset] | None = None
    settings: Settings = field(default_factory=dict, hash=False, compare=False)
    """The settings that differ from the defaults of `tiny_config` for all rows with this model."""


GPT = PlannedModel("gpt", tiny_gpt, token_data, lambda: token_data(samples=23))
COARSE = replace(GPT, name="gpt by threes", settings={"batch": {"microbatch_size": 3}})
"""A third of the microbatches: for rows whose fact does not depend on how many there are."""
INFINITE = PlannedModel("mlp, infinite", lambda config: mlp(), lambda: vector_data(infinite=17))
"""One of the samples overflows every step that it is in."""
WIDE = PlannedModel(
    "wide mlp",
    lambda config: mlp(3, 510),
    lambda: vector_data(24, 510),
    settings={
        "pruning": {"sparsity": 0.4},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 3},
    },
)
"""Wide enough that shares of sharded state split a tensor."""
WIDE_INFINITE = replace(WIDE, name="wide, infinite", data=lambda: vector_data(24, 510, infinite=3))


@dataclass(frozen=True)
class Row:
    """One run and its reference."""

    layout: Layout
    """Stages and replicas; each stage has `layout.g_tensor` tensor-parallel ranks."""
    settings: Settings = field(default_factory=dict)
    free: Settings = field(default_factory=dict)
    judge: Judge = TORCH
    subject: PlannedModel = GPT
    order: int | None = None
    """Which arrival order of messages is drawn."""
    tolerance: tuple[float, float] | None = None
    """Relative, of losses and of norms. None asks for equal bits of all state."""
    plain: PlannedModel | None = None
    """The model of the reference, if it is another way to write the same model."""
    is_usual: bool = True
    """Whether `make test` runs the row; `make test-all` runs all."""

    def config(self) -> Config:
        return tiny_config(**merged(self.subject.settings, self.settings, self.free))

    def judged_by(self) -> Config:
        """The configuration of the run that it must be equal to."""
        return tiny_config(**merged(self.subject.settings, self.settings))

    def __str__(self) -> str:
        g_inter, g_data = self.layout
        g_tensor = f"x{self.g_tensor}" * (self.g_tensor > 1)
        said = " ".join(_words(section) for section in (self.settings, self.free) if section)
        drawn = "" if self.order is None else f" order {self.order}"
        return f"{self.subject.name} {g_inter}x{g_data}{g_tensor} {said}{drawn} = {self.judge}"

    @property
    def g_tensor(self) -> int:
        return self.config().layout.g_tensor


def _words(sections: Settings) -> str:
    return ",".join(
        f"{key}={value}"
        for name, section in sections.items()
        for key, value in (section.items() if isinstance(section, dict) else [(name, section)])
    )


def merged(*settings: Settings) -> dict[str, Any]:
    """Sections of configurations, key by key; the last of several values counts."""
    result: dict[str, Any] = {}
    for sections in settings:
        for name, value in sections.items():
            both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = {**result[name], **value} if both else value
    return result


def steps(number: int, **sections: Any) -> Settings:
    return {"train": {"steps": number}, **sections}


def batch(size: int, microbatch: int) -> Settings:
    """A global batch, and the size of its microbatches."""
    return {"batch": {"global_batch_size": size, "microbatch_size": microbatch}}


def axis(section: str, key: str, *values: Any) -> list[Settings]:
    """One setting with each of some values, for `crossed`."""
    return [{section: {key: value}} for value in values]


def crossed(layouts: Sequence[Layout], *axes: Sequence[Settings], **others: Any) -> list[Row]:
    """Rows of every layout with every setting of the first axis; further axes take turns along
    both."""
    base, (first, *further) = others.pop("settings", {}), axes
    return [
        Row(
            layout,
            merged(base, setting, *(axis[(m + n) % len(axis)] for axis in further)),
            **others,
        )
        for m, layout in enumerate(layouts)
        for n, setting in enumerate(first)
    ]


def freed(layouts: Sequence[Layout], free: Sequence[Settings], **others: Any) -> list[Row]:
    """Rows of every layout with every one of some free settings."""
    return [Row(layout, free=each, **others) for layout in layouts for each in free]


def parameters(rows: Iterable[Row], every: int = 1) -> list[Any]:
    """The rows for `pytest.mark.parametrize`, sorted by their reference.

    Of the usual rows `make test` has one in `every`.
    """
    ordered = sorted(rows, key=lambda row: (row.subject.name, row.judge, str(row.settings)))
    usual = [row for row in ordered if row.is_usual][::every]
    return [
        pytest.param(row, id=str(row), marks=() if row in usual else pytest.mark.exhaustive)
        for row in ordered
    ]


def judge(row: Row, **others: Any) -> Ranks:
    """Train a row in this process and compare every rank with its reference; returns the ranks."""
    ranks = _train(row.subject, row.layout, row.config(), order=row.order, **others)
    references = reference(row)
    for rank, (_, trace) in enumerate(ranks):
        hold(row, rank, trace, references)
        for name, weight in ranks[rank % (row.layout[0] * row.g_tensor)][1].weights.items():
            assert torch.equal(trace.weights[name], weight), f"replicas differ in {name}"
    return ranks


def reference(row: Row) -> list[Trace]:
    """The traces that the row's run must be equal to: one for all, one a replica, or one a rank."""
    config = row.judged_by()
    replicas = 1 if row.judge == ONE_RANK else row.layout[1]
    layout = row.layout if row.judge == SAME_LAYOUT else (1, replicas)
    return _reference(row.plain or row.subject, row.judge, layout, config.model_dump_json())


def hold(row: Row, rank: int, ours: Trace, references: Sequence[Trace]) -> None:
    """Compare one rank with the reference."""
    if row.judge == SAME_LAYOUT:
        expected = references[rank]
    elif row.judge == ONE_STAGE:
        # Each replica has as many references as tensor-parallel ranks.
        replica = rank // (row.layout[0] * row.g_tensor)
        expected = references[replica * len(references) // row.layout[1]]
    else:
        expected = references[0]
    if row.tolerance is None:
        # A stage may have nothing to train.
        (assert_bitwise if ours.weights else assert_same_steps)(ours, expected)
        return
    assert ours.finite == expected.finite
    losses, norms = row.tolerance
    assert ours.losses == pytest.approx(expected.losses, rel=losses)
    assert ours.norms == pytest.approx(expected.norms, rel=norms)


def judge_everywhere(
    model: Model,
    data: Dataset,
    settings: Settings,
    *,
    plain: Model | None = None,
) -> list[Trace]:
    """Train in one to four stages, with and without recomputation in turn, and compare each with
    one stage.

    With `plain`, which is the same model in other words, all are compared with plain torch. Returns
    the traces of the last run's ranks.
    """
    subject = PlannedModel("own", lambda _: model, lambda: data)
    other = None if plain is None else PlannedModel("plain", lambda _: plain, lambda: data)
    rows = [
        Row(
            (stages, 1),
            settings,
            {"pipeline": {"checkpoint_activations": stages % 2}},
            TORCH if plain else ONE_STAGE,
            subject,
            order=stages,
            plain=other,
        )
        for stages in range(1, min(4, len(model.layers)) + 1)
    ]
    ranks = [judge(row) for row in rows]
    return [trace for _, trace in ranks[-1]]


@lru_cache(maxsize=12)
def _reference(subject: PlannedModel, by: Judge, layout: Layout, config_text: str) -> list[Trace]:
    config = Config.model_validate(json.loads(config_text))
    if by == TORCH:
        oracle = oracle_of(config, layout[1], subject.model(config), subject.data())
        return [oracle.run(config.train.steps)]
    return [trace for _, trace in _train(subject, layout, config)]


def _train(subject: PlannedModel, layout: Layout, config: Config, **others: Any) -> Ranks:
    if config.train.eval_steps:
        others["validation"] = (subject.validation or subject.data)()
    given = (*layout, subject.model(config), config, subject.data())
    return train_in_process(*given, g_tensor=config.layout.g_tensor, **others)


def oracle_of(
    config: Config, g_data: int, model: Model | None = None, data: Dataset | None = None
) -> Oracle:
    """As the settings say, not run yet; without a model it is a GPT on random tokens."""
    pruning = config.pruning
    given = (model or tiny_gpt(config), config, data or token_data(), g_data)
    optimizer = {"adamw": adamw, "sgd": sgd, "lamb": lamb}[config.optimizer.name]
    at_once = pruning.method in ("magnitude", "random") and pruning.rewind_step in ("auto", "never")
    if not config.samo.enabled or (at_once and pruning.distribution == "uniform"):
        return Oracle(*given, optimizer)
    return MethodOracle(*given, optimizer)
