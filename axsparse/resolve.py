"""What follows from configuration, model and number of ranks alone, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from axsparse.comm import Transport
from axsparse.config.load import Loaded
from axsparse.config.schema import Config, OptimizerConfig
from axsparse.config.validate import check_batch, resolve_grid
from axsparse.errors import ConfigError
from axsparse.grid import Grid, Place
from axsparse.models.survey import LayerInfo, Survey
from axsparse.observe.console import format_bytes
from axsparse.pipeline.partition import partition, split_by_hand
from axsparse.planner.memory import activation_bytes
from axsparse.pruning.criteria import Criterion, Score
from axsparse.pruning.pattern import parse_pattern
from axsparse.pruning.targets import Targets, targets
from axsparse.samo.adamw import ADAMW
from axsparse.samo.footprint import stage_bytes
from axsparse.samo.lamb import LAMB
from axsparse.samo.loss_scale import LossScale
from axsparse.samo.memory import IndexKind
from axsparse.samo.optimizer import Optimizer
from axsparse.samo.sgd import sgd

if TYPE_CHECKING:
    from axsparse.pruning.ticket import Ticket

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {"adamw": ADAMW, "lamb": LAMB}
MOST_HALF_MICROBATCHES = 8
"""Up to here accumulation in half precision errs by less than 0.4 %."""
DEFAULT_SLACK = 1
FROM_START = frozenset({"magnitude", "random", "custom", "set", "rigl"})
"""Methods whose first masks ask for nothing but the weights."""
UNTIL = {"set": 0.75, "rigl": 0.75}
"""Part of the steps after which `pruning.until_step: auto` ends; 0.5 for other methods."""
AUTO_INDEX: IndexKind = "uint16"
"""Half of int32 at no time that shows in a step: docs/decisions/009-index-encodings.md."""


@dataclass(frozen=True)
class Resolved:
    """A run with every `auto` decided, as one rank sees it."""

    config: Config
    survey: Survey
    stages: Sequence[range]
    """The layers of each stage."""
    place: Place
    targets: Targets | None
    """What is pruned; None trains dense."""
    criterion: Criterion
    """By which score."""
    ticket: Ticket | None
    """Whose masks are used from the start."""
    optimizer: Optimizer
    dtype: torch.dtype
    """Of weights, activations and messages."""
    gradient_dtype: torch.dtype
    """Of gradient accumulation."""
    index: IndexKind
    """How the positions of kept entries are stored."""

    def layers_of(self, stage: int) -> list[LayerInfo]:
        """The layers of a stage."""
        return [self.survey.layers[number] for number in self.stages[stage]]

    @property
    def starts_pruned(self) -> bool:
        """Whether state is built compressed; otherwise it is dense until the first pruning."""
        pruning = self.config.pruning
        if self.targets is None:
            return False
        return self.ticket is not None or (pruning.at_step == 0 and pruning.method in FROM_START)

    @property
    def kept_at_start(self) -> Mapping[str, int]:
        """Entries of the pruned tensors that state is built with; of a threshold for all the even
        spread."""
        if not self.starts_pruned:
            return {}
        assert self.targets is not None
        return self.targets.kept() if self.ticket is None else self.ticket.kept

    def state_bytes(self, layers: Sequence[LayerInfo], kept: Mapping[str, int]) -> int:
        """Bytes of model state of one rank that holds these layers; `kept` as in `stage_bytes`."""
        return stage_bytes(
            layers,
            self.survey.ties,
            kept,
            dtype=self.dtype,
            gradient_dtype=self.gradient_dtype,
            moments=len(self.optimizer.moments),
            index=self.index,
            split_master=self.config.samo.split_master,
            replicas=self.place.grid.g_data if self.config.samo.shard_optimizer else 1,
        ).total

    def stage_of(self, name: str) -> int:
        """The stage that holds a parameter."""
        layer = self.survey.layer_of(name)
        return next(number for number, stage in enumerate(self.stages) if layer in stage)


def resolve(
    loaded: Loaded,
    surveyed: Survey,
    transport: Transport,
    grid: Grid | None,
    score: Score | None = None,
) -> Resolved:
    """Decide every `auto` of a configuration that `check_config` lets pass; ConfigError for what
    this transport, number of ranks or model cannot run.

    `grid` comes before the layout of the configuration. `score` is one's own criterion.
    """
    config = loaded.config
    _check_transport(loaded, transport)
    num_layers = len(surveyed.layers)
    if grid is None:
        grid = resolve_grid(loaded, transport.size, num_layers)
    else:
        _check_grid(grid, transport.size, num_layers)
    check_batch(loaded, grid)
    gradient = _gradient(config, grid)
    index = AUTO_INDEX if config.samo.index == "auto" else config.samo.index
    pruning = config.pruning
    wanted = targets(surveyed, pruning) if config.samo.enabled else None
    if wanted is not None and not any([wanted.sparsity, *wanted.own.values(), pruning.ticket]):
        wanted = None
    ticket = None
    if wanted is not None and pruning.ticket is not None:
        from axsparse.pruning.ticket import open_ticket

        ticket = open_ticket(pruning.ticket)
        ticket.check(_shapes(surveyed))
    until = round(config.train.steps * UNTIL.get(pruning.method, 0.5))
    run = Resolved(
        config=_with(
            config,
            {
                "data.sequence_length": _unless_auto(
                    config.data.sequence_length, config.model.sequence_length
                ),
                "layout.g_inter": grid.g_inter,
                "layout.g_data": grid.g_data,
                "pipeline.slack": _unless_auto(config.pipeline.slack, DEFAULT_SLACK),
                "pruning.rewind_step": _unless_auto(
                    pruning.rewind_step, 0 if pruning.method == "iterative" else "never"
                ),
                "pruning.until_step": _unless_auto(
                    pruning.until_step, max(until, pruning.at_step, 1)
                ),
                "samo.index": index,
                "samo.gradient": gradient,
                "schedule.decay_steps": _unless_auto(
                    config.schedule.decay_steps, config.train.steps
                ),
            },
        ),
        survey=surveyed,
        stages=(),
        place=grid.place(transport.rank),
        targets=wanted,
        criterion=_criterion(loaded, score),
        ticket=ticket,
        optimizer=_optimizer(config.optimizer),
        dtype=DTYPES[config.precision],
        gradient_dtype=torch.float32 if gradient == "fp32" else DTYPES[config.precision],
        index=index,
    )
    split = config.layout.split
    stages = _balanced(loaded, run) if split == "auto" else split_by_hand(split)
    sizes = tuple(len(stage) for stage in stages)
    return replace(run, config=_with(run.config, {"layout.split": sizes}), stages=stages)


def _balanced(loaded: Loaded, run: Resolved) -> list[range]:
    """The stages whose dearest does the least work, of those that fit `layout.memory_per_rank`."""
    config, layers, stages = run.config, run.survey.layers, run.place.grid.g_inter
    room = config.layout.memory_per_rank
    work = [layer.work for layer in layers]
    if room == "auto":
        found = partition(work, stages)
        assert found is not None, "there is no limit"
        return found
    kept = run.kept_at_start
    limit = room * 1e9
    # By layer: a weight that two layers of a stage share counts twice here.
    state = [run.state_bytes([layer], kept) for layer in layers]
    batch = config.batch
    microbatches = batch.global_batch_size // (run.place.grid.g_data * batch.microbatch_size)
    slack = config.pipeline.slack
    assert slack != "auto"

    def needs(stage: int, held: range) -> int:
        most = stages - stage + slack if config.pipeline.schedule != "gpipe" else microbatches
        return sum(state[layer] for layer in held) + activation_bytes(
            [layers[layer] for layer in held],
            microbatch_size=batch.microbatch_size,
            in_flight=min(microbatches, most),
            checkpoint_activations=config.pipeline.checkpoint_activations,
        )

    found = partition(work, stages, lambda stage, held: needs(stage, held) <= limit)
    if found is not None:
        return found
    even = partition(state, stages)
    assert even is not None, "there is no limit"
    most, fullest = max((needs(stage, held), stage) for stage, held in enumerate(even))
    raise ConfigError(
        f"{loaded.where('layout.memory_per_rank')}: no split of {len(layers)} layers into "
        f"{stages} stages fits {format_bytes(limit)}; with the state spread evenly, stage "
        f"{fullest} needs {format_bytes(most)}; take more stages (layout.g_inter), prune more, "
        "or recompute activations (pipeline.checkpoint_activations)"
    )


def _criterion(loaded: Loaded, score: Score | None) -> Criterion:
    """The score by which the method of the configuration prunes."""
    config = loaded.config
    pruning = config.pruning
    if pruning.method == "custom" and score is None:
        raise ConfigError(
            f"{loaded.where('pruning.method')}: custom needs a score of your own; give it to build "
            "in Python (score=…), or choose magnitude"
        )
    if score is not None and pruning.method in ("magnitude", "random", "snip"):
        raise ConfigError(
            f"{loaded.where('pruning.method')}: {pruning.method} has a score already; choose "
            "custom, or a method over time, for the one given to build"
        )
    pattern = None if pruning.pattern is None else parse_pattern(pruning.pattern)
    if score is not None:
        return Criterion(score, config.seed, pattern)
    at_random = pruning.method in ("random", "set", "rigl")
    return Criterion("random" if at_random else "magnitude", config.seed, pattern)


def _shapes(surveyed: Survey) -> dict[str, tuple[int, ...]]:
    """Of all parameters, in model order."""
    return {
        parameter.name: tuple(parameter.shape)
        for layer in surveyed.layers
        for parameter in layer.parameters
    }


def loss_scale(config: Config) -> LossScale:
    """The loss scale of a run's first step."""
    settings = config.loss_scale
    if config.precision != "fp16":
        return LossScale.none(settings.patience)
    return LossScale(
        scale=2.0 ** math.floor(math.log2(settings.initial)),
        floor=2.0 ** math.floor(math.log2(settings.floor)),
        growth_interval=settings.growth_interval,
        patience=settings.patience,
    )


def _optimizer(settings: OptimizerConfig) -> Optimizer:
    if settings.name == "sgd":
        return sgd(settings.momentum, nesterov=settings.nesterov)
    return OPTIMIZERS[settings.name]


def _gradient(config: Config, grid: Grid) -> str:
    """Precision of accumulation, by the rule in the schema."""
    if config.precision == "fp32":
        return "fp32"
    if config.samo.gradient != "auto":
        return config.samo.gradient
    batch = config.batch
    microbatches = batch.global_batch_size // (grid.g_data * batch.microbatch_size)
    return "half" if microbatches <= MOST_HALF_MICROBATCHES else "fp32"


def _check_transport(loaded: Loaded, transport: Transport) -> None:
    wanted = loaded.config.transport
    if wanted == "local" and transport.name != "local":
        raise ConfigError(
            f"{loaded.where('transport')}: local is for one process without MPI, but "
            f"{transport.size} MPI ranks are running; choose auto or mpi"
        )
    if wanted == "mpi" and transport.name == "local":
        raise ConfigError(
            f"{loaded.where('transport')}: no MPI library was found; load the site's MPI module, "
            "install axsparse[mpich], or choose auto"
        )


def _check_grid(grid: Grid, ranks: int, num_layers: int) -> None:
    if grid.size != ranks:
        raise ConfigError(
            f"grid: {grid} are {grid.size} ranks, {ranks} are running; start {grid.size} ranks or "
            "make another grid"
        )
    if grid.g_inter > num_layers:
        raise ConfigError(
            f"grid: {grid.g_inter} stages for {num_layers} layers; choose at most {num_layers}"
        )


def _unless_auto(value: Any, otherwise: Any) -> Any:
    return otherwise if value == "auto" else value


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
