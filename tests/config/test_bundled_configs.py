"""The bundled configs run as they are, and those of GPT-3 are the published ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.exhaustive import by_default

from axsparse.config.load import bundled_configs, load_config
from axsparse.config.model_config import GptConfig, Vgg19Config, of_family
from axsparse.config.schema import Config
from axsparse.config.validate import check_batch, check_config
from axsparse.data.digits import VALIDATION_SAMPLES
from axsparse.models.survey import survey
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.model_registry import named_model
from axsparse.planner.auto_layout import resolve_grid
from axsparse.runtime.errors import ConfigError

GPT3 = {
    # name: layers, width, heads, parameters, sequences of a batch, learning rate
    "gpt3_xl": (24, 2048, 16, 1.3e9, 512, 2.0e-4),
    "gpt3_2.7b": (32, 2560, 32, 2.7e9, 512, 1.6e-4),
    "gpt3_6.7b": (32, 4096, 32, 6.7e9, 1024, 1.2e-4),
    "gpt3_13b": (40, 5120, 40, 13e9, 2048, 1.0e-4),
}
WARM_UP_TOKENS, DECAY_TOKENS = 375e6, 260e9
WORDS = 50257
STUDY = {"gpt_wikitext103": "gpt3_xl", "gpt_bookcorpus": "gpt3_2.7b"}
"""Models of the SAMO study that were trained to the end, and what they are otherwise."""
IMAGENET = {
    # name: model, parameters, learning rate, weight decay, steps, steps between falls
    "vgg19": ("vgg19", 143_667_240, 1e-2, 5e-4, 370_000, 92_500),
    "wideresnet101": ("wide_resnet101_2", 126_886_696, 0.1, 1e-4, 90 * 5005, 30 * 5005),
}
LLAMAS = {
    # name: parameters of the published model
    "llama3_8b": 8_030_261_248,
    "qwen3_1.7b": 1_720_574_976,
    "smollm2_135m": 134_515_008,
}
every_gpt3 = pytest.mark.parametrize("name", GPT3)


def config_of(name: str) -> Config:
    return load_config(f"{name}.yaml").config


def test_these_are_all() -> None:
    assert set(bundled_configs()) == {
        *("quickstart", "digits_cnn"),
        *(*IMAGENET, *GPT3, *STUDY, *LLAMAS, "prune_llama"),
    }


@pytest.mark.parametrize("name", ["quickstart", *GPT3, *STUDY, *LLAMAS])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_bundled_config_keeps_the_rules_on_usual_numbers_of_ranks(
    name: str, ranks: int
) -> None:
    loaded = load_config(name)
    model = loaded.config.model
    layers = model.num_layers + 2 if isinstance(model, GptConfig) else 28 + 3

    check_config(loaded)
    check_batch(
        loaded,
        resolve_grid(loaded, ranks, layers),
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_digits_train_on_usual_numbers_of_ranks_and_are_evaluated_on_all_images(ranks: int) -> None:
    loaded = load_config("digits_cnn")
    config = loaded.config

    check_config(loaded)
    check_batch(loaded, resolve_grid(loaded, ranks, len(named_model(loaded).layers)))
    assert config.train.eval_steps != "all"
    assert config.train.eval_steps * config.batch.global_batch_size >= VALIDATION_SAMPLES


@every_gpt3
def test_models_have_the_published_shapes_and_numbers_of_parameters(name: str) -> None:
    layers, width, heads, parameters, _, _ = GPT3[name]
    model = of_family(config_of(name).model, GptConfig)

    assert (model.num_layers, model.hidden_size, model.num_heads) == (layers, width, heads)
    assert (model.sequence_length, model.tie_embeddings, model.dropout) == (2048, True, 0.0)
    assert 0 <= model.vocab_size - WORDS < 128
    assert model.vocab_size % 128 == 0
    counted = survey(gpt(model, model.sequence_length)).num_params
    assert counted == pytest.approx(parameters, rel=0.03)


@pytest.mark.parametrize("name", IMAGENET)
def test_image_models_are_the_published_ones_and_trained_with_the_published_settings(
    name: str,
) -> None:
    model, parameters, rate, decay, steps, fall = IMAGENET[name]
    loaded = load_config(name)
    config = loaded.config
    optimizer, schedule = config.optimizer, config.schedule
    built = named_model(loaded)

    assert (config.model.name, survey(built).num_params) == (model, parameters)
    assert (optimizer.name, optimizer.momentum, optimizer.nesterov) == ("sgd", 0.9, False)
    assert (optimizer.learning_rate, optimizer.weight_decay) == (rate, decay)
    assert (optimizer.clip_norm, schedule.warmup_steps) == (0, 0)
    assert (schedule.decay, schedule.step_every, schedule.step_factor) == ("step", fall, 0.1)
    assert (config.batch.global_batch_size, config.train.steps) == (256, steps)
    assert (config.data.source, config.data.image_size) == ("images", 224)
    if isinstance(config.model, Vgg19Config):
        assert config.model.dropout == 0.5
    assert config.train.eval_steps != "all"
    assert config.train.eval_steps * 256 >= 50_000  # all of the validation images
    check_config(loaded)
    for ranks in (1, 2, 4, 8):
        check_batch(loaded, resolve_grid(loaded, ranks, len(built.layers)))


@pytest.mark.parametrize(("name", "parameters"), by_default([*LLAMAS.items()][1:], LLAMAS.items()))
def test_llamas_are_the_published_ones_and_trained_on_with_their_masks(
    transformers: Any, name: str, parameters: int
) -> None:
    loaded = load_config(name)
    config = loaded.config

    assert survey(replace(named_model(loaded), example=None)).num_params == parameters
    assert config.model.name == "hf"
    assert config.model.from_ is None
    assert (config.data.source, config.precision) == ("tokens", "auto")
    assert config.schedule.warmup_steps * 10 <= config.train.steps


def test_prune_llama_is_for_any_folder_and_for_no_model_without_one(
    transformers: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"model\.hf .*has no model_type; name a folder"):
        check_config(load_config("prune_llama"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')

    config = load_config("prune_llama", [f"model.from={tmp_path}"]).config

    assert (config.model.name, config.pruning.method) == ("hf", "magnitude")
