"""Decides every `auto` setting of a run, the same on every rank.

`resolve` goes from the configuration as it was written to a `RunSpec`, in which nothing is left
open. docs/reference/auto.md names the place that decides each setting.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch

from axsparse.config.model_config import GptConfig
from axsparse.config.schema import Config, num_microbatches, sample_length
from axsparse.config.validate import check_batch, check_rounds, check_split
from axsparse.models.layer import Model
from axsparse.models.survey import LayerInfo, Survey, match, named_value
from axsparse.models.tensor_shard import TensorShard
from axsparse.pipeline.partition import split_by_hand
from axsparse.planner.auto_layout import (
    Choice,
    balanced,
    check_grid,
    chosen_layout,
    cluster_of,
    fitting_slack,
    resolve_grid,
)
from axsparse.planner.cluster import Cluster
from axsparse.planner.cutting import Cutting
from axsparse.planner.layout import DEFAULT_SLACK
from axsparse.planner.memory_budget import UNLIMITED, MemoryBudget
from axsparse.planner.run_workload import (
    Prediction,
    has_costs,
    predict,
    splits_backward,
)
from axsparse.planner.surveyed_model import SurveyedModel, state_format
from axsparse.pruning.criteria import Criterion, Score, configured_criterion
from axsparse.pruning.targets import (
    Targets,
    kept_at_start,
    starts_pruned,
    what_is_pruned,
)
from axsparse.runtime.communication import Transport
from axsparse.runtime.grid import Grid, Place
from axsparse.samo.layer_state import StateTypes
from axsparse.samo.optim.optimizer import LearningRate, Optimizer, optimizer_of
from axsparse.samo.precision import DTYPES, accumulates_in_half
from axsparse.samo.state_bytes import master_kind, stage_bytes
from axsparse.tensor_parallel.plan import check_ties
from axsparse.training.checkpoint.verification import flat
from axsparse.training.run_checks import check_transport, check_weights_are_loaded

COMPILED_WIDTH = 1024
"""From which hidden size on `pipeline.compile: auto` is true on a GPU."""
COMPILED_WORK = 2.7e10
"""From how many tokens of a microbatch times the squared hidden size on it fuses the layers: on an
H200, GPT-3 2.7B is 8 % faster by it with 8,192 tokens, and slower with 2,048."""
HOLES = 0.3
"""The part of a process's memory that may be freed blocks, which glibc keeps."""


@dataclass(frozen=True)
class ParameterGroup:
    """The settings of a parameter that `optimizer.learning_rates` or `weight_decays` name."""

    peak: float
    """Its peak learning rate."""
    weight_decay: float


@dataclass(frozen=True)
class RunInputs:
    """The inputs that decide the `auto` settings of a run, in addition to its configuration."""

    model: Model
    survey: Survey
    """The contents and costs of the model's layers."""
    transport: Transport
    """Gives the number of ranks, and which of them this one is."""
    grid: Grid | None = None
    """The layout given in Python, which overrides the configuration's."""
    score: Score | None = None
    """A pruning criterion of the user's own."""
    budget: MemoryBudget = UNLIMITED
    """The memory of a rank, equal on all; without limit if that is not known."""
    saved: Mapping[str, int] | None = None
    """Kept entries of the pruned tensors in the checkpoint that the run is resumed from."""
    on_host: bool = True
    """Whether ranks compute on CPUs."""
    optimizer: Optimizer | None = None
    """A custom optimizer, which overrides the configuration's."""
    learning_rate: LearningRate | None = None
    """A custom schedule, which overrides the configuration's."""


@dataclass(frozen=True)
class RunSpec:
    """A run with every `auto` decided, as one rank sees it."""

    config: Config
    model: Model
    survey: Survey
    stages: Sequence[range]
    """The layers of each stage."""
    place: Place
    targets: Targets | None
    """The pruned tensors; None trains dense."""
    criterion: Criterion
    """The score by which entries are kept."""
    optimizer: Optimizer
    learning_rate: LearningRate | None
    """A custom schedule; None for the configuration's."""
    groups: Mapping[str, ParameterGroup]
    """The parameters that have separate settings, by name; both uses of a tied weight."""
    kept_at_start: Mapping[str, int]
    """The number of entries of each pruned tensor that state is built with.

    Under one threshold for all tensors it is an even spread, since the true numbers depend on the
    weights. A run that resumes has the numbers that were saved.
    """
    prediction: Prediction | None = None
    """The planner's memory and time; None for a model without an example."""
    on_host: bool = True
    """Whether ranks compute on CPUs."""
    room: float = math.inf
    """Bytes that this rank may take in addition to its process's at its start."""
    shards: Mapping[str, TensorShard] = field(default_factory=dict)
    """The last shard of each sharded parameter, by name."""
    member: Survey | None = None
    """The shard of the model on the tensor-parallel rank that holds most; None where layers are not
    sharded."""

    @property
    def counted(self) -> list[str]:
        """`Survey.counted`, with the names of its shards in place of a sharded tensor's name."""
        return [
            name
            for full in self.survey.counted
            for name in (
                [f"{full}#{n}" for n in range(self.shards[full].count)]
                if full in self.shards
                else [full]
            )
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, activations and messages."""
        return DTYPES[self.config.precision]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The type in which gradients are accumulated."""
        kinds = {"fp32": torch.float32, "exact": torch.int64}
        return kinds.get(self.config.samo.gradient, self.dtype)

    @property
    def types(self) -> StateTypes:
        """The forms in which the state of a layer is stored."""
        master = master_kind(half=self.dtype != torch.float32)
        index = self.config.samo.index
        return StateTypes(self.gradient_dtype, master, self.optimizer.moments, index)

    def layers_of(self, stage: int) -> list[LayerInfo]:
        """The layers of a stage, as one rank has them."""
        survey = self.member or self.survey
        return [survey.layers[number] for number in self.stages[stage]]

    @property
    def starts_pruned(self) -> bool:
        """Whether state is built compressed; otherwise it is dense until the first pruning."""
        return starts_pruned(self.config, self.targets)

    @property
    def memory_is_tight(self) -> bool:
        """Whether there is no memory for freed blocks that the C library keeps."""
        if self.prediction is None or not self.on_host:
            return False
        return self.prediction.memory_bytes * (1 + HOLES) > self.room

    def state_bytes(self, layers: Sequence[LayerInfo], kept: Mapping[str, int]) -> int:
        """Bytes of model state of one rank that holds these layers; `kept` as in `stage_bytes`."""
        return stage_bytes(
            layers,
            self.survey.ties,
            kept,
            state_format(self.config, self.optimizer, self.place.grid.g_data),
        ).total

    def stage_of(self, name: str) -> int:
        """The stage that holds a parameter or a shard of it."""
        layer = self.survey.layer_of(name.rpartition("#")[0] or name)
        return next(number for number, stage in enumerate(self.stages) if layer in stage)


def resolve(loaded: Config, inputs: RunInputs) -> RunSpec:
    """Decide every `auto` of a configuration that `check_config` lets pass.

    The result is the same on every rank but for its place. docs/reference/auto.md lists who
    decides what. ConfigError for what this transport, number of ranks or model cannot run.
    """
    config, survey = loaded, inputs.survey
    check_transport(loaded, inputs.transport, on_host=inputs.on_host)
    targets = what_is_pruned(config, survey)
    draws = targets is not None and targets.mask_file is None
    if targets is not None and draws and config.pruning.method in ("zeros", "sparsegpt"):
        check_weights_are_loaded(loaded, inputs.model, targets)
    kept = kept_at_start(config, targets) if inputs.saved is None else inputs.saved
    criterion = configured_criterion(loaded, inputs.score)
    optimizer = inputs.optimizer or optimizer_of(config.optimizer)
    cutting = Cutting(loaded, inputs.model, survey)
    subject = _subject(inputs, cutting, optimizer, kept, criterion)
    cluster = cluster_of(config)
    grid, choice = _layout(loaded, inputs, subject, cluster)
    slack = DEFAULT_SLACK
    if choice is not None:
        slack = choice.row.layout.schedule.slack
    elif config.layout.memory_per_rank != "auto" and has_costs(survey):
        slack = fitting_slack(subject, config, grid, inputs.budget)
    run = RunSpec(
        config=_settled(config, inputs, grid, slack),
        model=inputs.model,
        survey=survey,
        stages=(),
        place=grid.place(inputs.transport.rank),
        targets=targets,
        criterion=criterion,
        optimizer=subject.optimizer,
        learning_rate=inputs.learning_rate,
        groups=parameter_groups(config, survey, targets),
        kept_at_start=kept,
        on_host=inputs.on_host,
        room=inputs.budget.for_model,
    )
    run = _sharded(run, cutting)
    if draws:
        check_rounds(loaded, run.config)
    member = subject.of_member(grid.g_tensor)
    run = replace(run, member=None if member is subject else member.survey)
    stages = _stages(loaded, run, inputs, member, choice)
    sizes = tuple(len(stage) for stage in stages)
    run = replace(run, config=_with(run.config, {"layout.split": sizes}), stages=stages)
    shards = _shards(run, member.kept)
    run = replace(run, config=_with(run.config, {"samo.shard_optimizer": shards}))
    if not has_costs(survey):
        return run
    reason = None if choice is None else choice.reason
    subject = replace(subject, config=run.config)
    return replace(run, prediction=predict(subject, cluster, run.config, grid, slack, reason))


def _subject(
    inputs: RunInputs,
    cutting: Cutting,
    optimizer: Optimizer,
    kept: Mapping[str, int],
    criterion: Criterion,
) -> SurveyedModel:
    """The model about which the planner is asked; `kept` as `RunSpec.kept_at_start`."""
    return SurveyedModel(
        cutting.config,
        inputs.survey,
        cutting.config.name,
        kept,
        optimizer,
        on_host=inputs.on_host,
        has_masks=inputs.saved is not None,
        sees_inputs=criterion.sees_inputs,
        sees_gradients=criterion.sees_gradients,
        cutting=cutting,
    )


def _layout(
    config: Config, inputs: RunInputs, subject: SurveyedModel, cluster: Cluster | None
) -> tuple[Grid, Choice | None]:
    """Stages and replicas, and why the planner chose them; None where it did not choose."""
    ranks, num_layers = inputs.transport.size, len(inputs.survey.layers)
    grid, choice = inputs.grid, None
    if grid is not None:
        check_grid(grid, ranks, num_layers)
        check_split(config, grid.g_inter, num_layers)
    else:
        choice = chosen_layout(config, subject, cluster, ranks, inputs.budget)
        if choice is not None:
            chosen = {"layout.g_inter": choice.row.layout.grid.g_inter}
            config = _with(config, chosen)
        grid = resolve_grid(config, ranks, num_layers)
    check_batch(config, grid)
    return grid, choice


def _settled(config: Config, inputs: RunInputs, grid: Grid, slack: int) -> Config:
    """The configuration with every `auto` replaced but `layout.split`, which needs the rest; by
    `slack` for `pipeline.slack`."""
    pruning, steps = config.pruning, config.train.steps
    automatic: dict[str, object] = {
        "data.sequence_length": sample_length(config),
        "pipeline.slack": slack,
        "pipeline.split_backward": splits_backward(config.pipeline, grid.g_inter),
        "pipeline.compile": _compiled(config, inputs, grid),
        "pruning.rewind_step": 0 if pruning.method == "iterative" else "never",
        "pruning.until_step": max(round(steps * 0.5), pruning.at_step, 1),
        "schedule.decay_steps": max(steps, config.schedule.warmup_steps),
    }
    written = flat(config.model_dump())
    asked = {key: value for key, value in automatic.items() if written[key] == "auto"}
    layout = {f"layout.{key}": getattr(grid, key) for key in ("g_inter", "g_data", "g_tensor")}
    return _with(config, {**layout, "samo.gradient": _gradient(config, grid), **asked})


def _compiled(config: Config, inputs: RunInputs, grid: Grid) -> bool | Literal["loss"]:
    """The decision of `pipeline.compile: auto`.

    With several stages, splitting backwards wins more than fusing layers may. In small microbatches
    a GPU waits for its host, which needs longer for fused layers than for others.
    """
    model = config.model
    may = (
        not inputs.on_host
        and inputs.model.name == model.name
        and grid.g_inter == grid.g_tensor == 1
        and config.pipeline.split_backward is not True
        and has_compiler()
    )
    if not may or not isinstance(model, GptConfig) or model.hidden_size < COMPILED_WIDTH:
        return False
    tokens = config.batch.microbatch_size * sample_length(config)
    return True if tokens * model.hidden_size**2 >= COMPILED_WORK else "loss"


def has_compiler() -> bool:
    """Whether torch.compile can make kernels of a GPU here: Triton calls a C compiler."""
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    return find_spec("triton") is not None and any(map(shutil.which, compilers))


def _sharded(run: RunSpec, cutting: Cutting) -> RunSpec:
    """The run with the shards of its layers and the ties of these, if it is to have any."""
    survey, ranks = run.survey, run.place.grid.g_tensor
    shards = cutting.shards(ranks)
    check_ties(survey.ties, shards)
    ties = {
        f"{second}#{index}": f"{first}#{index}"
        for second, first in survey.ties.items()
        for index in range(ranks if first in shards else 0)
    }
    return replace(run, shards=shards, survey=replace(survey, ties={**survey.ties, **ties}))


def _stages(
    config: Config,
    run: RunSpec,
    inputs: RunInputs,
    member: SurveyedModel,
    choice: Choice | None,
) -> Sequence[range]:
    """The layers of each stage.

    Memory limits a split where the user gives a limit, or where the number of stages was chosen by
    it; stages that the user has chosen are tried all the same.
    """
    split, grid = config.layout.split, run.place.grid
    if split != "auto":
        return split_by_hand(split)
    is_limited = choice is not None or run.config.layout.memory_per_rank != "auto"
    budget = inputs.budget if is_limited else UNLIMITED
    return balanced(config, run.config, grid, member, budget)


def _shards(run: RunSpec, kept: Mapping[str, int]) -> bool:
    """Whether replicas share the optimizer state: for `auto` if that makes a rank's state smaller.
    `kept` has the pruned tensors as one rank has them.

    Time does not decide (docs/decisions/041-waiting-and-start-up.md).
    """
    asked = run.config.samo.shard_optimizer
    if asked != "auto":
        return asked
    unsharded = replace(run, config=_with(run.config, {"samo.shard_optimizer": False}))
    layers = [run.layers_of(stage) for stage in range(len(run.stages))]
    return any(run.state_bytes(s, kept) < unsharded.state_bytes(s, kept) for s in layers)


def _gradient(config: Config, grid: Grid) -> str:
    """The precision in which gradients are accumulated."""
    if config.samo.gradient == "exact":
        return "exact"
    if config.precision == "fp32":
        return "fp32"
    if config.samo.gradient != "auto":
        return config.samo.gradient
    return "half" if accumulates_in_half(num_microbatches(config.batch, grid.g_data)) else "fp32"


def _with(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy with some leaves "section.key" set."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, leaf = key.partition(".")
        sections.setdefault(section, {})[leaf] = value
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=leaves)
            for section, leaves in sections.items()
        }
    )


def parameter_groups(
    config: Config, survey: Survey, targets: Targets | None
) -> dict[str, ParameterGroup]:
    """The separate settings of some parameters; ConfigError for an entry of another form, or with a
    pattern that no parameter matches."""
    settings, names, shapes = config.optimizer, survey.counted, survey.shapes
    rates = _own_values("optimizer.learning_rates", settings.learning_rates, names)
    decays = _own_values("optimizer.weight_decays", settings.weight_decays, names)
    if targets is not None and config.pruning.rate_power:
        for name, kept in targets.kept().items():
            density = kept / math.prod(targets.shapes[name])
            usual = settings.learning_rate * density**-config.pruning.rate_power
            rates.setdefault(name, usual)
    groups = {}
    for name in names:
        if name in rates or name in decays:
            decay = settings.weight_decay if len(shapes[name]) >= 2 else 0.0
            peak = rates.get(name, settings.learning_rate)
            groups[name] = ParameterGroup(peak, decays.get(name, decay))
    return groups | {second: groups[of] for second, of in survey.ties.items() if of in groups}


def _own_values(key: str, entries: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """The value of each parameter that an entry `pattern=value` names; the last one counts."""
    values: dict[str, float] = {}
    for entry in entries:
        form = "pattern=value with a value of at least 0; write it like head.*=0.01"
        pattern, value = named_value(key, entry, math.inf, form)
        named = match([pattern], names, key, "no trained parameter")
        values.update(dict.fromkeys(named, value))
    return values
