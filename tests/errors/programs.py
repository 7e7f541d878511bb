"""The names for the programs of the tables: parts of the package, and small models and data."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import shlex
import struct
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import hf, mask_files, planner_cases, preparing, runs, sharded_model
from support.hf import beside, gpt2_folder, ours_from, small_gpt
from support.local_world import LocalWorld, WorldTransport
from support.resuming import ran
from support.runs import (
    mlp,
    on_ranks,
    random_init,
    summed_loss,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import axsparse as ax
from axsparse.__main__ import main
from axsparse.cli import prune_defaults, prune_order
from axsparse.cli.prune_folder import prune_folder
from axsparse.cli.prune_order import PruneOrder
from axsparse.config import load, validate
from axsparse.config.load import configure
from axsparse.config.schema import Config
from axsparse.data import batches, documents, preparation, sources, token_file, tokenizers
from axsparse.data import megatron as indexed
from axsparse.data.batches import Batches
from axsparse.data.dataset import ArrayDataset, Dataset, Datasets
from axsparse.models import layer_cost, model_profile
from axsparse.models.layer import Layer, Model
from axsparse.models.sequential import from_sequential
from axsparse.models.start_weights import open_weights, start_from
from axsparse.observe import metrics, run_report, trace_file
from axsparse.planner import auto_layout, cluster, plan_model
from axsparse.pruning import criteria, mask_file, targets
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import AxsparseError
from axsparse.runtime.files import run_folder, safetensors
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.samo.index import base as index_base
from axsparse.samo.precision import DTYPES
from axsparse.training import plan, run_directory, run_sources
from axsparse.training.plan import RunPlan, plan_run
from axsparse.training.trainer import build

MODULES = (
    *(planner_cases, preparing, runs, sharded_model, hf, mask_files, load, validate),
    *(batches, documents, preparation, sources, token_file, layer_cost, model_profile),
    *(auto_layout, cluster, plan_model, criteria, mask_file, targets, safetensors, run_folder),
    *(index_base, plan, run_sources, indexed, tokenizers, prune_defaults, prune_order),
)
BY_NAME = (copy, dataclasses, os, metrics, run_report, trace_file)
"""Modules that programs name."""


def names() -> dict[str, Any]:
    """The names that a program may use without an import."""
    found: dict[str, Any] = {}
    for module in MODULES:
        found |= {name: value for name, value in vars(module).items() if name[0] != "_"}
    return found | globals()


def write(name: str, contents: str | bytes) -> str:
    """A file in the folder of the row; returns its name."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return name


def command(words: str) -> None:
    """A command, in which patterns become the files that they match."""
    found = ((word, Path().glob(word) if "*" in word else ()) for word in shlex.split(words))
    main([name for word, files in found for name in [*map(str, files)] or [word]])


def read_config(text: str | bytes, *overrides: str) -> Config:
    """The configuration of a file `run.yaml`."""
    return configure(write("run.yaml", text), overrides)


def cluster_of(text: str) -> object:
    return cluster.parse_cluster(text, "mine.yaml")


SUMMIT_TEXT = cluster.cluster_text("summit")


def without(name: str) -> str:
    """Summit's file without the lines that begin so."""
    kept = [line for line in SUMMIT_TEXT.splitlines() if not line.startswith(name)]
    return "\n".join(kept) + "\n"


def constant(name: str, value: str, kind: str = "assumed", source: str = "x") -> str:
    return f"{name}: {{value: {value}, kind: {kind}, source: {source}}}\n"


# -- training ---------------------------------------------------------------------------------


def dense(inputs: int = 16, outputs: int = 16, name: str = "") -> Layer:
    return Layer(name or f"linear{inputs}x{outputs}", partial(nn.Linear, inputs, outputs))


Both = partial(runs.Doing, lambda m, x: (m.linear(x), x), 5)
"""Logits, and what came in."""


def train(
    model: Model | None = None,
    data: Dataset | None = None,
    *,
    stages: int = 1,
    replicas: int = 1,
    validation: Dataset | None = None,
    own: dict[str, Any] | None = None,
    **sections: Any,
) -> None:
    """A short training, by default of a small GPT."""
    small = {"batch": {"global_batch_size": 12, "microbatch_size": 3}, "train": {"steps": 2}}
    config = tiny_config(**{**small, **sections})
    if model is None:
        model, data = tiny_gpt(config), data or token_data()
    train_in_process(
        *(stages, replicas, model, config, vector_data() if data is None else data),
        validation=validation,
        **(own or {}),
    )


def sharded(model: Model | None = None, ranks: int = 2, **sections: Any) -> None:
    data = token_data() if model is not None and model.name != "custom" else None
    train(model, data, own={"g_tensor": ranks}, layout={"g_tensor": ranks}, **sections)


class Between(nn.Module):
    """A function of the features between the sharded modules."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def train_layers(
    last: Callable[[], nn.Module] | None = None,
    loss: Callable[..., Tensor] = summed_loss,
    **more: Any,
) -> None:
    train(Model([dense(), Layer("last", last or partial(nn.Linear, 16, 5))], loss), **more)


def trained(**more: Any) -> None:
    """A training of a linear layer with validation, by a model with other arguments."""
    model = Model([Layer("last", partial(nn.Linear, 16, 5))], summed_loss, **more)
    train(model, validation=vector_data(), train={"steps": 1, "eval_steps": 1})


def on_logits(loss: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """A loss of the first output and the targets."""
    return lambda logits, *others: loss(logits, others[-1])


def build_with(**wrong: Any) -> None:
    """`build` on two ranks, with some wrong arguments."""
    arguments: dict[str, Any] = {
        "model": Model([dense(), dense(16, 5)], summed_loss),
        "open_datasets": lambda: Datasets(vector_data()),
        "config": tiny_config(train={"steps": 1}),
        "quiet": True,
    }
    on_ranks(2, lambda transport: build(Job(transport), **{**arguments, **wrong}))


def resolved(ranks: int = 1, model: Model | None = None, **sections: Any) -> RunPlan:
    config = tiny_config(**sections)
    model = tiny_gpt(config) if model is None else model
    transport: Transport = WorldTransport(LocalWorld(ranks), 0)
    profiled = model_profile.profile(model, DTYPES[config.precision])
    loaded = config.with_origins("test", {})
    return plan_run(loaded, model, profiled, transport)


# -- models -----------------------------------------------------------------------------------


def sequential(modules: Any, **settings: Any) -> Model:
    return from_sequential(modules, summed_loss, **settings)


def load_deepseek(bias: Tensor) -> None:
    """Loads a small DeepSeek-V3 whose router of 4 experts has this bias."""
    transformers = pytest.importorskip("transformers", reason="pip install 'axsparse[test]'")
    sizes = {**hf.FAMILIES["alone"]["deepseek_v3"], "n_routed_experts": 4}
    sizes |= {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = transformers.AutoConfig.for_model("deepseek_v3", **sizes)
    hf.saved_model(transformers, settings, Path())
    weights = load_file("model.safetensors")
    [name] = (name for name in weights if name.endswith("e_score_correction_bias"))
    save_file({**weights, name: bias}, "model.safetensors")
    ax.load_pruned(Path(), fewest_zeros=None)


def scripted(module: nn.Module) -> nn.Module:
    """A module of TorchScript, which torch calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.jit.script(module)
    return made


def small(inputs: int = 3, outputs: int = 4) -> Callable[[], nn.Module]:
    """A builder of a matrix."""
    return partial(nn.Linear, inputs, outputs, bias=False)


def frozen() -> nn.Module:
    return nn.Linear(3, 4, bias=False).requires_grad_(requires_grad=False)


def with_more(value: Tensor, *, is_buffer: bool = False) -> Callable[[], nn.Module]:
    """A builder of a module with one more frozen parameter, or buffer."""

    def build() -> nn.Module:
        module = nn.Linear(3, 4)
        if is_buffer:
            module.register_buffer("k", value)
        else:
            module.register_parameter("k", nn.Parameter(value, requires_grad=False))
        return module

    return build


def profiled(*layers: Any, ties: Sequence[tuple[str, str]] = ()) -> model_profile.ModelProfile:
    """The profile of a model; builds alone become layers a, b and c with an init."""
    named = zip("abc"[: len(layers)], layers, strict=True)
    made = [
        each if isinstance(each, Layer) else Layer(name, each, init=random_init)
        for name, each in named
    ]
    return model_profile.profile(Model(made, summed_loss, ties=[ax.Tie(*tie) for tie in ties]))


def masked(masks: dict[str, Tensor], *layers: Any, ties: Sequence[tuple[str, str]] = ()) -> object:
    """The targets of a mask file `m` for a model of these layers."""
    save_file(masks, "m")
    return mask_file.open_masks(Path("m")).targets(profiled(*layers, ties=ties))


def started(tensors: dict[str, Any], new: Sequence[str] = ()) -> None:
    """Read the weights of a linear layer from a file of these tensors."""
    save_file(tensors, "w.safetensors")
    model = sequential([nn.Linear(16, 5)])
    start = start_from(model, open_weights(Path("w.safetensors")), new=new).start
    assert start is not None
    for name in ("0.weight", "0.bias"):
        start.read(name)


def gpt2(changed: dict[str, Any] | None = None, **settings: Any) -> Model:
    """A GPT that starts at a folder of GPT-2 with some tensors and settings changed."""
    changed = {f"transformer.{name}": tensor for name, tensor in (changed or {}).items()}
    gpt2_folder(Path(), small_gpt(), changed, **settings)
    return ours_from(Path(), **beside(Path()))


# -- data -------------------------------------------------------------------------------------

ONES = torch.ones(9, 2)


class Reads(ArrayDataset):
    """Reads what it is given, whatever the samples."""

    def __init__(self, given: Any) -> None:
        super().__init__(torch.ones(9, 1), torch.ones(9, 1), "given")
        self._given = given

    def read(self, indices: Any) -> Any:
        return self._given


class Counts(ArrayDataset):
    """Says how many targets count."""

    def __init__(self, count: Any, targets_per_sample: Any = None) -> None:
        inputs, targets = vector_data().read(np.arange(30))
        super().__init__(inputs[0], targets)
        self.targets_per_sample = targets_per_sample
        self._count = count

    def count_targets(self, targets: Tensor) -> Any:
        return self._count


def first_batch(dataset: Dataset) -> object:
    """The batch of the first step, of all samples."""
    return Batches(
        dataset,
        num_samples=len(dataset),
        global_batch_size=9,
        microbatch_size=9,
        replica=0,
        g_data=1,
        seed=7,
    ).training(0)


class Drawing(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise."""

    def __init__(self, draw: Callable[[], Any] = lambda: torch.ones(1), length: int = 10) -> None:
        self.draw, self.length = draw, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return number + self.draw(), torch.tensor(number)


LOADER = DataLoader(TensorDataset(torch.zeros(9)))


def prepare(*contents: bytes, out: Path = Path("out"), **values: Any) -> None:
    """Prepare files of these contents; those that begin with a brace are JSONL."""
    for number, content in enumerate(contents):
        ending = ".jsonl" if content.startswith(b"{") else ""
        write(f"in/{number}{ending}", content)
    Path("in").mkdir(exist_ok=True)
    preparing.run(preparation.Request((Path("in"),), out, **values))


def chats(
    kind: str,
    turns: int = 1,
    chat_template: Any = None,
    roles: Sequence[str] = ("user", "assistant"),
    **columns: Any,
) -> None:
    """Prepare a chat next to other columns, by a template of `preparing` or another one."""
    settings = {} if chat_template is None else {"chat_template": chat_template}
    folder = preparing.folder_of(kind, Path(), **settings)
    said = [{"role": role, "content": role} for role in roles] * turns
    source = preparing.write_jsonl(Path("chats.jsonl"), [{"messages": said, **columns}])
    preparing.run(preparation.Request((source,), Path("out"), tokenizer=folder))


def trained_on_moved_tokens() -> None:
    """A run `mine`, whose tokens were in `out` and are in `moved` now."""
    if Path("moved").exists():
        return
    prepare(b"a text of words " * 99, validation_fraction=0.2)
    data = {"source": "tokens", "path": "out"}
    config = tiny_config(data=data, model={"vocab_size": 256}, train={"steps": 1})
    ran((1, 1), config, Path("mine"), data=sources.token_datasets(Path("out"), 12)["train"])
    Path("out").rename("moved")


def pruned(
    field: str, said: str = "a text of words " * 40, *more: str, out: str = "pruned", **order: Any
) -> None:
    """Prune a folder by texts in a field of records."""
    gc.collect()  # of the lock of a prune that failed
    folder = preparing.folder_of("none", Path())
    gpt2_folder(folder, small_gpt().model_copy(update={"vocab_size": 258}))
    value = [{"role": "user", "content": said}] if field == "messages" else said
    texts = preparing.write_jsonl(Path("texts.jsonl"), [{field: value}] * 40)
    few = ("batch.global_batch_size=8", "pruning.calibration_samples=8", "train.eval_steps=1")
    given = folder, (texts,), (), Path(out), "prune_llama.yaml", (*few, *more)
    asked = PruneOrder(*given, **{"heal": "none", **order})
    prune_folder(Job(LocalTransport()), asked)


def megatron(*number: Any, **sizes: int) -> None:
    """Read files of Megatron with a number of the index changed, (at, form, value), or cut."""
    preparing.write_megatron(Path("c"), [[5, 6, 7], [8], [9, 10, 11, 12], [13]])
    for ending in ("idx", "bin"):
        content = bytearray(Path(f"c.{ending}").read_bytes())
        if number and ending == "idx":
            at, form, value = number
            struct.pack_into(form, content, at, value)
        Path(f"c.{ending}").write_bytes(content[: sizes.get(ending)])
    indexed.MegatronIds(Path("c"), "data.path").begins()


def opened(folder: str = "out") -> dict[token_file.Split, ax.TokenDataset]:
    return sources.token_datasets(Path(folder), 16)


def exported() -> object:
    data = configure(None, ["data.source=tokens", "data.path=out"]).data
    return tokenizers.exported_tokenizer(
        data, "tokens", token_file.read_sidecar(Path("out"), "").train.digest
    )


def described(**values: Any) -> object:
    """Prepared tokens whose tokens.json has other values."""
    prepare(b"x" * 99)
    path = Path("out/tokens.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return opened()


# -- optimizers -------------------------------------------------------------------------------


def update_velocity(block: ax.Block, hyper: ax.Hyper) -> None:
    block.moments["velocity"].mul_(0.5).add_(block.grad)


def apply_velocity(block: ax.Block, statistics: Any, hyper: ax.Hyper) -> Any:
    block.master.add_(block.moments["velocity"], alpha=-hyper.learning_rate)


def own_optimizer(moments: Any = ("velocity",), apply: Any = apply_velocity) -> ax.Optimizer:
    return ax.Optimizer(moments, update_velocity, None, apply)


def by_inputs(name: str, weight: Tensor, inputs: Tensor) -> Tensor:
    return weight.abs() * inputs


def scored(score: Any, model: Model | None = None, **pruning: Any) -> None:
    """A training whose masks are drawn by a score."""
    base = {"method": "custom", "sparsity": 0.7, "calibration_samples": 6}
    train(model or mlp(), own={"score": score}, pruning={**base, **pruning})


def ordered(*settings: str, out: str = "out", **more: Any) -> PruneOrder:
    """An order to prune a small Llama in the folder `model`."""
    hf.write_llama(Path("model"))
    given = (Path("model"), (Path("texts"),), (), Path(out), "prune_llama.yaml", settings)
    return PruneOrder(*given, **{"heal": None, **more})


def found_targets(**pruning: Any) -> object:
    config: Config = tiny_config(pruning=pruning)
    return targets.find_targets(
        model_profile.profile(tiny_gpt(config)), config.pruning, config.where
    )


HEAD = Layer("out", partial(nn.Linear, 16, 5), kind="head", init=random_init)


# -- files ------------------------------------------------------------------------------------

EMPTY = '{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'


def index(file: object) -> object:
    """Weights of an index that places a tensor in a file."""
    text = json.dumps({"weight_map": {"a": file}})
    return open_weights(Path(write("model.safetensors.index.json", text)))


def header(text: str) -> object:
    """A safetensors file of this header, in which EMPTY stands for a tensor without entries."""
    content = text.replace("EMPTY", EMPTY).encode("latin-1")
    length = len(content).to_bytes(8, "little")
    return safetensors.SafetensorsFile(Path(write("x.safetensors", length + content)))


def masks_of(text: str) -> object:
    safetensors.write_safetensors(Path("m"), {}, iter([]), {"masks": text})
    return mask_file.open_masks(Path("m"))


def forged(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> object:
    """The masks of a file whose header, and what its metadata say of masks, were changed."""
    contents = mask_files.small_mask_file(Path()).read_bytes()
    start = 8 + int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8:start])
    said = json.loads(header["__metadata__"]["masks"])
    change(header, said)
    header["__metadata__"]["masks"] = json.dumps(said)
    text = json.dumps(header).encode()
    write("m", len(text).to_bytes(8, "little") + text + contents[start:])
    Path("mask.safetensors").unlink()
    return mask_file.open_masks(Path("m"))


def made_run_dir(path: str = "run", *, overwrite: bool = False, **sections: Any) -> None:
    """Make the directory of a run, and let go of it."""
    config = tiny_config(run_dir=path, **sections)
    config = config.with_origins("quick", {"run_dir": "--run-dir"})
    before = sorted(Path().rglob("*"))
    try:
        run_directory.make_run_dir(config, overwrite=overwrite)[1].release()
    except AxsparseError:
        assert sorted(Path().rglob("*")) == before, "what is there stays as it is"
        raise


def resumed(
    run: str, data: Dataset | None = None, *, resume: str = "auto", **sections: Any
) -> None:
    """Go on with the saved run under other settings."""
    config = tiny_config(**{"train": {"steps": 4}, "checkpoint": {"every": 2}, **sections})
    ran((1, 1), config, Path(run), data=data, resume=resume)


def traced() -> Path:
    """The trace of a short training."""
    ran((1, 1), tiny_config(train={"steps": 2, "trace": 1}), Path("mine"))
    (path,) = Path("mine/trace").glob("*.json")
    return path


def record(line: bytes) -> object:
    """The records of a run whose second line is this one."""
    first = b'{"step": 1, "loss": 2.0}\n'
    return run_report.read_records(Path(write("metrics.jsonl", first + line + b"\n" + first)))
