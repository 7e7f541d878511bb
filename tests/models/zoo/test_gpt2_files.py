"""Files of Hugging Face's GPT-2, both ways, and files whose tensors have other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from support.hf import (
    SMALL_LLAMA,
    beside,
    config_from,
    gpt2_folder,
    hf_logits,
    hf_losses,
    our_logits,
    ours_from,
    saved_model,
    small_gpt,
    start_tensors,
    tokens,
)
from support.images import assert_equal_tensors, write_safetensors
from support.resuming import train_and_save
from support.runs import VOCABULARY, tiny_config, token_data, train_in_process

from axsparse.config.hf_config import config_json
from axsparse.models.model_profile import profile
from axsparse.models.start_weights import is_left_over, open_weights
from axsparse.models.zoo.gpt import gpt2_name, turned
from axsparse.models.zoo.hf_models import HfFile
from axsparse.runtime.errors import DataError

LOGITS_RTOL = 1e-5
LOSS_RTOL = 1e-6
"""Seen: 2e-7. The squares of the norm and the gradients of a tied weight are added in another
order, which every AdamW step carries on; GPT-2's GELU is made of elementary functions there."""
GPT2_SIZES = {
    **{"vocab_size": VOCABULARY, "n_positions": 12, "n_embd": 32, "n_layer": 2, "n_head": 2},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt 2": {"activation_function": "gelu_new"},
    "gpt 2 untied": {"tie_word_embeddings": False},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(transformers: Any, kind: str, path: Path) -> Any:
    """A small model of transformers of random parameters, biases and norms included; saved."""
    settings = transformers.GPT2Config(
        **{**GPT2_SIZES, "bos_token_id": None, "eos_token_id": None, **KINDS[kind]}
    )
    return saved_model(transformers, settings, path)


@every_kind
def test_names_logits_and_losses_are_those_of_transformers_in_every_pipeline(
    transformers: Any, kind: str, tmp_path: Path
) -> None:
    theirs = make(transformers, kind, tmp_path)
    config, model = config_from(tmp_path), ours_from(tmp_path)

    there = {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}
    ours = {
        gpt2_name(name): tuple(turned(name, torch.empty(shape)).shape)
        for name, shape in profile(model).shapes.items()
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


@every_kind
def test_what_a_run_saves_goes_to_transformers_and_back_bit_by_bit(
    transformers: Any, kind: str, tmp_path: Path
) -> None:
    first = make(transformers, kind, tmp_path / "start")
    save_model(first, str(tmp_path / "start" / "model.safetensors"))  # a tied weight by the head
    config = config_from(
        tmp_path / "start",
        pruning={"sparsity": 0.7},
        precision="bf16",
        samo={"zero_stage": 1},
        batch={"microbatch_size": 3},
        train={"steps": 2},
    )
    model = ours_from(tmp_path / "start")
    masters = train_and_save((2, 2), model, config, tmp_path / "ours")

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )

    assert not any(report.values()), report
    start, ours = (open_weights(tmp_path / one).shapes for one in ("start", "ours"))
    assert ours == start
    state = theirs.state_dict()
    for name, master in masters.items():
        assert torch.equal(state[gpt2_name(name)], turned(name, master)), name
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    assert_equal_tensors(start_tensors(ours_from(tmp_path / "theirs")), masters)
    logits = our_logits(ours_from(tmp_path / "ours"), config_from(tmp_path / "ours"), tokens())
    torch.testing.assert_close(logits, hf_logits(theirs.eval()), rtol=LOGITS_RTOL, atol=3e-6)


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

GPT = small_gpt()
OLD_BUFFERS = {
    "h.0.attn.bias": torch.ones(1, 1, 12, 12),
    "h.1.attn.masked_bias": torch.tensor(-1e4),
}


def test_files_of_the_body_alone_and_with_old_buffers_are_read(tmp_path: Path) -> None:
    model = GPT.model_copy(update={"tie_embeddings": True})
    (tmp_path / "whole").mkdir()
    ours = gpt2_folder(tmp_path / "whole", model)
    (tmp_path / "body").mkdir()
    body = {gpt2_name(name, prefix=""): turned(name, tensor) for name, tensor in ours.items()}
    write_safetensors(tmp_path / "body" / "model.safetensors", {**body, **OLD_BUFFERS})
    text = (tmp_path / "whole" / "config.json").read_text()
    (tmp_path / "body" / "config.json").write_text(text)

    for path in ("whole", "body"):
        assert_equal_tensors(start_tensors(ours_from(tmp_path / path)), ours)


def test_settings_that_a_folder_lacks_or_no_settings_at_all_are_taken(tmp_path: Path) -> None:
    gpt2_folder(tmp_path, GPT)
    settings = json.loads((tmp_path / "config.json").read_text())
    for key in ("n_inner", "layer_norm_epsilon", "scale_attn_weights", "add_cross_attention"):
        del settings[key]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ours_from(tmp_path, **beside(tmp_path))
    (tmp_path / "config.json").unlink()
    assert profile(ours_from(tmp_path, **beside(tmp_path))).start.startswith("model.safetensors ")


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


ATTENTION = "model.layers.0.self_attn"
NEEDED = {
    f"{ATTENTION}.bias": (12,),  # of a layer, and trained
    f"{ATTENTION}.q_proj.bias": (2, 2),
    "model.embed_positions.weight": (3, 4),
    "v_head.summary.weight": (3, 4),
}
LEFT_OVER = {
    f"{ATTENTION}.bias": (1, 1, 12, 12),
    f"{ATTENTION}.masked_bias": (),
    f"{ATTENTION}.rotary_emb.inv_freq": (4,),
    f"{ATTENTION}.rotary_emb.cos_cached": (3, 4),
    "transformer.h.0.attn.causal_mask": (3, 4),
    "decoder.version": (1,),
    "model.vision_tower.embeddings.position_ids": (3, 4),
    "model.embed_positions.weights": (3, 4),
}


def test_buffers_of_older_versions_are_known_by_their_names_and_shapes() -> None:
    for known, shapes in ((False, NEEDED), (True, LEFT_OVER)):
        for name in shapes:
            assert is_left_over(shapes, name) == known, name
