"""The bundled configs run as they are, and GPT-3's are the published ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.exhaustive import by_default
from support.page_blocks import BUNDLED
from support.runs import of_family

from axsparse.config.load import configure
from axsparse.config.model_config import GptConfig
from axsparse.config.validate import check_batch, check_config
from axsparse.models.model_profile import profile
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
LLAMAS = {
    # name: parameters of the published model
    "llama3_8b": 8_030_261_248,
    "qwen3_1.7b": 1_720_574_976,
    "smollm2_135m": 134_515_008,
}
every_gpt3 = pytest.mark.parametrize("name", GPT3)


def test_these_are_all() -> None:
    assert set(BUNDLED) == {*("quickstart", "prune_llama", *GPT3, *STUDY, *LLAMAS)}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, ranks) for name in (*GPT3, *STUDY, *LLAMAS) for ranks in (1, 2, 8)),
        *(("quickstart", ranks) for ranks in (2, 4, 6, 8)),
    ],
)
def test_every_bundled_config_keeps_the_rules_on_usual_numbers_of_ranks(
    name: str, ranks: int
) -> None:
    loaded = configure(name)
    model = loaded.model
    layers = model.num_layers + 2 if isinstance(model, GptConfig) else 28 + 3

    check_config(loaded)
    check_batch(loaded, resolve_grid(loaded, ranks, layers))


@every_gpt3
def test_models_have_the_published_shapes_and_numbers_of_parameters(name: str) -> None:
    layers, width, heads, parameters, sequences, rate = GPT3[name]
    config = configure(name)
    model, schedule = of_family(config.model, GptConfig), config.schedule

    assert (model.num_layers, model.hidden_size, model.num_heads) == (layers, width, heads)
    assert (model.sequence_length, model.tie_embeddings, model.dropout) == (2048, True, 0.0)
    assert 0 <= model.vocab_size - WORDS < 128
    assert model.vocab_size % 128 == 0
    counted = profile(gpt(model, model.sequence_length)).num_params
    assert counted == pytest.approx(parameters, rel=0.03)
    assert (config.batch.global_batch_size, config.optimizer.learning_rate) == (sequences, rate)
    ends = [schedule.warmup_steps, schedule.decay_steps]
    tokens = [WARM_UP_TOKENS / (sequences * 2048), DECAY_TOKENS / (sequences * 2048)]
    assert ends == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(("name", "parameters"), by_default([*LLAMAS.items()][1:], LLAMAS.items()))
def test_llamas_are_the_published_ones_and_trained_on_with_their_masks(
    transformers: Any, name: str, parameters: int
) -> None:
    config = configure(name)

    assert profile(replace(named_model(config), example=None)).num_params == parameters
    assert config.model.name == "hf"
    assert config.model.from_ is None
    assert (config.data.source, config.precision) == ("tokens", "auto")
    assert config.schedule.warmup_steps * 10 <= config.train.steps


def test_prune_llama_is_for_any_folder_and_for_no_model_without_one(
    transformers: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"model\.hf .*has no model_type; name a folder"):
        check_config(configure("prune_llama"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')

    config = configure("prune_llama", [f"model.from={tmp_path}"])

    assert (config.model.name, config.pruning.method) == ("hf", "magnitude")
