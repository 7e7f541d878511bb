"""Models of Hugging Face's transformers, both ways: the same logits, losses and bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import lines_beside, refusal
from support.exhaustive import by_default
from support.hf import SMALL_LLAMA, STEPS, hf_logits, hf_losses, our_logits, tokens
from support.images import assert_equal_tensors, write_safetensors
from support.resuming import train_and_save
from support.runs import VOCABULARY, tiny_config, token_data, train_in_process
from torch import Tensor

from axsparse.config.hf_config import config_json
from axsparse.config.load import configure, load_config, made_in_python
from axsparse.config.model_config import Family
from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.start_weights import open_weights
from axsparse.models.survey import survey
from axsparse.models.zoo.hf_models import GPT2, LLAMA, HfFamily, hf_model
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import AxsparseError, ConfigError

LOGITS_RTOL = 1e-5
LOSS_RTOL = 1e-6
"""Seen: 2e-7. The squares of the norm and the gradients of a tied weight are added in another
order, which every AdamW step carries on; GPT-2's GELU is made of elementary functions there."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 20,
}
"""Some of the wavelengths of a head of 10 are long for it, some short, some in between."""
GPT2_SIZES = {
    **{"vocab_size": VOCABULARY, "n_positions": 12, "n_embd": 32, "n_layer": 2, "n_head": 2},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
LLAMA_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 24,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt 2": ("GPT2LMHeadModel", {"activation_function": "gelu_new"}),
    "gpt 2 untied": ("GPT2LMHeadModel", {"tie_word_embeddings": False}),
    "llama": ("LlamaForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama 3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "head_dim": 10}),
    "mistral": (
        "MistralForCausalLM",
        {"head_dim": 6, "sliding_window": None, "num_key_value_heads": 1},
    ),
    "qwen 2": ("Qwen2ForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen 3": (
        "Qwen3ForCausalLM",
        {"head_dim": 18, "rope_parameters": {"rope_theta": 50.0}},
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def family_of(kind: str) -> HfFamily:
    return GPT2 if kind.startswith("gpt") else LLAMA


def make(transformers: Any, kind: str, path: Path) -> Any:
    """A small model of transformers of random parameters, biases and norms included; saved."""
    name, settings = KINDS[kind]
    sizes = GPT2_SIZES if kind.startswith("gpt") else LLAMA_SIZES
    model_class = getattr(transformers, name)
    ends = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**{**sizes, **ends, **settings}))
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


def ours_from(path: Path, **sections: Any) -> Model:
    return named_model(made_in_python(config_from(path, **sections), "tiny"))


def start_of(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Start values of a model that begins at a folder."""
    start = ours_from(path).start
    assert start is not None
    read = {name: start.read(name) for name in names}
    return {name: tensor for name, tensor in read.items() if tensor is not None}


@every_kind
def test_names_logits_and_losses_are_those_of_transformers_in_every_pipeline(
    transformers: Any, kind: str, tmp_path: Path
) -> None:
    theirs = make(transformers, kind, tmp_path)
    config, model, family = config_from(tmp_path), ours_from(tmp_path), family_of(kind)

    there = {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}
    ours = {
        family.named(name): tuple(family.turned(name, torch.empty(shape)).shape)
        for name, shape in survey(model).shapes.items()
    }
    assert ours == there
    logits = our_logits(model, config, tokens())
    assert logits.abs().max() > 1
    error = (logits - hf_logits(theirs)).abs().max() / logits.abs().max()
    assert error < LOGITS_RTOL
    expected = list(hf_losses(theirs, config))
    assert expected[-1] < expected[0] - 0.1
    first = None
    for g_inter in (1, 4):
        for _, trace in train_in_process(g_inter, 1, model, config, token_data()):
            assert trace.losses == pytest.approx(expected, rel=LOSS_RTOL)
            first = first or trace.losses
            assert trace.losses == first, g_inter


def test_with_torchs_gelu_on_both_sides_logits_are_bitwise_the_same(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        KINDS, "gpt 2", ("GPT2LMHeadModel", {"activation_function": "gelu_pytorch_tanh"})
    )
    theirs = make(transformers, "gpt 2", tmp_path)

    ours = our_logits(ours_from(tmp_path), config_from(tmp_path), tokens(), 2)

    assert torch.equal(ours, hf_logits(theirs))


@pytest.mark.parametrize("method", by_default(["sparsegpt"], ["sparsegpt", "wanda", "magnitude"]))
@pytest.mark.parametrize("kind", ["gpt 2", "llama 3", "mistral", "qwen 2"])
def test_masks_and_losses_of_pruned_models_are_the_same_in_every_pipeline(
    transformers: Any, kind: str, method: str, tmp_path: Path
) -> None:
    make(transformers, kind, tmp_path)
    pruning = {"method": method, "sparsity": 0.6, "calibration_samples": 8}
    config = config_from(tmp_path, pruning=pruning, train={"steps": 2})
    model = ours_from(tmp_path)

    found = []
    for g_inter in (1, 3, 4):
        masks: dict[str, Tensor] = {}
        runs = train_in_process(g_inter, 1, model, config, token_data())
        for trainer, _ in runs:
            for layer in trainer.parts.layers:
                pruned = (t for t in layer.state.owned if t.kept < t.parameter.numel())
                masks |= {tensor.name: tensor.positions() for tensor in pruned}
        found.append((runs[0][1].losses, masks))

    losses, masks = found[0]
    assert len(masks) == (8 if kind == "gpt 2" else 14)
    for other_losses, other_masks in found[1:]:
        assert other_losses == losses
        assert_equal_tensors(other_masks, masks)


@every_kind
def test_what_a_run_saves_goes_to_transformers_and_back_bit_by_bit(
    transformers: Any, kind: str, tmp_path: Path
) -> None:
    make(transformers, kind, tmp_path / "start")
    config = config_from(
        tmp_path / "start",
        pruning={"sparsity": 0.7},
        precision="bf16",
        samo={"shard_optimizer": True},
        batch={"microbatch_size": 3},
        train={"steps": 2},
    )
    model, family = ours_from(tmp_path / "start"), family_of(kind)
    masters = train_and_save((2, 2), model, config, tmp_path / "ours")

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )

    assert not any(report.values()), report
    state = theirs.state_dict()
    for name, master in masters.items():
        assert torch.equal(state[family.named(name)], family.turned(name, master)), name
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    assert_equal_tensors(start_of(tmp_path / "theirs", list(masters)), masters)
    logits = our_logits(ours_from(tmp_path / "ours"), config_from(tmp_path / "ours"), tokens())
    torch.testing.assert_close(logits, hf_logits(theirs.eval()), rtol=LOGITS_RTOL, atol=3e-6)


@pytest.mark.parametrize("kind", ["gpt 2", "llama 3", "mistral", "qwen 2", "qwen 3"])
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


def test_weights_of_bf16_and_files_of_the_tokenizer_come_along(
    transformers: Any, tmp_path: Path
) -> None:
    make(transformers, "llama", tmp_path / "start")
    (tmp_path / "start" / "tokenizer.json").write_text('{"some": "tokens"}')
    generation = (tmp_path / "start" / "generation_config.json").read_bytes()
    config = config_from(tmp_path / "start", precision="bf16", train={"steps": 1})

    masters = train_and_save(
        (1, 1), ours_from(tmp_path / "start"), config, tmp_path / "ours", trained=True
    )

    assert (tmp_path / "ours" / "tokenizer.json").read_text() == '{"some": "tokens"}'
    assert (tmp_path / "ours" / "generation_config.json").read_bytes() == generation
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    theirs = json.loads((tmp_path / "start" / "config.json").read_text())
    assert ours == {**theirs, "dtype": "bfloat16"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert torch.equal(loaded.lm_head.weight, masters["head.weight"].bfloat16())


def test_settings_of_a_gpt_are_those_that_transformers_makes(transformers: Any) -> None:
    model = tiny_config(model={"dropout": 0.25, "tie_embeddings": False}).model
    ours = config_json(model, "float32")

    theirs = transformers.GPT2Config(**ours).to_dict()

    default = transformers.GPT2Config().to_dict()
    assert {name: theirs[name] for name in ours if name != "dtype"} == {
        name: value for name, value in ours.items() if name != "dtype"
    }
    assert ours.keys() <= default.keys()
    assert ours["resid_pdrop"] == ours["embd_pdrop"] == 0.25
    assert ours["attn_pdrop"] == 0.0


# -- files ----------------------------------------------------------------------------------

GPT: Family = tiny_config().model
OLD_BUFFERS = {
    "h": {"h.0.attn.bias": torch.ones(1, 1, 12, 12), "h.1.attn.masked_bias": torch.tensor(-1e4)},
    "layers": {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
}


def saved(
    folder: Path, model: Family, changed: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Tensor]:
    """Write a folder of transformers with some tensors and settings changed; returns the tensors.

    A tensor that is None is left out.
    """
    found = hf_model(model)
    assert found is not None
    family, surveyed = found
    generator = torch.Generator().manual_seed(4)
    ours = {name: torch.rand(shape, generator=generator) for name, shape in surveyed.shapes.items()}
    state = {family.named(name): family.turned(name, tensor) for name, tensor in ours.items()}
    state = {name: t for name, t in {**state, **(changed or {})}.items() if t is not None}
    write_safetensors(folder / "model.safetensors", state)
    known = config_json(model, "float32") | settings
    (folder / "config.json").write_text(json.dumps(known))
    return ours


@pytest.mark.parametrize("model", [GPT, SMALL_LLAMA], ids=["gpt", "llama"])
def test_files_of_the_body_alone_and_with_old_buffers_are_read(
    model: Family, tmp_path: Path
) -> None:
    found = hf_model(model.model_copy(update={"tie_embeddings": True}))
    assert found is not None
    family, _ = found
    model = model.model_copy(update={"tie_embeddings": True})
    (tmp_path / "whole").mkdir()
    ours = saved(tmp_path / "whole", model)
    (tmp_path / "body").mkdir()
    body = {
        family.named(name, prefix=""): family.turned(name, tensor) for name, tensor in ours.items()
    }
    write_safetensors(
        tmp_path / "body" / "model.safetensors", {**body, **OLD_BUFFERS[family.blocks]}
    )
    text = (tmp_path / "whole" / "config.json").read_text()
    (tmp_path / "body" / "config.json").write_text(text)

    for path in ("whole", "body"):
        assert_equal_tensors(start_of(tmp_path / path, list(ours)), ours)


def beside(folder: Path, **model: Any) -> dict[str, Any]:
    """The settings of a model that starts at a folder and does not follow its config.json."""
    return {"model": {**GPT.model_dump(), "weights": str(folder), **model, "from": None}}


def test_settings_that_a_folder_lacks_or_no_settings_at_all_are_taken(tmp_path: Path) -> None:
    saved(tmp_path, GPT)
    settings = json.loads((tmp_path / "config.json").read_text())
    for key in ("n_inner", "layer_norm_epsilon", "scale_attn_weights", "add_cross_attention"):
        del settings[key]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ours_from(tmp_path, **beside(tmp_path))
    (tmp_path / "config.json").unlink()
    assert survey(ours_from(tmp_path, **beside(tmp_path))).start.startswith("model.safetensors ")


def cut_short(folder: Path) -> None:
    saved(folder, GPT)
    with (folder / "model.safetensors").open("r+b") as cut:
        cut.truncate((folder / "model.safetensors").stat().st_size - 1)


def configured(folder: Path, text: str) -> None:
    saved(folder, GPT)
    (folder / "config.json").write_text(text)


QKV, POSITIONS = "transformer.h.1.attn.c_attn.weight", "transformer.wpe.weight"
CROSS = "transformer.h.0.crossattention.c_attn.weight"
OTHER_SETTINGS: list[tuple[str, Any]] = [
    ("model_type", "llama"),
    ("activation_function", "relu"),
    ("activation_function", ["gelu"]),
    ("layer_norm_epsilon", 1e-6),
    ("scale_attn_weights", False),
    ("scale_attn_by_inverse_layer_idx", True),
    ("add_cross_attention", True),
    ("n_inner", 64),
]
OTHER_TENSORS: list[tuple[str, dict[str, Any]]] = [
    ("a tensor less", {QKV: None}),
    ("another shape, turned", {QKV: torch.zeros(32, 97)}),
    ("another shape", {POSITIONS: torch.zeros(12, 31)}),
    ("more dimensions", {QKV: torch.zeros(32, 3, 32)}),
    ("two tensors more", {CROSS: torch.zeros(1), "score.weight": torch.zeros(1)}),
    ("a bias more", {"transformer.h.0.attn.c_attn.biases": torch.zeros(1)}),
    ("another head", {"lm_head.weight": torch.ones(VOCABULARY, 32)}),
]
Damage = Callable[[Path], object]
WRONG: dict[str, Damage] = {
    **{
        f"{key} {value}": partial(saved, model=GPT, **{key: value}) for key, value in OTHER_SETTINGS
    },
    "other sizes": partial(saved, model=GPT, n_head=4, n_layer=12, tie_word_embeddings=False),
    **{case: partial(saved, model=GPT, changed=changed) for case, changed in OTHER_TENSORS},
    "cut short": cut_short,
    "half a config.json": partial(configured, text="{"),
    "a list": partial(configured, text="[]"),
}


@pytest.mark.parametrize(("case", "line"), lines_beside(__file__).items())
def test_folders_of_other_models_and_damaged_ones_are_refused(
    case: str, line: str, tmp_path: Path
) -> None:
    WRONG[case](tmp_path)

    assert refusal(lambda: ours_from(tmp_path, **beside(tmp_path)), AxsparseError, tmp_path) == line


def test_settings_of_a_llama_that_are_not_those_of_its_folder_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, SMALL_LLAMA)
    settings = {**SMALL_LLAMA.model_dump(), "weights": str(tmp_path), "from": None}
    settings["rope_theta"] = 5.0

    with pytest.raises(
        ConfigError, match=r"of model\.rope_theta 5\.0; set model\.rope_theta to 10"
    ):
        ours_from(tmp_path, model=settings)


def test_files_of_our_own_names_are_read_whatever_lies_beside(tmp_path: Path) -> None:
    ours = saved(tmp_path, GPT, n_head=16)
    file = write_safetensors(tmp_path / "ours.safetensors", ours)

    start = ours_from(file, **beside(file)).start

    assert start is not None
    assert_equal_tensors({name: open_weights(file).read(name) for name in ours}, ours)
    read = start.read("block1.fc1.weight")
    assert read is not None
    assert torch.equal(read, ours["block1.fc1.weight"])


def test_a_folder_says_what_the_model_is(tmp_path: Path) -> None:
    ours = saved(tmp_path, GPT.model_copy(update={"tie_embeddings": False}))

    loaded = load_config(None, [f"model.from={tmp_path}", "data.sequence_length=8"])

    assert loaded.config.model.name == "gpt"
    model = named_model(loaded)
    assert model.ties == []
    assert model.start is not None
    read = model.start.read("head.weight")
    assert read is not None
    assert torch.equal(read, ours["head.weight"])
