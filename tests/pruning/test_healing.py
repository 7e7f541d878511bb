"""Pruned layers that are fitted to the dense ones, against the formulas in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.exhaustive import by_default
from support.runs import (
    alone,
    default_dtype,
    job_alone,
    loaded,
    mlp,
    random_init,
    summed_loss,
    tiny_config,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.data.order import samples_of_step
from axsparse.models.layer import Layer, Model, Tie
from axsparse.models.start_weights import open_weights, start_from
from axsparse.pruning import calibration
from axsparse.pruning.healing import HealedLayers, Reconstruction, relative_error
from axsparse.runtime.errors import DataError, TrainingError
from axsparse.training.trainer import build

SAMPLES, SIZE = 10, 2
LAYOUTS = [(2, 1), (4, 1), (1, 2), (2, 2)]
METHODS = ("magnitude", "wanda", "sparsegpt")


def config_of(**sections: Any) -> Config:
    pruning = {"method": "magnitude", "sparsity": 0.6, "calibration_samples": SAMPLES}
    healing = {"heal": "blocks", "heal_passes": 3, "heal_rate": 0.05}
    return tiny_config(
        pruning={**pruning, **healing, **sections.pop("pruning", {})},
        batch={"global_batch_size": 4, "microbatch_size": SIZE},
        train={"steps": 1},
        **sections,
    )


def started(layout: tuple[int, int], model: Model, config: Config) -> dict[str, Tensor]:
    """The masters that a run starts with, in dense form, the same on all replicas."""
    found: dict[str, Tensor] = {}

    def note(trainer: Any) -> None:
        for layer in trainer.layers:
            for tensor in layer.state.owned:
                value = layer.state.dense_master(tensor.name).clone()
                assert torch.equal(found.setdefault(tensor.name, value), value), tensor.name

    train_in_process(*layout, model, config, vector_data(), before=note)
    return found


def read_samples(config: Config) -> list[tuple[Tensor, Tensor]]:
    """The inputs and the targets of the calibration samples."""
    data = vector_data()
    samples = samples_of_step(len(data), SAMPLES, 0, config.seed)
    read = [data.read(samples[at : at + SIZE]) for at in range(0, SAMPLES, SIZE)]
    return [(inputs[0], targets) for inputs, targets in read]


def healed_by_torch(model: Model, config: Config) -> dict[str, Tensor]:
    """The entire healing, for pruning by magnitude, with torch's own Adam."""
    assert model.start is not None
    samples = read_samples(config)
    pruned, targets = ([each[n] for each in samples] for n in range(2))
    dense = list(pruned)
    head = model.layers[-1].build()
    head.load_state_dict({name: _start(model, f"out.{name}") for name in head.state_dict()})
    found: dict[str, Tensor] = {}
    for layer in model.layers:
        module = layer.build()
        for name, value in module.named_parameters():
            value.data.copy_(_start(model, f"{layer.name}.{name}"))
        with torch.no_grad():
            dense = [module(x) for x in dense]
        masks = {}
        for name, value in module.named_parameters():
            if value.dim() == 2 and layer.kind != "head":
                order = value.detach().abs().flatten().argsort(descending=True, stable=True)
                keep = value.numel() - round(0.6 * value.numel())
                masks[name] = torch.zeros(value.numel(), dtype=torch.bool)
                masks[name][order[:keep]] = True
                masks[name] = masks[name].view_as(value)
                value.data.mul_(masks[name])
        if masks:
            errors = [partial(_difference, *pair) for pair in zip(pruned, dense, strict=True)]
            _fit(module, masks, errors, config, config.pruning.heal_rate)
        if layer.name == "hidden2":  # the last one of which something is pruned
            losses = [partial(_loss, head, *pair) for pair in zip(pruned, targets, strict=True)]
            _fit(module, masks, losses, config, 0.15 * config.pruning.heal_rate)
        with torch.no_grad():
            pruned = [module(x) for x in pruned]
        found |= {f"{layer.name}.{n}": p.detach() for n, p in module.named_parameters()}
    return found


def _start(model: Model, name: str) -> Tensor:
    assert model.start is not None
    value = model.start.read(name)
    assert value is not None
    return value


def _difference(x: Tensor, y: Tensor, module: nn.Module) -> Tensor:
    difference: Tensor = module(x) - y
    return (difference.square().sum(-1) / y.square().sum(-1)).mean()


def _loss(head: nn.Module, x: Tensor, targets: Tensor, module: nn.Module) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(head(module(x)), targets)
    return loss


def _fit(
    module: nn.Module,
    masks: dict[str, Tensor],
    errors: Sequence[Callable[[nn.Module], Tensor]],
    config: Config,
    rate: float,
) -> None:
    pruning, step = config.pruning, 0
    each = pruning.heal_batch
    batches = [errors[at : at + each] for at in range(0, len(errors), each)]
    steps = pruning.heal_passes * len(batches)
    groups = [{"params": [value]} for value in module.parameters()]
    values = [value.detach() for value in module.parameters()]
    sizes = [float(value[value != 0].square().mean().sqrt()) for value in values]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.95))
    for _ in range(pruning.heal_passes):
        for batch in batches:
            for group, size in zip(adam.param_groups, sizes, strict=True):
                group["lr"] = rate * size * (1 - step / steps)
            step += 1
            adam.zero_grad()
            for error in batch:
                (error(module) / len(batch)).backward()
            adam.step()
            for name, value in module.named_parameters():
                if name in masks:
                    value.data.mul_(masks[name])


@pytest.mark.parametrize("batch", [1, 3])
def test_it_is_the_formula(batch: int) -> None:
    model, config = loaded(mlp()), config_of(pruning={"heal_batch": batch})

    ours, expected = started((1, 1), model, config), healed_by_torch(model, config)

    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(ours[name] == 0, value == 0), name


@pytest.mark.parametrize(("g_inter", "g_data"), by_default([(2, 2)], LAYOUTS))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", by_default(["bf16"], ["fp32", "bf16"]))
def test_every_layout_heals_to_the_same_bits(
    g_inter: int, g_data: int, method: str, precision: str
) -> None:
    model = loaded(mlp())
    # Five microbatches: two steps of two, which replicas share, and one of one, which they do not.
    batch = 2 if method == "wanda" else 1
    config = config_of(pruning={"method": method, "heal_batch": batch}, precision=precision)

    found, expected = started((g_inter, g_data), model, config), started((1, 1), model, config)

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_replicas_share_the_microbatches_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, config = loaded(mlp()), config_of(pruning={"heal_batch": 2})
    computed: list[bool] = []

    def noting(outputs: Any, wanted: Any) -> tuple[Tensor, int]:
        computed.append(torch.is_grad_enabled())
        return relative_error(outputs, wanted)

    monkeypatch.setattr(calibration, "relative_error", noting)
    counts = []
    for layout in ((1, 1), (1, 2)):
        computed.clear()
        started(layout, model, config)
        counts.append((computed.count(True), computed.count(False)))

    # Three layers, three passes, five microbatches, of which the last is a step of its own.
    assert counts == [(3 * 3 * 5, 3 * 2 * 5), (3 * 3 * 6, 3 * 2 * 5)]


def test_a_token_is_the_last_dimension_and_of_an_image_a_sample() -> None:
    asked = torch.tensor([[[3.0, 4.0], [0.0, 100.0]]])

    error, tokens = relative_error((asked + 5.0, torch.ones(1)), (asked, torch.ones(1)))
    of_image, images = relative_error((asked[None] + 5.0,), (asked[None],))
    of_zeros, _ = relative_error((torch.zeros(2, 3),), (torch.zeros(2, 3),))
    with default_dtype(torch.float64):
        of_half, _ = relative_error((asked.bfloat16(),), (asked.bfloat16(),))

    assert tokens == 3
    assert float(error) == pytest.approx(50 / 25 + 50 / 10_000)
    assert images == 1
    assert float(of_image) == pytest.approx(100 / 10_025)
    assert float(of_zeros) == 0.0, "zeros divide nothing"
    assert of_half.dtype == torch.float32


def test_healing_that_diverges_is_told() -> None:
    model = loaded(mlp())

    with pytest.raises(
        TrainingError,
        match=r"^pruning\.heal_rate: at 1e\+35 the error of hidden. goes from \d\.\d+ "
        r"to (inf|nan); choose a smaller rate$",
    ):
        started((1, 1), model, config_of(pruning={"heal_rate": 1e35}))


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, 2),
        ({"checkpoint": {"every": 7}}, 2),
        ({"data": {"sequence_length": 7}}, 4),
        ({"pruning": {"heal_passes": 2}}, 4),
    ],
)
def test_a_start_that_was_killed_goes_on_after_the_last_layer_that_was_healed(
    changed: dict[str, Any], fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third layer takes a fit to its outputs and one by the loss."""
    model = loaded(mlp())
    config = config_of(run_dir=str(tmp_path / "run"))
    now = config_of(run_dir=str(tmp_path / "run"), **changed)
    expected = started((1, 1), model, now)
    real, healed = Reconstruction.heal, list[int]()

    def counting(self: Reconstruction, *given: Any) -> tuple[float, float]:
        healed.append(1)
        if len(healed) == 3:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(Reconstruction, "heal", counting)
    data = Datasets(vector_data(), None)
    with pytest.raises(KeyboardInterrupt):
        build(job_alone(), model, lambda: data, config)
    assert sorted(path.name for path in (tmp_path / "run" / "healing").iterdir()) == [
        "hidden0.safetensors",
        "hidden1.safetensors",
    ]

    trainer = build(job_alone(), model, lambda: data, now, resume="auto")
    found = trainer.state_dict()
    trainer.close()

    assert found is not None
    assert len(healed) == 3 + fits
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("how", [{"resume": "auto"}, {"overwrite": True}])
def test_layers_of_another_score_are_healed_again(how: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(pruning={"method": "custom"}, run_dir=str(tmp_path / "run"))
    scores = [lambda name, weight: weight.abs(), lambda name, weight: -weight.abs()]

    def started_by(score: Any, config: Config, **own: Any) -> dict[str, Tensor]:
        trainer = alone(loaded(mlp()), config, vector_data(), score=score, **own)
        found = trainer.state_dict()
        trainer.close()
        assert found is not None
        return found

    started_by(scores[0], config, quiet=False)  # and stops before the first checkpoint
    found = started_by(scores[1], config, quiet=False, **how)

    expected = started_by(scores[1], config.with_values({"run_dir": "auto"}))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_healed_layers_stay_until_a_checkpoint_has_them(tmp_path: Path) -> None:
    config = config_of(run_dir=str(tmp_path), checkpoint={"every": 1})
    trainer = alone(loaded(mlp()), config, vector_data(), quiet=False)
    assert any((tmp_path / "healing").iterdir())

    trainer.train()
    trainer.close()

    assert (tmp_path / "checkpoints" / "step-1").is_dir()
    assert not (tmp_path / "healing").exists()


def test_what_was_healed_with_other_settings_is_passed_over(tmp_path: Path) -> None:
    layers = HealedLayers(tmp_path / "healing", "these", writes=True)
    (tmp_path / "healing" / ".one.safetensors.unfinished-7").mkdir(parents=True)
    layers.write("one", {"kept a": torch.ones(2)})

    assert [path.name for path in (tmp_path / "healing").iterdir()] == ["one.safetensors"]
    assert layers.read("other") is None
    assert HealedLayers(tmp_path / "healing", "those", writes=True).read("one") is None
    found = layers.read("one")
    assert found is not None
    assert torch.equal(found.read("kept a"), torch.ones(2))
    whole = (tmp_path / "healing" / "one.safetensors").read_bytes()
    (tmp_path / "healing" / "one.safetensors").write_bytes(whole[:-1])
    assert layers.read("one") is None


def test_values_are_those_of_the_file_and_zeros_are_no_negative_ones(tmp_path: Path) -> None:
    layers = HealedLayers(tmp_path / "healing", "these", writes=True)
    mask = torch.tensor([160], dtype=torch.uint8)  # of four entries: one, none, one, none
    layers.write(
        "one",
        {"mask a": mask, "mask b": mask, "kept b": torch.tensor([5.0, 6.0]), "fitted c": mask},
    )
    before = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])

    found = {name: layers.value("one", name, before) for name in "abcd"}

    assert found["a"].flatten().tolist() == [-1, 0, -3, 0]
    assert not found["a"][:, 1].signbit().any()
    assert found["b"].tolist() == [[5, 0], [6, 0]]
    assert torch.equal(found["c"], mask)
    assert found["d"] is before
    with pytest.raises(DataError, match="is gone, or of another run; start the command again"):
        layers.value("other", "a", before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])  # whose masters are no weights
def test_it_begins_at_the_weights_that_the_method_has_changed(
    precision: str,
) -> None:
    model = loaded(mlp())
    barely = config_of(
        pruning={"method": "sparsegpt", "heal_rate": 1e-12, "heal_passes": 1}, precision=precision
    )
    unhealed = config_of(pruning={"method": "sparsegpt", "heal": "none"}, precision=precision)

    found, expected = started((1, 1), model, barely), started((1, 1), model, unhealed)

    torch.testing.assert_close(found["hidden0.0.weight"], expected["hidden0.0.weight"])


def test_a_tied_parameter_stays_since_its_other_use_is_in_another_layer(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    torch.manual_seed(4)
    weights = {f"{name}.0.weight": torch.randn(16, 16) / 4 for name in ("one", "two")}
    weights |= {"one.0.bias": torch.full((16,), 0.5)}
    save_file(weights, tmp_path / "model.safetensors")
    layers = [Layer(name, build, init=random_init) for name in ("one", "two")]
    tied = Model(layers, loss=summed_loss, ties=[Tie("one.0.bias", "two.0.bias")], name="tied")
    model = start_from(tied, open_weights(tmp_path / "model.safetensors"))

    for layout in ((1, 1), (2, 1)):
        found = started(layout, model, config_of())
        assert not torch.equal(found["one.0.weight"], weights["one.0.weight"])
        assert torch.equal(found["one.0.bias"], weights["one.0.bias"])
