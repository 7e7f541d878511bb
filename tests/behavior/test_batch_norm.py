"""Running statistics: in every layout the same, changed by training forwards and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from support.images import (
    Ranks,
    assert_equal_tensors,
    assert_same_in_1_to_4_stages,
    buffers_of,
    image_config,
    image_data,
    small_wide_resnet,
)
from support.oracle import Oracle, Trace
from support.pruned import kept
from support.runs import assert_bitwise, summed_loss, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset
from axsparse.data_parallel.agreement import Verdict
from axsparse.models.layer import Layer, Model
from axsparse.runtime.errors import ConfigError
from axsparse.samo.stage_bytes import stage_bytes
from axsparse.samo.state_bytes import StateFormat
from axsparse.training.trainer import Trainer

WIDTH = 16
BF16_TOLERANCE = 0.03
"""bf16 activations: 8 bits of mantissa, through normalisations of four samples (5e-3 seen)."""
FP16_TOLERANCE = 0.004
"""Three more bits (5e-4 seen)."""


def norm_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-0.5, 0.5, generator=generator)


def norm_model() -> Model:
    layers = [Layer(f"norm{number}", norm_layer, init=init) for number in range(3)]
    out = Layer("out", lambda: nn.Linear(WIDTH, 5), kind="head", init=init)
    return Model([*layers, out], summed_loss)


def config(**sections: object) -> Config:
    """Three steps of four microbatches."""
    return image_config(**{"batch": {"global_batch_size": 12, "microbatch_size": 3}, **sections})


def last_buffers(ranks: Ranks) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in buffers_of(ranks).items()}


def test_statistics_and_losses_are_bitwise_those_of_plain_torch() -> None:
    oracle = Oracle(norm_model(), config(), vector_data(), 1)
    trace = oracle.run(3)

    ranks = assert_same_in_1_to_4_stages(norm_model(), config(), vector_data())

    assert_bitwise(ranks[0][1], trace)
    theirs = {
        f"norm{number}.{name}": buffer
        for number, module in enumerate(oracle.modules[:3])
        for name, buffer in module.named_buffers()
    }
    assert_equal_tensors(buffers_of(ranks), theirs)
    assert theirs["norm0.1.num_batches_tracked"].item() == 3 * 4


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("g_inter", [1, 2, 4])
def test_recomputation_changes_neither_statistics_nor_losses(every: int, g_inter: int) -> None:
    kept = train_in_process(1, 1, norm_model(), config(), vector_data())
    recomputing = config(pipeline={"checkpoint_activations": every})

    ranks = train_in_process(g_inter, 1, norm_model(), recomputing, vector_data(), order=1)

    for _, trace in ranks:
        assert_bitwise(trace, kept[0][1])
    assert_equal_tensors(buffers_of(ranks), buffers_of(kept))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("every", [0, 1])
def test_half_precision_trains_with_statistics_in_fp32(precision: str, every: int) -> None:
    settings = {"train": {"steps": 3, "eval_steps": 2}}
    data = vector_data()
    [(_, oracle)] = train_in_process(1, 1, norm_model(), config(**settings), data)
    half = config(
        precision=precision,
        pipeline={"checkpoint_activations": every},
        loss_scale={"initial": 256.0},
        **settings,
    )

    ranks = assert_same_in_1_to_4_stages(norm_model(), half, data, validation=data)

    tolerance = BF16_TOLERANCE if precision == "bf16" else FP16_TOLERANCE
    assert ranks[0][1].finite == [True] * 3
    assert ranks[0][1].losses == pytest.approx(oracle.losses, rel=tolerance)
    statistics = buffers_of(ranks)
    assert {b.dtype for b in statistics.values()} == {torch.float32, torch.int64}
    assert statistics["norm0.1.num_batches_tracked"].item() == 12
    weights = {w.dtype for _, trace in ranks for w in trace.weights.values()}
    assert weights == {torch.bfloat16 if precision == "bf16" else torch.float16}


def test_statistics_take_in_changes_too_small_for_half_precision() -> None:
    inputs = torch.full((12, WIDTH), 256.0)
    data = ArrayDataset(inputs, torch.zeros(12, dtype=torch.int64))
    layers = [
        Layer("norm", lambda: nn.BatchNorm1d(WIDTH, momentum=1e-3)),
        Layer("out", lambda: nn.Linear(WIDTH, 5)),
    ]
    half = config(precision="bf16", train={"steps": 3})

    ranks = train_in_process(1, 1, Model(layers, summed_loss), half, data)

    mean = buffers_of(ranks)["norm.running_mean"]
    assert mean.tolist() == pytest.approx([256 * (1 - (1 - 1e-3) ** 12)] * WIDTH, rel=1e-6)


@pytest.mark.parametrize(("g_inter", "g_data"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_evaluation_leaves_training_and_statistics_as_they_are(g_inter: int, g_data: int) -> None:
    data = vector_data()
    often = config(train={"steps": 3, "eval_every": 1, "eval_steps": 2})
    never = config(train={"steps": 3, "eval_steps": 0})

    plain = train_in_process(g_inter, g_data, norm_model(), never, data, validation=data)
    ranks = train_in_process(g_inter, g_data, norm_model(), often, data, validation=data)

    for ours, theirs in zip(ranks, plain, strict=True):
        assert_bitwise(ours[1], theirs[1])
        assert_equal_tensors(buffers_of([ours]), buffers_of([theirs]))


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
        for layer in trainer.parts.layers:
            x = layer.module.eval()(x)
    return float(summed_loss(x, targets).detach()) / 24


@pytest.mark.parametrize(("g_inter", "g_data"), [(1, 1), (2, 1), (2, 2)])
def test_a_skipped_step_leaves_no_trace_in_the_statistics(g_inter: int, g_data: int) -> None:
    data = vector_data(infinite=17)
    settings = config(train={"steps": 5})
    seen: dict[int, list[dict[str, Tensor]]] = {}

    def note(trainer: Trainer) -> None:
        step = trainer.step
        seen[trainer.parts.place.rank] = []

        def noted_step() -> Verdict:
            found = step()
            seen[trainer.parts.place.rank].append(last_buffers([(trainer, Trace())]))
            return found

        trainer.step = noted_step  # type: ignore[method-assign]  # nobody else is told of a step

    ranks = train_in_process(g_inter, g_data, norm_model(), settings, data, before=note)

    finite = ranks[0][1].finite
    assert 0 < finite.count(False) < 5
    for states in seen.values():
        for state in states:
            assert all(torch.isfinite(tensor).all() for tensor in state.values())
        for number, good in enumerate(finite):
            if number and not good:
                assert_equal_tensors(states[number], states[number - 1])


def test_statistics_count_as_state_in_live_bytes_and_formula() -> None:
    model = small_wide_resnet()
    settings = image_config(train={"steps": 1})
    [(trainer, _)] = train_in_process(1, 1, model, settings, image_data(33))
    layers = trainer.parts.survey.layers

    statistics = sum(layer.buffer_bytes for layer in layers)
    weights = sum(4 * layer.numel for layer in layers)
    shapes = [buffer.shape for layer in layers for buffer in layer.buffers]
    norms = shapes.count(())
    channels = sum(shape[0] for shape in shapes if shape)
    assert statistics == 4 * channels + 8 * norms > 0
    assert trainer.state_bytes().weight == weights + statistics
    assert trainer.state_bytes() == stage_bytes(
        layers,
        {},
        kept(model, settings.pruning),
        StateFormat(half=False, gradient_bytes=4, moments=2, index="auto"),
    )


class Counter(nn.Module):
    """Counts its calls in a buffer, which the output depends on; as moving averages may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(1))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        out: Tensor = self.linear(x) * (1 + self.calls)
        return out


class Reassigning(Counter):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1
        out: Tensor = self.linear(x) * (1 + self.calls)
        return out


class ByTheBack(Counter):
    """Changes its buffer where autograd does not look."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.data.add_(1)
        out: Tensor = self.linear(x) * (1 + self.calls.clone())
        return out


@pytest.mark.parametrize("module", [Reassigning, ByTheBack])
def test_other_buffers_that_a_forward_changes_are_recomputed_as_they_were(
    module: type[nn.Module],
) -> None:
    layers = [Layer(f"count{number}", module) for number in range(3)]
    model = Model([*layers, Layer("out", lambda: nn.Linear(WIDTH, 5))], summed_loss)
    kept = train_in_process(1, 1, model, config(), vector_data())

    for g_inter in (1, 2, 3, 4):
        for every in (0, 1):
            again = config(pipeline={"checkpoint_activations": every})
            ranks = train_in_process(g_inter, 1, model, again, vector_data(), order=2)
            for _, trace in ranks:
                assert_bitwise(trace, kept[0][1])
            assert buffers_of(ranks)["count1.calls"].item() == 12


def one_layer(module: type[nn.Module]) -> Model:
    return Model([Layer("odd", module), Layer("out", lambda: nn.Linear(WIDTH, 5))], summed_loss)


class Late(Counter):
    """Begins to count in its third call."""

    made = 0

    def forward(self, x: Tensor) -> Tensor:
        self.made += 1
        if self.training and self.made > 2:
            self.calls = self.calls + 1
        out: Tensor = self.linear(x)
        return out


def test_a_buffer_that_begins_to_change_is_refused_where_it_is_recomputed() -> None:
    recomputing = config(pipeline={"checkpoint_activations": 1})

    with pytest.raises(
        ConfigError,
        match=r"^layer odd: its forward changes buffer 'calls' and did not in its first call, so "
        r"that a recomputation would see other values; change it in every call, or set "
        r"pipeline.checkpoint_activations to 0$",
    ):
        train_in_process(2, 1, one_layer(Late), recomputing, vector_data())


class InEvaluation(Counter):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.calls += 1
        out: Tensor = self.linear(x)
        return out


def test_a_buffer_that_an_evaluation_changes_is_refused_unless_it_is_a_cache() -> None:
    class Cache(InEvaluation):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1), persistent=False)

    settings = config(train={"steps": 1, "eval_steps": 1})
    data = vector_data()

    with pytest.raises(
        ConfigError,
        match=r"^layer odd: an evaluation changes buffer 'calls', and must leave training as it "
        r"is; change it only where self.training, or register it with persistent=False if it is "
        r"a cache$",
    ):
        train_in_process(2, 1, one_layer(InEvaluation), settings, data, validation=data)
    [(trainer, _)] = train_in_process(1, 1, one_layer(Cache), settings, data, validation=data)
    assert trainer.last_evaluation is not None
    assert math.isfinite(trainer.last_evaluation.loss)
