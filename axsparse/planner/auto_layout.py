"""Stages and replicas: which layout a run takes, and which layers each stage."""

from __future__ import annotations

from dataclasses import replace

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config
from axsparse.config.validate import (
    check_divides_ranks,
    check_split,
    counted,
    divisors,
    one_of,
)
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.layout_search import Rejection
from axsparse.planner.run_workload import Choice, choose_layout
from axsparse.planner.stage_memory import most_in_flight, stage_memory
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.planner.workload import StageLoad
from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

ASSUMED_CLUSTER = "laptop"
"""By which a layout is found where no cluster is named: memory alone decides, no time is told."""


def cluster_of(config: Config) -> Cluster | None:
    """The constants by which times are predicted; what the process holds already is no matter."""
    name = config.layout.cluster
    return None if name is None else replace(load_cluster(name), overhead_bytes=0.0)


def chosen_layout(
    loaded: LoadedConfig,
    subject: SurveyedModel,
    cluster: Cluster | None,
    ranks: int,
    found_memory: float | None,
) -> Choice | None:
    """What `layout.g_inter: auto` takes; None where it is given, or nothing limits it."""
    config = loaded.config
    layout = config.layout
    if not layout.g_inter == layout.g_data == layout.split == "auto":
        return None
    batch = config.batch

    def divides(stages: int) -> bool:
        share, rest = divmod(batch.global_batch_size, ranks // stages)
        return not rest and share % batch.microbatch_size == 0

    stages = [n for n in range(1, subject.most_stages + 1) if ranks % n == 0]
    if layout.memory_per_rank != "auto":
        room = layout.memory_per_rank * 1e9
    elif found_memory is not None:
        # Shared with all else on the host, it is a bound and no promise: never fewer than usual.
        room, usual = found_memory, 2 if 2 in stages else 1
        if not divides(usual):
            return None
        stages = [n for n in stages if n >= usual]
    else:
        return None
    stages = [n for n in stages if divides(n)]
    if not stages:
        return None
    assumed = cluster or replace(load_cluster(ASSUMED_CLUSTER), overhead_bytes=0.0)
    has_times = cluster is not None
    found = choose_layout(subject, assumed, config, ranks, stages, room, has_times=has_times)
    if isinstance(found, Rejection):
        raise ConfigError(
            f"{loaded.where('layout.g_inter')}: auto finds no number of stages of {ranks} ranks "
            f"that fits {format_bytes(room)} a rank; with {found.g_inter}, {found.reason}; take "
            "more ranks, prune more, recompute activations (pipeline.checkpoint_activations), or "
            "set layout.g_inter to try all the same"
        )
    return found


def balanced(
    loaded: LoadedConfig, config: Config, grid: Grid, subject: SurveyedModel
) -> list[range]:
    """The stages whose dearest does the least work, of those that fit `layout.memory_per_rank`.

    `config` with its slack resolved; ConfigError if none fits.
    """
    room, batch, pipeline = config.layout.memory_per_rank, config.batch, config.pipeline
    microbatches = batch.global_batch_size // (grid.g_data * batch.microbatch_size)
    assert pipeline.slack != "auto"
    schedule = Schedule(pipeline.schedule, pipeline.slack, pipeline.prefer)

    def needs(stage: int, load: StageLoad) -> float:
        held = most_in_flight(
            schedule, stage=stage, g_inter=grid.g_inter, microbatches=microbatches
        )
        return stage_memory(
            load, microbatch_size=batch.microbatch_size, in_flight=held, overhead=0.0
        ).total

    def fits(stage: int, load: StageLoad) -> bool:
        return room == "auto" or needs(stage, load) <= room * 1e9

    found = subject.ranges(grid.g_inter, grid.g_data, fits, microbatches=microbatches)
    if found is not None:
        return found
    assert room != "auto"
    even = subject.stages(grid.g_inter, grid.g_data, microbatches=microbatches)
    assert even is not None, "there is no limit"
    most, fullest = max((needs(stage, load), stage) for stage, load in enumerate(even))
    raise ConfigError(
        f"{loaded.where('layout.memory_per_rank')}: no split of {len(subject.survey.layers)} "
        f"layers into {grid.g_inter} stages fits {format_bytes(room * 1e9)}; with the work "
        f"balanced, stage {fullest} needs {format_bytes(most)}; take more stages "
        "(layout.g_inter), prune more, or recompute activations "
        "(pipeline.checkpoint_activations)"
    )


def check_grid(grid: Grid, ranks: int, num_layers: int) -> None:
    """ConfigError for a grid of the Python API that these ranks or this model cannot have."""
    if grid.size != ranks:
        raise ConfigError(
            f"grid: {grid} are {grid.size} ranks, {ranks} are running; start {grid.size} ranks or "
            "make another grid"
        )
    if grid.g_inter > num_layers:
        raise ConfigError(
            f"grid: {grid.g_inter} stages for {num_layers} layers; choose at most {num_layers}"
        )


def resolve_grid(loaded: LoadedConfig, ranks: int, num_layers: int) -> Grid:
    """The grid of `ranks` ranks for a list of `num_layers` layers, embedding and head included.

    Raises ConfigError if the layout does not use every rank, or cannot give each stage
    a layer and each layer a stage.
    """
    g_inter, g_data = loaded.config.layout.g_inter, loaded.config.layout.g_data
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
        g_inter = 2 if 2 in stages else 1
        g_data = ranks // g_inter

    if ranks != g_inter * g_data:
        raise ConfigError(
            f"layout: {counted(ranks, 'rank')} ≠ g_inter {g_inter} × g_data {g_data}; "
            f"start {counted(g_inter * g_data, 'rank')} or set layout.g_inter to "
            f"{one_of(stages, near=g_inter)} and layout.g_data to auto"
        )
    check_split(loaded, g_inter, num_layers)
    return Grid(g_inter, g_data)


def pruned_layout(loaded: LoadedConfig) -> LoadedConfig:
    """The configuration with the layout that `layout.g_inter_pruned` asks for; replicas and split
    are not those of the first one."""
    layout = loaded.config.layout
    assert layout.g_inter_pruned is not None
    others = {"g_inter": layout.g_inter_pruned, "g_data": "auto", "split": "auto"}
    config = loaded.config.model_copy(update={"layout": layout.model_copy(update=others)})
    origin = loaded.origins.get("layout.g_inter_pruned", "default")
    named = f"by layout.g_inter_pruned, {origin}"
    return replace(loaded, config=config, origins={**loaded.origins, "layout.g_inter": named})
