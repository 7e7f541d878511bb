"""Overflows of fp16 gradients, planted one by one: who skips, what the scale does, who is named."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.exhaustive import by_default
from support.runs import assert_bitwise, tiny_config, tiny_gpt, token_data, train_in_process
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.samo.layer_state import LayerState
from axsparse.samo.tensor_state import TensorState
from axsparse.training.trainer import Trainer

INITIAL = 2.0**6
"""So low that nothing overflows but what is planted."""


@dataclass
class Seen:
    """The observations of one rank in the backward of each step."""

    scales: dict[int, float] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    """Digest of weights, masters and moments, which the step has not changed yet."""


def config_of(**sections: Any) -> Config:
    return tiny_config(
        model={"num_layers": 2, "hidden_size": 16, "sequence_length": 4},
        batch={"global_batch_size": 4, "microbatch_size": 1},
        precision="fp16",
        **sections,
    )


def states_of(trainer: Trainer) -> list[LayerState]:
    return [layer.state for layer in trainer.layers]


def first_pruned(trainer: Trainer) -> TensorState:
    owned = [tensor for state in states_of(trainer) for tensor in state.owned]
    return next(tensor for tensor in owned if tensor.kept < tensor.parameter.numel())


def digest(states: Sequence[LayerState]) -> str:
    found = hashlib.blake2b()
    for state in states:
        assert state.optimizer_state.master_K is not None
        # Sparse weights follow from masters.
        weights = [tensor.weight_D for tensor in state.owned if tensor.expanded_at is None]
        for values in (
            *weights,
            state.optimizer_state.master_K,
            *state.optimizer_state.moments_K.values(),
        ):
            found.update(values.numpy().tobytes())
    return found.hexdigest()


def plant(
    trainer: Trainer,
    steps: Collection[int],
    position: Callable[[TensorState], int],
    value: float = math.inf,
) -> None:
    """Spoil an entry of a gradient as autograd has it, dense, in one microbatch of these steps."""
    tensor = first_pruned(trainer)
    at = position(tensor)
    spoilt_steps: set[int] = set()

    def spoil(gradient: Tensor) -> Tensor:
        step = trainer.steps_done
        if step not in steps or step in spoilt_steps:
            return gradient
        spoilt_steps.add(step)
        spoilt = gradient.clone()
        spoilt.view(-1)[at] = value
        return spoilt

    tensor.parameter.register_hook(spoil)


def kept_position(tensor: TensorState) -> int:
    return int(tensor.index.positions()[tensor.kept // 2])


def pruned_position(tensor: TensorState) -> int:
    kept = set(tensor.index.positions().tolist())
    return next(at for at in range(tensor.parameter.numel()) if at not in kept)


def specified_scales(overflows: Collection[int], interval: int, steps: int) -> list[float]:
    """Halved by an overflow, doubled by a run of good steps: the settings' own words."""
    scale, good, scales = INITIAL, 0, []
    for step in range(steps):
        scales.append(scale)
        good = 0 if step in overflows else good + 1
        if step in overflows:
            scale /= 2
        elif good % interval == 0:
            scale *= 2
    return scales


@pytest.mark.parametrize(
    "samo",
    by_default(
        [{"weights": "sparse", "zero_stage": 3}],
        [{}, {"gradient": "fp32"}, {"zero_stage": 1}, {"weights": "sparse", "zero_stage": 3}],
    ),
    ids=str,
)
def test_an_overflow_on_any_one_rank_is_skipped_by_all_and_replicas_never_differ(
    samo: Mapping[str, object],
) -> None:
    # On another rank each time: every stage and every replica has its turn.
    every, interval = 6, 4
    overflows = {every * (rank + 1): rank for rank in range(4)}
    steps = 4 * every + 3
    scale = {"initial": INITIAL, "growth_interval": interval}
    config = config_of(samo=samo, loss_scale=scale, train={"steps": steps})
    seen: dict[int, Seen] = defaultdict(Seen)

    def prepare(trainer: Trainer) -> None:
        rank, states = trainer.transport.rank, states_of(trainer)

        def note(gradient: Tensor) -> None:
            step = trainer.steps_done
            if step not in seen[rank].scales:
                seen[rank].scales[step] = trainer.progress.loss_scale
                seen[rank].states[step] = digest(states)

        states[0].owned[0].parameter.register_hook(note)
        plant(trainer, {step for step, at in overflows.items() if at == rank}, kept_position)

    ranks = train_in_process(2, 2, tiny_gpt(config), config, token_data(length=4), before=prepare)

    for rank, (_, trace) in enumerate(ranks):
        assert [step for step, good in enumerate(trace.finite) if not good] == list(overflows)
        assert list(seen[rank].scales.values()) == specified_scales(overflows, interval, steps)
        states = list(seen[rank].states.values())
        assert len(states) == steps
        unmoved = [step for step in range(steps - 1) if states[step] == states[step + 1]]
        assert unmoved == list(overflows)
    for (one, _), (other, _) in zip(ranks[:2], ranks[2:], strict=True):
        for ours, theirs in zip(states_of(one), states_of(other), strict=True):
            for mine, its in zip(ours.owned, theirs.owned, strict=True):
                weights = [
                    each.weight_D if each.kept_weight is None else each.kept_weight
                    for each in (mine, its)
                ]
                assert torch.equal(*weights)
                assert weights[0].isfinite().all()
            if not ours.shares.is_sharded:
                assert digest([ours]) == digest([theirs])


@pytest.mark.parametrize(
    ("value", "g_inter", "g_data"),
    by_default(
        [(math.inf, 2, 2)],
        [(value, size, size) for value in (math.inf, math.nan) for size in (1, 2)],
    ),
)
def test_an_overflow_at_a_pruned_position_changes_nothing(
    g_inter: int, g_data: int, value: float
) -> None:
    config = config_of(train={"steps": 6})
    data = token_data(length=4)
    reference = train_in_process(g_inter, g_data, tiny_gpt(config), config, data)

    ranks = train_in_process(
        g_inter,
        g_data,
        tiny_gpt(config),
        config,
        data,
        before=lambda trainer: plant(trainer, range(6), pruned_position, value),
    )

    for (trainer, trace), (_, expected) in zip(ranks, reference, strict=True):
        assert trace.finite == [True] * 6
        assert_bitwise(trace, expected)
        assert trainer.progress.loss_scale == config.loss_scale.initial
