"""The first lines on the screen: what is trained, where it stands, what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from axsparse.config.schema import Config, prunes
from axsparse.config.validate import ONCE
from axsparse.models.survey import LayerInfo, Survey
from axsparse.runtime.console import format_bytes, format_count
from axsparse.runtime.grid import Grid
from axsparse.runtime.version import __version__


def banner(
    config: Config,
    survey: Survey,
    stages: Sequence[range],
    grid: Grid,
    *,
    name: str,
    transport: str,
    dense_bytes: int,
    live_bytes: int,
    data: str,
    metrics: Path,
    planned: str = "",
) -> Iterator[str]:
    """The lines in order. `config` has every `auto` resolved; bytes are the fullest rank's.

    `planned` is what was predicted, and why this layout.
    """
    parameters = f"{format_count(survey.num_params)} parameters"
    ranks = f"{grid.size} rank" + "s" * (grid.size > 1)
    yield (
        f"axsparse {__version__} · {name} {parameters} · {_pruning(config)} · "
        f"{config.precision} · {ranks} = {grid} · {transport}"
    )
    yield "   ".join(
        f"stage {number}: {_layers([survey.layers[layer] for layer in stage], survey.work)}"
        for number, stage in enumerate(stages)
    )
    beside = f" · {planned}" if planned else ""
    yield f"model state/rank: {_state(config, dense_bytes, live_bytes)}{beside}"
    batch = config.batch
    per_replica = batch.global_batch_size // grid.g_data
    yield (
        f"batch {batch.global_batch_size} = {grid.g_data} replica{'s' * (grid.g_data > 1)} × "
        f"{per_replica // batch.microbatch_size} microbatches × {batch.microbatch_size} · {data}"
    )
    steps = config.train.steps
    yield f"{steps} step{'s' * (steps != 1)} · metrics → {metrics}"


def _pruning(config: Config) -> str:
    if not config.samo.enabled:
        return "dense (samo.enabled is false)"
    pruning = config.pruning
    if not prunes(pruning):
        return "dense (pruning.sparsity is 0)"
    what = "of the block weights" if pruning.include == "blocks" else "of all matrices"
    if pruning.ticket is not None:
        return f"pruned by the ticket {pruning.ticket}"
    when = f" after step {pruning.at_step}" if pruning.at_step else ""
    if pruning.pattern is not None:
        return f"{pruning.pattern} {what} kept by {pruning.method}{when}"
    return f"{100 * pruning.sparsity:g} % {what} pruned by {pruning.method}{when}"


def _state(config: Config, dense_bytes: int, live_bytes: int) -> str:
    if live_bytes == dense_bytes:
        later = config.samo.enabled and prunes(config.pruning)
        at_step = config.pruning.at_step
        when = f"step {at_step}" if config.pruning.method in ONCE and at_step else "it is pruned"
        return f"dense {format_bytes(dense_bytes)}" + f" until {when}, then SAMO" * later
    return f"dense {format_bytes(dense_bytes)} → SAMO {format_bytes(live_bytes)}"


def _layers(layers: Sequence[LayerInfo], work: float) -> str:
    """ "embed, block0–2 (2.4M, 48 % of the work)"; layers are weighed by `LayerInfo.work`."""
    parameters = format_count(sum(layer.numel for layer in layers))
    share = (
        f", {100 * sum(layer.work for layer in layers) / work:.0f} % of the work" if work else ""
    )
    return f"{_names(layers)} ({parameters}{share})"


def _names(layers: Sequence[LayerInfo]) -> str:
    """ "embed, block0–2": runs of numbered layers are drawn together."""
    runs: list[tuple[str, int | None, int | None]] = []
    for layer in layers:
        stem = layer.name.rstrip("0123456789")
        digits = layer.name[len(stem) :]
        number = int(digits) if digits else None
        if runs and number is not None and runs[-1][0] == stem and runs[-1][2] == number - 1:
            runs[-1] = (stem, runs[-1][1], number)
        else:
            runs.append((stem, number, number))
    texts = [
        stem if first is None else f"{stem}{first}" if first == last else f"{stem}{first}–{last}"
        for stem, first, last in runs
    ]
    return ", ".join(texts)
