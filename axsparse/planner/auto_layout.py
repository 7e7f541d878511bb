"""Decides which layout a run takes: how many stages and replicas, and which layers on each stage.

This is the one place where `layout.g_inter: auto` is decided. `training/resolution.py` asks two
functions, one after the other:

1. `chosen_layout`, if the costs of the model's layers are known. If `layout.memory_per_rank` or the
   machine's memory limits what a rank may take, it searches for the fewest stages that fit.
2. `resolve_grid` otherwise. It takes the numbers that the configuration gives. If it gives neither
   g_inter nor g_data, there are 2 stages where 2 divides the ranks, and 1 elsewhere.

`balanced` decides `layout.split: auto`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config, num_microbatches
from axsparse.config.validate import (
    check_divides_ranks,
    check_split,
    counted,
    divisors,
    one_of,
)
from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.layout import Layout, LayoutQuestion, Row
from axsparse.planner.layout_search import Rejection, split_layers, try_layouts
from axsparse.planner.run_workload import (
    configured_schedule,
    machine_of,
    run_question,
    schedules,
)
from axsparse.planner.schedule_choice import Trade, with_schedule_that_pays
from axsparse.planner.stage_memory import gigabytes
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid


@dataclass(frozen=True)
class Choice:
    """The layout that `auto` takes, and why it takes this number of stages."""

    row: Row
    room: float
    """Bytes that a rank may take."""
    smaller: Rejection | None
    """The layout of fewer stages that came closest; None if there was none."""
    trades: Sequence[Trade] | None = None
    """What options of the schedule cost and bring; None if the schedule was not searched for."""

    @property
    def reason(self) -> str:
        """Why so many stages, in a few words."""
        room = f"{gigabytes(self.room)} GB a rank"
        if self.smaller is None:
            return f"fits {room}"
        return f"the fewest that fit {room} (with {self.smaller.g_inter}, {self.smaller.reason})"


# -- the number of stages ---------------------------------------------------------------


def chosen_layout(
    loaded: LoadedConfig,
    subject: SurveyedModel,
    cluster: Cluster | None,
    ranks: int,
    found_memory: float | None,
) -> Choice | None:
    """The fewest stages whose memory fits, for `layout.g_inter: auto`.

    `found_memory` is what the machine leaves to each rank, in bytes, if that is known. It may lead
    to more stages than `resolve_grid` would take, never to fewer. Returns None, so that
    `resolve_grid` decides, if the configuration gives g_inter, g_data or a split, if nothing limits
    the memory of a rank, or if no number of stages leaves each replica a microbatch.
    ConfigError if nothing fits.
    """
    config = loaded.config
    layout = config.layout
    members, all_ranks = layout.g_tensor, ranks
    if ranks % members:
        return None
    ranks //= members
    if not layout.g_inter == layout.g_data == layout.split == "auto":
        return None

    def is_enough(stages: int) -> bool:
        """Whether each replica gets a microbatch."""
        return num_microbatches(config.batch) >= ranks // stages

    stages = [n for n in range(1, subject.most_stages + 1) if ranks % n == 0]
    if layout.memory_per_rank != "auto":
        room = layout.memory_per_rank * 1e9
    elif found_memory is not None:
        # Fewer stages than usual might not fit later: others on the host may take some memory.
        room, usual = found_memory, _usual_stages(stages)
        if not is_enough(usual):
            return None
        stages = [n for n in stages if n >= usual]
    else:
        return None
    stages = [n for n in stages if is_enough(n)]
    if not stages:
        return None
    # Without a named cluster memory alone decides, and no time is predicted.
    question = run_question(subject, machine_of(cluster), config, all_ranks, stages, room)
    tried = schedules(config, has_times=cluster is not None)
    found = fewest_stages(replace(question, schedules=tried))
    if isinstance(found, Rejection):
        raise ConfigError(
            f"{loaded.where('layout.g_inter')}: auto finds no number of stages of {ranks} ranks "
            f"that fits {format_bytes(room)} a rank; with {found.g_inter}, {found.reason}; take "
            "more ranks, prune more, recompute activations (pipeline.checkpoint_activations), or "
            "set layout.g_inter to try all the same"
        )
    return found


def fewest_stages(question: LayoutQuestion) -> Choice | Rejection:
    """The fewest of the question's stages that fit; the last rejection if none do.

    The question names its numbers of stages in rising order.
    """
    assert question.g_inter, "there is nothing to try"
    smaller: Rejection | None = None
    for stages in question.g_inter:
        rows, rejected = try_layouts(replace(question, g_inter=[stages]))
        if rows and question.schedules is not None:
            return Choice(rows[0], question.room, smaller)
        if rows:
            search = with_schedule_that_pays(question, rows[0])
            return Choice(search.row, question.room, smaller, search.trades)
        smaller = rejected[-1]
    assert smaller is not None
    return smaller


def resolve_grid(loaded: LoadedConfig, ranks: int, num_layers: int) -> Grid:
    """The grid of `ranks` ranks for a model of `num_layers` layers, embedding and head included.

    ConfigError if the layout of the configuration does not use every rank, or cannot give each
    stage a layer and each layer a stage.
    """
    g_inter, g_data = loaded.config.layout.g_inter, loaded.config.layout.g_data
    g_tensor, all_ranks = loaded.config.layout.g_tensor, ranks
    of_tensor = [each for each in divisors(ranks) if each & (each - 1) == 0]
    check_divides_ranks(loaded, "layout.g_tensor", g_tensor, ranks, of_tensor)
    ranks //= g_tensor
    stages = [divisor for divisor in divisors(ranks) if divisor <= num_layers]
    if g_inter != "auto":
        if g_inter > num_layers:
            raise ConfigError(
                f"{loaded.where('layout.g_inter')}: {g_inter} stages for "
                f"{counted(num_layers, 'layer')}; choose at most {num_layers}"
            )
        if g_data == "auto":
            check_divides_ranks(loaded, "layout.g_inter", g_inter, ranks, stages)
            g_data = ranks // g_inter
    elif g_data != "auto":
        replicas = [ranks // count for count in stages]
        check_divides_ranks(loaded, "layout.g_data", g_data, ranks, replicas)
        g_inter = ranks // g_data
        if g_inter > num_layers:
            raise ConfigError(
                f"{loaded.where('layout.g_data')}: {g_data} leaves {g_inter} stages for "
                f"{counted(num_layers, 'layer')}; choose {one_of(replicas, near=g_data)}"
            )
    else:
        g_inter = _usual_stages(stages)
        g_data = ranks // g_inter

    if ranks != g_inter * g_data:
        tensor = f" × g_tensor {g_tensor}" * (g_tensor > 1)
        raise ConfigError(
            f"layout: {counted(all_ranks, 'rank')} ≠ g_inter {g_inter} × g_data {g_data}{tensor}; "
            f"start {counted(g_inter * g_data * g_tensor, 'rank')} or set layout.g_inter to "
            f"{one_of(stages, near=g_inter)} and layout.g_data to auto"
        )
    check_split(loaded, g_inter, num_layers)
    return Grid(g_inter, g_data, g_tensor)


def _usual_stages(possible: Sequence[int]) -> int:
    """How many of the possible stages a run takes where nothing asks for more or fewer."""
    return 2 if 2 in possible else 1


def check_grid(grid: Grid, ranks: int, num_layers: int) -> None:
    """ConfigError if a grid of the Python API does not fit these ranks or layers."""
    if grid.size != ranks:
        raise ConfigError(
            f"grid: {grid} are {grid.size} ranks, {ranks} are running; start {grid.size} ranks or "
            "make another grid"
        )
    if grid.g_inter > num_layers:
        raise ConfigError(
            f"grid: {grid.g_inter} stages for {num_layers} layers; choose at most {num_layers}"
        )


def cluster_of(config: Config) -> Cluster | None:
    """The cluster by whose constants times are predicted, if the configuration names one.

    Its overhead is 0, since `memory_per_rank` does not count what a process holds already.
    """
    name = config.layout.cluster
    return None if name is None else replace(load_cluster(name), overhead_bytes=0.0)


# -- the layers of each stage -----------------------------------------------------------


def balanced(
    loaded: LoadedConfig, config: Config, grid: Grid, subject: SurveyedModel
) -> list[range]:
    """The layers of each stage for `layout.split: auto`.

    The work of the busiest stage is as small as it can be while every stage fits
    `layout.memory_per_rank`; ConfigError if none fits. The pipeline of `config` is resolved.
    """
    limit, batch = config.layout.memory_per_rank, config.batch
    room = math.inf if limit == "auto" else limit * 1e9
    microbatches = num_microbatches(batch, grid.g_data)
    schedule = configured_schedule(config.pipeline)
    layout = Layout(grid, schedule, batch.microbatch_size, microbatches)
    found = split_layers(subject, layout, 0.0, room)
    if not isinstance(found, Rejection):
        return [load.numbers for load in found]
    raise ConfigError(
        f"{loaded.where('layout.memory_per_rank')}: no split of {len(subject.survey.layers)} "
        f"layers into {grid.g_inter} stages fits {format_bytes(room)}; with the work balanced, "
        f"{found.reason}; take more stages (layout.g_inter), prune more, or recompute activations "
        "(pipeline.checkpoint_activations)"
    )
