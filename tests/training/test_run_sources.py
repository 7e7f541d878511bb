"""The forms in which `ax.Trainer` takes a model, data and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf import write_llama
from support.runs import mlp, vector_data

import axsparse as ax
from axsparse.config.schema import Config
from axsparse.training.run_sources import run_sources

MODEL = mlp()
DATA = vector_data()


def config_of(config: Any, **settings: Any) -> Config:
    return run_sources(MODEL, DATA, config, settings).config


def test_settings_come_over_those_of_a_file_a_dictionary_or_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("pruning: {sparsity: 0.5}\nseed: 3\n")
    dictionary = {"pruning.sparsity": 0.5, "seed": 3}
    nested = {"pruning": {"sparsity": 0.5}, "seed": 3}

    for given in (file, str(file), dictionary, nested, ax.configure(file), ax.configure(nested)):
        config = config_of(given, g_inter=2, seed=4)
        assert (config.pruning.sparsity, config.layout.g_inter, config.seed) == (0.5, 2, 4)
    assert config_of(None) == Config()


def test_a_run_has_the_name_of_its_file_or_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n")

    assert run_sources(MODEL, DATA, tmp_path / "mine.yaml", {"seed": 1}).config.name == "mine"
    assert run_sources(MODEL, DATA, ax.configure({}), {}).config.name == MODEL.name


def test_a_setting_knows_where_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n")

    loaded = run_sources(MODEL, DATA, ax.configure(tmp_path / "mine.yaml"), {"sparsity": 0}).config

    assert loaded.where("seed") == "seed (mine.yaml:1)"
    assert loaded.where("pruning.sparsity") == "pruning.sparsity (Trainer)"
    assert loaded.where("precision") == "precision (default)"


@pytest.mark.parametrize(
    "data", [DATA, (DATA, DATA), ax.Datasets(DATA, DATA), lambda: ax.Datasets(DATA, DATA)]
)
def test_data_are_one_or_a_pair_or_a_function_of_them(data: Any) -> None:
    opened = run_sources(MODEL, data, None, {}).open_datasets()

    assert opened.training is DATA
    assert opened.validation is (None if data is DATA else DATA)


def test_tokens_and_folders_of_hugging_face_are_settings(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")

    sources = run_sources(
        ax.hf(tmp_path / "llama"),
        ax.tokens("texts", validation="others"),
        {"data.sequence_length": 8},
        {},
    )

    data = sources.config.data
    assert (data.source, data.path, data.validation) == ("tokens", "texts", "others")
    assert sources.model.name == "hf" or "llama" in sources.model.name
    assert sources.model.start is not None
    assert torch.equal(
        *(
            one.read("model.norm.weight")  # type: ignore[arg-type]
            for one in (sources.model.start, sources.model.start)
        )
    )
