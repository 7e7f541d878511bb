"""Models that a Hugging Face folder names: family and sizes, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config.test_refusals import cases_in

from axsparse.config.hf_config import config_json, model_settings
from axsparse.config.load import load_config, to_yaml
from axsparse.config.model_config import GptConfig, LlamaConfig
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

LLAMA_2 = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "pretraining_tp": 1,
    "rope_scaling": None,
}
"""As Llama 2 7B has it, but for what says nothing of the model."""
LLAMA_31 = {
    **LLAMA_2,
    **{"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
    **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "attention_bias": False},
    "rope_scaling": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
}
QWEN_2 = {
    **LLAMA_2,
    **{"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 131072},
    **{"use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": True},
}
"""The keys of Qwen2 0.5B, with other sizes."""


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def write(settings: object) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return tmp_path

    return write


def model_from(folder: Path, *overrides: str) -> Any:
    return load_config(None, [f"model.from={folder}", *overrides]).config.model


def refusal(folder: Path, *overrides: str, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as told:
        model_from(folder, *overrides)
    return str(told.value).replace(f"{folder}/", "")


def test_family_and_sizes_come_from_the_folder(folder: Any) -> None:
    two = model_from(folder(LLAMA_2))
    assert isinstance(two, LlamaConfig)
    assert (two.num_layers, two.num_key_value_heads, two.head_dim) == (32, 32, 128)
    assert (two.sequence_length, two.norm_eps, two.tie_embeddings) == (4096, 1e-5, False)
    assert (two.rope_theta, two.rope_factor, two.qkv_bias) == (10_000.0, 1.0, False)

    three = model_from(folder(LLAMA_31))
    assert (three.num_key_value_heads, three.rope_theta) == (8, 500_000.0)
    assert (three.rope_factor, three.rope_low_factor, three.rope_high_factor) == (8.0, 1.0, 4.0)
    assert three.rope_original_length == 8192

    qwen = model_from(folder(QWEN_2))
    assert (qwen.qkv_bias, qwen.qk_norm, qwen.tie_embeddings) == (True, False, True)
    assert model_from(folder({**QWEN_2, "model_type": "qwen3"})).head_dim == 128
    assert model_from(folder({**QWEN_2, "model_type": "qwen3"})).qk_norm


def test_a_gpt2_folder_is_a_gpt(folder: Any) -> None:
    model = model_from(folder({"model_type": "gpt2", "n_layer": 3, "resid_pdrop": 0.1}))

    assert isinstance(model, GptConfig)
    assert (model.num_layers, model.hidden_size, model.sequence_length) == (3, 768, 1024)
    assert (model.vocab_size, model.dropout) == (50257, 0.0)


def test_what_a_run_writes_down_names_folder_and_sizes_and_is_read_again(
    folder: Any, tmp_path: Path
) -> None:
    config = load_config(None, [f"model.from={folder(LLAMA_31)}", "data.sequence_length=8"]).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))

    assert f"from: {tmp_path}\n" in to_yaml(config)
    assert "rope_factor: 8.0\n" in to_yaml(config)
    assert load_config(str(tmp_path / "config.yaml")).config == config


def test_what_is_given_beside_the_folder_has_to_agree(folder: Any) -> None:
    path = folder(LLAMA_2)

    model_from(path, "model.num_layers=32", "model.name=llama", "model.head_dim=null")
    assert refusal(path, "model.num_layers=31") == (
        "model.num_layers (--set): 31, but config.json has 32; leave it out, or name another folder"
    )
    assert refusal(path, "model.name=gpt") == (
        "model.name (--set): 'gpt', but config.json has \"llama\"; leave it out, or name another "
        "folder"
    )
    assert refusal(path, "model.sequence_length=512").endswith(
        "; for shorter samples set data.sequence_length"
    )
    weights = refusal(path, "model.weights=w.safetensors")
    assert weights.startswith("model.weights (--set): 'w.safetensors', but model.from '/")
    assert weights.endswith(" has weights as well; leave one of them out")
    assert "model.dropout (--set): unknown key for model.name llama" in refusal(
        path, "model.dropout=0.5"
    )


@pytest.mark.parametrize(("changed", "told"), cases_in("hf_refusals.txt"))
def test_what_the_models_here_have_not_is_refused_by_name(
    folder: Any, changed: str, told: str
) -> None:
    path = folder({**LLAMA_2, **json.loads(changed)})

    assert refusal(path, kind=DataError) == f"config.json: {told}"


@pytest.mark.parametrize(
    "harmless",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 9},
        {
            **{"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9},
            "max_window_layers": 32,
        },
        {"model_type": "qwen3", "layer_types": ["full_attention"] * 32},
        {"rope_scaling": {"rope_type": "default"}},
        {"attention_dropout": 0.0, "mlp_bias": None},
    ],
    ids=str,
)
def test_settings_that_change_nothing_are_taken(folder: Any, harmless: dict[str, Any]) -> None:
    assert model_from(folder({**LLAMA_2, **harmless})).num_layers == 32


def test_broken_folders_are_told_in_one_line(folder: Any, tmp_path: Path) -> None:
    assert refusal(tmp_path, kind=MissingInputError) == (
        f"model.from: {str(tmp_path)!r} has no config.json; name a Hugging Face folder of "
        "config.json and safetensors"
    )
    assert refusal(folder([1]), kind=DataError) == "config.json: is list, not settings; get it anew"
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path, kind=DataError).startswith("config.json: cannot be read as JSON")
    lacking = {key: value for key, value in LLAMA_2.items() if key != "vocab_size"}
    assert refusal(folder(lacking), kind=DataError) == (
        "config.json: has no vocab_size; get it anew"
    )
    assert refusal(folder({**LLAMA_2, "num_hidden_layers": "two"})) == (
        "model.num_layers (config.json): 'two' should be a valid integer"
    )
    assert refusal(folder({**LLAMA_2, "num_attention_heads": 0})).startswith("model.num_heads (con")
    assert refusal(folder({**LLAMA_2, "rope_theta": float("inf")})).startswith("model.rope_theta (")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "llama"),
        ({"rope_factor": 8.0, "rope_theta": 5e5}, "llama"),
        ({"hidden_size": 30, "num_heads": 4, "head_dim": 6}, "mistral"),
        ({"qkv_bias": True, "tie_embeddings": False}, "qwen2"),
        ({"qk_norm": True, "head_dim": 64}, "qwen3"),
    ],
    ids=str,
)
def test_settings_become_a_config_json_and_come_back(
    settings: dict[str, Any], kind: str, folder: Any
) -> None:
    model = LlamaConfig(**settings)
    written = config_json(model, "float32")

    assert written["model_type"] == kind
    read = model_settings(folder(written) / "config.json")
    back = LlamaConfig(**read)
    assert config_json(back, "float32") == written
    assert {**model.model_dump(), **read} == back.model_dump()


def test_settings_that_no_model_there_has_are_refused() -> None:
    with pytest.raises(ConfigError) as told:
        config_json(LlamaConfig(qkv_bias=True, qk_norm=True), "float32")

    assert str(told.value) == (
        "--to hf: no model of transformers has both model.qkv_bias and model.qk_norm; choose --to "
        "torch"
    )
