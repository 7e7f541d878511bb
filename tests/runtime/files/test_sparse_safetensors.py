"""Kept entries in a file: the same tensors in bf16, fewer bytes, and damage that is told."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.images import write_safetensors as write_named
from torch import Tensor

from axsparse.runtime.errors import DataError
from axsparse.runtime.files.safetensors import SafetensorsFile, header_of, write_safetensors
from axsparse.runtime.files.sparse_safetensors import (
    SPARSE_FILE,
    VERSION,
    VERSION_KEY,
    SparseFile,
    is_sparse,
    sparse_tensors,
)


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(2)
    half, ninety, odd = torch.randn(40, 50), torch.randn(3, 40, 50), torch.randn(5, 7)
    half[torch.rand(40, 50) < 0.5] = 0
    ninety[torch.rand(3, 40, 50) < 0.9] = 0
    odd[:, 1:] = 0
    return {
        "half": half,
        "ninety": ninety,
        "odd": odd,
        "dense": torch.randn(9, 9),
        "vector": torch.zeros(30),
        "count": torch.arange(4),
    }


def written(folder: Path, version: str = VERSION) -> Path:
    named = {name: (header_of(one), partial(one.clone)) for name, one in tensors().items()}
    stored = sparse_tensors(named)
    assert is_sparse(stored)
    write_safetensors(
        folder / SPARSE_FILE,
        {name: header for name, (header, _) in stored.items()},
        (read() for _, read in stored.values()),
        {VERSION_KEY: version},
    )
    return folder / SPARSE_FILE


def test_tensors_come_back_in_bf16(tmp_path: Path) -> None:
    file = SparseFile(written(tmp_path))
    for name, tensor in tensors().items():
        assert file.shapes[name] == tuple(tensor.shape)
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(file.read(name), wanted)
    assert set(file.shapes) == set(tensors())
    stored = SafetensorsFile(file.path).shapes
    assert stored["half.mask"] == (250,)
    assert "dense" in stored
    assert "vector" in stored


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("half.values", torch.zeros(3).bfloat16()),
        ("half.mask", torch.zeros(249, dtype=torch.uint8)),
        ("half.shape", torch.tensor([40, 51])),
        ("half.shape", torch.tensor([-40, 50])),
        ("half.mask", None),
    ],
)
def test_parts_that_disagree(tmp_path: Path, part: str, other: Tensor | None) -> None:
    whole = SafetensorsFile(written(tmp_path))
    parts = {name: whole.read(name) for name in whole.shapes if name != part}
    if other is not None:
        parts[part] = other
    path = tmp_path / "other" / SPARSE_FILE
    path.parent.mkdir()
    write_safetensors(
        path,
        {name: header_of(one) for name, one in parts.items()},
        iter(parts.values()),
        {VERSION_KEY: VERSION},
    )
    with pytest.raises(DataError, match="values, mask and shape of 'half' disagree; get it anew"):
        SparseFile(path).read("half")


def test_other_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="axsparse_sparse is '2', and this version reads '1'"):
        SparseFile(written(tmp_path, "2"))
    write_named(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    with pytest.raises(DataError, match="axsparse_sparse is None"):
        SparseFile(tmp_path / "model.safetensors")
