"""Training with moving masks equals a dense network whose masks move by sorting."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.allocated import peak_of
from support.methods import EXACT, MovingOracle, Plan, masks_of, moving
from support.runs import (
    assert_bitwise,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
)
from torch import nn

from axsparse.config.schema import Config
from axsparse.pruning.methods.masking import Moment
from axsparse.pruning.methods.regrowth import (
    DynamicSparsity,
    GradientGrowth,
    RandomGrowth,
    Regrowth,
    moved_entries,
)
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo import selection
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.index.base import make_index
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.shards import ALONE, BLOCK, Replicas
from axsparse.samo.tensor_state import TensorState

STEPS = 5
GRADIENT, CHANCE = Plan("gradient"), Plan("chance")


def config_of(**sections: Any) -> Config:
    settings: dict[str, Any] = {
        "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 8},
        "batch": {"global_batch_size": 4, "microbatch_size": 1},
        "train": {"steps": STEPS},
    }
    return tiny_config(**{**settings, **sections})


def run(config: Config, plan: Plan, layout: tuple[int, int] = (1, 1), **others: Any) -> Any:
    data = token_data(length=8)
    return train_in_process(*layout, tiny_gpt(config), config, data, before=moving(plan, **others))


def oracle_of(config: Config, plan: Plan, g_data: int = 1) -> MovingOracle:
    oracle = MovingOracle(tiny_gpt(config), config, token_data(length=8), g_data, plan=plan)
    oracle.run(STEPS)
    return oracle


# -- against the oracle ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "include", "plan"),
    [
        ((1, 1), "blocks", GRADIENT),
        ((3, 1), "all", GRADIENT),
        ((2, 2), "all", GRADIENT),
        ((2, 2), "all", Plan("gradient", capacity=EXACT)),
        ((1, 1), "all", CHANCE),
        ((2, 2), "all", CHANCE),
        ((2, 2), "all", Plan("chance", warm=True)),
    ],
)
def test_every_layout_is_bitwise_the_dense_oracle_that_sorts(
    layout: tuple[int, int], include: str, plan: Plan
) -> None:
    """With `all`, the tied embedding moves, too; except at 1x1, its two uses are on two stages.
    With room for all candidates the choice is that of the whole gradient."""
    config = config_of(pruning={"include": include})
    oracle = oracle_of(config, plan, layout[1])

    ranks = run(config, plan, layout)

    for _, trace in ranks:
        assert_bitwise(trace, oracle.trace)
    positions = masks_of(ranks)
    assert oracle.masks
    for name, mask in oracle.masks.items():
        assert torch.equal(positions[name], mask.view(-1).nonzero().view(-1)), name


def test_positions_that_need_64_bits_travel_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = run(config_of(), GRADIENT, (1, 2))
    monkeypatch.setattr(selection, "fits_int32", lambda numel: False)

    for (_, ours), (_, theirs) in zip(run(config_of(), GRADIENT, (1, 2)), reference, strict=True):
        assert_bitwise(ours, theirs)


def test_one_microbatch_of_one_replica_is_exact_whatever_the_capacity() -> None:
    config = config_of(
        batch={"global_batch_size": 4, "microbatch_size": 4}, pruning={"include": "blocks"}
    )
    oracle = oracle_of(config, Plan("gradient", capacity=EXACT))

    [(_, trace)] = run(config, GRADIENT)

    assert_bitwise(trace, oracle.trace)


# -- one tensor ---------------------------------------------------------------------------------


def one_tensor(
    numel: int, density: float = 0.1, dtype: torch.dtype = torch.bfloat16
) -> tuple[LayerState, GradientCollector]:
    """A layer of one matrix with equal masters, and its collector."""
    kept = torch.rand(numel, generator=torch.Generator().manual_seed(1)) < density
    weight = nn.Parameter(torch.zeros(numel // 8, 8, dtype=dtype))
    tensor = TensorState("w", weight, make_index(kept, "mask"), decays=True)
    layer = LayerState(
        "layer",
        [tensor],
        StateTypes(
            dtype,
            "fp32" if dtype != torch.float32 else "weight",
            ("exp_avg", "exp_avg_sq"),
            index="mask",
        ),
    )
    layer.optimizer_state.write_master(tensor, 0, torch.full((tensor.kept,), 0.5))
    return layer, GradientCollector([layer], lambda layer: None, nullcontext)


@pytest.mark.parametrize(
    ("kept", "numel", "fraction", "moved"),
    [(10, 100, 0.3, 3), (10, 100, 0.0, 0), (10, 100, 1.0, 10), (90, 100, 0.3, 10), (7, 7, 0.5, 0)],
)
def test_a_fraction_of_the_kept_entries_moves_or_as_many_as_are_pruned(
    kept: int, numel: int, fraction: float, moved: int
) -> None:
    assert moved_entries(kept, numel, fraction) == moved


def test_of_equal_weights_the_higher_positions_go_and_of_equal_gradients_the_lower_ones_grow() -> (
    None
):
    layer, collector = one_tensor(800)
    tensor = layer.tensor("w")
    before = tensor.index.positions()
    regrowth = Regrowth([layer], [], {}, ALONE, GradientGrowth(collector))

    regrowth.arm(0.25)
    collector.begin()
    tensor.parameter.sum().backward()
    counts = regrowth.regrow(1)

    count = round(0.25 * len(before))
    pruned = torch.tensor([at for at in range(800) if at not in set(before.tolist())])
    expected = torch.cat([before[:-count], pruned[:count]]).sort().values
    assert counts == {"w": count}
    assert torch.equal(tensor.index.positions(), expected)
    assert regrowth.fraction is None
    assert collector._candidates == {}


def test_the_gradients_of_replicas_are_added_in_rank_order() -> None:
    """In fp32, (1 + 1e8) − 1e8 is 0, less than the 0.25 beside it; in other orders it is 1."""
    world: LocalWorld[list[int]] = LocalWorld(3)

    def replica(rank: int) -> list[int]:
        transport = LocalTransport(world, rank)
        replicas = Replicas(transport.collective("column", range(3)), transport.backoff)
        layer, collector = one_tensor(800, dtype=torch.float32)
        tensor = layer.tensor("w")
        regrowth = Regrowth([layer], [], {}, replicas, GradientGrowth(collector))
        regrowth.arm(1 / tensor.kept)
        collector.begin()
        gradient = torch.zeros(800)
        gradient[3], gradient[5] = (1.0, 1e8, -1e8)[rank], (0.25, 0.0, 0.0)[rank]
        (tensor.parameter.view(-1) * gradient).sum().backward()
        assert not torch.isin(torch.tensor([3, 5]), tensor.index.positions()).any()
        assert regrowth.regrow(1) == {"w": 1}
        return torch.isin(torch.tensor([3, 5]), tensor.index.positions()).tolist()

    assert world.run(replica) == [[False, True]] * 3


@pytest.mark.parametrize("density", [0.1, 2.0])
def test_a_tensor_that_is_dense_or_that_no_gradient_reached_keeps_its_mask(density: float) -> None:
    layer, collector = one_tensor(800, density)
    before = layer.tensor("w").index.positions()
    regrowth = Regrowth([layer], [], {}, ALONE, GradientGrowth(collector))

    regrowth.arm(0.25)
    collector.begin()
    if density > 1:
        layer.tensor("w").parameter.sum().backward()

    assert collector._candidates == {}
    assert regrowth.regrow(1) == {"w": 0}
    assert torch.equal(layer.tensor("w").index.positions(), before)


@pytest.mark.parametrize("by", ["gradient", "chance"])
def test_a_move_needs_bytes_in_proportion_to_one_tensor(by: str) -> None:
    """The peak is some 16 bytes an entry at a tenth kept; 8 of them are for making an index of a
    mask. It adds the peaks of torch and of numpy, which are at different moments."""
    numel = 64 * BLOCK
    layer, collector = one_tensor(numel)
    tensor = layer.tensor("w")
    growth = GradientGrowth(collector) if by == "gradient" else RandomGrowth(seed=1)
    regrowth = Regrowth([layer], [], {}, ALONE, growth)

    def move() -> None:
        regrowth.arm(0.3)
        collector.begin()
        tensor.parameter.sum().backward()
        assert regrowth.regrow(1)["w"] > 0

    assert 5 * numel < peak_of(move) < 13 * numel + 50 * tensor.kept


@pytest.fixture
def masking() -> DynamicSparsity:
    """SET, of a run of which nothing is trained any more."""
    config = tiny_config(
        pruning={"method": "set", "interval": 3, "until_step": 8, "drop_fraction": 0.4},
        train={"steps": 10},
    )
    [(trainer, _)] = train_in_process(1, 1, tiny_gpt(config), config, token_data())
    assert isinstance(trainer.parts.masking, DynamicSparsity)
    return trainer.parts.masking


def test_masks_move_after_every_interval_until_they_stay(masking: DynamicSparsity) -> None:
    changes = {step: masking.before_step(Moment(step, step, lambda: None)) for step in range(10)}

    moves = {step: change for step, change in changes.items() if change is not None}
    assert list(moves) == [3, 6]
    assert moves[3].figures["sparsity"] == pytest.approx(0.8, abs=1e-3)
    assert [change.is_ticket for change in moves.values()] == [False, True]


def test_a_skipped_step_puts_a_move_off_until_one_updates(masking: DynamicSparsity) -> None:
    def moves(step: int, updates: int) -> bool:
        return masking.before_step(Moment(step, updates, lambda: None)) is not None

    assert [moves(step, step) for step in range(3)] == [False] * 3
    assert not moves(3, 2), "the step before was skipped"
    assert moves(4, 3)


def test_what_grows_warm_has_the_usual_square_also_where_state_is_shared() -> None:
    squares: list[dict[str, torch.Tensor]] = []
    for shards in (False, True):
        config = config_of(samo={"shard_optimizer": shards})
        found: dict[str, torch.Tensor] = {}
        for trainer, _ in run(config, Plan("chance", at=(STEPS - 1,), warm=True), (1, 2)):
            for layer in trainer.parts.layers:
                held = layer.state.shares.held
                for tensor in layer.state.owned:
                    part = tensor.entries_in(held)
                    values = found.setdefault(tensor.name, torch.zeros(tensor.kept))
                    values[part.start : part.stop] = layer.state.optimizer_state.moments_of(
                        tensor, part.start, part.stop
                    )["exp_avg_sq"]
        squares.append(found)

    grown = squares[0]["block0.fc1.weight"]
    assert grown.unique(return_counts=True)[1].max() == round(0.3 * grown.numel())
    assert all(torch.equal(squares[1][name], value) for name, value in squares[0].items())


def test_rates_go_by_density_but_those_that_are_named() -> None:
    config = config_of(
        pruning={"sparsity": 0.75, "rate_power": 0.5},
        optimizer={"learning_rate": 1e-3, "learning_rates": ["block0.fc1.weight=0.5"]},
    )

    [(trainer, _)] = run(config, CHANCE)

    rates = {name: group.peak for name, group in trainer.parts.run.groups.items()}
    assert rates.pop("block0.fc1.weight") == 0.5
    assert rates.keys() >= {"block0.fc2.weight", "block1.attention.qkv.weight"}
    assert not any("bias" in name or "embed" in name for name in rates)
    assert list(rates.values()) == pytest.approx([2e-3] * len(rates))
