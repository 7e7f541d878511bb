"""GPT-2 of Hugging Face's transformers, both ways: the same logits, losses and bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf import STEPS, hf_logits, hf_losses, our_logits, tokens
from support.images import assert_equal_tensors, write_safetensors
from support.runs import VOCABULARY, tiny_config, tiny_gpt, token_data, train_in_process
from support.saved import train_and_save
from torch import Tensor

from axsparse.config.hf_config import config_json
from axsparse.config.load import load_config
from axsparse.config.model_config import GptConfig, of_family
from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.start_weights import open_weights
from axsparse.models.survey import survey
from axsparse.models.zoo.hf_models import GPT2, start_from_hf
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import ConfigError, DataError

LOGITS_ATOL = 3e-6
"""Tolerance for logits up to 2. transformers computes GELU by elementary functions, which round
differently (seen: 6e-7). With torch's own GELU on both sides the bits are the same."""
LOSS_RTOL = 1e-6
"""Eight roundings of an fp32 loss (seen: 8e-8). Beside the GELU, the two gradients of a tied weight
and the squares of the norm are added in another order, which every AdamW step carries on."""


def make_gpt2(transformers: Any, **settings: Any) -> Any:
    """A GPT-2 of transformers in which all parameters are random, biases and norms included."""
    config = transformers.GPT2Config(
        **{
            "vocab_size": VOCABULARY,
            "n_positions": 12,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | settings
    )
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def dense_config(**sections: Any) -> Config:
    defaults = {
        "pruning": {"sparsity": 0.0},
        "schedule": {"warmup_steps": 0, "decay": "constant"},
        "train": {"steps": STEPS},
    }
    return tiny_config(**{**defaults, **sections})


def ours_from(path: Path, config: Config) -> Model:
    settings = of_family(config.model, GptConfig)
    return start_from_hf(tiny_gpt(config), open_weights(path), settings)


# -- in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("g_inter", [1, 2])
@pytest.mark.parametrize(
    ("activation", "atol"), [("gelu_new", LOGITS_ATOL), ("gelu_pytorch_tanh", 0.0)]
)
def test_logits_are_those_of_transformers(
    transformers: Any, activation: str, atol: float, g_inter: int, tmp_path: Path
) -> None:
    theirs = make_gpt2(transformers, activation_function=activation)
    theirs.save_pretrained(tmp_path)
    config = dense_config(train={"steps": 1})

    ours = our_logits(ours_from(tmp_path, config), config, tokens(), g_inter)

    assert ours.abs().max() > 1
    torch.testing.assert_close(ours, hf_logits(theirs), rtol=0, atol=atol)


def test_files_of_the_body_alone_of_several_shards_and_with_masks_are_read(
    transformers: Any, tmp_path: Path
) -> None:
    theirs = make_gpt2(transformers)
    theirs.save_pretrained(tmp_path / "whole")
    theirs.transformer.save_pretrained(tmp_path / "body")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    state = dict(theirs.transformer.state_dict())
    state["h.0.attn.bias"] = torch.ones(1, 1, 12, 12)
    state["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    write_safetensors(tmp_path / "old.safetensors", state)
    masks = {f"transformer.{name}": tensor for name, tensor in state.items()}
    write_safetensors(tmp_path / "masks.safetensors", masks)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert "wte.weight" in open_weights(tmp_path / "body").shapes
    config = dense_config()
    names = [p.name for layer in survey(tiny_gpt(config)).layers for p in layer.parameters]

    def values(path: str) -> dict[str, Tensor]:
        start = ours_from(tmp_path / path, config).start
        assert start is not None
        read = {name: start.read(name) for name in names if name != "head.weight"}
        return {name: tensor for name, tensor in read.items() if tensor is not None}

    whole = values("whole")
    assert whole.keys() == {*names} - {"head.weight"}
    for path in ("body", "shards", "shards/model.safetensors.index.json", "old.safetensors"):
        assert_equal_tensors(values(path), whole)
    assert_equal_tensors(values("masks.safetensors"), whole)
    turned = theirs.transformer.h[1].mlp.c_fc.weight.detach().t()
    assert torch.equal(whole["block1.fc1.weight"], turned)


@pytest.mark.parametrize("g_inter", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_five_steps_lose_what_transformers_and_torch_lose(
    transformers: Any, tied: bool, g_inter: int, tmp_path: Path
) -> None:
    theirs = make_gpt2(transformers, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    model = {**dense_config().model.model_dump(), "tie_embeddings": tied}
    config = dense_config(model=model, batch={"global_batch_size": 12, "microbatch_size": 4})

    ranks = train_in_process(g_inter, 1, ours_from(tmp_path, config), config, token_data())

    expected = list(hf_losses(theirs, config))
    assert expected[-1] < expected[0] - 0.1
    for _, trace in ranks:
        assert trace.losses == pytest.approx(expected, rel=LOSS_RTOL)


# -- out, and in again ----------------------------------------------------------------------


@pytest.mark.parametrize(("g_inter", "g_data"), [(1, 1), (3, 1), (2, 2)])
def test_what_a_run_saves_is_loaded_by_transformers(
    transformers: Any, g_inter: int, g_data: int, tmp_path: Path
) -> None:
    config = dense_config(
        pruning={"sparsity": 0.8}, precision="bf16", samo={"shard_optimizer": g_data > 1}
    )
    model = tiny_gpt(config)
    masters = train_and_save((g_inter, g_data), model, config, tmp_path / "ours")

    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )

    assert not any(report.values()), report
    state = theirs.state_dict()
    assert torch.equal(state["lm_head.weight"], masters["embed.token.weight"])
    for name, master in masters.items():
        block = name.startswith("block") and master.dim() == 2
        assert torch.equal(state[GPT2.named(name)], master.t() if block else master), name
    # The way back: the next run starts at the file that transformers saves again.
    theirs.save_pretrained(tmp_path / "theirs")
    still = dense_config(
        pruning={"sparsity": 0.8},
        train={"steps": 1},
        optimizer={"learning_rate": 1e-30, "weight_decay": 0.0},
    )
    again = train_and_save((1, 1), ours_from(tmp_path / "theirs", still), still, tmp_path / "again")
    assert_equal_tensors(again, masters)
    logits = our_logits(ours_from(tmp_path / "ours", still), still, tokens())
    torch.testing.assert_close(logits, hf_logits(theirs.eval()), rtol=0, atol=LOGITS_ATOL)


def test_the_weights_of_bf16_are_loaded_by_transformers(transformers: Any, tmp_path: Path) -> None:
    config = dense_config(precision="bf16", train={"steps": 1})
    masters = train_and_save((2, 1), tiny_gpt(config), config, tmp_path / "x", trained=True)

    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "x", dtype="auto")

    embedding = theirs.transformer.wte.weight
    assert torch.equal(embedding, masters["embed.token.weight"].bfloat16())


def test_settings_are_those_that_transformers_makes(transformers: Any) -> None:
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


# -- what is refused ------------------------------------------------------------------------


def saved(tmp_path: Path, changed: dict[str, Any], **settings: Any) -> Path:
    """A folder with some tensors and settings changed; a tensor that is None is left out."""
    config = dense_config()
    state: dict[str, Tensor] = {}
    for layer in survey(tiny_gpt(config)).layers:
        for p in layer.parameters:
            block = p.name.startswith("block") and len(p.shape) == 2
            state[GPT2.named(p.name)] = torch.zeros(p.shape[::-1] if block else p.shape)
    del state["lm_head.weight"]
    state.update(changed)
    write_safetensors(
        tmp_path / "model.safetensors", {k: v for k, v in state.items() if v is not None}
    )
    known = config_json(config.model, "float32") | settings
    (tmp_path / "config.json").write_text(json.dumps(known))
    return tmp_path


def refusal(path: Path, kind: type[Exception] = DataError) -> str:
    with pytest.raises(kind) as told:
        ours_from(path, dense_config())
    return str(told.value)


def test_a_folder_as_it_should_be_is_taken(tmp_path: Path) -> None:
    path = saved(tmp_path, {})
    ours_from(path, dense_config())
    settings = json.loads((path / "config.json").read_text())
    left_out = ("n_inner", "layer_norm_epsilon", "scale_attn_weights", "add_cross_attention")
    for key in left_out:
        del settings[key]
    (path / "config.json").write_text(json.dumps(settings))
    ours_from(path, dense_config())
    (path / "config.json").unlink()
    ours_from(path, dense_config())


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model_type", "llama", 'is "llama", and the GPT here has "gpt2"'),
        (
            "activation_function",
            "relu",
            'is "relu", and the GPT here has "gelu_new" or "gelu_pytorch_tanh" or "gelu_fast"',
        ),
        ("activation_function", ["gelu"], 'is ["gelu"], and the GPT here has "gelu_new" or'),
        ("layer_norm_epsilon", 1e-6, "is 1e-06, and the GPT here has 1e-05"),
        ("scale_attn_weights", False, "is false, and the GPT here has true"),
        ("scale_attn_by_inverse_layer_idx", True, "is true, and the GPT here has false"),
        ("add_cross_attention", True, "is true, and the GPT here has false"),
        ("n_inner", 64, "is 64, and the GPT here has null or 128"),
    ],
)
def test_other_kinds_of_gpt2_are_refused(
    key: str, value: object, told: str, tmp_path: Path
) -> None:
    message = refusal(saved(tmp_path, {}, **{key: value}))

    assert message.startswith(f"{tmp_path}/config.json: {key} {told}")
    assert message.endswith("; take a checkpoint that was trained so")
    if key == "layer_norm_epsilon":
        assert message == (
            f"{tmp_path}/config.json: {key} is 1e-06, and the GPT here has 1e-05; take a "
            "checkpoint that was trained so"
        )


def test_settings_that_are_not_those_of_the_file_are_named_with_the_right_ones(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path, {}, n_head=4, n_layer=12, tie_word_embeddings=False)

    assert refusal(path, ConfigError) == (
        f"{path}/config.json: the checkpoint is not of model.num_layers 2, model.num_heads 2, "
        "model.tie_embeddings true; set model.num_layers to 12, model.num_heads to 4, "
        "model.tie_embeddings to false"
    )


def test_weights_that_are_missing_misshapen_or_too_many_are_named(tmp_path: Path) -> None:
    qkv = "transformer.h.1.attn.c_attn.weight"
    file = tmp_path / "model.safetensors"

    assert refusal(saved(tmp_path, {qkv: None})) == (
        f"{file}: has no tensor {qkv!r}, which is block1.attention.qkv.weight of the model; take "
        "the file of a gpt model"
    )
    assert refusal(saved(tmp_path, {qkv: torch.zeros(32, 97)})) == (
        f"{file}: {qkv!r} has shape (32, 97), which is read as (97, 32), "
        "block1.attention.qkv.weight of the model has (96, 32); make the model's settings those "
        "of the file, or let it begin anew (model.new: [block1.attention.qkv.weight], in Python "
        "new=)"
    )
    assert "'transformer.wpe.weight' has shape (12, 31), embed.position.weight" in refusal(
        saved(tmp_path, {"transformer.wpe.weight": torch.zeros(12, 31)})
    )
    assert "has shape (32, 3, 32), block1.attention.qkv.weight" in refusal(
        saved(tmp_path, {qkv: torch.zeros(32, 3, 32)})
    )
    cross = "transformer.h.0.crossattention.c_attn.weight"
    assert f"holds {cross!r} and 1 more, which the model lacks" in refusal(
        saved(tmp_path, {cross: torch.zeros(1), "score.weight": torch.zeros(1)})
    )
    assert "holds 'transformer.h.0.attn.c_attn.biases', which" in refusal(
        saved(tmp_path, {"transformer.h.0.attn.c_attn.biases": torch.zeros(1)})
    )
    assert "'transformer.wte.weight' and 'lm_head.weight' differ" in refusal(
        saved(tmp_path, {"lm_head.weight": torch.ones(VOCABULARY, 32)})
    )


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {})
    file = path / "model.safetensors"
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 1)

    assert refusal(path) == f"{file}: ends before the last of its tensors; get it anew"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read as JSON (JSONDecodeError); get it anew, or remove it"),
        ("[]", "is list, not settings; get it anew"),
    ],
)
def test_a_broken_configuration_is_told(text: str, told: str, tmp_path: Path) -> None:
    path = saved(tmp_path, {})
    (path / "config.json").write_text(text)

    assert refusal(path) == f"{path}/config.json: {told}"


def test_a_configuration_names_the_folder(tmp_path: Path) -> None:
    path = saved(tmp_path, {})
    settings = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "sequence_length": 12,
        "vocab_size": VOCABULARY,
        "weights": path,
    }
    overrides = [f"model.{name}={value}" for name, value in settings.items()]

    model = named_model(load_config(None, overrides))

    assert survey(model).start.startswith("model.safetensors ")
    with pytest.raises(ConfigError, match=r"config.json: the checkpoint is not of model.num_heads"):
        named_model(load_config(None, [*overrides, "model.num_heads=4"]))


def test_files_of_our_own_names_are_read_whatever_lies_beside(tmp_path: Path) -> None:
    path = saved(tmp_path, {}, n_head=16)
    state = {
        p.name: torch.ones(p.shape)
        for layer in survey(tiny_gpt(dense_config())).layers
        for p in layer.parameters
    }
    file = write_safetensors(path / "ours.safetensors", state)

    start = ours_from(file, dense_config()).start

    assert start is not None
    read = start.read("block1.fc1.weight")
    assert read is not None
    assert torch.equal(read, state["block1.fc1.weight"])


def test_a_folder_says_what_the_model_is(transformers: Any, tmp_path: Path) -> None:
    theirs = make_gpt2(transformers, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)

    loaded = load_config(None, [f"model.from={tmp_path}", "data.sequence_length=8"])
    model = named_model(loaded)

    assert loaded.config.model.name == "gpt"
    assert model.ties == []
    assert model.start is not None
    read = model.start.read("head.weight")
    assert read is not None
    assert torch.equal(read, theirs.lm_head.weight)
