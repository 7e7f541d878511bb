"""Full trainings on a GPU: several ranks share it by way of the hosts, and the oracle is the
reference.

Every layout's cases run in one job. Rounding is not the CPU's on a GPU, hence tolerances to
the oracle, which is plain torch on one CPU. Between layouts with equally many replicas the bits
are the same: all kernels run in their deterministic forms then (`use_deterministic_algorithms`
and cuBLAS workspaces of a fixed size), on tensors of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.ranks_training import ON_CPU, Case, Outcome, joined, train_cases
from support.cases import merged, oracle_of
from support.oracle import Oracle
from support.runs import tiny_config, tiny_gpt, token_data
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is to be had here")

Layout = tuple[int, ...]
LAYOUTS: list[Layout] = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
MEMBERS: list[Layout] = [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2)]
"""Stages, replicas and tensor-parallel ranks."""
STEPS, OVERFLOW = 6, 3
FP32_LOSS, FP32_NORM, FP32_MASTERS = 2e-6, 5e-6, 5e-5
"""Relative, masters by the norm of each tensor. The oracle in fp64 is 4e-8, 1.3e-7 and 4e-6 away
from itself in fp32 over these steps: ten times that and more for sums of other orders, and for
exponentials that are other approximations."""
BF16_LOSS = 0.002
"""As on a CPU: bf16 has 8 bits of mantissa."""
FP16_LOSS = 3e-4
"""As on a CPU."""
SHAPE: dict[str, Any] = {
    # Tensors of many tiles of a kernel, and of more than one block of 65,536 entries.
    "model": {"hidden_size": 160},
    "batch": {"global_batch_size": 8, "microbatch_size": 1},
    "train": {"steps": STEPS},
}
EPS = {"eps": 1e-5}
"""So large that a gradient which is rounding and nothing else, as the keys' biases have, is no
step of the full learning rate."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": EPS,
    "sgd": {"name": "sgd", "learning_rate": 0.5},
    "lamb": {"name": "lamb", "eps": 1e-6},
}
EQUAL: dict[str, dict[str, Any]] = {
    # Cases of each layout that have the bits of `adamw`, and how they differ from it.
    "int32": {"samo": {"index": "int32"}},
    "mask": {"samo": {"index": "mask"}},
    "recomputed": {"pipeline": {"checkpoint_activations": 1}},
    "sharded": {"samo": {"zero_stage": 1}},
    "sparse": {"samo": {"weights": "sparse"}},
    "1f1b": {"pipeline": {"schedule": "1f1b"}},
}
HALVES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "bf16-fp32-gradient": {"precision": "bf16", "samo": {"gradient": "fp32"}},
    "fp16": {"precision": "fp16"},
}
DROPOUT: dict[str, Any] = {"model": {**SHAPE["model"], "dropout": 0.2}}


HEADS: dict[str, Any] = {"model": {**SHAPE["model"], "num_heads": 4}}
"""Heads for any number of tensor-parallel ranks."""
OF_MEMBERS: dict[str, dict[str, Any]] = {
    "members": {},
    "members-bf16": {"precision": "bf16"},
    "members-split": {"pipeline": {"split_backward": True, "checkpoint_activations": 1}},
    "members-gradual": {"pruning": {"method": "gradual", "interval": 2, "include": "all"}},
    "members-evaluated": {"train": {"steps": STEPS, "eval_steps": 2}},
}


def settings(*changes: dict[str, Any]) -> dict[str, Any]:
    return merged(SHAPE, {"optimizer": EPS}, *changes)


def cases(layout: Layout) -> list[Case]:
    wanted = {name: settings({"optimizer": chosen}) for name, chosen in OPTIMIZERS.items()}
    wanted |= {name: settings(change) for name, change in EQUAL.items()}
    wanted |= {name: settings(change) for name, change in HALVES.items()}
    wanted["dropout"] = settings(DROPOUT)
    found = [Case(name, layout, chosen) for name, chosen in wanted.items()]
    spoilt = settings({"precision": "fp16", "loss_scale": {"initial": 64.0}})
    found.append(Case("overflow", layout, spoilt, overflow_at=OVERFLOW))
    return found


def cases_of_members(layout: Layout, *changes: dict[str, Any]) -> list[Case]:
    """The cases of several tensor-parallel ranks."""
    return [
        Case(name, layout, settings(HEADS, change, *changes)) for name, change in OF_MEMBERS.items()
    ]


Train = Callable[[Layout, str], list[Outcome]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Train:
    """The results of the ranks of a layout for a case; a layout's job runs when it is first asked
    for, with the cases of the chosen tests."""
    chosen = [item for item in request.session.items if item.path == request.path]

    @cache
    def job(layout: Layout) -> tuple[dict[str, list[Outcome]], str]:
        every = cases_of_members(layout) if layout in MEMBERS else cases(layout)
        wanted = {name for item in chosen for name in asked(item)}
        own = [one for one in every if one.name in wanted]
        return train_cases(tmp_path_factory.mktemp("layout"), own)

    def found(layout: Layout, name: str) -> list[Outcome]:
        done, said = job(layout)
        assert name in done, said
        outcomes = done[name]
        for outcome in outcomes:
            assert outcome.devices == {"cuda"}
            assert outcome.trace.losses == outcomes[0].trace.losses
            assert outcome.trace.norms == outcomes[0].trace.norms
        return outcomes

    return found


def asked(item: pytest.Item) -> set[str]:
    """The names of the cases that a test looks at."""
    told: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    return {"adamw", "overflow", *(told[key] for key in ("name", "optimizer") if key in told)}


@cache
def judged(g_data: int, optimizer: str) -> Oracle:
    """An oracle of fp32 that has run."""
    config = tiny_config(**settings({"optimizer": OPTIMIZERS[optimizer]}))
    oracle = oracle_of(config, g_data)
    oracle.run(STEPS)
    return oracle


def assert_same_bits(ours: Sequence[Outcome], reference: Sequence[Outcome]) -> None:
    assert ours[0].trace.losses == reference[0].trace.losses
    assert ours[0].trace.norms == reference[0].trace.norms
    for key in ("kept", "masters", "moments"):
        expected = joined(reference, key)
        for name, values in joined(ours, key).items():
            other = expected.get(name)
            if other is None:  # the tied weight's second use, where it stands by itself
                other = expected[name.replace("head.weight", "embed.token.weight")]
            assert torch.equal(values, other), (key, name)


def assert_masters_follow(outcomes: Sequence[Outcome], weights: dict[str, Tensor]) -> None:
    masters, kept = joined(outcomes, "masters"), joined(outcomes, "kept")
    assert masters
    for name, values in masters.items():
        owner = name if name in weights else "embed.token.weight"
        expected = weights[owner].reshape(-1)[kept[name]]
        distance = (values - expected).norm().item()
        assert distance <= FP32_MASTERS * expected.norm().item(), name


# -- against the oracle ---------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fp32_on_a_gpu_follows_the_oracle(trained: Train, layout: Layout, optimizer: str) -> None:
    oracle = judged(layout[1], optimizer)

    outcomes = trained(layout, optimizer)

    assert outcomes[0].trace.losses == pytest.approx(oracle.trace.losses, rel=FP32_LOSS)
    assert outcomes[0].trace.norms == pytest.approx(oracle.trace.norms, rel=FP32_NORM)
    kept = joined(outcomes, "kept")
    for name, mask in oracle.masks.items():
        assert torch.equal(kept[name], mask.view(-1).nonzero().view(-1)), name
    assert_masters_follow(outcomes, oracle.trace.weights)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_half_precision_follows_the_fp32_oracle(trained: Train, layout: Layout, name: str) -> None:
    oracle, tolerance = judged(1, "adamw"), FP16_LOSS if name == "fp16" else BF16_LOSS

    outcomes = trained(layout, name)

    assert outcomes[0].trace.losses == pytest.approx(oracle.trace.losses, rel=tolerance)
    assert outcomes[0].trace.losses != oracle.trace.losses


class SpoiltOracle(Oracle):
    """Skips the step of the overflow."""

    def _gradients(self, step: int) -> tuple[float, dict[str, Tensor]]:
        loss, total = super()._gradients(step)
        if step == OVERFLOW:
            next(iter(total.values())).view(-1)[0] = torch.inf
        return loss, total


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_overflow_on_one_rank_is_skipped_by_all(trained: Train, layout: Layout) -> None:
    config = tiny_config(**settings())
    oracle = SpoiltOracle(tiny_gpt(config), config, token_data(), 1).run(STEPS)

    outcomes = trained(layout, "overflow")

    for outcome in outcomes:
        assert outcome.trace.finite == [step != OVERFLOW for step in range(STEPS)]
        assert outcome.scale == 32.0
        good = [step for step in range(STEPS) if step != OVERFLOW]
        assert [outcome.trace.losses[step] for step in good] == pytest.approx(
            [oracle.losses[step] for step in good], rel=FP16_LOSS
        )
    assert all(values.isfinite().all() for values in joined(outcomes, "masters").values())


# -- against each other ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", *HALVES, "dropout"])
@pytest.mark.parametrize(
    ("layout", "reference"), [((2, 1), (1, 1)), ((4, 1), (1, 1)), ((2, 2), (1, 2))], ids=str
)
def test_layouts_with_equally_many_replicas_are_the_same_bits(
    trained: Train, layout: Layout, reference: Layout, name: str
) -> None:
    assert_same_bits(trained(layout, name), trained(reference, name))


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_how_state_is_stored_and_in_which_order_stages_work_change_no_bit(
    trained: Train, layout: Layout, name: str
) -> None:
    assert_same_bits(trained(layout, name), trained(layout, "adamw"))


@pytest.mark.parametrize("name", OF_MEMBERS)
@pytest.mark.parametrize("layout", MEMBERS, ids=str)
def test_members_have_the_bits_of_one_stage(trained: Train, layout: Layout, name: str) -> None:
    ours, reference = trained(layout, name), trained((1, *layout[1:]), name)

    assert_same_bits(ours, reference)
    assert ours[0].validation_loss == reference[0].validation_loss


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="NCCL wants a GPU for each rank")
@pytest.mark.parametrize("layout", [layout for layout in MEMBERS if layout[2] == 2], ids=str)
def test_members_have_the_same_bits_over_nccl(
    trained: Train, layout: Layout, tmp_path: Path
) -> None:
    """Two parts of a sum are added by NCCL as by every other transport."""
    found, said = train_cases(tmp_path, cases_of_members(layout, {"transport": "nccl"}))

    assert not said, said
    for name, outcomes in found.items():
        assert_same_bits(outcomes, trained(layout, name))


# -- from one device to another -------------------------------------------------------------


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Outcome]]:
    """A full run of each device, and one of each from the middle of each, with its evaluation."""
    folder = tmp_path_factory.mktemp("moved")
    saving = settings(
        {
            "checkpoint": {"every": STEPS // 2},
            "schedule": {"decay_steps": STEPS},
            "train": {"eval_steps": 2},
        }
    )
    environments = {"gpu": {}, "cpu": ON_CPU}
    found: dict[tuple[str, str], list[Outcome]] = {}

    def train(source: str, target: str, layout: Layout) -> None:
        name = f"{source}-{target}"
        middle = folder / f"{source}-{source}" / "checkpoints" / f"step-{STEPS // 2}"
        begins = source == target
        own = Case(name, layout, saving, run_dir=folder / name, resume=None if begins else middle)
        done, said = train_cases(folder, [own], environments[target.removesuffix("-again")])
        assert not said, said
        found[source, target] = done[name]

    for device in environments:
        train(device, device, (2, 1))
    train("gpu", "cpu", (1, 1))
    train("cpu", "gpu", (2, 2))
    train("gpu", "gpu-again", (1, 1))
    return found


@pytest.mark.parametrize(("source", "target"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_a_run_goes_on_on_the_other_device_under_another_layout(
    moved: dict[tuple[str, str], list[Outcome]], source: str, target: str
) -> None:
    whole = moved["cpu", "cpu"]

    outcomes = moved[source, target]

    assert {tuple(outcome.devices) for outcome in outcomes} == {
        ("cuda",) if target == "gpu" else ("cpu",)
    }
    assert outcomes[0].trace.losses == pytest.approx(
        whole[0].trace.losses[STEPS // 2 :], rel=FP32_LOSS
    )
    assert outcomes[0].validation_loss == pytest.approx(whole[0].validation_loss, rel=FP32_LOSS)
    expected, kept = joined(whole, "masters"), joined(whole, "kept")
    for name, values in joined(outcomes, "masters").items():
        assert torch.equal(joined(outcomes, "kept")[name], kept[name]), name
        distance = (values - expected[name]).norm().item()
        assert distance <= FP32_MASTERS * expected[name].norm().item(), name


def test_a_run_that_goes_on_on_its_gpu_has_the_bits_of_one_that_never_stopped(
    moved: dict[tuple[str, str], list[Outcome]],
) -> None:
    whole, later = moved["gpu", "gpu"], moved["gpu", "gpu-again"]

    assert later[0].trace.losses == whole[0].trace.losses[STEPS // 2 :]
    assert later[0].validation_loss == whole[0].validation_loss
    expected = joined(whole, "masters")
    for name, values in joined(later, "masters").items():
        assert torch.equal(values, expected[name]), name
