"""The plan of a run, in which no `auto` is left, the same on every rank.

`plan_run` goes from the configuration as it was written to a `RunPlan`. docs/reference/auto.md
names the place that decides each setting. After it come the precision and the memory, which are
decided before, and the check that all ranks have the same plan.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import torch

from axsparse.config.messages import shorten
from axsparse.config.model_config import GptConfig
from axsparse.config.schema import Config, num_microbatches, sample_length
from axsparse.config.validate import check_batch, check_rounds
from axsparse.models.layer import Model, TensorShard
from axsparse.models.model_profile import LayerInfo, ModelProfile, match, named_value
from axsparse.models.sequential import given_module
from axsparse.models.start_weights import LOAD, FromFile, some_of
from axsparse.pipeline.partition import split_by_hand
from axsparse.planner.auto_layout import (
    LayoutDecision,
    Prediction,
    balanced,
    chosen_layout,
    cluster_of,
    fitting_row,
    has_costs,
    predict,
    resolve_grid,
)
from axsparse.planner.layout_search import (
    DEFAULT_EXTRA_IN_FLIGHT,
    GATHERED,
    Candidate,
    splits_backward,
)
from axsparse.planner.profiled_model import ProfiledModel, state_format
from axsparse.planner.stage_memory import (
    GPU_OVERHEAD,
    HOST_OVERHEAD,
    UNLIMITED,
    MemoryBudget,
    memory_budget,
)
from axsparse.pruning.criteria import Criterion, Score, configured_criterion
from axsparse.pruning.targets import (
    Targets,
    kept_at_start,
    starts_pruned,
    to_exclude,
    what_is_pruned,
)
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.exchange import gather_values, sum_of, value_of_first
from axsparse.runtime.grid import Grid, RankCoords
from axsparse.runtime.machine import host_memory_bytes, resident_memory_bytes
from axsparse.runtime.provenance import versions
from axsparse.samo.optim.optimizer import LearningRate, Optimizer
from axsparse.samo.optim.update import optimizer_of
from axsparse.samo.precision import DTYPES, accumulates_in_half, cpu_multiplies
from axsparse.samo.state_bytes import StateFormat, WeightKind, stage_bytes
from axsparse.tensor_parallel.modules import check_ties
from axsparse.training.placement import GpuMemory

COMPILED_WIDTH = 1024
"""From which hidden size on `pipeline.compile: auto` is true on a GPU."""
COMPILED_WORK = 2.7e10
"""From how many tokens of a microbatch times the squared hidden size on it fuses the layers: on an
H200, GPT-3 2.7B is 8 % faster by it with 8,192 tokens, and slower with 2,048."""
CONTEXT_BYTES = 1.2e9
"""Bytes of a GPU that a process takes as soon as it uses it (1.05 GB on an H100)."""
HOLES = 0.3
"""The part of a process's memory that may be freed blocks, which glibc keeps."""
START = "start values"
"""The name of the fact that differs where ranks have drawn different start values."""


@dataclass(frozen=True)
class ParameterGroup:
    """The settings of a parameter that `optimizer.learning_rates` or `weight_decays` name."""

    peak: float
    weight_decay: float


@dataclass(frozen=True)
class RunPlan:
    """A run with every `auto` decided, as one rank sees it."""

    config: Config
    model: Model
    profile: ModelProfile
    stages: Sequence[range]
    coords: RankCoords
    targets: Targets | None
    """The pruned tensors; None trains dense."""
    criterion: Criterion
    optimizer: Optimizer
    learning_rate: LearningRate | None
    """A custom schedule; None for the configuration's."""
    groups: Mapping[str, ParameterGroup]
    """The parameters that have separate settings, by name; both uses of a tied weight."""
    kept_at_start: Mapping[str, int]
    """Kept entries of each pruned tensor when state is built; an even spread if not known yet."""
    prediction: Prediction | None
    """The planner's memory and time; None for a model without an example."""
    layout_reason: str | None
    """Why there are this many stages; None if the configuration says so."""
    on_host: bool
    memory_budget: float
    """Bytes that this rank may take in addition to its process's at its start."""
    shards: Mapping[str, TensorShard]
    """The last shard of each sharded parameter, by name."""
    largest_rank: ModelProfile
    """The shard of the model on the tensor-parallel rank that holds most."""

    @property
    def counted(self) -> list[str]:
        """`ModelProfile.counted`, with the names of its shards in place of a sharded tensor's
        name."""
        names = []
        for full in self.profile.counted:
            shard = self.shards.get(full)
            names += [full] if shard is None else [f"{full}#{n}" for n in range(shard.count)]
        return names

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, activations and messages."""
        return DTYPES[self.config.precision]

    @property
    def state_format(self) -> StateFormat:
        """How the state of the layers is stored."""
        return state_format(self.config, self.optimizer, self.coords.grid.g_data)

    def layers_of(self, stage: int) -> list[LayerInfo]:
        """The layers of a stage, as one rank has them."""
        return [self.largest_rank.layers[number] for number in self.stages[stage]]

    @property
    def taught_from(self) -> str | None:
        """The fingerprint of the teacher's weights; None without a teacher."""
        return None if self.profile.teacher is None else self.profile.teacher.start

    @property
    def has_sparse_weights(self) -> bool:
        """Whether pruned weights are sparse at rest."""
        return self.config.samo.weights == "sparse" and self.targets is not None

    @property
    def gathers_weights(self) -> bool:
        """Whether replicas gather sparse weights before they use them (ZeRO stage 3)."""
        is_shared = self.config.samo.zero_stage == 3 and self.coords.grid.g_data > 1
        return is_shared and self.has_sparse_weights

    @property
    def starts_pruned(self) -> bool:
        """Whether state is built compressed; otherwise it is dense until the first pruning."""
        return starts_pruned(self.config, self.targets)

    @property
    def memory_is_tight(self) -> bool:
        """Whether there is no memory for freed blocks that the C library keeps."""
        if self.prediction is None or not self.on_host:
            return False
        return self.prediction.memory_bytes * (1 + HOLES) > self.memory_budget

    def state_bytes(self, layers: Sequence[LayerInfo], kept: Mapping[str, int]) -> int:
        """Bytes of model state of one rank that holds these layers; `kept` as in `stage_bytes`."""
        return stage_bytes(layers, self.profile.ties, kept, self.state_format).total

    @property
    def facts(self) -> dict[str, str]:
        """The facts that must be equal on all ranks: every version, every setting, every layer."""
        settings = {key: str(value) for key, value in self.config.by_key().items()}
        layers = {f"layer {layer.name}": repr(layer.parameters) for layer in self.profile.layers}
        return {
            **versions(),
            **settings,
            **layers,
            "ties": repr(self.profile.ties),
            START: self.profile.start or "drawn from the seed",
            "teacher": self.taught_from or "none",
            "Trainer: optimizer": f"the moments {', '.join(self.optimizer.moments) or 'none'}",
            "Trainer: learning_rate": "none" if self.learning_rate is None else "a function",
        }

    def stage_of(self, name: str) -> int:
        """The stage that holds a parameter or a shard of it."""
        layer = self.profile.layer_of(name.rpartition("#")[0] or name)
        return next(number for number, stage in enumerate(self.stages) if layer in stage)


# Reason: all that decides the settings of a run beside its configuration, most of it optional.
def plan_run(
    config: Config,
    model: Model,
    profile: ModelProfile,
    transport: Transport,
    *,
    score: Score | None = None,
    budget: MemoryBudget = UNLIMITED,
    saved: Mapping[str, int] | None = None,
    on_host: bool = True,
    optimizer: Optimizer | None = None,
    learning_rate: LearningRate | None = None,
) -> RunPlan:
    """Decide every `auto` of a configuration that `check_config` lets pass.

    The result is the same on every rank but for its place. `profile` has the contents and costs of
    the model's layers. A score, an optimizer and a schedule given in Python override the
    configuration's. `budget` is the memory of a rank, equal on all. `saved` has the kept entries of
    the pruned tensors in the checkpoint that the run is resumed from.

    ConfigError for what this transport, number of ranks or model cannot run.
    """
    check_transport(config, transport, on_host=on_host)
    check_types(config, model, profile)
    targets = what_is_pruned(config, profile, saved)
    draws = targets is not None and targets.given is None
    looks = config.pruning.method in ("zeros", "sparsegpt") or config.pruning.initial_sparsity
    if targets is not None and draws and looks:
        check_weights_are_loaded(config, model, targets)
    kept = kept_at_start(config, targets) if saved is None else saved
    criterion = configured_criterion(config, score)
    optimizer = optimizer or optimizer_of(config.optimizer)
    planned_model = ProfiledModel(
        config,
        profile,
        kept,
        optimizer,
        model,
        on_host=on_host,
        has_masks=saved is not None,
        sees_inputs=criterion.sees_inputs,
        sees_gradients=criterion.sees_gradients,
    )
    # A model that is not sharded so on any ranks is refused before the ranks are.
    shards = planned_model.shards(config.layout.g_tensor, transport.size)
    ties = _ties(profile, shards, config.layout.g_tensor)
    planned_model.tp_shard(config.layout.g_tensor)
    grid, row, choice = _layout(config, planned_model, transport.size, budget)
    extra_in_flight = _extra_in_flight(config, profile, row)
    if row is not None and row.weights == "gathered":
        planned_model = planned_model.with_values(GATHERED)
    elif config.samo.weights == "auto":
        planned_model = planned_model.with_values({"samo.weights": _weights(profile, row)})
    config = planned_model.config
    decided = _decided(
        config, grid, extra_in_flight, _compiled(config, model, grid, on_host=on_host)
    )
    groups = parameter_groups(config, profile, targets)
    if draws:
        check_rounds(config, decided)
    largest = planned_model.tp_shard(grid.g_tensor)
    # Stages that the user has chosen are tried in any memory, unless a limit is given.
    is_limited = choice is not None or config.layout.memory_per_rank != "auto"
    if config.layout.split != "auto":
        stages: Sequence[range] = split_by_hand(config.layout.split)
    else:
        stages = balanced(decided, grid, largest, budget if is_limited else UNLIMITED)

    def state_of(config: Config) -> list[int]:
        stored, layers = state_format(config, optimizer, grid.g_data), largest.profile.layers
        each = ([layers[number] for number in stage] for stage in stages)
        return [stage_bytes(stage, ties, largest.kept, stored).total for stage in each]

    sizes = tuple(map(len, stages))
    decided = decided.with_values(
        {"layout.split": sizes, "samo.zero_stage": _zero_stage(decided, state_of)}
    )
    prediction = None
    if has_costs(profile):
        known = replace(planned_model, config=decided)
        prediction = predict(known, grid, cluster_of(config))
    return RunPlan(
        config=decided,
        model=model,
        profile=replace(profile, ties=ties),
        stages=stages,
        coords=grid.coords(transport.rank),
        targets=targets,
        criterion=criterion,
        optimizer=optimizer,
        learning_rate=learning_rate,
        groups=groups,
        kept_at_start=kept,
        prediction=prediction,
        layout_reason=None if choice is None else choice.reason,
        on_host=on_host,
        memory_budget=budget.for_model,
        shards=shards,
        largest_rank=largest.profile,
    )


def _layout(
    config: Config, planned_model: ProfiledModel, ranks: int, budget: MemoryBudget
) -> tuple[Grid, Candidate | None, LayoutDecision | None]:
    """The grid; its row, by which more settings are decided, None if that is not asked for or does
    not fit; and the choice of the planner, None where the configuration gives the grid."""
    choice = chosen_layout(planned_model, cluster_of(config), ranks, budget)
    if choice is not None:
        config = config.with_values({"layout.g_inter": choice.row.layout.grid.g_inter})
    grid = resolve_grid(config, ranks, len(planned_model.profile.layers))
    check_batch(config, grid)
    if choice is not None:
        return grid, choice.row, choice
    samo = config.samo
    is_open = samo.weights == "auto" or (samo.weights == "sparse" and samo.zero_stage == "auto")
    is_asked = config.layout.memory_per_rank != "auto" or is_open
    if not is_asked or not has_costs(planned_model.profile):
        return grid, None, None
    return grid, fitting_row(planned_model, grid, budget), None


def _extra_in_flight(config: Config, profile: ModelProfile, row: Candidate | None) -> int:
    """The number for `pipeline.extra_in_flight: auto`; `row` is as in `_layout`."""
    if row is not None:
        return row.layout.schedule.extra_in_flight
    is_limited = config.layout.memory_per_rank != "auto" and has_costs(profile)
    return 0 if is_limited else DEFAULT_EXTRA_IN_FLIGHT


def _weights(profile: ModelProfile, row: Candidate | None) -> WeightKind:
    """The decision of `samo.weights: auto`: dense where that fits, and for a model whose memory
    nobody knows; `row` is as in `_layout`."""
    if row is not None:
        return "dense" if row.weights == "dense" else "sparse"
    return "sparse" if has_costs(profile) else "dense"


def _decided(
    config: Config, grid: Grid, extra_in_flight: int, compiled: bool | Literal["loss"]
) -> Config:
    """The configuration with every `auto` replaced but `layout.split` and `samo.zero_stage`."""
    pruning, steps = config.pruning, config.train.steps
    automatic: dict[str, object] = {
        "data.sequence_length": sample_length(config),
        "pipeline.extra_in_flight": extra_in_flight,
        "pipeline.split_backward": splits_backward(config.pipeline, grid.g_inter),
        "pipeline.compile": compiled,
        "pruning.rewind_step": 0 if pruning.method == "iterative" else "never",
        "pruning.until_step": max(round(steps * 0.5), pruning.at_step, 1),
        "schedule.decay_steps": max(steps, config.schedule.warmup_steps),
    }
    written = config.by_key()
    asked = {key: value for key, value in automatic.items() if written[key] == "auto"}
    layout = {f"layout.{key}": getattr(grid, key) for key in ("g_inter", "g_data", "g_tensor")}
    return config.with_values({**layout, "samo.gradient": _gradient(config, grid), **asked})


def _compiled(config: Config, own: Model, grid: Grid, *, on_host: bool) -> bool | Literal["loss"]:
    """The decision of `pipeline.compile: auto`.

    With several stages, splitting backwards wins more than fusing layers may. In small microbatches
    a GPU waits for its host, which needs longer for fused layers than for others.
    """
    model = config.model
    may = (
        not on_host
        and own.name == model.name
        and grid.g_inter == grid.g_tensor == 1
        and config.pipeline.split_backward is not True
        and own.teacher is None
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


def _ties(profile: ModelProfile, shards: Mapping[str, TensorShard], ranks: int) -> dict[str, str]:
    check_ties(profile.ties, shards)
    pairs = [(second, first) for second, first in profile.ties.items() if first in shards]
    of_shards = {f"{a}#{index}": f"{b}#{index}" for a, b in pairs for index in range(ranks)}
    return {**profile.ties, **of_shards}


def _zero_stage(config: Config, state_of: Callable[[Config], Sequence[int]]) -> Literal[0, 1, 3]:
    """The decision of `samo.zero_stage: auto`: replicas share the optimizer state if that makes a
    rank's state smaller. `state_of` gives the bytes of one rank of each stage.

    Time does not decide (docs/decisions/041-waiting-and-start-up.md).
    """
    asked = config.samo.zero_stage
    if asked != "auto":
        return asked
    shared, full = (state_of(config.with_values({"samo.zero_stage": stage})) for stage in (1, 0))
    return 1 if any(here < there for here, there in zip(shared, full, strict=True)) else 0


def _gradient(config: Config, grid: Grid) -> str:
    if config.samo.gradient == "exact":
        return "exact"
    if config.precision == "fp32":
        return "fp32"
    if config.samo.gradient != "auto":
        return config.samo.gradient
    return "half" if accumulates_in_half(num_microbatches(config.batch, grid.g_data)) else "fp32"


def parameter_groups(
    config: Config, profile: ModelProfile, targets: Targets | None
) -> dict[str, ParameterGroup]:
    """The separate settings of some parameters; ConfigError for an entry of another form, or with a
    pattern that no parameter matches, and for two values of one tied weight."""
    settings, names, shapes = config.optimizer, profile.counted, profile.shapes
    ties = {second: first for second, first in profile.ties.items() if first in names}
    rates, decays = (
        _own_values(config.where(f"optimizer.{key}"), getattr(settings, key), names, ties)
        for key in ("learning_rates", "weight_decays")
    )
    if targets is not None and config.pruning.rate_power:
        for name, kept in targets.kept().items():
            if kept:  # A tensor without entries has no density, and nothing to step.
                density = kept / math.prod(targets.shapes[name])
                usual = settings.learning_rate * density**-config.pruning.rate_power
                rates.setdefault(name, usual)
    groups = {}
    for name in names:
        if name in rates or name in decays:
            decay = settings.weight_decay if len(shapes[name]) >= 2 else 0.0
            peak = rates.get(name, settings.learning_rate)
            groups[name] = ParameterGroup(peak, decays.get(name, decay))
    return groups | {second: groups[of] for second, of in ties.items() if of in groups}


def _own_values(
    key: str, entries: Sequence[str], names: Sequence[str], ties: Mapping[str, str]
) -> dict[str, float]:
    """The value of each parameter that an entry `pattern=value` names, a tied weight by either
    name; the last one counts. ConfigError for entries that name the two apart, and differ, if no
    later entry names both."""
    values: dict[str, float] = {}
    apart: dict[tuple[str, str], dict[str, float]] = {pair: {} for pair in ties.items()}
    for entry in entries:
        form = "pattern=value with a value of at least 0; write it like head.*=0.01"
        pattern, value = named_value(key, entry, math.inf, form)
        named = match([pattern], [*names, *ties], key, "no trained parameter")
        values.update(dict.fromkeys((ties.get(name, name) for name in named), value))
        for pair, own in apart.items():
            if all(name in named for name in pair):
                own.clear()
            else:
                own.update((name, value) for name in pair if name in named)
    for (second, first), own in apart.items():
        if len(own) == 2 and own[first] != own[second]:
            raise ConfigError(
                f"{key}: {first} gets {own[first]:g} and {second} {own[second]:g}, but they "
                "are one tied weight; give both the same value, or name one of them"
            )
    return values


# -- what a transport and a model cannot run ----------------------------------------------------


def check_transport(config: Config, transport: Transport, *, on_host: bool) -> None:
    """ConfigError for a way to communicate that these ranks cannot take."""
    setting, ranks = config.transport, transport.size
    rules = {
        # One process that has loaded MPI needs it as little as one that has not.
        f"local is for one process, but {ranks} ranks are running; choose auto or mpi": (
            setting == "local" and ranks > 1
        ),
        "nccl is for GPUs, and no rank sees one; load the driver and a torch with CUDA, or choose "
        "auto": setting == "nccl" and on_host,
        "no MPI library was found; load the site's MPI module, install axsparse[mpich], or choose "
        "auto": setting not in ("auto", "local") and transport.name == "local",
    }
    for rule, is_broken in rules.items():
        if is_broken:
            raise ConfigError(f"{config.where('transport')}: {rule}")


def check_weights_are_loaded(config: Config, model: Model, targets: Targets) -> None:
    """ConfigError unless all that is pruned starts at loaded weights, as some methods need."""
    start, method = model.start, config.pruning.method
    anew = [name for name in targets.shapes if isinstance(start, FromFile) and name in start.new]
    if start is None or anew:
        why = f"none are loaded; {LOAD}"
        if anew:
            fit = targets.shapes.keys() - anew
            suggestion = to_exclude(anew, targets.shapes, fit, "choose another method")
            why = f"not at drawn ones as of {some_of(anew)}; {suggestion}"
        where = config.where("pruning.method")
        raise ConfigError(f"{where}: {method} looks at loaded weights, and {why}")


def check_types(config: Config, model: Model, profile: ModelProfile) -> None:
    """ConfigError for modules of the user's whose parameters have several types, where the run
    would give all of them a half one."""
    named: dict[str, str] = {}
    for layer, info in zip(model.layers, profile.layers, strict=True):
        for parameter in info.parameters if given_module(layer) is not None else ():
            named.setdefault(str(parameter.dtype).removeprefix("torch."), parameter.name)
    if len(named) > 1 and config.precision != "fp32":
        found = " and ".join(f"{name} is {kind}" for kind, name in named.items())
        raise ConfigError(
            f"{config.where('precision')}: {found}, and a run computes with all weights in "
            f"{config.precision}; give it the module in one type (module.float()), or set "
            "precision: fp32"
        )


# -- before a plan: precision and memory ---------------------------------------------------------


def decided_precision(
    config: Config, transport: Transport, *, on_host: bool
) -> tuple[Config, Sequence[str]]:
    """The configuration with `precision: auto` decided, and a line if a CPU lacks the type.

    All ranks call this together.
    """
    asked = config.precision
    wanted = "bf16" if asked == "auto" else asked
    has_type = not on_host or cpu_multiplies(DTYPES[wanted])
    is_slow = sum_of(transport, [float(not has_type)]) != [0.0]
    lines = []
    if is_slow and asked == "auto":
        wanted = "fp32"
        lines = ["precision auto: fp32, since a CPU has no instructions for bf16"]
    elif is_slow:
        lines = [
            f"warning: precision {asked}: a CPU has no instructions for it, and multiplies "
            "matrices 3 to 20 times as slowly as in fp32, in more memory than is planned; choose "
            "auto"
        ]
    return config.decided({"precision": wanted}), lines


def found_budget(
    config: Config, transport: Transport, memory: GpuMemory | None = None
) -> MemoryBudget:
    """The memory budget of the rank that may take least, the same on every rank.

    `memory` belongs to this rank's GPU; without one a rank shares its host's memory with the other
    ranks there. All ranks call this together.
    """
    on_host = memory is None
    if memory is None:
        here = [host_memory_bytes(), resident_memory_bytes(), socket.gethostname()]
    else:
        here = [memory.total, memory.total - memory.free, memory.uuid]
    found = gather_values(transport, here)
    ranks = Counter(where for _, _, where in found)
    given = config.layout.memory_per_rank
    limit = None if given == "auto" else given * 1e9
    budgets = []
    for total, taken, where in found:
        if on_host:
            overhead = max(HOST_OVERHEAD, taken)
        else:
            of_others = taken / ranks[where] - CONTEXT_BYTES
            overhead = GPU_OVERHEAD + max(0.0, of_others)
        share = total / ranks[where]
        budgets.append(memory_budget(share, overhead, on_host=on_host, limit=limit))
    return min(budgets, key=lambda budget: budget.for_model)


# -- the same on all ranks -----------------------------------------------------------------------


def reject_mismatching_rank(transport: Transport, facts: Mapping[str, str]) -> None:
    """ConfigError if a fact differs between ranks; names the odd rank and its host."""
    odd = mismatching_rank(transport, facts)
    if odd is not None:
        fact, text = odd
        way = "start all ranks with the same command, configuration and environment"
        if fact == START:
            way = "call torch.manual_seed before you make the modules"
        raise ConfigError(f"{text}; {way}")


def mismatching_rank(
    transport: Transport, facts: Mapping[str, str] | None
) -> tuple[str, str] | None:
    """A fact that differs between ranks, and on which rank and host; None if all are equal.

    Rank 0 has facts. All ranks call this together; those whose facts are None are not compared.
    """
    here = None if facts is None else {"host": socket.gethostname(), **facts}
    # Facts of a large model are 40 kB, so that all ranks' are only gathered to name the odd one.
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    is_other = digest != value_of_first(transport, digest) and facts is not None
    if sum_of(transport, [float(is_other)]) == [0.0]:
        return None
    everyone = {rank: there for rank, there in enumerate(gather_values(transport, here)) if there}
    for fact in everyone[0]:
        values = Counter(there.get(fact, "nothing") for there in everyone.values())
        common = values.most_common(1)[0][0]
        for rank, there in everyone.items():
            if fact != "host" and (has := there.get(fact, "nothing")) != common:
                others = "the others have" if len(everyone) > 2 else "rank 0 has"
                return fact, (
                    f"{fact}: rank {rank} on host {there['host']} has {shorten(has)}, {others} "
                    f"{shorten(common)}"
                )
    return None
