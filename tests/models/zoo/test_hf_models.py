"""Models of Hugging Face's transformers by its own modules: every family next to transformers
alone.

A family's test goes all the way: logits, five steps, stages, recomputation, pruning, the exported
folder and its text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.commands import refusal
from support.exhaustive import by_default
from support.hf import (
    FAMILIES,
    SMALL_LLAMA,
    STEPS,
    config_from,
    hf_logits,
    hf_losses,
    our_logits,
    saved_model,
    saved_with_pictures,
    small_llama,
    start_tensors,
    tokens,
    write_llama,
)
from support.images import write_safetensors
from support.resuming import ran, train_and_save
from support.runs import (
    VOCABULARY,
    assert_bitwise,
    summed_loss,
    tiny_config,
    token_data,
    train_in_process,
)
from torch import Tensor, nn

from axsparse.config.load import configure
from axsparse.config.model_config import HfConfig
from axsparse.config.schema import PruningConfig
from axsparse.data.dataset import TokenDataset
from axsparse.models import model_profile
from axsparse.models.layer import Layer, Model, as_tuple
from axsparse.models.layer_cost import Tracer
from axsparse.models.model_profile import profile
from axsparse.models.sequential import filled_modules
from axsparse.models.start_weights import open_weights
from axsparse.models.zoo.hf_experts import mark_what_multiplies
from axsparse.models.zoo.hf_models import Part, SplitModel
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import AxsparseError, ConfigError, MissingInputError
from axsparse.training.checkpoint.verification import checkpoint_of
from axsparse.training.export import export

LOSS_RTOL = 2e-6
"""The squares of the norm and the gradients of a tied weight are added in another order, which
every AdamW step carries on."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ALONE = FAMILIES["alone"]
USUAL = ("llama", "gpt_neox")
"""Those that are run by default; a GPT-NeoX has its head by another name, `embed_out`."""


def make(transformers: Any, family: str, path: Path, **changed: Any) -> Any:
    """A small model of a family with random parameters, in a folder."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    return saved_model(transformers, kind(**{**SIZES, **ALONE[family], **changed}), path)


def settings_of(folder: Path, family: str, **sections: Any) -> Any:
    """A configuration that begins at a folder, with enough layers for three stages."""
    longest = {} if family not in ("bloom", "mpt") else {"sequence_length": 24}
    return config_from(folder, model={"name": "hf", "from": str(folder), **longest}, **sections)


@pytest.mark.parametrize("family", by_default(USUAL, ALONE))
def test_a_family_computes_trains_and_writes_as_transformers_does(
    transformers: Any, family: str, tmp_path: Path
) -> None:
    theirs = make(transformers, family, tmp_path / "start")
    config = settings_of(tmp_path / "start", family)
    model, data = named_model(config), token_data()

    assert torch.equal(our_logits(model, config, tokens()), hf_logits(theirs))
    [(_, reference)] = train_in_process(1, 1, model, config, data)
    for g_inter in (2, 3):
        for _, trace in train_in_process(g_inter, 1, model, config, data):
            assert_bitwise(trace, reference)

    # Pruned, cut in three, with backwards in two parts and layers computed again.
    pruned = settings_of(tmp_path / "start", family, pruning={"sparsity": 0.9})
    other = settings_of(
        tmp_path / "start",
        family,
        pruning={"sparsity": 0.9},
        pipeline={"checkpoint_activations": 1, "split_backward": True},
    )
    [(trainer, reference_pruned)] = train_in_process(1, 1, model, pruned, data)
    states = [state for layer in trainer.layers for state in layer.state.owned]
    matrices = [one for one in states if one.kept < one.parameter.numel()]
    names = [one.name for one in matrices]
    assert len(matrices) >= 3 * 4
    assert not any("router" in name or "mlp.gate.weight" in name for name in names)
    assert ("experts" in str(list(theirs.state_dict()))) == ("experts" in str(names))
    for one in matrices:
        assert one.kept == pytest.approx(0.1 * one.parameter.numel(), rel=0.03, abs=1), one.name
    for _, trace in train_in_process(3, 1, model, other, data):
        assert_bitwise(trace, reference_pruned)

    masters = train_and_save((2, 1), model, pruned, tmp_path / "ours")
    out, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    start, ours = (open_weights(tmp_path / one).shapes for one in ("start", "ours"))
    assert ours == start
    state = out.state_dict()
    for name in masters.keys() & state.keys():  # A file has no buffers that are computed.
        assert torch.equal(state[name], masters[name]), name
    again = settings_of(tmp_path / "ours", family)
    logits = our_logits(named_model(again), again, tokens())
    assert torch.equal(logits, hf_logits(out.eval()))
    assert torch.equal(logits, hf_logits(trainer.model()))

    # Training changes the model of transformers, so that it comes last.
    expected = list(hf_losses(theirs, config))
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.05
    assert reference.losses == pytest.approx(expected, rel=LOSS_RTOL)


# -- documents ------------------------------------------------------------------------------


def separated_data() -> TokenDataset:
    """Samples of 16 tokens, most of them of several documents, which end with token 0."""
    words = np.random.default_rng(4).integers(0, 8, 40 * 16 + 1, dtype=np.uint8)
    return TokenDataset("separated", "0", VOCABULARY, words, 16, separator=0)


@pytest.mark.parametrize(
    "family", by_default(["gemma2"], ["llama", "gemma2", "gpt2", "qwen3", "gpt_neox", "cohere2"])
)
def test_a_document_among_others_is_read_as_if_it_were_alone(
    transformers: Any, family: str, tmp_path: Path
) -> None:
    theirs = make(transformers, family, tmp_path)
    config = settings_of(
        tmp_path, family, data={"sequence_length": 16, "intra_document_attention": True}
    )
    model = named_model(config)
    modules = filled_modules(model, profile(model).ties, start_tensors(model))
    (samples, starts), _ = separated_data().read(np.arange(6))

    with torch.no_grad():
        # Another microbatch before it, of the same shape, has borders of its own.
        before: tuple[Tensor, ...] = (samples, torch.zeros_like(starts))
        for name, module in modules.items():
            before = as_tuple(name, module(*before))
        flow: tuple[Tensor, ...] = (samples, starts)
        for name, module in modules.items():
            flow = as_tuple(name, module(*flow))
        packed = F.linear(*flow) if len(flow) == 2 else flow[0]
        documents = 0
        for row, begins in enumerate(starts.tolist()):
            for begin in sorted(set(begins)):
                end = begin + begins.count(begin)
                alone = theirs(samples[row : row + 1, begin:end]).logits
                torch.testing.assert_close(packed[row : row + 1, begin:end], alone)
                documents += 1
        assert documents > 12
        assert not torch.allclose(packed, theirs(samples).logits, atol=1e-3)


def test_a_model_that_is_its_own_teacher_learns_nothing(transformers: Any, tmp_path: Path) -> None:
    """Also of logits that a head has changed, and in documents of their own."""
    make(transformers, "gemma2", tmp_path)
    data: dict[str, Any] = {"sequence_length": 16, "intra_document_attention": True}
    train = {"steps": 2, "teacher": str(tmp_path)}
    config = settings_of(tmp_path, "gemma2", data=data, train=train)

    runs = [
        train_in_process(stages, 1, named_model(config), config, separated_data())
        for stages in (1, 3)
    ]

    [(_, first)] = runs[0]
    for _, trace in runs[1]:
        assert_bitwise(trace, first)
    assert abs(first.losses[0]) < 1e-5


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "mixtral": ({"num_local_experts": 4}, {"mlp.gate"}),
    "qwen2_moe": (EXPERTS, {"mlp.gate", "mlp.shared_expert_gate"}),
    "afmoe": ({**EXPERTS, "num_dense_layers": 0, "num_shared_experts": 1}, {"mlp.router.gate"}),
    "hunyuan_v1_moe": ({**EXPERTS, "head_dim": 12, "moe_topk": 2}, {"mlp.gate.wg"}),
    "gemma4_text": (
        {**EXPERTS, "enable_moe_block": True, "top_k_experts": 2, "head_dim": 12},
        {"router.proj"},
    ),
    "zaya": (
        {**EXPERTS, "num_experts_per_tok": 1, "head_dim": 12, "router_hidden_size": 12},
        {
            *("mlp.gate.down_proj", "mlp.gate.router_mlp.fc1", "mlp.gate.router_mlp.fc2"),
            *("mlp.gate.router_mlp.out_proj", "self_attn.qkv_proj.conv_qk_depthwise"),
        },
    ),
    "longcat_flash": (
        {
            **{"n_routed_experts": 4, "zero_expert_num": 4, "moe_topk": 2, "num_layers": 3},
            **{"ffn_hidden_size": 20, "expert_ffn_hidden_size": 16},
        },
        {"mlp.router.classifier", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    ),
}
"""Mixtures of experts, and their matrices that stay dense."""


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_stay_dense_and_experts_are_pruned(transformers: Any, family: str) -> None:
    changed, dense = ROUTERS[family]
    settings = transformers.AutoConfig.for_model(family, **{**SIZES, **changed})
    with torch.device("meta"):
        layers = transformers.AutoModelForCausalLM.from_config(settings).model.layers

    mark_what_multiplies(layers)

    profiled = profile(Model([Layer("layers", lambda: layers)], summed_loss))
    found = {p.name for p in profiled.layers[0].parameters if len(p.shape) > 1 and not p.multiplies}
    assert {name.split(".", 2)[2].removesuffix(".weight") for name in found} == dense


def test_plans_count_the_mask_of_documents() -> None:
    run_on, apart = (
        profile(small_llama(64, separate=separate), torch.bfloat16).layers[1].activations
        for separate in (False, True)
    )

    assert run_on is not None and apart is not None
    assert apart.saved - run_on.saved >= 2 * 64 * 64
    assert apart.outputs - run_on.outputs == 4 * 64


def test_models_that_do_not_tell_documents_apart_are_refused(
    transformers: Any, tmp_path: Path
) -> None:
    for family in ("opt", "falcon", "bloom", "gpt_oss"):
        make(transformers, family, tmp_path / family)
        config = settings_of(tmp_path / family, family, data={"intra_document_attention": True})
        with pytest.raises(
            ConfigError, match=r"^data\.intra_document_attention: true, but the model's"
        ):
            named_model(config)


def test_frequencies_that_older_versions_saved_change_nothing(tmp_path: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    traces = []
    for more in ({}, old):
        weights = write_llama(tmp_path)
        write_safetensors(tmp_path / "model.safetensors", weights | more)
        config = config_from(tmp_path)
        [(_, trace)] = train_in_process(1, 1, named_model(config), config, token_data())
        traces.append(trace)

    assert_bitwise(*traces)


# -- start values and costs -----------------------------------------------------------------


@pytest.mark.parametrize("family", by_default(["gemma3", "llava_next"], FAMILIES["pictures"]))
def test_texts_mean_to_a_text_model_what_they_mean_to_the_model_around_it(
    transformers: Any, family: str, tmp_path: Path
) -> None:
    saved_with_pictures(transformers, family, tmp_path)
    kind = transformers.AutoModelForImageTextToText
    theirs = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    config = config_from(tmp_path)

    for stages in (1, 2):
        found = our_logits(named_model(config), config, tokens(), stages)
        assert torch.equal(found, hf_logits(theirs))


@pytest.mark.parametrize("family", ["mixtral", "gemma3"])
def test_a_folder_in_the_names_of_the_model_goes_out_in_them(
    transformers: Any, family: str, tmp_path: Path
) -> None:
    """Experts in one tensor, and a text model's path in the model around it, are published in other
    names, which some programs do not save. A buffer that older versions saved stays, too, where
    nobody but the model around it reads it."""
    if family in ALONE:
        theirs = make(transformers, family, tmp_path / "published")
    else:
        theirs = saved_with_pictures(transformers, family, tmp_path / "published")
    theirs.save_pretrained(tmp_path / "start", save_original_format=False)
    if family == "gemma3":
        file = tmp_path / "start" / "model.safetensors"
        positions = {"model.vision_tower.embeddings.position_ids": torch.arange(4)[None]}
        save_file(load_file(file) | positions, file, {"format": "pt"})
    config = config_from(tmp_path / "start")

    train_and_save((1, 1), named_model(config), config, tmp_path / "ours")

    published, start, ours = (
        open_weights(tmp_path / one).shapes for one in ("published", "start", "ours")
    )
    assert ours == start != published


def test_what_a_model_computes_of_its_settings_is_rounded_in_no_run_in_fp32(
    transformers: Any, tmp_path: Path
) -> None:
    """Such as the scale of Gemma's embedding, of a folder in bf16."""
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
    settings = transformers.AutoConfig.for_model("gemma", **sizes, **heads)
    saved_model(transformers, settings, tmp_path, torch.bfloat16)

    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        config = config_from(tmp_path, precision=precision)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        ours = our_logits(named_model(config), config, tokens())
        assert torch.equal(ours, hf_logits(theirs).to(ours.dtype)), precision


def test_layers_that_share_keys_and_values_are_refused(transformers: Any, tmp_path: Path) -> None:
    """Gemma 4 by another number of layers of its own."""
    text = {
        **{**FAMILIES["pictures"]["gemma4"]["text_config"], "num_hidden_layers": 4},
        **{"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    }
    settings = transformers.AutoConfig.for_model("gemma4_text", **text)
    saved_model(transformers, settings, tmp_path)

    with pytest.raises(AxsparseError, match="cannot be cut into layers") as caught:
        profile(named_model(config_from(tmp_path)))
    assert "\n" not in str(caught.value)


def test_to_someone_who_made_no_function_none_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(split: SplitModel, part: Part) -> nn.Module:
        raise ValueError("no memory")

    fail.__module__ = SplitModel.build.__module__
    monkeypatch.setattr(SplitModel, "build", fail)

    with pytest.raises(ConfigError) as caught:
        profile(small_llama())
    assert str(caught.value) == "layer model.embed_tokens: its build raised ValueError: no memory"


def test_buffers_that_are_too_large_to_be_computed_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("axsparse.models.zoo.hf_models.MOST_COMPUTED", 3)

    with pytest.raises(ConfigError, match=r"^model\.hf: buffer .* has 4 entries, more than the 3 "):
        small_llama()


@pytest.mark.parametrize("tied", by_default([True], [False, True]))
def test_a_model_without_a_folder_starts_as_transformers_would_in_every_pipeline(
    tied: bool,
) -> None:
    model = small_llama(tie_word_embeddings=tied)
    config = tiny_config(model=SMALL_LLAMA, train={"steps": 2})

    [(_, reference)] = train_in_process(1, 1, model, config, token_data())
    for _, trace in train_in_process(3, 1, model, config, token_data()):
        assert_bitwise(trace, reference)

    found: dict[str, Tensor] = {}
    train_in_process(
        1,
        1,
        small_llama(tie_word_embeddings=tied, initializer_range=0.5),
        config.model_copy(update={"pruning": PruningConfig(sparsity=0.0)}),
        token_data(),
        before=lambda trainer: found.update(trainer.state_dict() or {}),
    )
    embedding, norm = found["model.embed_tokens.weight"], found["model.norm.weight"]
    assert embedding.std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(norm, torch.ones_like(norm))


@pytest.mark.parametrize("family", by_default(["llama", "smollm3"], ALONE))
def test_a_layer_like_the_one_before_is_run_once_with_the_costs_of_each(
    transformers: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    theirs = {**kind(**{**SIZES, **ALONE[family]}).to_dict(), "num_hidden_layers": 3}
    config = tiny_config(model={"name": "hf", "hf": theirs, "sequence_length": 24})
    model, run = named_model(config), Tracer.run
    ran: list[str] = []

    def watched(tracer: Tracer, name: str, module: nn.Module) -> Any:
        ran.append(name)
        return run(tracer, name, module)

    monkeypatch.setattr(Tracer, "run", watched)
    together, count = profile(model), len(ran)
    monkeypatch.setattr(model_profile, "are_alike", lambda one, other: False)

    assert together.layers == profile(model).layers
    assert count == {"llama": 4, "smollm3": 6}.get(family, count)


# -- what is refused ------------------------------------------------------------------------


ZAMBA: dict[str, Any] = {
    **{"layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 8, "mamba_headdim": 12},
    **{"mamba_d_state": 8, "attention_hidden_size": 96, "attention_head_dim": 24},
}


def other_model(transformers: Any, kind: str, **settings: Any) -> Callable[[], object]:
    """Makes the model of some settings of transformers."""
    sizes = {**SIZES, "is_decoder": True, **settings}
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind](**sizes)
    hf = config.to_dict()
    asked = configure({"model": {"name": "hf", "hf": hf, "sequence_length": 24}})
    return lambda: named_model(asked)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("bert", {}, "its output head is not a module beside"),
        ("gemma4_text", {}, "what its forward computes before layers.0 is"),
        ("gemma3n_text", {"num_kv_shared_layers": 0}, "it has 3 lists of modules (model.layers, "),
        # Its layers also get the embeddings, which no stage but the first one has.
        ("zamba2", ZAMBA, "layers.0 gets 2 tensors of what is"),
    ],
)
def test_models_of_another_shape_are_refused_with_the_reason(
    transformers: Any, kind: str, settings: dict[str, Any], why: str
) -> None:
    told = refusal(other_model(transformers, kind, **settings), ConfigError)

    assert told.startswith(f"model.hf: this model cannot be cut into layers: {why}")
    assert told.endswith("; choose a decoder of embeddings, one list of layers, a norm and a head")


def test_infinities_of_a_folder_are_there_in_the_settings_and_checkpoints_of_a_run(
    transformers: Any, tmp_path: Path
) -> None:
    """As `json.dumps` writes them; they came back as null, which transformers refuses."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8}
    kind = transformers.AutoConfig.for_model(
        "mamba2", **sizes, head_dim=8, n_groups=1, vocab_size=VOCABULARY
    )
    saved_model(transformers, kind, tmp_path / "model")
    theirs = json.loads((tmp_path / "model" / "config.json").read_text())
    theirs["time_step_limit"] = [0.0, math.inf]
    (tmp_path / "model" / "config.json").write_text(json.dumps(theirs))
    config = config_from(tmp_path / "model", train={"steps": 1}, checkpoint={"every": 1})

    ran((1, 1), config, tmp_path / "run", model=named_model)

    again = configure(tmp_path / "run" / "config.yaml")
    assert isinstance(again.model, HfConfig)
    assert again.model.hf["time_step_limit"] == [0.0, math.inf]
    manifest = checkpoint_of(tmp_path / "run", None).manifest
    assert manifest.config["model"]["hf"]["time_step_limit"] == [0.0, math.inf]
    export(tmp_path / "run", "hf", tmp_path / "out")
    written = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert [*written.time_step_limit] == [0.0, math.inf]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"hidden_size": 2**30}, "a token's hidden state has 1,073,741,824 entries, more than the"),
        ({"head_dim": 2**30}, "buffer model.rotary_emb.inv_freq has 536,870,912 entries, more tha"),
    ],
)
def test_sizes_that_no_machine_holds_are_refused_before_anything_is_computed(
    transformers: Any, sizes: dict[str, int], told: str
) -> None:
    said = refusal(other_model(transformers, "llama", **sizes), ConfigError)

    assert said.startswith(f"model.hf: {told}"), said
    assert said.endswith("; correct the model's sizes"), said


def test_what_transformers_fails_on_is_one_line(
    transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.LlamaPreTrainedModel, "_init_weights", lambda *_: 1 / 0)

    assert refusal(other_model(transformers, "llama"), ConfigError).startswith(
        "model.hf: this model cannot be cut into layers: transformers fails on buffer model.rotary_"
        "emb.inv_freq (ZeroDivisionError: division by zero); choose"
    )


def test_a_library_that_transformers_lacks_is_to_be_installed(
    transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> None:
        raise ImportError("TimmWrapperModel requires the timm library")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", lacking)

    assert refusal(other_model(transformers, "llama"), MissingInputError) == (
        "model.hf: transformers lacks a library for this model (ImportError: TimmWrapperModel "
        "requires the timm library); install it"
    )
