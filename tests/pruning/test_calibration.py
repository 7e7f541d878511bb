"""Wanda's masks, drawn through the stages, against the published method in plain torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exhaustive import by_default
from support.hf import SMALL_LLAMA, saved_model, small_llama, write_llama
from support.methods import published
from support.runs import (
    VOCABULARY,
    Doing,
    alone,
    job_alone,
    loaded,
    summed_loss,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

import axsparse as ax
from axsparse.config.schema import Config, parse_pattern
from axsparse.data.dataset import ArrayDataset, Dataset
from axsparse.data.order import samples_of_step
from axsparse.models.layer import Model
from axsparse.models.losses import linear_cross_entropy
from axsparse.models.sequential import from_sequential
from axsparse.models.zoo.model_registry import named_model
from axsparse.pruning.calibration import CalibrationProgress
from axsparse.pruning.input_statistics import SparseGptStatistics
from axsparse.training.build import owl_sparsities
from axsparse.training.trainer import build

SAMPLES = 6


def settings(**pruning: Any) -> dict[str, Any]:
    return {
        "pruning": {
            **{"method": "wanda", "sparsity": 0.6, "calibration_samples": SAMPLES},
            **pruning,
        },
        "batch": {"global_batch_size": 4, "microbatch_size": 2},
        "train": {"steps": 1},
    }


def kept_of(
    g_inter: int, g_data: int, model: Model, config: Config, data: Dataset | None = None
) -> dict[str, Tensor]:
    """The mask of every pruned matrix, the same on all replicas."""
    masks: dict[str, Tensor] = {}
    for trainer, _ in train_in_process(g_inter, g_data, model, config, data or token_data()):
        for layer in trainer.layers:
            for name, tensor in layer.state.by_full_name.items():
                mask = layer.state.mask(name).view(tensor.full_shape)
                assert torch.equal(masks.setdefault(name, mask), mask), name
    return {name: mask for name, mask in masks.items() if not mask.all()}


def dense_modules(model: Model, weights: dict[str, Tensor]) -> dict[str, nn.Module]:
    modules = {}
    for layer in model.layers:
        modules[layer.name] = layer.build()
        for name, parameter in modules[layer.name].named_parameters():
            parameter.data.copy_(weights[f"{layer.name}.{name}"])
    return modules


def signed(name: str, tensor: Tensor) -> Tensor:
    """Weights of both signs, and rows and columns of different sizes."""
    if tensor.dim() == 1:
        return tensor * 6
    seed = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(tensor.shape, generator=seed) * tensor


def test_other_models_are_calibrated_alike_and_own_sparsities_count() -> None:
    pruning = {"layers": ["block0.*=0.25"], "exclude": ["*.proj.weight"]}
    config = tiny_config(**settings(**pruning))

    one, three = (kept_of(g_inter, 1, tiny_gpt(config), config) for g_inter in (1, 3))

    assert one.keys() == three.keys()
    assert all(torch.equal(mask, three[name]) for name, mask in one.items())
    assert {name: int(mask.sum(1).unique()) for name, mask in one.items()} == {
        "block0.attention.qkv.weight": 24,
        "block0.fc1.weight": 24,
        "block0.fc2.weight": 96,
        "block1.attention.qkv.weight": 13,
        "block1.fc1.weight": 13,
        "block1.fc2.weight": 52,
    }


# -- against transformers and plain torch -----------------------------------------------------

LINEAR: dict[str, dict[str, Any]] = {
    "falcon": {"num_attention_heads": 4, "ffn_hidden_size": 40},
    "gpt2": {"num_attention_heads": 4, "max_position_embeddings": 24},
    "mamba": {"state_size": 4},
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40},
}
"""Families whose layers multiply in modules of their own (a subclass of nn.Linear, a transposed
matrix, and linear layers next to a convolution of each channel by itself), and in plain ones."""
EXPERTS = {
    **{"intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    **{"max_position_embeddings": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def saved(transformers: Any, kind: str, folder: Path, blocks: int = 2) -> Any:
    """A small model of a family, or of experts; of gpt-oss no token meets the last expert of the
    first layer."""
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": blocks}
    settings = kinds[kind](**sizes, **LINEAR.get(kind, EXPERTS))
    model = saved_model(transformers, settings, folder)
    if kind == "gpt_oss":
        with torch.no_grad():
            model.model.layers[0].mlp.router.bias[3] = -1e4
        model.save_pretrained(folder)
    return model


def model_of(theirs: Any, folder: Path) -> dict[str, Any]:
    """The settings of a saved model, as a configuration has them."""
    sizes = {"vocab_size": VOCABULARY, "sequence_length": 12}
    return {"name": "hf", "from": str(folder), "hf": theirs.config.to_dict(), **sizes}


def products(name: str, module: Any, calls: list[Any]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """The matrices of a module, (outputs, inputs), each with what it was multiplied with."""
    if not name.endswith("experts"):
        matrix = module.weight if isinstance(module, nn.Linear) else module.weight.t()
        return {f"{name}.weight": [(matrix, torch.cat([call[0].flatten(0, -2) for call in calls]))]}
    stacks = [module.gate_up_proj, module.down_proj]
    ups, downs = [s.transpose(1, 2) if module.is_transposed else s for s in stacks]
    given, middle = [], []
    for expert, up in enumerate(ups):
        met = [hidden[(chosen == expert).any(-1)] for hidden, chosen, _ in calls]
        given.append((up, torch.cat(met)))
        y = given[-1][1] @ up.t()
        bias = module.gate_up_proj_bias[expert] if module.has_bias else 0.0
        middle.append((downs[expert], module._apply_gate(y + bias)))
    return {f"{name}.gate_up_proj": given, f"{name}.down_proj": middle}


def kept_entries(
    matrix: Tensor, x: Tensor, method: str, sparsity: float, pattern: tuple[int, int] | None
) -> Tensor:
    """The mask of one matrix by the published methods; what pruning changes is written to it."""
    if not len(x):
        x = torch.eye(matrix.shape[1])
    stays = torch.ones(matrix.shape, dtype=torch.bool)
    if method == "sparsegpt":
        stays, changed = published(matrix, [x], sparsity, pattern)
        matrix.copy_(changed)
    else:
        score = matrix.abs() * (x.square().sum(0).sqrt() if method == "wanda" else 1.0)
        groups = score if method == "wanda" else score.reshape(1, -1)
        removed = int(groups.shape[1] * sparsity)
        if pattern is not None:
            groups, removed = score.view(-1, pattern[1]), pattern[1] - pattern[0]
        gone = groups.sort(dim=1, stable=True).indices[:, :removed]
        stays.view_as(groups).scatter_(1, gone, False)
    matrix.mul_(stays)
    return stays


Product = tuple[Tensor, Tensor]
"""A matrix, (outputs, inputs), and what it was multiplied with, (tokens, inputs)."""


def blocks_in_torch(model: Any, config: Config) -> Iterator[dict[str, tuple[list[Product], bool]]]:
    """For each block, of each weight its products, one for each expert, and whether it has inputs
    first. The samples pass when the block's turn comes."""
    data = token_data()
    samples = samples_of_step(len(data), SAMPLES, 0, config.seed)
    [(at, layers), *_] = [x for x in model.named_modules() if isinstance(x[1], nn.ModuleList)]
    for number, layer in enumerate(layers):
        pruned = {
            path: module
            for path, module in layer.named_modules()
            if isinstance(module, nn.Linear)
            or type(module).__name__ == "Conv1D"
            or path.endswith("experts")
        }
        calls: dict[str, list[Any]] = {path: [] for path in pruned}
        hooks = [
            module.register_forward_pre_hook(lambda _, x, into=calls[path]: into.append(x))
            for path, module in pruned.items()
        ]
        if "mixer.dt_proj" in pruned:  # multiplied without a call, by the first outputs of another
            features = pruned["mixer.dt_proj"].in_features
            one = calls["mixer.dt_proj"]
            hooks.append(
                pruned["mixer.x_proj"].register_forward_hook(
                    lambda _, __, y, into=one, n=features: into.append((y[..., :n],))
                )
            )
        for begin in range(0, SAMPLES, 2):
            model(data.read(samples[begin : begin + 2])[0][0])
        for hook in hooks:
            hook.remove()
        yield {
            name: (each, getattr(module, "is_transposed", type(module).__name__ == "Conv1D"))
            for path, module in pruned.items()
            for name, each in products(f"{at}.{number}.{path}", module, calls[path]).items()
        }


def masks_in_torch(
    model: Any, method: str, config: Config, pattern: tuple[int, int] | None
) -> dict[str, Tensor]:
    """The published methods in plain torch, for every matrix and every expert by itself, in the
    shape of the weight."""
    masks = {}
    for block in blocks_in_torch(model, config):
        for name, (each, is_turned) in block.items():
            own = [kept_entries(matrix, x, method, 0.5, pattern) for matrix, x in each]
            mask = torch.stack(own) if len(own) > 1 else own[0]
            masks[name] = mask.mT if is_turned else mask
    return masks


def test_layers_that_write_into_their_inputs_are_pruned_by_what_they_were_given() -> None:
    config = tiny_config(**settings())

    def masks(tanh: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(3)
        layers = [Doing(lambda m, x: m.linear(tanh(x))) for _ in range(3)]
        return kept_of(1, 1, from_sequential(layers, summed_loss), config, vector_data())

    kept, of_writing = masks(Tensor.tanh), masks(Tensor.tanh_)

    assert kept and all(torch.equal(mask, of_writing[name]) for name, mask in kept.items())


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_a_plan_says_how_many_entries_the_method_keeps_in_rows_or_blocks(method: str) -> None:
    config = tiny_config(**settings(method=method, sparsity=0.9))  # of 32 inputs 28 go, not 29

    trainer = alone(loaded(tiny_gpt(config)), config, token_data())

    tensors = [it for layer in trainer.layers for it in layer.state.by_full_name.items()]
    kept = {name: each.full_kept for name, each in tensors if each.full_kept < each.full_numel}
    assert trainer.plan.kept_at_start == kept


def test_encoder_layers_of_torch_show_the_products_that_their_fast_path_hides() -> None:
    torch.manual_seed(3)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)]
    model = from_sequential(layers, lambda out, y: (out.sum((1, 2)) - y).square().sum())
    data = ArrayDataset(torch.randn(30, 5, 16), torch.randn(30))
    config = tiny_config(**settings(include="all"))

    found = kept_of(1, 1, model, config, data)

    (x,), _ = data.read(samples_of_step(30, SAMPLES, 0, config.seed))
    for number, layer in enumerate(layers):
        given: list[Tensor] = []
        layer.linear1.register_forward_pre_hook(
            lambda _, x, to=given: to.append(x[0].flatten(0, 1))
        )
        with torch.no_grad():
            layer(x)
            expected = kept_entries(layer.linear1.weight.clone(), given[0], "wanda", 0.6, None)
            assert torch.equal(found[f"{number}.linear1.weight"], expected)
            for name, parameter in layer.named_parameters():
                parameter.mul_(found.get(f"{number}.{name}", torch.ones(())))
            x = layer(x)
    assert torch.backends.mha.get_fastpath_enabled()


def test_masters_start_as_sparsegpt_has_changed_them_and_weights_as_their_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prune, changed = SparseGptStatistics.prune, []

    def noted(*given: Any) -> tuple[Tensor, Tensor]:
        mask, after = prune(*given)
        changed.append(after)
        return mask, after

    monkeypatch.setattr(SparseGptStatistics, "prune", noted)
    config = tiny_config(precision="bf16", **settings(method="sparsegpt"))

    trainer = alone(loaded(tiny_gpt(config)), config, token_data())

    states = [(layer.state, name) for layer in trainer.layers for name in layer.state.by_full_name]
    pruned = [(state, name) for state, name in states if not state.mask(name).all()]
    for (state, name), after in zip(pruned, changed, strict=True):
        assert torch.equal(state.dense_master(name), after), name
        assert torch.equal(state.by_full_name[name].parameter, after.bfloat16()), name


@pytest.mark.parametrize(
    ("kind", "method", "layout", "pattern"),
    by_default(
        [
            ("mixtral", "wanda", (2, 2), None),
            ("gpt_oss", "sparsegpt", (2, 1), None),
            ("falcon", "wanda", (1, 1), None),
            ("gpt2", "sparsegpt", (2, 1), None),
            ("mamba", "wanda", (2, 1), None),
            ("llama", "wanda", (4, 1), "2:4"),
            ("llama", "wanda", (2, 2), None),
        ],
        [
            *itertools.product(
                *(("mixtral", "gpt_oss"), ("wanda", "sparsegpt", "magnitude")),
                *(((1, 1), (2, 1), (1, 2), (2, 2)), (None,)),
            ),
            *itertools.product(LINEAR, ("wanda", "sparsegpt"), ((1, 1), (2, 1)), (None,)),
            *itertools.product(["llama"], ("wanda", "sparsegpt"), ((4, 1), (2, 2)), (None, "2:4")),
        ],
    ),
)
def test_whatever_multiplies_is_pruned_by_its_inputs_and_an_expert_by_those_routed_to_it(
    transformers: Any,
    kind: str,
    method: str,
    layout: tuple[int, int],
    pattern: str | None,
    tmp_path: Path,
) -> None:
    theirs = saved(transformers, kind, tmp_path)
    pruning = settings(method=method, sparsity=0.5, pattern=pattern)
    config = tiny_config(model=model_of(theirs, tmp_path), **pruning)

    found = kept_of(*layout, named_model(config), config)

    with torch.no_grad():
        groups = None if pattern is None else parse_pattern(pattern)
        expected = masks_in_torch(theirs, method, config, groups)
    assert found.keys() == expected.keys()
    for name, mask in expected.items():
        assert torch.equal(found[name], mask), name
    assert kind in LINEAR or sum(".experts." in name for name in found) == 2 * 2


@pytest.mark.parametrize("kind", ["gpt_oss", "gpt2"])
def test_layers_with_more_outliers_stay_denser(
    kind: str, transformers: Any, tmp_path: Path
) -> None:
    theirs = saved(transformers, kind, tmp_path, blocks=3)
    config = tiny_config(model=model_of(theirs, tmp_path), **settings())
    datasets = ax.Datasets(token_data(), None)

    found = owl_sparsities(
        job_alone(), named_model(config), lambda: datasets, config, 0.8, tmp_path
    )

    shares, entries = [], []
    with torch.no_grad():
        blocks = list(blocks_in_torch(theirs, config))
        for block in blocks:
            pairs = [pair for each, _ in block.values() for pair in each]
            scores = torch.cat(
                [(matrix.abs() * x.norm(dim=0)).flatten().double() for matrix, x in pairs]
            )
            shares.append(float((scores > 5 * scores.mean()).double().mean()))
            entries.append(scores.numel())
    least, most = min(shares), max(shares)
    assert least < most
    densities = [0.16 * (share - least) / (most - least) for share in shares]
    mean = sum(d * n for d, n in zip(densities, entries, strict=True)) / sum(entries)
    expected = {
        name: 0.8 - (density - mean)
        for block, density in zip(blocks, densities, strict=True)
        for name in block
    }
    assert found == pytest.approx(expected, abs=1e-12)


def said_by(config: Config, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is said while a run is built."""
    config, datasets = config.with_values({"run_dir": str(folder)}), ax.Datasets(token_data(), None)
    build(job_alone(), named_model(config), lambda: datasets, config).close()
    return capsys.readouterr().out.splitlines()


def test_experts_that_no_token_met_are_said_once(
    transformers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = saved(transformers, "gpt_oss", tmp_path / "start")
    config = tiny_config(model=model_of(theirs, tmp_path / "start"), **settings(sparsity=0.5))

    lines = said_by(config, tmp_path / "run", capsys)

    assert [line for line in lines if "no token" in line] == [
        "wanda: no token of the samples met 2 matrices of experts, which are pruned by magnitude: "
        "model.layers.0.mlp.experts.gate_up_proj[3], model.layers.0.mlp.experts.down_proj[3]"
    ]


def test_it_says_that_the_data_have_fewer_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(**settings(calibration_samples=100))

    lines = said_by(config, tmp_path / "run", capsys)

    assert [line for line in lines if "warning" in line] == [
        "warning: pruning.calibration_samples: 100 are more than the 40 samples of the data; some "
        "count repeatedly"
    ]


def test_it_says_how_far_it_is_and_what_the_pruning_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_llama(tmp_path / "start", signed)
    model = {**SMALL_LLAMA, "from": str(tmp_path / "start")}
    config = tiny_config(model=model, **settings())

    lines = [s for s in said_by(config, tmp_path / "run", capsys) if s.startswith("wanda: ")]

    assert lines[0] == "wanda: stage 0, layer 1 of 5, 3 microbatches of samples"
    said = re.fullmatch(r"wanda: loss of the first microbatch (.+) before, (.+) after", lines[-1])
    assert said is not None
    dense, pruned = map(float, said.groups())
    weights = write_llama(tmp_path / "start", signed)
    *body, head = dense_modules(small_llama(), weights).values()
    (tokens,), targets = token_data().read(samples_of_step(len(token_data()), 2, 0, config.seed))
    with torch.no_grad():
        for module in body:
            tokens = module(tokens)
        hidden, weight = head(tokens)
        expected = linear_cross_entropy(hidden, weight, targets) / targets.numel()
    assert dense == pytest.approx(expected.item(), abs=1e-4)
    assert pruned != dense


def test_it_shows_the_time_that_is_left_by_the_layers_that_are_done() -> None:
    said: list[str] = []
    shown: list[tuple[int, int, str]] = []
    progress = CalibrationProgress(said.append, lambda *view: shown.append(view), 4, began=0.0)

    for number, now in enumerate([0.0, 3.0, 20.0]):
        progress.show(number, f"layer {number + 1}", now)

    assert said == ["layer 1", "layer 3, eta 00:20"], "the second comes too early"
    assert shown == [(0, 4, "layer 1"), (1, 4, "layer 2, eta 00:09"), (2, 4, "layer 3, eta 00:20")]
