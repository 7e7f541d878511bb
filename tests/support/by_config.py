"""What a configuration's pruning method should do, by the oracle that fits it."""

from __future__ import annotations

from dataclasses import replace

from support.methods import MethodOracle
from support.moving import MovingOracle, Plan
from support.oracle import Oracle
from support.runs import tiny_gpt, token_data

from axsparse.config.schema import Config
from axsparse.pruning.methods.regrowth import drop_fraction


class Annealed(MovingOracle):
    """Moves as many entries as `pruning.drop_fraction` says after each step."""

    def _move(self, name: str, step: int) -> None:
        pruning = self.config.pruning
        assert pruning.until_step != "auto"
        fraction = drop_fraction(step, alpha=pruning.drop_fraction, end=pruning.until_step)
        self.plan = replace(self.plan, fraction=fraction)
        super()._move(name, step)


def oracle_of(config: Config, g_data: int) -> Oracle:
    """A GPT on random tokens, as the settings say; not run yet."""
    pruning = config.pruning
    if pruning.method not in ("set", "rigl"):
        return MethodOracle(tiny_gpt(config), config, token_data(), g_data)
    assert pruning.until_step != "auto"
    at_random = config.model_copy(
        update={"pruning": pruning.model_copy(update={"method": "random"})}
    )
    plan = Plan(
        by="gradient" if pruning.method == "rigl" else "chance",
        at=range(pruning.interval - 1, pruning.until_step - 1, pruning.interval),
    )
    return Annealed(tiny_gpt(config), at_random, token_data(), g_data, plan=plan)
