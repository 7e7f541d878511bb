"""The banner: the first lines on the screen, with the model, the layout, and their cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from axsparse.config.schema import ONCE, Config, num_microbatches, prunes
from axsparse.models.model_profile import LayerInfo, ModelProfile
from axsparse.runtime.console import format_bytes, format_count
from axsparse.runtime.grid import Grid
from axsparse.runtime.provenance import __version__


@dataclass(frozen=True)
class ModelLayout:
    """A model and where its layers lie."""

    name: str
    profile: ModelProfile
    stages: Sequence[range]
    grid: Grid
    transport: str
    """The transport between the ranks, such as "mpi (MPICH 4.2)"."""
    dense_bytes: int
    """Bytes of model state on the fullest rank if nothing were pruned."""
    live_bytes: int
    """Bytes of model state on the fullest rank as the run begins."""
    teacher_bytes: int = 0
    """Bytes of the teacher's weights on the rank that has most; 0 without a teacher."""
    has_saved_masks: bool = False
    """Whether a checkpoint gives the masks of `pruning.mask`."""


def banner(
    config: Config, model: ModelLayout, *, data: str, metrics: Path, planned: str = ""
) -> Iterator[str]:
    """The lines in order. `config` has every `auto` resolved; `planned` says what the planner
    predicts and why it chose this layout."""
    profile, grid = model.profile, model.grid
    parameters = f"{format_count(profile.num_params)} parameters"
    ranks = f"{grid.size} rank" + "s" * (grid.size > 1)
    pruning = _pruning(config, has_saved_masks=model.has_saved_masks)
    yield (
        f"axsparse {__version__} · {model.name} {parameters} · {pruning} · "
        f"{config.precision} · {ranks} = {grid} · {model.transport}"
    )
    yield "   ".join(
        f"stage {number}: {_layers([profile.layers[layer] for layer in stage], profile.work)}"
        for number, stage in enumerate(model.stages)
    )
    beside = f" · {planned}" if planned else ""
    is_shared = config.samo.zero_stage and grid.g_data > 1
    shared = f", optimizer state shared by {grid.g_data} replicas" if is_shared else ""
    if model.teacher_bytes:
        shared += f" · teacher {format_bytes(model.teacher_bytes)}"
    yield f"model state/rank: {_state(config, model)}{shared}{beside}"
    batch = config.batch
    most, least = num_microbatches(batch, grid.g_data), num_microbatches(batch) // grid.g_data
    each = f"{most}" if most == least else f"{least} or {most}"
    yield (
        f"batch {batch.global_batch_size} = {grid.g_data} replica{'s' * (grid.g_data > 1)} × "
        f"{each} microbatches × {batch.microbatch_size} · {data}"
    )
    steps = config.train.steps
    yield f"{steps} step{'s' * (steps != 1)} · metrics → {metrics}"


def _pruning(config: Config, *, has_saved_masks: bool) -> str:
    if not config.samo.enabled:
        return "dense (samo.enabled is false)"
    pruning = config.pruning
    if not prunes(pruning):
        return "dense (pruning.sparsity is 0)"
    what = "of the block weights" if pruning.include == "blocks" else "of all matrices"
    if pruning.mask is not None:
        return f"pruned by the masks of {'the checkpoint' if has_saved_masks else pruning.mask}"
    when = f" after step {pruning.at_step}" if pruning.at_step else ""
    if pruning.pattern is not None:
        return f"{pruning.pattern} {what} kept by {pruning.method}{when}"
    first = f"{100 * pruning.initial_sparsity:g} → " if pruning.initial_sparsity else ""
    return f"{first}{100 * pruning.sparsity:g} % {what} pruned by {pruning.method}{when}"


def _state(config: Config, model: ModelLayout) -> str:
    dense = f"dense {format_bytes(model.dense_bytes)}"
    if model.live_bytes == model.dense_bytes:
        later = config.samo.enabled and prunes(config.pruning)
        at_step = config.pruning.at_step
        when = f"step {at_step}" if config.pruning.method in ONCE and at_step else "it is pruned"
        return dense + f" until {when}, then SAMO" * later
    sparse = ", weights sparse at rest" * (config.samo.weights == "sparse")
    gathers = sparse and config.samo.zero_stage == 3 and config.layout.g_data != 1
    sparse += " and gathered by replicas" * bool(gathers)
    return f"{dense} → SAMO {format_bytes(model.live_bytes)}{sparse}"


def _layers(layers: Sequence[LayerInfo], work: float) -> str:
    """The layers of a stage, as in "embed, block0–2 (2.4M, 48 % of the work)"."""
    parameters, own = format_count(sum(each.numel for each in layers)), sum(e.work for e in layers)
    share = f", {100 * own / work:.0f} % of the work" if work else ""
    return f"{_names(layers)} ({parameters}{share})"


def _names(layers: Sequence[LayerInfo]) -> str:
    """The layers' names, as in "embed, block0–2": consecutive numbers become one range."""

    def run(at_and_layer: tuple[int, LayerInfo]) -> tuple[str, int | str]:
        at, name = at_and_layer[0], at_and_layer[1].name
        digits = name[len(name.rstrip("0123456789")) :]
        return name.removesuffix(digits), int(digits) - at if digits else name

    texts = []
    for (stem, _), group in groupby(enumerate(layers), run):
        names = [layer.name for _, layer in group]
        last = names[-1].removeprefix(stem)
        texts.append(names[0] if len(names) == 1 else f"{names[0]}–{last}")
    return ", ".join(texts)
