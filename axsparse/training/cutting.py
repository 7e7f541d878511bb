"""Which tensors of a run are cut into chunks (`layout.g_tensor`), and what keeps layers whole."""

from __future__ import annotations

from collections.abc import Mapping

from axsparse.config.load import LoadedConfig
from axsparse.models.layer import Model
from axsparse.models.survey import Survey
from axsparse.models.tensor_parallel import Cut, cuts_of, most_chunks
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid


def cuts(loaded: LoadedConfig, grid: Grid) -> bool:
    """Whether layers are to be cut."""
    return grid.g_tensor > 1 or loaded.config.layout.tensor_exact


def _where(loaded: LoadedConfig, grid: Grid) -> str:
    """The setting that asks for chunks."""
    return loaded.where("layout.tensor_exact" if grid.g_tensor == 1 else "layout.g_tensor")


def refuse_uncut(
    loaded: LoadedConfig,
    grid: Grid,
    model: Model,
    on_host: bool,
) -> None:
    """ConfigError for what does not work with tensors that are cut, if layers are to be cut."""
    config, members = loaded.config, grid.g_tensor
    if not cuts(loaded, grid):
        return
    refused = {
        f"{members} is no power of two": bool(members & (members - 1)),
        "layers are cut on CPUs only so far": not on_host,
        f"model {model.name} names no modules to cut (Layer.tensor)": not any(
            layer.tensor for layer in model.layers
        ),
        "pipeline.compile fuses layers, which are not cut then": config.pipeline.compile,
        "no plan counts cut layers yet, which layout.memory_per_rank needs": (
            config.layout.memory_per_rank != "auto"
        ),
    }
    for reason, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"{_where(loaded, grid)}: {reason}; choose another value there, or layout.g_tensor "
                "1 without layout.tensor_exact"
            )


def cuts_of_model(loaded: LoadedConfig, grid: Grid, model: Model, survey: Survey) -> dict[str, Cut]:
    """How parameters are cut into chunks, by global name; empty where layers are whole.

    ConfigError for a number of members that does not divide what is cut.
    """
    if not cuts(loaded, grid):
        return {}
    where, chunks = _where(loaded, grid), grid.g_tensor
    found: dict[str, Cut] = {}
    shapes = {
        layer.name: {p.name.removeprefix(f"{layer.name}."): p.shape for p in layer.parameters}
        for layer in survey.layers
    }
    if loaded.config.layout.tensor_exact:
        most = (most_chunks(each.name, each.tensor, shapes[each.name]) for each in model.layers)
        chunks = min(most)
        if chunks % grid.g_tensor:
            raise ConfigError(
                f"{where}: {grid.g_tensor}, but layout.tensor_exact cuts this model into {chunks} "
                f"chunks; choose at most {chunks}"
            )
    for layer in model.layers if chunks > 1 else ():
        of_layer = cuts_of(layer.name, layer.tensor, shapes[layer.name], chunks, where)
        found.update((f"{layer.name}.{name}", cut) for name, cut in of_layer.items())
    return found


def ties_of_chunks(survey: Survey, cuts: Mapping[str, Cut]) -> dict[str, str]:
    """The ties of the chunks of tied tensors that are cut; ConfigError where one alone is."""
    ties = {}
    for second, first in survey.ties.items():
        if cuts.get(first) != cuts.get(second):
            raise ConfigError(
                f"tie {first} = {second}: the two uses are not cut alike (Layer.tensor); cut both "
                "by vocabulary, or neither"
            )
        for number in range(cuts[first].chunks if first in cuts else 0):
            ties[f"{second}#{number}"] = f"{first}#{number}"
    return ties
