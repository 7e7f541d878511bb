"""From settings to what draws and changes masks: the methods of `pruning.method`."""

from __future__ import annotations

from collections.abc import Sequence

from axsparse.config.validate import DISTANCES
from axsparse.data_parallel.sync import StageTie
from axsparse.masking.change import Masking
from axsparse.masking.live import Live
from axsparse.masking.moving import Moving
from axsparse.masking.once import Once
from axsparse.masking.rewind import Rewinder
from axsparse.masking.search import Search
from axsparse.masking.stepwise import Stepwise
from axsparse.pruning.early_bird import EarlyBird
from axsparse.resolve import Resolved
from axsparse.samo.dynamic import Regrowth
from axsparse.samo.gradient import GradientCollector


def choose_masking(
    run: Resolved,
    live: Live,
    collector: GradientCollector,
    ties: Sequence[StageTie],
) -> Masking | None:
    """What the settings of a run ask for; None where the masks of the start stay."""
    pruning = run.config.pruning
    until = pruning.until_step
    assert until != "auto" and pruning.rewind_step != "auto", "the configuration is resolved"
    moves = pruning.method in ("set", "rigl")
    if run.starts_pruned and not moves:
        return None
    if moves:
        regrowth = Regrowth(
            [layer.state for layer in live.layers],
            ties,
            run.survey.ties,
            live.options.replicas,
            collector=collector if pruning.method == "rigl" else None,
            seed=run.config.seed,
        )
        return Moving(
            live,
            regrowth,
            interval=pruning.interval,
            until_step=until,
            alpha=pruning.drop_fraction,
        )
    step = pruning.rewind_step
    rewinder = None if step == "never" else Rewinder(live, step)
    if pruning.method == "early-bird":
        search = EarlyBird(
            interval=pruning.interval,
            length=DISTANCES,
            start_step=max(pruning.at_step, run.config.schedule.warmup_steps),
            max_steps=until,
            threshold=pruning.threshold,
            metric=pruning.metric,
        )
        fails = pruning.undrawn == "fail"
        return Search(live, run.criterion, search, fails_undrawn=fails, rewinder=rewinder)
    if pruning.method in ("gradual", "iterative"):
        return Stepwise(
            live,
            run.criterion,
            begin=pruning.at_step,
            interval=pruning.interval,
            until_step=until,
            geometric=pruning.method == "iterative",
            rewinder=rewinder,
        )
    criterion = None if pruning.method == "snip" else run.criterion
    return Once(live, criterion, pruning.at_step, rewinder)
