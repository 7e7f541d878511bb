"""The data sets that a configuration can name."""

from __future__ import annotations

import numpy as np
import pytest

import axsparse as ax
from axsparse.config.load import configure
from axsparse.data.dataset import TokenDataset
from axsparse.data.sources import open_datasets
from axsparse.models.zoo.model_registry import named_model


def test_files_are_told_apart_for_a_model_that_separates_them() -> None:
    pytest.importorskip("transformers", reason="no transformers: pip install 'axsparse[test]'")
    tiny = "model_type: llama, hidden_size: 8, num_attention_heads: 1, num_hidden_layers: 1"
    asked = ["model.name=hf", f"model.hf={{{tiny}, vocab_size: 256, max_position_embeddings: 64}}"]
    for settings, inputs in (([*asked, "data.intra_document_attention=true"], 2), (asked, 1)):
        loaded = configure(None, settings)
        datasets, example = open_datasets(loaded), named_model(loaded).example
        assert example is not None
        assert len(example(1)) == inputs
        for dataset in (datasets.training, datasets.validation):
            assert isinstance(dataset, TokenDataset)
            assert len(dataset.read(np.arange(1))[0]) == inputs


def test_the_model_of_a_configuration_has_a_public_name_for_data_of_ones_own() -> None:
    settings = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 9}

    model = ax.named_model(ax.configure({"model": settings}))

    assert [layer.name for layer in model.layers] == ["embed", "block0", "head"]
    assert model.vocab_size == 9
