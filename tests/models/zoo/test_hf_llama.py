"""Llama, Mistral, Qwen2 and Qwen3 of Hugging Face's transformers, both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exhaustive import by_default
from support.hf import STEPS, hf_logits, hf_losses, our_logits, tokens
from support.images import assert_equal_tensors, write_safetensors
from support.runs import VOCABULARY, token_data, train_in_process
from support.saved import train_and_save
from torch import Tensor

from axsparse.config.load import LoadedConfig, configure, made_in_python
from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.survey import survey
from axsparse.models.zoo.hf_models import LLAMA
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import ConfigError, DataError

LOGITS_RTOL = 1e-5
LOSS_RTOL = 1e-6
"""Seen: 2e-7. The squares of the norm and the gradients of a tied weight are added in another
order, which every AdamW step carries on."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 20,
}
"""Some of the wavelengths of a head of 10 are long for it, some short, some in between."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 10}),
    "mistral": ("Mistral", {"head_dim": 6, "sliding_window": None, "num_key_value_heads": 1}),
    "qwen 2": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen 3": ("Qwen3", {"head_dim": 18, "rope_parameters": {"rope_theta": 50.0}}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(transformers: Any, kind: str, path: Path, **others: Any) -> Any:
    """A small model of transformers of random parameters, biases and norms included; saved."""
    name, settings = KINDS[kind]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 40,
        "intermediate_size": 52,
        "num_hidden_layers": 2,
        "num_attention_heads": 5 if "num_attention_heads" not in settings else 4,
        "num_key_value_heads": 5,
        "max_position_embeddings": 24,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **settings, **others})
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return model.eval()


def config_from(path: Path, **sections: Any) -> Config:
    settings: dict[str, Any] = {
        "model": {"from": str(path)},
        "data": {"sequence_length": 12},
        "batch": {"global_batch_size": 12, "microbatch_size": 4},
        "precision": "fp32",
        "pruning": {"sparsity": 0.0},
        "optimizer": {"learning_rate": 1e-2, "clip_norm": 0.5},
        "schedule": {"decay": "constant"},
        "train": {"steps": STEPS, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e9},
        "seed": 11,
    }
    for key, value in sections.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return configure(settings)


def loaded_from(path: Path, **sections: Any) -> LoadedConfig:
    return made_in_python(config_from(path, **sections), "tiny")


def ours_from(path: Path) -> Model:
    return named_model(loaded_from(path))


@every_kind
def test_logits_and_losses_are_those_of_transformers_in_every_pipeline(
    transformers: Any, kind: str, tmp_path: Path
) -> None:
    theirs = make(transformers, kind, tmp_path)
    config, model = config_from(tmp_path), ours_from(tmp_path)

    logits = our_logits(model, config, tokens())
    assert logits.abs().max() > 1
    error = (logits - hf_logits(theirs)).abs().max() / logits.abs().max()
    assert error < LOGITS_RTOL

    expected = list(hf_losses(theirs, config))
    assert expected[-1] < expected[0] - 0.1
    first = None
    for g_inter in (1, 2, 3, 4) if kind == "llama tied" else (1, 4):
        for _, trace in train_in_process(g_inter, 1, model, config, token_data()):
            assert trace.losses == pytest.approx(expected, rel=LOSS_RTOL)
            first = first or trace.losses
            assert trace.losses == first, g_inter


@pytest.mark.parametrize("method", by_default(["sparsegpt"], ["sparsegpt", "wanda", "magnitude"]))
@every_kind
def test_masks_and_losses_of_pruned_models_are_the_same_in_every_pipeline(
    transformers: Any, kind: str, method: str, tmp_path: Path
) -> None:
    make(transformers, kind, tmp_path)
    pruning = {"method": method, "sparsity": 0.6, "calibration_samples": 8}
    config = config_from(tmp_path, pruning=pruning, train={"steps": 2})
    model = ours_from(tmp_path)

    found = []
    for g_inter in (1, 2, 3, 4):
        masks: dict[str, Tensor] = {}
        runs = train_in_process(g_inter, 1, model, config, token_data())
        for trainer, _ in runs:
            for layer in trainer.parts.layers:
                pruned = (t for t in layer.state.owned if t.kept < t.parameter.numel())
                masks |= {tensor.name: tensor.positions() for tensor in pruned}
        found.append((runs[0][1].losses, masks))

    losses, masks = found[0]
    assert len(masks) == 14
    for other_losses, other_masks in found[1:]:
        assert other_losses == losses
        assert_equal_tensors(other_masks, masks)


@every_kind
def test_what_a_run_saves_goes_to_transformers_and_back_bit_by_bit(
    transformers: Any, kind: str, tmp_path: Path
) -> None:
    make(transformers, kind, tmp_path / "start")
    config = config_from(tmp_path / "start", pruning={"sparsity": 0.7})
    model = ours_from(tmp_path / "start")
    masters = train_and_save((2, 1), model, config, tmp_path / "ours")

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )

    assert not any(report.values()), report
    state = theirs.state_dict()
    for name, master in masters.items():
        assert torch.equal(state[LLAMA.named(name)], master), name
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    start = ours_from(tmp_path / "theirs").start
    assert start is not None
    again = {name: start.read(name) for name in masters}
    assert_equal_tensors({name: t for name, t in again.items() if t is not None}, masters)


@pytest.mark.parametrize("kind", ["llama", "llama 3", "mistral", "qwen 2", "qwen 3"])
def test_a_model_that_began_at_no_folder_is_loaded_too_and_generates(
    transformers: Any, kind: str, tmp_path: Path
) -> None:
    make(transformers, kind, tmp_path / "start")
    settings = config_from(tmp_path / "start").model.model_dump()
    config = config_from(tmp_path, model={**settings, "from": None}, train={"steps": 1})
    model = named_model(made_in_python(config, "tiny"))
    train_and_save((1, 1), model, config, tmp_path / "ours", trained=True)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()

    written = theirs.generate(tokens()[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert written.shape == (3, 7)
    assert torch.equal(written[:, 4], hf_logits(theirs)[:, 3].argmax(-1))


def test_files_of_the_tokenizer_come_along(transformers: Any, tmp_path: Path) -> None:
    make(transformers, "llama", tmp_path / "start")
    (tmp_path / "start" / "tokenizer.json").write_text('{"some": "tokens"}')
    generation = (tmp_path / "start" / "generation_config.json").read_bytes()
    config = config_from(tmp_path / "start", train={"steps": 1})

    train_and_save((1, 1), ours_from(tmp_path / "start"), config, tmp_path / "ours")

    assert (tmp_path / "ours" / "tokenizer.json").read_text() == '{"some": "tokens"}'
    assert (tmp_path / "ours" / "generation_config.json").read_bytes() == generation
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    theirs = json.loads((tmp_path / "start" / "config.json").read_text())
    assert ours == {**theirs, "dtype": "float32"}


def test_names_of_files_of_the_body_alone_and_old_buffers_are_known(
    transformers: Any, tmp_path: Path
) -> None:
    theirs = make(transformers, "llama tied", tmp_path)
    state = dict(theirs.model.state_dict())
    state["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    write_safetensors(tmp_path / "model.safetensors", state)

    start = ours_from(tmp_path).start

    assert start is not None
    read = start.read("block1.attention.o.weight")
    assert read is not None
    assert torch.equal(read, theirs.model.layers[1].self_attn.o_proj.weight)


def test_weights_that_are_missing_or_too_many_are_named(transformers: Any, tmp_path: Path) -> None:
    theirs = make(transformers, "qwen 2", tmp_path)
    state: dict[str, Tensor] = dict(theirs.state_dict())
    file = tmp_path / "model.safetensors"

    bias = state.pop("model.layers.1.self_attn.k_proj.bias")
    write_safetensors(file, state)
    with pytest.raises(DataError) as missing:
        ours_from(tmp_path)
    state["model.layers.1.self_attn.k_proj.bias"] = bias
    state["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(40)
    write_safetensors(file, state)
    with pytest.raises(DataError) as spare:
        ours_from(tmp_path)

    assert str(missing.value) == (
        f"{file}: has no tensor 'model.layers.1.self_attn.k_proj.bias', which is "
        "block1.attention.k.bias of the model; take the file of a llama model"
    )
    assert "holds 'model.layers.1.self_attn.o_proj.bias', which the model lacks" in str(spare.value)


def test_weights_beside_other_settings_are_refused(transformers: Any, tmp_path: Path) -> None:
    make(transformers, "llama", tmp_path)
    settings = config_from(tmp_path).model.model_dump()
    other = {**settings, "from": None, "weights": str(tmp_path), "rope_theta": 5.0}

    with pytest.raises(ConfigError) as told:
        named_model(made_in_python(config_from(tmp_path, model=other), "tiny"))

    assert str(told.value) == (
        f"{tmp_path}/config.json: the checkpoint is not of model.rope_theta 5.0; set "
        "model.rope_theta to 10000.0"
    )


@every_kind
def test_every_parameter_has_a_name_there(transformers: Any, kind: str, tmp_path: Path) -> None:
    theirs = make(transformers, kind, tmp_path)
    ours = survey(ours_from(tmp_path)).shapes

    there = {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}
    assert {LLAMA.named(name): shape for name, shape in ours.items()} == there
