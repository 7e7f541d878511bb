"""Memory of dense training by DDP, ZeRO and pipelines: published formulas, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
from support.runs import tiny_config, tiny_gpt

from axsparse.planner.cluster import load_cluster
from axsparse.planner.layout_search import Plan
from axsparse.planner.plan_model import planned_model

MACHINE = load_cluster("a100-pod")


def planned(gpus: int, **sections: Any) -> tuple[Plan, int]:
    """The plan of a small GPT, and the number of its parameters."""
    config = tiny_config(**sections)
    asked = planned_model(config.with_origins("tiny", {}), MACHINE, tiny_gpt(config))
    return asked.plan("start", MACHINE, gpus), asked.dense.profile.num_params


@pytest.mark.parametrize(
    ("sections", "widths"),
    [
        ({"precision": "bf16"}, (2, 2, 12)),
        ({"precision": "bf16", "samo": {"zero_stage": 1}}, (2, 2, 12)),
        ({"precision": "fp32", "samo": {"gradient": "exact"}}, (4, 4, 8)),
        ({"precision": "bf16", "optimizer": {"name": "sgd"}}, (2, 2, 8)),
    ],
)
def test_state_is_that_of_the_zero_paper_whatever_ours_is(
    sections: dict[str, Any], widths: tuple[int, int, int]
) -> None:
    weight, gradient, k = widths
    found, parameters = planned(4, layout={"g_inter": 1}, **sections)
    ddp, first, third = found.baselines

    def beside(nbytes: float, state: float) -> float:
        return nbytes - state * parameters

    activations = beside(ddp.nbytes, weight + gradient + k)
    assert beside(first.nbytes, weight + gradient + k / 4) == pytest.approx(activations)
    assert beside(third.nbytes, (weight + gradient + k) / 4) == pytest.approx(activations)
    of_plan = found.recommended.memory[0]
    assert activations == pytest.approx(
        of_plan.working + of_plan.logits + of_plan.activations + MACHINE.overhead_bytes
    )
    assert [each.formula for each in found.baselines] == [
        f"{weight} + {gradient} + {k}",
        f"{weight} + {gradient} + {k}/4",
        f"({weight} + {gradient} + {k})/4",
    ]


def test_a_dense_pipeline_has_the_stages_of_the_plan() -> None:
    found, _ = planned(2, precision="bf16", layout={"split": [1, 3]})
    best, dense = found.recommended, found.baselines[-1]

    assert dense.name == "dense, pipeline of 2"
    assert dense.nbytes == pytest.approx(
        max(
            16 * load.trained
            + memory.working
            + memory.logits
            + memory.activations
            + memory.overhead
            for load, memory in zip(best.loads, best.memory, strict=True)
        ),
        rel=1e-9,
    )


def test_one_device_has_nobody_to_share_with() -> None:
    found, _ = planned(1)

    assert [each.name for each in found.baselines] == ["dense, DDP"]
