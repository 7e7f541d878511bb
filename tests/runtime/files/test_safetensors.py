"""The safetensors format: several files behind one index, and files that are written."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.images import assert_equal_tensors
from support.images import write_safetensors as write_named
from torch import Tensor

from axsparse.models.start_weights import open_weights
from axsparse.runtime.errors import DataError
from axsparse.runtime.files import safetensors
from axsparse.runtime.files.safetensors import (
    SPARSE_FILE,
    VERSION,
    VERSION_KEY,
    SafetensorsFile,
    SparseFile,
    TensorHeader,
    header_of,
    is_sparse,
    sparse_tensors,
    write_safetensors,
)

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(5.0).bfloat16(),
    "c": torch.arange(4).view(4, 1),
}


def store(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    headers = {name: header_of(tensor) for name, tensor in tensors.items()}
    write_safetensors(path, headers, iter(tensors.values()), metadata)


def index_of(folder: Path, weight_map: object, files: dict[str, list[str]]) -> Path:
    """An index, and next to it files with some of the tensors."""
    for file, names in files.items():
        write_named(folder / file, {name: TENSORS[name] for name in names})
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


# -- several files --------------------------------------------------------------------------


def test_the_files_of_an_index_are_read_as_one(tmp_path: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    path = index_of(tmp_path, {"a": two, "b": one, "c": two}, {one: ["b"], two: ["c", "a"]})

    for named in (path, tmp_path):
        file = open_weights(named)
        assert file.path == path
        assert_equal_tensors({name: file.read(name) for name in file.shapes}, TENSORS)
        assert set(file.files) == {path, tmp_path / one, tmp_path / two}


def test_a_whole_file_in_a_folder_comes_before_an_index(tmp_path: Path) -> None:
    index_of(tmp_path, {"a": "part.safetensors"}, {"part.safetensors": ["a"]})
    write_named(tmp_path / "model.safetensors", TENSORS)

    assert open_weights(tmp_path).path == tmp_path / "model.safetensors"


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = write_named(tmp_path / "x.safetensors", TENSORS)
    file = SafetensorsFile(path)
    with path.open("r+b") as changed:
        changed.truncate(path.stat().st_size - 1)

    file.read("a")
    with pytest.raises(DataError, match=rf"^{path}: became shorter while it was read; get it anew"):
        file.read("b")


# -- writing --------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tensors = {**TENSORS, "none": torch.zeros(0, 3), "one": torch.tensor(1.5).half()}
    turned = {name: t.t() if t.dim() == 2 else t for name, t in tensors.items()}
    path = tmp_path / "x.safetensors"

    store(path, turned)
    with pytest.raises(FileExistsError):  # and nothing is written over what is there
        store(path, TENSORS)

    file = SafetensorsFile(path)
    assert_equal_tensors({name: file.read(name) for name in file.shapes}, turned)
    assert [file.read(name).dtype for name in turned] == [t.dtype for t in turned.values()]
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize("dtype", safetensors.DTYPES.values())
def test_tensors_of_every_type_are_read_as_they_were_written(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    bits = torch.randint(2, (4 * 3 * dtype.itemsize,), dtype=torch.uint8)
    tensor = bits.view(dtype).view(4, 3)
    path = tmp_path / "x.safetensors"

    assert safetensors.can_be_stored(tensor)
    store(path, {"x": tensor})

    read = SafetensorsFile(path).read("x")
    assert (read.dtype, read.shape) == (dtype, tensor.shape)
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []

    def tensors() -> Iterator[Tensor]:
        for _ in range(3):
            assert [ref for ref in made if ref() is not None] == []
            tensor = torch.zeros(4, 5)
            made.append(weakref.ref(tensor))
            yield tensor
            del tensor

    wanted = {name: TensorHeader(torch.float32, (4, 5)) for name in "abc"}
    write_safetensors(tmp_path / "x.safetensors", wanted, tensors())

    assert len(made) == 3


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
        "codebook.values": torch.ones(3),
        "codebook.mask": torch.ones(3),
    }


def written(folder: Path, version: str = VERSION) -> Path:
    stored = sparse_tensors({name: (header_of(one), one.clone) for name, one in tensors().items()})
    assert is_sparse(stored)
    made = {name: read() for name, (_, read) in stored.items()}
    assert {name: header_of(one) for name, one in made.items()} == {
        name: header for name, (header, _) in stored.items()
    }
    store(folder / SPARSE_FILE, made, **{VERSION_KEY: version})
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
    assert not is_sparse([name for name in stored if name.startswith("codebook")])


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("half.values", lambda values: values[:3]),
        ("half.values", lambda values: values.to(torch.int16)),
        ("half.values", lambda values: values.to(torch.float8_e5m2)),
        ("half.mask", lambda mask: mask[:249]),
        ("half.mask", lambda mask: mask.view(torch.int8)),
        ("half.shape", lambda _: torch.tensor([40, 51])),
        ("half.shape", lambda _: torch.tensor([-40, 50])),
        ("half.shape", lambda shape: shape.float()),
        ("half.shape", lambda shape: shape.view(2, 1)),
    ],
)
def test_parts_that_disagree(tmp_path: Path, part: str, change: Callable[[Tensor], Tensor]) -> None:
    whole = SafetensorsFile(written(tmp_path))
    parts = {name: whole.read(name) for name in whole.shapes}
    parts[part] = change(parts[part])
    path = tmp_path / "other" / SPARSE_FILE
    path.parent.mkdir()
    store(path, parts, **{VERSION_KEY: VERSION})
    with pytest.raises(DataError, match="values, mask and shape of 'half' disagree; get it anew"):
        SparseFile(path).read("half")


def test_other_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="axsparse_sparse is '2', and this version reads '1'"):
        SparseFile(written(tmp_path, "2"))
    write_named(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    with pytest.raises(DataError, match="axsparse_sparse is None"):
        SparseFile(tmp_path / "model.safetensors")
