"""Models of Hugging Face's transformers next to ours: logits, losses of some steps, folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from support.cases import merged
from support.images import write_safetensors
from support.oracle import torch_losses
from support.runs import VOCABULARY, of_family, tiny_config, token_data, train_in_process
from torch import Tensor, nn

from axsparse.config.hf_config import config_json
from axsparse.config.load import configure
from axsparse.config.model_config import GptConfig, HfConfig
from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.model_profile import profile
from axsparse.models.zoo.gpt import gpt, gpt2_name, turned
from axsparse.models.zoo.hf_models import hf_model
from axsparse.models.zoo.model_registry import named_model
from axsparse.training.trainer import Trainer

STEPS = 5
SMALL_LLAMA: dict[str, Any] = {
    "name": "hf",
    "sequence_length": 12,
    "vocab_size": VOCABULARY,
    "hf": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 44,
        "max_position_embeddings": 12,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
    },
}
"""Settings of a small Llama, as a configuration has them. Tests that use it need transformers."""


def small_llama(sequence_length: int = 12, *, separate: bool = False, **changed: Any) -> Model:
    """`SMALL_LLAMA` at random start values, with some settings changed."""
    pytest.importorskip("transformers", reason="no transformers: pip install 'axsparse[test]'")
    settings = {**SMALL_LLAMA, "hf": {**SMALL_LLAMA["hf"], **changed}}
    config = of_family(configure({"model": settings}).model, HfConfig)
    return hf_model(config, sequence_length, separate=separate)


def write_llama(
    folder: Path, change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor
) -> dict[str, Tensor]:
    """Write a folder of `SMALL_LLAMA` with random weights; returns them by global name.

    `change` makes other weights of them.
    """
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: change(name, torch.empty(shape).uniform_(0.05, 0.2, generator=generator))
        for name, shape in profile(small_llama()).shapes.items()
    }
    write_safetensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA["hf"]))
    return weights


def write_folder(folder: Path) -> None:
    """Write a small Llama with a tokenizer of single letters, and two folders of texts next to it,
    `texts` and `held`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    write_llama(folder)
    letters = {chr(97 + n % 26) * (1 + n // 26): n for n in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, **letters}, "b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    for name, numbers in (("texts", range(20)), ("held", range(20, 22))):
        (folder.parent / name).mkdir(exist_ok=True)
        for number in numbers:
            words = (chr(97 + (number + n * n) % 26) for n in range(150))
            (folder.parent / name / f"{number}.txt").write_text(" ".join(words))


def saved_model(
    transformers: Any,
    settings: Any,
    path: Path,
    dtype: torch.dtype = torch.float32,
    kind: str = "CausalLM",
) -> Any:
    """A small model of transformers of random parameters, biases and norms included; saved."""
    torch.manual_seed(3)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(settings, dtype=dtype)
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
    return configure(merged(settings, sections))


def ours_from(path: Path, **sections: Any) -> Model:
    return named_model(config_from(path, **sections))


def start_tensors(model: Model) -> dict[str, Tensor]:
    """The parameters and saved buffers that a model starts at."""
    assert model.start is not None
    profiled = profile(replace(model, example=None))
    saved = {b.name for layer in profiled.layers for b in layer.buffers if b.persists}
    read = {name: model.start.read(name) for name in (*profiled.shapes, *saved)}
    return {name: tensor for name, tensor in read.items() if tensor is not None}


def small_gpt() -> GptConfig:
    return of_family(tiny_config().model, GptConfig)


def gpt2_folder(
    folder: Path, model: GptConfig, changed: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Tensor]:
    """Write a folder of transformers with some tensors and settings changed; returns the tensors.

    A tensor that is None is left out.
    """
    profiled = profile(gpt(model, 12))
    generator = torch.Generator().manual_seed(4)
    ours = {name: torch.rand(shape, generator=generator) for name, shape in profiled.shapes.items()}
    state = {gpt2_name(name): turned(name, tensor) for name, tensor in ours.items()}
    state = {name: t for name, t in {**state, **(changed or {})}.items() if t is not None}
    write_safetensors(folder / "model.safetensors", state)
    known = config_json(model, "float32") | settings
    (folder / "config.json").write_text(json.dumps(known))
    return ours


def beside(folder: Path, **model: Any) -> dict[str, Any]:
    """The settings of a model that starts at a folder and does not follow its config.json."""
    return {"model": {**small_gpt().model_dump(), "weights": str(folder), **model, "from": None}}


def our_logits(model: Model, config: Config, tokens: Tensor, g_inter: int = 1) -> Tensor:
    """The logits of the layers that a run has built, before its first step."""
    stages: dict[int, list[nn.Module]] = {}

    def note(trainer: Trainer) -> None:
        layers = [layer.module for layer in trainer.layers]
        stages[trainer.coords.stage] = layers
        if len(stages) == g_inter:
            found.append(forward([m for stage in sorted(stages) for m in stages[stage]]))

    def forward(modules: list[nn.Module]) -> Tensor:
        *body, head = modules
        x = tokens
        with torch.no_grad():
            for module in body:
                x = module(x)
            outputs = head(x)
            return F.linear(*outputs) if isinstance(outputs, tuple) else outputs

    found: list[Tensor] = []
    train_in_process(g_inter, 1, model, config, token_data(), before=note)
    return found[0]


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(5))


def hf_logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens()).logits
    return logits


def hf_losses(model: Any, config: Config) -> Iterator[float]:
    """The losses of transformers' model in plain torch."""

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        logits = outputs.logits.flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")

    return torch_losses(model, loss, token_data(), config)


FAMILIES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (Path(__file__).parent / "families.yaml").read_text(encoding="utf-8")
)
"""Families of transformers by what is done with them, with what is theirs of the settings."""


def saved_with_pictures(transformers: Any, family: str, folder: Any) -> Any:
    """One of the models, saved in bf16."""
    settings = transformers.AutoConfig.for_model(family, **FAMILIES["pictures"][family])
    return saved_model(transformers, settings, folder, torch.bfloat16, "ImageTextToText")
