"""A pruned folder in use: loaded by kept entries, and continued by transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from support.allocated import peak_of
from support.commands import Axsparse
from support.exhaustive import by_default
from support.hf import (
    FAMILIES,
    hf_logits,
    saved_model,
    saved_with_pictures,
    write_folder,
    write_llama,
)
from support.runs import VOCABULARY

import axsparse as ax
from axsparse.models.zoo.hf_models import full_model
from axsparse.runtime.errors import EXIT_DATA, EXIT_MISSING
from axsparse.samo.pruned_weight import PrunedWeight, multiplied_weights
from axsparse.training.load_pruned import continued

transformers = pytest.importorskip("transformers")
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 44, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3_moe": {
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 0},
}


@torch.no_grad()
def prune(model: Any, sparsity: float) -> None:
    for _, _, weight, _ in multiplied_weights(model):
        weight[torch.rand_like(weight) < sparsity] = 0


def folder_of(kind: str, path: Path) -> Path:
    settings = transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    model = saved_model(transformers, settings, path)
    prune(model, 0.6)
    model.save_pretrained(path)
    if kind == "llama":  # the tied weight by the head's name alone
        save_model(model, str(path / "model.safetensors"))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_and_its_sparse_form_compute_what_transformers_does(
    kind: str, tmp_path: Path, axsparse: Axsparse
) -> None:
    folder = folder_of(kind, tmp_path / "folder")
    exact = hf_logits(transformers.AutoModelForCausalLM.from_pretrained(folder).eval())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    noise = (hf_logits(theirs.eval()).float() - exact).abs().max()
    code, screen, _ = axsparse("export", folder, "--to", "sparse", "--out", tmp_path / "sparse")
    assert code == 0
    assert screen.endswith(f", of {folder}\n")
    sparse, dense = (
        tmp_path / one / f"{name}.safetensors"
        for one, name in (("sparse", "sparse"), ("folder", "model"))
    )
    assert sparse.stat().st_size < 0.45 * dense.stat().st_size
    first = None
    for place in (folder, tmp_path / "sparse"):
        model = ax.load_pruned(place)
        assert any(isinstance(weight, PrunedWeight) for weight in model.parameters())
        assert not model.training
        logits = hf_logits(model)
        assert (logits.float() - exact).abs().max() <= 1.5 * noise
        first = logits if first is None else first
        assert torch.equal(logits, first)


@pytest.mark.parametrize("family", by_default(["gemma3"], FAMILIES["pictures"]))
def test_a_model_with_pictures_is_loaded_whole(family: str, tmp_path: Path) -> None:
    saved_with_pictures(transformers, family, tmp_path)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="bfloat16")

    model = ax.load_pruned(tmp_path, fewest_zeros=None)

    assert_same(model, theirs)


def assert_same(model: Any, theirs: Any) -> None:
    """Fail unless two models have the same tensors, in the same types, and logits."""
    assert type(model) is type(theirs)
    for name, tensor in {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}.items():
        ours = model.get_parameter(name) if name in dict(model.named_parameters()) else None
        ours = model.get_buffer(name) if ours is None else ours
        assert torch.equal(ours, tensor) and ours.dtype == tensor.dtype, name
    assert torch.equal(hf_logits(model), hf_logits(theirs.eval()))


DEEPSEEK = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    **{"v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("hunyuan_v1_moe", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
        ("minimax", {"num_local_experts": 4}),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
        ("deepseek_v3", {"n_routed_experts": 4, "num_experts_per_tok": 2, **DEEPSEEK}),
    ],
)
def test_tensors_have_the_types_that_transformers_gives_them(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Routers and biases in fp32, and buffers of the file in bf16."""
    sizes = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0}
    kind = transformers.AutoConfig.for_model(family, **sizes, **settings)
    saved_model(transformers, kind, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")

    assert_same(ax.load_pruned(tmp_path, fewest_zeros=None), theirs)


def test_a_buffer_may_be_infinite(tmp_path: Path) -> None:
    """As the bounds of a linear layer that clips."""
    settings = FAMILIES["pictures"]["gemma4"]
    vision = {**settings["vision_config"], "use_clipped_linears": True}
    kind = transformers.AutoConfig.for_model("gemma4", **{**settings, "vision_config": vision})
    saved_model(transformers, kind, tmp_path, torch.bfloat16, "ImageTextToText")

    buffers = dict(ax.load_pruned(tmp_path, fewest_zeros=None).named_buffers())

    bounds = [one for name, one in buffers.items() if name.endswith("input_max")]
    assert bounds and all(bound == torch.inf for bound in bounds)


def test_a_buffer_of_whole_numbers_takes_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_llama(tmp_path)

    def counted(settings: dict[str, Any]) -> Any:
        model = full_model(settings)
        model.register_buffer("count", torch.zeros(2, dtype=torch.int64, device="meta"))
        return model

    monkeypatch.setattr("axsparse.training.load_pruned.full_model", counted)
    for count in (torch.tensor([1, 2], dtype=torch.int32), torch.ones(2)):
        save_file({**weights, "count": count}, tmp_path / "model.safetensors")
        if count.is_floating_point():
            with pytest.raises(ax.DataError, match="'count' is float32, not int64; get it anew"):
                ax.load_pruned(tmp_path, fewest_zeros=None)
        else:
            assert ax.load_pruned(tmp_path, fewest_zeros=None).count.tolist() == [1, 2]


def test_the_dense_model_is_never_in_memory(tmp_path: Path) -> None:
    settings = transformers.AutoConfig.for_model(
        "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=8, vocab_size=64
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    prune(model, 0.9)
    model.save_pretrained(tmp_path)
    dense = sum(one.nbytes for one in model.parameters())
    ax.load_pruned(tmp_path)  # what is loaded once for all
    peak = peak_of(lambda: ax.load_pruned(tmp_path))
    assert peak < 0.75 * dense


def test_generate_says_that_a_folder_is_dense(tmp_path: Path, axsparse: Axsparse) -> None:
    write_folder(tmp_path / "folder")
    code, screen, _ = axsparse("generate", tmp_path / "folder", "--prompt", "a", "--tokens", 2)
    assert code == 0
    note = "note: accelerate: no weight has enough zeros; the model stays dense"
    assert screen.splitlines()[0] == note


def test_generate_refuses_what_a_folder_has_damaged_and_runs_no_code_of_it(
    axsparse: Axsparse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to transformers' question
    folder = tmp_path / "folder"
    write_folder(folder)
    words = ("generate", folder, "--prompt", "a", "--tokens", 2)
    generation = folder / "generation_config.json"
    for asked in (
        '"num_beams": 4',
        '"return_dict_in_generate": true',
        '"penalty_alpha": 0.6, "top_k": 4',
        '"dola_layers": "low"',
    ):
        generation.write_text(f"{{{asked}}}")
        code, _, said = axsparse(*words)
        assert code == 0, (asked, said)
    generation.write_text('{"stop_strings": ["b"]}')
    # transformers gets the tokenizer, of which it cannot take one of whole words.
    assert "substring not found" in axsparse(*words)[2]
    generation.write_text('{"num_be')
    code, _, said = axsparse(*words)
    assert (code, "generation_config.json: is damaged (OSError: " in said) == (EXIT_DATA, True)

    generation.unlink()
    mark = tmp_path / "ran"
    (folder / "planted.py").write_text(f"import os; os.mkdir({str(mark)!r})\nclass Own: pass\n")
    auto = '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["planted.Own", null]}}'
    (folder / "tokenizer_config.json").write_text(auto)
    code, _, said = axsparse(*words)
    assert (code, "transformers finds no tokenizer" in said) == (EXIT_MISSING, True)
    assert not mark.exists()


def test_a_prompt_begins_with_the_token_that_its_tokenizer_adds(
    tmp_path: Path, axsparse: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, processors

    folder, given = tmp_path / "folder", list[list[int]]()
    write_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("d $A", special_tokens=[("d", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    generate = transformers.GenerationMixin.generate

    def noted(model: Any, ids: torch.Tensor, **how: Any) -> Any:
        given.extend(ids.tolist())
        return generate(model, ids, **how)

    monkeypatch.setattr(transformers.GenerationMixin, "generate", noted)
    code, _, _ = axsparse("generate", folder, "--prompt", "b c", "--tokens", 1)

    assert (code, given) == (0, [[3, 1, 2]])
    judge = transformers.AutoTokenizer.from_pretrained(folder)
    assert judge("b c")["input_ids"] == given[0]


def test_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder")
    model = ax.load_pruned(tmp_path / "folder", fewest_zeros=None)
    many = {"input_ids": torch.tensor([[VOCABULARY + 900]])}
    how: dict[str, Any] = {"temperature": None, "top_k": None, "seed": 0, "show": print}
    with pytest.raises(ax.ConfigError, match=r"^--prompt: has token \d+, and the model an embed"):
        continued(model, lambda *_, **__: many, "a", 1, **how)


def test_the_text_shown_is_the_decoded_prompt_and_continuation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a decoder that strips a first space, as that of Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = ["▁go", "▁", "**", "\n", "on"]
    own = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
    new = [0, 1, 2, 3, 0, 4, 1, 3, 3, 1, 0]

    def generate(ids: torch.Tensor, streamer: Any, **_: object) -> torch.Tensor:
        for value in (ids, *torch.tensor(new).split(1)):
            streamer.put(value)
        streamer.end()
        return torch.cat([ids, torch.tensor([new])], 1)

    embedding = torch.nn.Embedding(len(words), 1)
    model = SimpleNamespace(
        config=transformers.LlamaConfig(),
        get_input_embeddings=lambda: embedding,
        parameters=embedding.parameters,
        generate=generate,
    )
    said: list[str] = []
    decode, lengths = tokenizer.decode, list[int]()

    def counted(ids: Any, **how: object) -> Any:
        lengths.append(len(ids))
        return decode(ids, **how)

    monkeypatch.setattr(tokenizer, "decode", counted)
    prompt, show = 22 * "go ", said.append
    continued(model, tokenizer, prompt[:-1], 11, temperature=None, top_k=None, seed=0, show=show)

    assert "".join(said) == prompt + "go **\n goon \n\n  go" == decode([0] * 22 + new)
    assert max(lengths) < 22, "not the whole prompt for each token"
