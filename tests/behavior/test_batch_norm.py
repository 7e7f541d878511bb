"""Running statistics and other buffers: in every layout the same, changed by training forwards
alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import (
    ONE_STAGE,
    SAME_LAYOUT,
    PlannedModel,
    Ranks,
    Row,
    Settings,
    freed,
    judge,
    judge_everywhere,
    parameters,
)
from support.exhaustive import by_default
from support.images import assert_equal_tensors, buffers_of, image_config
from support.oracle import Trace
from support.runs import (
    FEW_MICROBATCHES,
    Doing,
    around_step,
    random_init,
    summed_loss,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Layer, Model
from axsparse.models.sequential import from_sequential
from axsparse.training.trainer import Trainer

WIDTH = 16
OUT = Layer("out", lambda: nn.Linear(WIDTH, 5), kind="head", init=random_init)


def norm_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def norm_model() -> Model:
    layers = [Layer(f"norm{number}", norm_layer, init=random_init) for number in range(3)]
    return Model([*layers, OUT], summed_loss)


def config(**sections: object) -> Config:
    """Three steps of four microbatches."""
    return image_config(**{"batch": FEW_MICROBATCHES, **sections})


NORM = PlannedModel(
    "norms",
    lambda _: norm_model(),
    vector_data,
    settings={"batch": FEW_MICROBATCHES, "train": {"steps": 3}},
)
EVALUATING = {"train": {"eval_every": 1, "eval_steps": 2}}
RECOMPUTED = [{"pipeline": {"checkpoint_activations": every}} for every in (0, 1, 2)]
HALF: list[Settings] = [
    {"precision": precision, "loss_scale": {"initial": 256.0}, **EVALUATING}
    for precision in ("bf16", "fp16")
]


@pytest.mark.parametrize(
    "row",
    parameters(
        [
            *freed([(1, 1), (2, 1), (4, 1)], RECOMPUTED, subject=NORM, order=1),
            *(
                Row((stages, 1), half, free, ONE_STAGE, NORM)
                for stages, half, free in zip((2, 4, 4), (*HALF, HALF[0]), RECOMPUTED, strict=True)
            ),
            *(
                Row(layout, free=EVALUATING, judge=SAME_LAYOUT, subject=NORM)
                for layout in ((1, 1), (2, 1), (1, 2), (2, 2))
            ),
        ],
        every=4,
    ),
)
def test_statistics_and_losses_are_the_judges(row: Row) -> None:
    """One stage's, as with plain torch; recomputation and evaluation change none of them."""
    ranks = judge(row)

    assert all(
        trace.buffers["norm0.1.num_batches_tracked"].item() == 12 / row.layout[1]
        for _, trace in ranks
        if "norm0.1.num_batches_tracked" in trace.buffers
    )


@pytest.mark.parametrize("g_inter", [1, 2])
def test_replicas_keep_statistics_of_their_own_and_evaluate_with_the_firsts(g_inter: int) -> None:
    data = vector_data()
    settings = config(train={"steps": 3, "eval_steps": 2})
    ranks = train_in_process(g_inter, 2, norm_model(), settings, data, validation=data)
    first, second = ranks[:g_inter], ranks[g_inter:]

    assert not torch.equal(
        buffers_of(first)["norm0.1.running_mean"], buffers_of(second)["norm0.1.running_mean"]
    )
    [evaluation] = {repr(trainer.last_evaluation) for trainer, _ in ranks}
    assert evaluation == repr(first[0][0].last_evaluation)
    assert first[0][0].last_evaluation is not None
    assert first[0][0].last_evaluation.loss == pytest.approx(mean_loss(first, data), rel=1e-6)


def mean_loss(ranks: Ranks, data: ArrayDataset) -> float:
    """By one replica alone, outside the engine; of the 24 samples that two batches have."""
    inputs, targets = (data._inputs[0][:24], data._targets[:24])
    x = inputs
    for trainer, _ in ranks:
        for layer in trainer.layers:
            x = layer.module.eval()(x)
    return float(summed_loss(x, targets).detach()) / 24


@pytest.mark.parametrize(("g_inter", "g_data"), [(1, 1), (2, 1), (2, 2)])
def test_a_skipped_step_leaves_no_trace_in_the_statistics(g_inter: int, g_data: int) -> None:
    data = vector_data(infinite=17)
    settings = config(train={"steps": 5})
    seen: dict[int, list[dict[str, Tensor]]] = {}

    def note(trainer: Trainer, _: object) -> None:
        buffers = buffers_of([(trainer, Trace())])
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        seen.setdefault(trainer.coords.rank, []).append(copies)

    ranks = train_in_process(
        g_inter, g_data, norm_model(), settings, data, before=around_step(after=note)
    )

    finite = ranks[0][1].finite
    assert 0 < finite.count(False) < 5
    for states in seen.values():
        for state in states:
            assert all(torch.isfinite(tensor).all() for tensor in state.values())
        for number, good in enumerate(finite):
            if number and not good:
                assert_equal_tensors(states[number], states[number - 1])


def reassigning(m: Any, x: Tensor) -> Any:
    """Counts its calls in a buffer, which the output depends on; as moving averages may."""
    if m.training:
        m.calls = m.calls + 1
    return m.linear(x) * (1 + m.calls)


def by_the_back(m: Any, x: Tensor) -> Any:
    """Changes its buffer where autograd does not look."""
    if m.training:
        m.calls.data.add_(1)
    return m.linear(x) * (1 + m.calls.clone())


def late(m: Any, x: Tensor) -> Any:
    """Begins to change a buffer after the first step, as averages with a warm-up do."""
    if m.training:
        m.calls.add_(1)
        if m.calls > 5:
            m.mean.lerp_(x.detach().mean(0), 0.3)
    return m.linear(x - m.mean)


@pytest.mark.parametrize(
    "forward", by_default([by_the_back, late], [reassigning, by_the_back, late])
)
def test_other_buffers_that_a_forward_changes_are_recomputed_as_they_were(
    forward: Callable[..., Any],
) -> None:
    def count() -> nn.Module:
        return Doing(forward, calls=torch.zeros(1), mean=torch.zeros(16))

    layers = [Layer(f"count{number}", count) for number in range(3)]
    model = Model([*layers, Layer("out", lambda: nn.Linear(WIDTH, 5))], summed_loss)
    settings = {"batch": FEW_MICROBATCHES, "train": {"steps": 3}}
    traces = judge_everywhere(model, vector_data(), settings)

    [calls] = [trace.buffers["count1.calls"] for trace in traces if "count1.calls" in trace.buffers]
    assert calls.item() == 12


def counting(m: Any, x: Tensor) -> Any:
    """Counts the calls of evaluations as well."""
    m.calls.add_(1)
    return m.linear(x) * (1 + m.calls)


def test_buffers_that_an_evaluation_changes_are_as_before_afterwards() -> None:
    model = of_layers(Doing(counting, calls=torch.zeros(1)))
    data = vector_data()
    evaluating = config(train={"steps": 3, "eval_every": 1, "eval_steps": 2})

    [(_, plain)] = train_in_process(1, 1, model, config(train={"steps": 3}), data)
    [(_, trace)] = train_in_process(1, 1, model, evaluating, data, validation=data)

    assert trace.losses == plain.losses


class Frozen(nn.Sequential):
    """Keeps its normalisations in evaluation."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for child in self.modules():
            if isinstance(child, nn.BatchNorm1d):
                child.eval()
        return self


class WithLoop(nn.Sequential):
    """Its `train` is no setting of a mode."""

    def train(self, loader: object, epochs: int) -> None:  # type: ignore[override]
        raise AssertionError


def frozen(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    """A normalisation, and a dropout in evaluation."""
    return kind(nn.BatchNorm1d(WIDTH), nn.Dropout().eval())


def in_evaluation(kind: type[nn.Sequential]) -> Callable[..., nn.Sequential]:
    """Makes a container of which all modules are in evaluation: a run trains all."""
    return lambda *modules: kind(*(module.eval() for module in modules))


def of_layers(norm: nn.Module, container: Callable[..., nn.Sequential] = nn.Sequential) -> Model:
    return from_sequential(container(norm, nn.Linear(WIDTH, 5)), summed_loss)


@pytest.mark.parametrize(
    ("make", "updates", "drops"),
    [
        (lambda: of_layers(frozen()), 12, False),
        (lambda: of_layers(frozen(), Frozen), 0, False),
        (lambda: Model([Layer("0", partial(frozen, Frozen)), OUT], summed_loss), 0, False),
        (lambda: of_layers(frozen(), in_evaluation(Frozen)), 0, True),
        (lambda: of_layers(frozen(Frozen), in_evaluation(WithLoop)), 0, True),
        (lambda: of_layers(frozen(), in_evaluation(nn.Sequential)), 12, True),
    ],
)
def test_a_train_of_a_modules_own_may_freeze_statistics(
    make: Callable[[], Model], updates: int, drops: bool
) -> None:
    settings = config(train={"steps": 3}, samo={"enabled": False}, pruning={"sparsity": 0.0})
    [(trainer, _)] = train_in_process(1, 1, make(), settings, vector_data())

    norm, dropout = trainer.layers[0].module.children()
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == updates
    assert dropout.training == drops
