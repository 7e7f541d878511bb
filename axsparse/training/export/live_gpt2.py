"""Saves what was trained as dense weights that other libraries read."""

from __future__ import annotations

import json
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from axsparse.models.start_weights import INDEX_FILE, WHOLE_FILE
from axsparse.models.survey import Survey, survey
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.hf_gpt2 import CONFIG_FILE, gpt2_name, gpt2_settings, turned
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError, OutputError
from axsparse.runtime.exchange import gather_texts, together
from axsparse.runtime.files.durable import sync_folder, write_new
from axsparse.runtime.files.safetensors import SUFFIX, TensorHeader, index_text, write_safetensors
from axsparse.training.trainer import Trainer


def save_hf_gpt2(trainer: Trainer, path: str | Path, *, masters: bool = True) -> None:
    """Write the GPT of a trainer as a folder that `GPT2LMHeadModel.from_pretrained` loads.

    All ranks call this together, before, between or after steps. Every stage of replica 0
    writes its own layers, one tensor at a time, dense with zeros at pruned positions: the
    fp32 master weights, or without `masters` the weights in the training precision. The
    folder appears whole or not at all, and is one that all hosts share.

    Raises, on all ranks alike, ConfigError for a model that is no GPT of the configuration,
    OutputError for a folder that holds something already or cannot be written.
    """
    transport, place = trainer.parts.transport, trainer.parts.place
    together(transport, lambda: _refuse_other_models(trainer))
    partial = Path(_on_first_rank(transport, lambda: _make_partial(Path(path))))
    try:
        together(
            transport, lambda: _write_stage(trainer, partial / _file(trainer, place.stage), masters)
        )
        _on_first_rank(transport, lambda: _complete(trainer, partial, Path(path), masters))
    except BaseException:
        if transport.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _on_first_rank(transport: Transport, work: Callable[[], str]) -> str:
    """What rank 0 finds, on all ranks; and what it raises."""
    found = together(transport, lambda: work() if transport.rank == 0 else "")
    return gather_texts(transport.world, transport.backoff, found)[0]


def _refuse_other_models(trainer: Trainer) -> None:
    config = trainer.config.model

    def contents(surveyed: Survey) -> object:
        shapes = {p.name: p.shape for layer in surveyed.layers for p in layer.parameters}
        return shapes, surveyed.ties

    if contents(trainer.parts.survey) != contents(survey(gpt(config, config.sequence_length))):
        raise ConfigError(
            "save_hf_gpt2: the model is not the GPT that the configuration describes; save what "
            "was trained as model.name gpt"
        )


# -- what is written ------------------------------------------------------------------------


def _file(trainer: Trainer, stage: int) -> str:
    """The file of a stage, as transformers numbers them."""
    stages = trainer.parts.place.grid.g_inter
    return WHOLE_FILE if stages == 1 else f"model-{stage + 1:05}-of-{stages:05}{SUFFIX}"


def _described(trainer: Trainer, masters: bool) -> dict[str, TensorHeader]:
    """All tensors by global name, as they are saved; a tied weight once."""
    surveyed = trainer.parts.survey
    dtype = _dtype(trainer, masters)
    return {
        p.name: TensorHeader(
            dtype, tuple(turned(p.name, torch.empty(p.shape, device="meta")).shape)
        )
        for layer in surveyed.layers
        for p in layer.parameters
        if p.name not in surveyed.ties
    }


def _dtype(trainer: Trainer, masters: bool) -> torch.dtype:
    parameter = next(trainer.parts.layers[0].module.parameters())
    return torch.float32 if masters else parameter.dtype


def _values(trainer: Trainer, masters: bool) -> Iterator[Tensor]:
    """The tensors of this stage, as they are described; none outlives its turn."""
    for layer in trainer.parts.layers:
        trained = {tensor.name for tensor in layer.state.owned}
        for local, parameter in layer.module.named_parameters():
            name = f"{layer.spec.name}.{local}"
            if name in trainer.parts.survey.ties:
                continue
            if not masters:
                yield turned(name, parameter.detach().cpu())
            elif name in trained:
                yield turned(name, layer.state.dense_master(name))
            else:  # frozen
                yield turned(name, parameter.detach().float().cpu())


# -- how ------------------------------------------------------------------------------------


def _make_partial(path: Path) -> str:
    """An empty folder that nobody else writes to, beside where it is to appear."""
    path = path.absolute()
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
            raise OutputError(
                f"save_hf_gpt2: {path} holds something already; choose another folder, or move "
                "it away"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as reason:
        raise _unwritable(path, reason) from reason
    return str(partial)


def _write_stage(trainer: Trainer, path: Path, masters: bool) -> None:
    """Write this stage's file, in replica 0; the others add their shares of the masters."""
    parts = trainer.parts
    described = {
        gpt2_name(name): tensor
        for name, tensor in _described(trainer, masters).items()
        if parts.stage_of(name) == parts.place.stage
    }
    values = _values(trainer, masters)
    try:
        if parts.place.replica == 0:
            write_safetensors(path, described, values)
    except OSError as reason:
        raise _unwritable(path, reason) from reason
    finally:
        if masters and trainer.config.samo.shard_optimizer:
            deque(values, maxlen=0)  # whoever fails still has shares that the others wait for


def _complete(trainer: Trainer, partial: Path, path: Path, masters: bool) -> str:
    """See that all is there, say what it is, and let the folder appear."""
    parts = trainer.parts
    stages = range(parts.place.grid.g_inter)
    for stage in stages:
        if not (partial / _file(trainer, stage)).exists():
            raise OutputError(
                f"save_hf_gpt2: {path}: rank 0 does not see what stage {stage} wrote; choose a "
                "folder that all hosts share"
            )
    described = _described(trainer, masters)
    settings = gpt2_settings(trainer.config.model, _dtype(trainer, masters))
    texts = {CONFIG_FILE: json.dumps(settings, indent=2)}
    if len(stages) > 1:
        files = {gpt2_name(name): _file(trainer, parts.stage_of(name)) for name in described}
        texts[INDEX_FILE] = index_text(files, sum(t.nbytes for t in described.values()))
    try:
        for name, text in texts.items():
            write_new(partial / name, f"{text}\n".encode())
        sync_folder(partial)
        partial.rename(path.absolute())
        sync_folder(path.absolute().parent)
    except OSError as reason:
        raise _unwritable(path, reason) from reason
    return ""


def _unwritable(path: Path, reason: OSError) -> OutputError:
    return OutputError(
        f"save_hf_gpt2: {path}: cannot be written ({reason.strerror}); choose another folder"
    )
