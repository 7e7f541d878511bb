"""Files of transformers whose tensors have other names or shapes than the model has."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from axsparse.models.start_weights import WeightFile
from axsparse.runtime.errors import DataError


class HfFile:
    """A `WeightFile` whose tensors have the names and shapes of the model's state dict.

    Some published files have others, such as a matrix for each expert where the model has one
    tensor of all; transformers says how the one is made of the other.
    """

    def __init__(self, file: WeightFile, causal: Any) -> None:
        """Raises DataError if two tensors would have one name, or do not fit together."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )

        self._file, self._causal = file, causal
        self.path, self.files = file.path, file.files
        transforms: list[Any] = list(get_model_conversion_mapping(causal))
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
        self._converters = {pattern: one for one in converters for pattern in one.source_patterns}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        """By a name of the model, the tensors of the file that it is made of, each with the pattern
        of its place."""
        names = causal.state_dict()
        for name in sorted(file.shapes, key=dot_natural_key):
            to, pattern = rename_source_key(
                name, renamings, converters, causal.base_model_prefix, names
            )
            if pattern is None and to in self._sources:
                raise DataError(
                    f"{file.path}: {name!r} and another tensor are both {to}; get it anew"
                )
            self._sources.setdefault(to, []).append((name, pattern))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._made_with: dict[str, str] = {}
        for to in self._sources:
            for name, tensor in self._made(to, self._empty).items():
                self.shapes[name], self._made_with[name] = tuple(tensor.shape), to

    def read(self, name: str) -> Tensor:
        """The tensor of a name of the model."""
        return self._made(self._made_with[name], self._file.read)[name]

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is one that older versions of transformers saved, and nobody needs."""
        patterns = self._causal._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, name) for pattern in (*patterns, r"rotary_emb\.inv_freq$"))

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self._file.shapes[name], device="meta")

    def _made(self, to: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The tensors of the model that are made together, by name."""
        sources = self._sources[to]
        [(first, pattern), *_] = sources
        if pattern is None:
            return {to: read(first)}
        converter: Any = copy.deepcopy(self._converters[pattern])
        for name, place in sources:
            converter.add_tensor(to, name, place, partial(read, name))
        try:
            made: dict[str, Any] = converter.convert(
                to, model=self._causal, config=self._causal.config
            )
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as reason:
            raise DataError(
                f"{self.path}: {first!r} and others do not make {to} "
                f"({' '.join(str(reason).split())[:120]}); get it anew"
            ) from reason
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
