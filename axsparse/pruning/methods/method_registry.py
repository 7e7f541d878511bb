"""Makes the pruning method that the settings name (`pruning.method`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from axsparse.config.schema import ONCE, Config
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.early_bird import EarlyBirdSearch
from axsparse.pruning.methods.gradual import (
    GradualPruning,
    PruningRounds,
    Rewinding,
    gradual_sparsity,
    iterative_sparsity,
    sensitivity,
)
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.pruner import Pruner
from axsparse.pruning.targets import initial_share


def choose_pruner(
    config: Config, criterion: Criterion, live: LiveMasks | None, *, starts_pruned: bool
) -> Pruner | None:
    """The pruning method of a run; None if nothing is pruned, or if the first masks stay.

    `config` has every `auto` resolved. `starts_pruned` says whether the state was built with masks,
    which change under `pruning.initial_sparsity` alone.
    """
    pruning = config.pruning
    until = pruning.until_step
    assert until != "auto" and pruning.rewind_step != "auto", "the configuration is resolved"
    if live is None or (starts_pruned and not initial_share(pruning)):
        return None
    method = _drawing_method(config, criterion, live, until)
    step = pruning.rewind_step
    return method if step == "never" else Rewinding(method, live, step)


def _drawing_method(config: Config, criterion: Criterion, live: LiveMasks, until: int) -> Pruner:
    """The method of a run that starts dense, without its rewinding."""
    pruning = config.pruning
    if pruning.method == "early-bird":
        return EarlyBirdSearch(
            live,
            criterion,
            interval=pruning.interval,
            start_step=max(pruning.at_step, config.schedule.warmup_steps),
            max_steps=until,
            threshold=pruning.threshold,
        )
    if pruning.method in ("gradual", "iterative"):
        rising = partial(gradual_sparsity, initial_share=initial_share(pruning))
        sparsity = iterative_sparsity if pruning.method == "iterative" else rising
        rounds = PruningRounds(pruning.at_step, pruning.interval, until)
        return GradualPruning(live, criterion, rounds, sparsity)
    assert pruning.method in ONCE, f"no class for the method {pruning.method}"
    once = PruningRounds(begin=pruning.at_step - 1, interval=1, until_step=pruning.at_step)
    if pruning.method == "snip":
        criterion = replace(criterion, score=sensitivity)
    return GradualPruning(live, criterion, once)
