"""Writes a GPT or a Llama as the folder that `from_pretrained` of transformers loads.

    config.json                                  settings
    model.safetensors                            all weights
    tokenizer.json, generation_config.json, …    the tokenizer: copies of what `model.from` had
                                                 beside its weights, else that of the data

`axsparse.models.zoo.hf_models` knows the names and shapes of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axsparse.config.hf_config import (
    CONFIG_FILE,
    config_json,
    model_settings,
    read_json,
    refuse_other_sizes,
)
from axsparse.config.model_config import Family, TextFamily
from axsparse.data.run_tokenizer import ExportedTokenizer
from axsparse.models.start_weights import WHOLE_FILE
from axsparse.models.zoo.hf_models import HfFamily
from axsparse.runtime.files.atomic import sync_folder, write_new
from axsparse.runtime.files.safetensors import TensorHeader, write_safetensors

COMPANIONS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    "generation_config.json",
)
"""Files of a Hugging Face folder that training does not change: its tokenizer's files, and the
settings of how it generates."""


@dataclass(frozen=True)
class HfFolder:
    """A folder that exists and gets the files of one model; its methods that write raise OSError.

    `settings` is called first, since it may refuse the model.
    """

    path: Path
    config: Family
    family: HfFamily
    dtype: torch.dtype
    """The type that config.json names."""
    headers: Mapping[str, TensorHeader]
    """All parameters by global name and in the model's shapes; a tied weight once."""
    tokenizer: ExportedTokenizer | None = None
    """The tokenizer of the training data, if it is known; it is written unless `model.from` has
    another."""

    @property
    def source(self) -> Path | None:
        """The folder of `model.from`; None if nothing is named or it is there no more."""
        if self.config.from_ is None or not (Path(self.config.from_) / CONFIG_FILE).is_file():
            return None
        return Path(self.config.from_)

    @property
    def notes(self) -> list[str]:
        """What the user should know of the folder."""
        if self.config.from_ is None or self.source is not None or self.tokenizer is not None:
            return []
        return [
            f"model.from {self.config.from_} is there no more: config.json says nothing of the "
            "first and last tokens of a text, and there are no files of a tokenizer; copy them"
        ]

    def settings(self) -> dict[str, Any]:
        """What config.json holds: that of `model.from`, or one made of the settings.

        ConfigError if no model of transformers has these settings, or if the folder of
        `model.from` has others meanwhile; DataError if its config.json cannot be read.
        """
        dtype = str(self.dtype).removeprefix("torch.")
        if self.source is None:
            ids = {} if self.tokenizer is None else self.tokenizer.ids
            return config_json(self.config, dtype) | ids
        path = self.source / CONFIG_FILE
        refuse_other_sizes(path, model_settings(path), self.config)
        theirs = {key: value for key, value in read_json(path).items() if key != "torch_dtype"}
        return theirs | {"dtype": dtype}

    def write(self, tensors: Iterator[Tensor], metadata: Mapping[str, str]) -> None:
        """Write all files; then all of the folder is on the disk.

        `tensors` yields the parameters in the order of `headers` and in the model's shapes; none
        is kept while the next is made. `metadata` are added to those of the safetensors format.
        """
        named, turned = self.family.named, self.family.turned
        headers = {named(name): self._turned_header(name) for name in self.headers}
        turned_tensors = (turned(name, next(tensors)) for name in self.headers)
        write_safetensors(self.path / WHOLE_FILE, headers, turned_tensors, metadata)
        texts = {CONFIG_FILE: json.dumps(self.settings(), indent=2)}
        if self.source is None and self.tokenizer is not None:
            assert isinstance(self.config, TextFamily), "transformers has these models only"
            files_of_text = self.tokenizer.files(self.config.sequence_length)
            texts |= {name: json.dumps(text, indent=2) for name, text in files_of_text.items()}
        for name, text in texts.items():
            write_new(self.path / name, f"{text}\n".encode())
        for name in COMPANIONS:
            if self.source is not None and (self.source / name).is_file():
                write_new(self.path / name, (self.source / name).read_bytes())
        sync_folder(self.path)

    def _turned_header(self, name: str) -> TensorHeader:
        header = self.headers[name]
        as_stored = self.family.turned(name, torch.empty(header.shape, device="meta"))
        return replace(header, shape=tuple(as_stored.shape))
