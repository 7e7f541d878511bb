"""The learning rates and weight decays that settings give to some parameters by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from axsparse.config.schema import Config
from axsparse.models.survey import Survey, match
from axsparse.runtime.errors import ConfigError
from axsparse.samo.optim.optimizer import Hyper


@dataclass(frozen=True)
class ParameterGroup:
    """The settings that some parameters have in common."""

    peak: float
    """Their peak learning rate."""
    weight_decay: float

    def hyper(self, base: Hyper, rate: Callable[[float], float]) -> Hyper:
        """Their settings in one step; `rate` gives the learning rate of this step for a peak."""
        return replace(base, learning_rate=rate(self.peak), weight_decay=self.weight_decay)


@dataclass(frozen=True)
class ParameterGroups:
    """The groups of the parameters that `optimizer.learning_rates` or `weight_decays` name."""

    by_name: Mapping[str, ParameterGroup]
    """By global name; both uses of a tied weight are in one group."""

    def hypers(self, base: Hyper, rate: Callable[[float], float]) -> dict[str, Hyper]:
        """The settings of the named parameters in one step, whose other settings are `base`."""
        made = {group: group.hyper(base, rate) for group in set(self.by_name.values())}
        return {name: made[group] for name, group in self.by_name.items()}


def parameter_groups(config: Config, survey: Survey) -> ParameterGroups:
    """The groups of a model; ConfigError for an entry or pattern that cannot be meant."""
    settings, names = config.optimizer, survey.counted
    rates = _own_values("optimizer.learning_rates", settings.learning_rates, names)
    decays = _own_values("optimizer.weight_decays", settings.weight_decays, names)
    shapes = survey.shapes
    groups = {}
    for name in names:
        if name in rates or name in decays:
            decay = settings.weight_decay if len(shapes[name]) >= 2 else 0.0
            peak = rates.get(name, settings.learning_rate)
            groups[name] = ParameterGroup(peak, decays.get(name, decay))
    groups |= {second: groups[first] for second, first in survey.ties.items() if first in groups}
    return ParameterGroups(groups)


def _own_values(key: str, entries: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """The value of each parameter that an entry `pattern=value` names; the last one counts."""
    found: dict[str, float] = {}
    for entry in entries:
        pattern, _, number = entry.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not pattern or not 0 <= value < float("inf"):
            raise ConfigError(
                f"{key}: {entry!r} is not pattern=value with a value of at least 0; write it like "
                "head.*=0.01"
            )
        named = match([pattern.strip()], names, key, "no trained parameter")
        found.update(dict.fromkeys(named, value))
    return found
