"""The bundled configs run as they are, and those of GPT-3 are the published ones."""

from __future__ import annotations

import pytest

from axsparse.config.load import bundled_configs, load_config
from axsparse.config.schema import Config
from axsparse.config.validate import check_batch, check_config, resolve_grid
from axsparse.models.gpt import gpt
from axsparse.models.survey import survey

GPT3 = {
    # name: layers, width, heads, parameters, sequences of a batch, learning rate
    "gpt3_xl": (24, 2048, 16, 1.3e9, 512, 2.0e-4),
    "gpt3_2.7b": (32, 2560, 32, 2.7e9, 512, 1.6e-4),
    "gpt3_6.7b": (32, 4096, 32, 6.7e9, 1024, 1.2e-4),
    "gpt3_13b": (40, 5120, 40, 13e9, 2048, 1.0e-4),
}
WARM_UP_TOKENS, DECAY_TOKENS = 375e6, 260e9
WORDS = 50257
every_gpt3 = pytest.mark.parametrize("name", GPT3)


def config_of(name: str) -> Config:
    return load_config(f"{name}.yaml").config


def test_these_are_all() -> None:
    assert set(bundled_configs()) == {"quickstart", *GPT3}


@pytest.mark.parametrize("name", ["quickstart", *GPT3])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_bundled_config_keeps_the_rules_on_usual_numbers_of_ranks(
    name: str, ranks: int
) -> None:
    loaded = load_config(name)

    check_config(loaded)
    check_batch(loaded, resolve_grid(loaded, ranks, loaded.config.model.num_layers + 2))


@every_gpt3
def test_models_have_the_published_shapes_and_numbers_of_parameters(name: str) -> None:
    layers, width, heads, parameters, _, _ = GPT3[name]
    model = config_of(name).model

    assert (model.num_layers, model.hidden_size, model.num_heads) == (layers, width, heads)
    assert (model.sequence_length, model.tie_embeddings, model.dropout) == (2048, True, 0.0)
    assert 0 <= model.vocab_size - WORDS < 128
    assert model.vocab_size % 128 == 0
    counted = survey(gpt(model, model.sequence_length)).num_params
    assert counted == pytest.approx(parameters, rel=0.03)


@every_gpt3
def test_models_are_trained_with_the_published_settings(name: str) -> None:
    _, _, _, _, sequences, rate = GPT3[name]
    config = config_of(name)
    optimizer, schedule = config.optimizer, config.schedule
    tokens = sequences * config.model.sequence_length

    assert config.batch.global_batch_size == sequences
    assert (optimizer.name, optimizer.learning_rate) == ("adamw", rate)
    assert (optimizer.betas, optimizer.eps) == ((0.9, 0.95), 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.1, 1.0)
    assert schedule.warmup_steps == round(WARM_UP_TOKENS / tokens)
    assert schedule.decay_steps == config.train.steps == round(DECAY_TOKENS / tokens)
    assert (schedule.decay, schedule.final_ratio) == ("cosine", 0.1)
    assert config.precision == "bf16"
    assert config.pipeline.checkpoint_activations == 1
    assert config.pruning.sparsity == 0.9
