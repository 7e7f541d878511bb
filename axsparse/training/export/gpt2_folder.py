"""Writes a GPT as the folder that `GPT2LMHeadModel.from_pretrained` of transformers loads.

    config.json                                  settings
    model.safetensors                            all weights in one file
    model-00001-of-00002.safetensors, …          or a file a stage,
    model.safetensors.index.json                 and which of them holds which tensor

`axsparse.models.zoo.hf_gpt2` knows the names and shapes of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from axsparse.config.schema import ModelConfig
from axsparse.models.start_weights import INDEX_FILE, WHOLE_FILE
from axsparse.models.survey import Survey, survey
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.hf_gpt2 import CONFIG_FILE, gpt2_name, gpt2_settings, turned
from axsparse.runtime.files.durable import sync_folder, write_new
from axsparse.runtime.files.safetensors import SUFFIX, TensorHeader, index_text, write_safetensors


def gpt_survey(config: ModelConfig) -> Survey:
    """The survey of the GPT that a configuration describes; only such a model can be written."""
    return survey(gpt(config, config.sequence_length))


def weights_file(stage: int, stages: int) -> str:
    """The name of the file of a stage, counted from 0."""
    return WHOLE_FILE if stages == 1 else f"model-{stage + 1:05}-of-{stages:05}{SUFFIX}"


@dataclass(frozen=True)
class Gpt2Folder:
    """A folder that exists and gets the files of one model; all methods raise OSError."""

    path: Path
    config: ModelConfig
    dtype: torch.dtype
    """The type that config.json names."""
    headers: Mapping[str, TensorHeader]
    """All parameters by global name and in the model's shapes; a tied weight once."""

    def write_weights(
        self,
        file: str,
        names: Sequence[str],
        tensors: Iterator[Tensor],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the file that holds the parameters of these names.

        `tensors` yields them in the order of `names` and in the model's shapes; none is held
        while the next is made. `metadata` are added to those of the safetensors format.
        """
        headers = {gpt2_name(name): _turned_header(name, self.headers[name]) for name in names}
        turned_tensors = (turned(name, next(tensors)) for name in names)
        write_safetensors(self.path / file, headers, turned_tensors, metadata)

    def write_description(self, files: Mapping[str, str]) -> None:
        """Write config.json, and the index if there is one; then all of the folder is on the disk.

        `files` names the file of each parameter, by global name.
        """
        settings = gpt2_settings(self.config, self.dtype)
        texts = {CONFIG_FILE: json.dumps(settings, indent=2)}
        if set(files.values()) != {WHOLE_FILE}:
            total = sum(header.nbytes for header in self.headers.values())
            texts[INDEX_FILE] = index_text(
                {gpt2_name(name): file for name, file in files.items()}, total
            )
        for name, text in texts.items():
            write_new(self.path / name, f"{text}\n".encode())
        sync_folder(self.path)


def _turned_header(name: str, header: TensorHeader) -> TensorHeader:
    return replace(
        header, shape=tuple(turned(name, torch.empty(header.shape, device="meta")).shape)
    )
