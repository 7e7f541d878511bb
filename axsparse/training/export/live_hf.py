"""Writes the GPT or Llama of a trainer, on all ranks together, for transformers."""

from __future__ import annotations

import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from axsparse.config.model_config import GptConfig
from axsparse.models.zoo.hf_models import HfModel, hf_model
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError, OutputError
from axsparse.runtime.exchange import text_of_first, together
from axsparse.runtime.files.atomic import sync_folder
from axsparse.runtime.files.safetensors import TensorHeader
from axsparse.training.export.hf_folder import HfFolder, weights_file
from axsparse.training.trainer import Trainer


def save_hf_gpt2(trainer: Trainer, path: str | Path, *, masters: bool = True) -> None:
    """`save_hf` for a GPT; ConfigError for any other model."""
    together(trainer.parts.transport, lambda: _refuse_other_families(trainer))
    save_hf(trainer, path, masters=masters)


def save_hf(trainer: Trainer, path: str | Path, *, masters: bool = True) -> None:
    """Write a GPT or a Llama as a folder that `from_pretrained` of transformers loads.

    With `model.from`, the files of its tokenizer come along. All ranks call this together,
    before, between or after steps. Every stage of replica 0 writes its own layers, one tensor at
    a time, dense with zeros at pruned positions: the fp32 master weights, or without `masters`
    the weights in the training precision. The folder appears whole or not at all, and must be
    one that all hosts share.

    Raises, on all ranks alike, ConfigError for a model that is not the one of the configuration,
    OutputError for a folder that holds something already or cannot be written.
    """
    transport = trainer.parts.transport
    model = together(transport, lambda: _hf_model(trainer))
    folder = _folder(trainer, model, Path(path), masters)
    together(transport, folder.settings)  # refuses what transformers has not
    partial = Path(_on_first_rank(transport, lambda: _make_partial(Path(path))))
    folder = replace(folder, path=partial)
    try:
        together(transport, lambda: _write_stage(trainer, folder, masters))
        _on_first_rank(transport, lambda: _complete(trainer, folder, Path(path)))
    except BaseException:
        if transport.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _on_first_rank(transport: Transport, work: Callable[[], str]) -> str:
    """Do some work on rank 0; its result, or the error it raises, is that of all ranks."""
    result = together(transport, lambda: work() if transport.rank == 0 else "")
    return text_of_first(transport, result)


def _refuse_other_families(trainer: Trainer) -> None:
    if not isinstance(trainer.config.model, GptConfig):
        raise ConfigError(
            f"save_hf_gpt2: the model is a {trainer.config.model.name}, not a gpt; call save_hf"
        )


def _hf_model(trainer: Trainer) -> HfModel:
    """What transformers calls the model; ConfigError if it is not that of the configuration."""
    own, name = trainer.parts.survey, trainer.config.model.name
    found = hf_model(trainer.config.model)
    if found is None or (own.shapes, own.ties) != (found.survey.shapes, found.survey.ties):
        raise ConfigError(
            f"save_hf: the model is not the {name} that the configuration describes, or "
            "transformers has none; save what was trained as model.name gpt or llama"
        )
    return found


def _make_partial(path: Path) -> str:
    """Make an empty folder beside `path`, of a name that nobody else uses."""
    path = path.absolute()
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
            raise OutputError(
                f"save_hf: {path} holds something already; choose another folder, or move it away"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as reason:
        raise _unwritable(path, reason) from reason
    return str(partial)


def _folder(trainer: Trainer, model: HfModel, path: Path, masters: bool) -> HfFolder:
    parts = trainer.parts
    dtype = next(parts.layers[0].module.parameters()).dtype
    if masters:
        dtype = torch.float32
    headers = {name: TensorHeader(dtype, shape) for name, shape in parts.survey.shapes.items()}
    return HfFolder(path, trainer.config.model, model, dtype, headers)


def _write_stage(trainer: Trainer, folder: HfFolder, masters: bool) -> None:
    """Write this stage's file on replica 0; other replicas give their shares of the masters."""
    parts, stage = trainer.parts, trainer.parts.place.stage
    names = [name for name in folder.headers if parts.stage_of(name) == stage]
    values = _values(trainer, masters)
    file = weights_file(stage, parts.place.grid.g_inter)
    try:
        if parts.place.replica == 0:
            folder.write_weights(file, names, values)
    except OSError as reason:
        raise _unwritable(folder.path / file, reason) from reason
    finally:
        if masters and trainer.config.samo.shard_optimizer:
            # The replicas wait for each other's shares, also for those of one that failed.
            deque(values, maxlen=0)


def _values(trainer: Trainer, masters: bool) -> Iterator[Tensor]:
    """The parameters of this stage, one after the other, each made when it is asked for."""
    for layer in trainer.parts.layers:
        trained = {tensor.name for tensor in layer.state.owned}
        for local, parameter in layer.module.named_parameters():
            name = f"{layer.spec.name}.{local}"
            if name in trainer.parts.survey.ties:
                continue
            if not masters:
                yield parameter.detach().cpu()
            elif name in trained:
                yield layer.state.dense_master(name)
            else:  # a frozen parameter has no master
                yield parameter.detach().float().cpu()


def _complete(trainer: Trainer, folder: HfFolder, path: Path) -> str:
    """Check that all stages have written, describe the files, and rename the folder to `path`."""
    stages = trainer.parts.place.grid.g_inter
    files = [weights_file(stage, stages) for stage in range(stages)]
    for stage, file in enumerate(files):
        if not (folder.path / file).exists():
            raise OutputError(
                f"save_hf: {path}: rank 0 does not see what stage {stage} wrote; choose a "
                "folder that all hosts share"
            )
    try:
        folder.write_description(
            {name: files[trainer.parts.stage_of(name)] for name in folder.headers}
        )
        folder.path.rename(path.absolute())
        sync_folder(path.absolute().parent)
        for note in folder.notes:
            print(f"axsparse: {note}", flush=True)
    except OSError as reason:
        raise _unwritable(path, reason) from reason
    return ""


def _unwritable(path: Path, reason: OSError) -> OutputError:
    return OutputError(
        f"save_hf: {path}: cannot be written ({reason.strerror}); choose another folder"
    )
