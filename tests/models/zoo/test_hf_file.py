"""Published files whose tensors have other names than the model's state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf import SMALL_LLAMA

from axsparse.models.zoo.hf_models import HfFile
from axsparse.runtime.errors import DataError


class Given:
    """A file that has these tensors."""

    def __init__(self, *names: str) -> None:
        self.path = Path("model.safetensors")
        self.files = (self.path,)
        self.shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (2, 2))

    def dtype(self, name: str) -> torch.dtype:
        return self.read(name).dtype

    def read(self, name: str) -> torch.Tensor:
        return torch.full(self.shapes[name], float(len(name)))


def causal(transformers: Any) -> Any:
    settings = {key: value for key, value in SMALL_LLAMA["hf"].items() if key != "model_type"}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def test_names_without_the_prefix_of_the_model_get_it(transformers: Any) -> None:
    file = HfFile(Given("norm.weight"), causal(transformers))

    assert file.shapes == {"model.norm.weight": (2, 2)}
    assert torch.equal(file.read("model.norm.weight"), torch.full((2, 2), 11.0))


def test_what_transformers_ignores_is_no_tensor_of_the_model(transformers: Any) -> None:
    """Layers that draft tokens, which folders of GLM-4.5 and DeepSeek-V3 have."""
    model, draft = causal(transformers), "model.layers.92.eh_proj.weight"
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.92.*", r"norm\.weight"]

    file = HfFile(Given("model.norm.weight", draft), model)

    assert (list(file.shapes), file.others) == (["model.norm.weight"], [draft])


def test_two_tensors_of_one_name_are_refused(transformers: Any) -> None:
    with pytest.raises(DataError, match=r"and another tensor are both model\.norm\.weight; get it"):
        HfFile(Given("norm.weight", "model.norm.weight"), causal(transformers))


def test_tensors_that_make_no_tensor_of_the_model_are_refused(transformers: Any) -> None:
    """The matrices of an expert with one of another shape."""
    config = transformers.MixtralConfig(
        **{"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
        **{"num_local_experts": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    )
    with torch.device("meta"):
        mixtral = transformers.MixtralForCausalLM(config)
    experts = "model.layers.0.block_sparse_moe.experts"
    given = Given(*(f"{experts}.{number}.w2.weight" for number in range(2)))
    given.shapes[f"{experts}.1.w2.weight"] = (3, 2)

    with pytest.raises(DataError, match=r"and others do not make \S*experts.down_proj .*; get it"):
        HfFile(given, mixtral).read("model.layers.0.mlp.experts.down_proj")


def test_what_older_versions_saved_is_ignored(transformers: Any) -> None:
    attention = "model.layers.0.self_attn"
    given = Given(f"{attention}.masked_bias", f"{attention}.bias", f"{attention}.q_proj.bias")
    given.shapes[f"{attention}.bias"] = (1, 1, 12, 12)
    file = HfFile(given, causal(transformers))

    assert [file.is_ignored(name) for name in given.shapes] == [True, True, False]
    given.shapes[f"{attention}.bias"] = (12,)  # of a layer, and trained
    assert not HfFile(given, causal(transformers)).is_ignored(f"{attention}.bias")
