"""What a configuration's pruning method should do, by the oracle that fits it."""

from __future__ import annotations

from dataclasses import replace

from support.dense_optimizers import lamb
from support.methods import MethodOracle
from support.moving import MovingOracle, Plan
from support.oracle import Oracle, adamw, sgd
from support.runs import tiny_gpt, token_data

from axsparse.config.schema import Config
from axsparse.data.dataset import Dataset
from axsparse.models.layer import Model
from axsparse.pruning.methods.regrowth import drop_fraction


class Annealed(MovingOracle):
    """Moves as many entries as `pruning.drop_fraction` says after each step."""

    def _move(self, name: str, step: int) -> None:
        pruning = self.config.pruning
        assert pruning.until_step != "auto"
        fraction = drop_fraction(step, alpha=pruning.drop_fraction, end=pruning.until_step)
        self.plan = replace(self.plan, fraction=fraction)
        super()._move(name, step)


def oracle_of(
    config: Config, g_data: int, model: Model | None = None, data: Dataset | None = None
) -> Oracle:
    """As the settings say, not run yet; without a model it is a GPT on random tokens."""
    pruning = config.pruning
    given = (model or tiny_gpt(config), config, data or token_data(), g_data)
    optimizer = {"adamw": adamw, "sgd": sgd, "lamb": lamb}[config.optimizer.name]
    at_once = pruning.method in ("magnitude", "random") and pruning.rewind_step in ("auto", "never")
    if not config.samo.enabled or (at_once and pruning.distribution == "uniform"):
        return Oracle(*given, optimizer)
    if pruning.method not in ("set", "rigl"):
        return MethodOracle(*given, optimizer)
    assert pruning.until_step != "auto"
    at_random = config.model_copy(
        update={"pruning": pruning.model_copy(update={"method": "random"})}
    )
    plan = Plan(
        by="gradient" if pruning.method == "rigl" else "chance",
        at=range(pruning.interval - 1, pruning.until_step - 1, pruning.interval),
    )
    return Annealed(given[0], at_random, *given[2:], plan=plan)
