"""Which tensors of a model are pruned, and to how many entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from axsparse.config.schema import Config, PruningConfig, prunes
from axsparse.models.survey import Survey
from axsparse.pruning.distribution import kept_counts, match
from axsparse.pruning.pattern import check_pattern, parse_pattern
from axsparse.pruning.ticket.ticket_reader import Ticket, open_ticket
from axsparse.runtime.errors import ConfigError
from axsparse.samo.masks import Shape


@dataclass(frozen=True)
class Targets:
    """The pruned tensors in model order, a tied weight once, and their final sparsities."""

    shapes: Mapping[str, Shape]
    sparsity: float
    distribution: Literal["uniform", "erk", "global"]
    own: Mapping[str, float]
    """Of tensors that have a sparsity of their own."""

    def kept(self, at: Callable[[float], float] = lambda final: final) -> dict[str, int]:
        """Entries that each tensor keeps; `at` gives the sparsity of now for a final one.

        Of a global distribution the even spread, which is what can be said without weights.
        """
        return kept_counts(
            self.shapes,
            at(self.sparsity),
            distribution="uniform" if self.distribution == "global" else self.distribution,
            own={name: at(sparsity) for name, sparsity in self.own.items()},
        )

    @property
    def common(self) -> Sequence[str]:
        """The tensors that share one threshold."""
        if self.distribution != "global":
            return []
        return [name for name in self.shapes if name not in self.own]


def targets(surveyed: Survey, pruning: PruningConfig) -> Targets:
    """What the settings prune of a model; ConfigError where they do not fit it."""
    trained = {
        parameter.name: tuple(parameter.shape)
        for layer in surveyed.layers
        for parameter in layer.parameters
        if parameter.trained
        and parameter.name not in surveyed.ties
        and len(parameter.shape) >= 2
        and (layer.kind == "block" or pruning.include == "all")
    }
    excluded = set(match(pruning.exclude, list(trained), "pruning.exclude"))
    shapes = {name: shape for name, shape in trained.items() if name not in excluded}
    if not shapes and prunes(pruning) and pruning.ticket is None:
        raise ConfigError(
            "pruning.exclude: no tensor is left to prune; leave some in, or set samo.enabled=false"
            if trained
            else "pruning.include: blocks, but no block of this model has a matrix; choose all, or "
            "set samo.enabled=false"
        )
    own = {}
    for entry in pruning.layers:
        pattern, own_sparsity = _entry(entry)
        own.update(dict.fromkeys(match([pattern], list(shapes), "pruning.layers"), own_sparsity))
    sparsity = pruning.sparsity
    if pruning.pattern is not None:
        n, m = parse_pattern(pruning.pattern)
        sparsity = 1 - n / m
        for name, shape in shapes.items():
            check_pattern(name, shape, n, m)
    return Targets(shapes, sparsity, pruning.distribution, own)


def _entry(entry: str) -> tuple[str, float]:
    """The pattern and the sparsity of `pattern=sparsity`."""
    pattern, _, number = entry.rpartition("=")
    try:
        sparsity = float(number)
    except ValueError:
        sparsity = -1.0
    if not pattern or not 0 <= sparsity < 1:
        raise ConfigError(
            f"pruning.layers: {entry!r} is not pattern=sparsity with a sparsity from 0 to below 1; "
            "write it like block0.*=0.5"
        )
    return pattern.strip(), sparsity


FROM_START = frozenset({"magnitude", "random", "custom", "set", "rigl"})
"""Methods whose first masks ask for nothing but the weights."""


def what_is_pruned(config: Config, surveyed: Survey) -> tuple[Targets | None, Ticket | None]:
    """The pruned tensors, None for dense training, and the ticket that is used from the start."""
    pruning = config.pruning
    wanted = targets(surveyed, pruning) if config.samo.enabled else None
    if wanted is not None and not prunes(pruning):
        wanted = None
    if wanted is None or pruning.ticket is None:
        return wanted, None
    ticket = open_ticket(pruning.ticket)
    ticket.check(surveyed.shapes)
    shapes = {name: entry.shape for name, entry in ticket.manifest.tensors.items()}
    return replace(wanted, shapes=shapes, own={}), ticket


def starts_pruned(config: Config, wanted: Targets | None, ticket: Ticket | None) -> bool:
    """Whether state is built compressed; otherwise it is dense until the first pruning."""
    pruning = config.pruning
    if wanted is None:
        return False
    return ticket is not None or (pruning.at_step == 0 and pruning.method in FROM_START)


def kept_at_start(
    config: Config, wanted: Targets | None, ticket: Ticket | None
) -> Mapping[str, int]:
    if wanted is None or not starts_pruned(config, wanted, ticket):
        return {}
    return wanted.kept() if ticket is None else ticket.kept
