"""The safetensors format: several files behind one index, and files that are written."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.images import assert_equal_tensors, write_safetensors
from torch import Tensor

from axsparse.models.start_weights import open_weights
from axsparse.runtime.errors import DataError, MissingInputError
from axsparse.runtime.files import safetensors
from axsparse.runtime.files.safetensors import SafetensorsFile, SafetensorsIndex, TensorHeader

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(5.0).bfloat16(),
    "c": torch.arange(4).view(4, 1),
}


def described(tensors: dict[str, Tensor]) -> dict[str, TensorHeader]:
    return {name: TensorHeader(t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def index_of(folder: Path, weight_map: object, files: dict[str, list[str]]) -> Path:
    """An index, and beside it files with some of the tensors."""
    for file, names in files.items():
        write_safetensors(folder / file, {name: TENSORS[name] for name in names})
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
    write_safetensors(tmp_path / "model.safetensors", TENSORS)

    assert open_weights(tmp_path).path == tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", r"no index of safetensors files \(JSONDecodeError: .*\); get it anew"),
        ("\xff", r"no index of safetensors files \(UnicodeDecodeError: .*\); get it anew"),
        ("[" * 100_000, r"no index of safetensors files \(RecursionError: .*\); get it anew"),
        ("[]", r"no index of safetensors files \(TypeError: .*\); get it anew"),
        ("{}", r"no index of safetensors files \(KeyError: 'weight_map'\); get it anew"),
        (
            '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
            r"no index of safetensors files \(ValueError: the name 'a' is there twice\); get it "
            "anew",
        ),
        ('{"weight_map": ["a"]}', "its weight_map is list, not tensors and files; get it anew"),
    ],
)
def test_what_is_no_index_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(DataError, match=f"^{path}: {told}$"):
        open_weights(path)


@pytest.mark.parametrize(
    "file",
    [
        *("../x.safetensors", "/x.safetensors", "a\\x.safetensors", "c:x.safetensors", "x.bin"),
        *("a\0.safetensors", "\ud800.safetensors", 3, None),
    ],
)
def test_an_index_leads_to_no_other_place(file: object, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    write_safetensors(tmp_path / "x.safetensors", TENSORS)
    path = index_of(tmp_path / "here", {"a": file}, {})

    with pytest.raises(DataError) as told:
        open_weights(path)

    assert str(told.value) == (
        f"{path}: places 'a' in {file!r}, which is no safetensors file beside it; get the index "
        "from someone you trust"
    )


def test_files_that_an_index_names_have_to_be_there_with_what_it_says(tmp_path: Path) -> None:
    path = index_of(
        tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}, {"1.safetensors": ["a"]}
    )
    with pytest.raises(
        MissingInputError,
        match=rf"^{path}: names 2.safetensors, which cannot be read \(No such file or directory\); "
        "get all of the files that it names$",
    ):
        SafetensorsIndex(path)
    write_safetensors(tmp_path / "2.safetensors", {"c": TENSORS["c"]})
    with pytest.raises(
        DataError,
        match=rf"^{path}: places 'b' in 2.safetensors, which lacks it; get all of its files anew$",
    ):
        SafetensorsIndex(path)
    (tmp_path / "2.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"2.safetensors: no safetensors file, or cut short"):
        SafetensorsIndex(path)


def test_pickles_of_hugging_face_are_refused_with_the_reason(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")

    with pytest.raises(DataError) as told:
        open_weights(tmp_path / "pytorch_model.bin")
    assert str(told.value) == (
        f"{tmp_path}/pytorch_model.bin: pickled weights may run code when they are read; save them "
        "as safetensors (save_pretrained of a recent transformers)"
    )
    with pytest.raises(MissingInputError) as missing:
        open_weights(tmp_path)
    assert str(missing.value) == (
        f"weights '{tmp_path}': has neither model.safetensors nor model.safetensors.index.json; "
        "pytorch_model.bin is pickled, which may run code when it is read; name a folder that "
        "save_pretrained of a recent transformers wrote"
    )


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", TENSORS)
    file = SafetensorsFile(path)
    with path.open("r+b") as changed:
        changed.truncate(path.stat().st_size - 1)

    file.read("a")
    with pytest.raises(DataError, match=rf"^{path}: became shorter while it was read; get it anew"):
        file.read("c")


# -- writing --------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tensors = {**TENSORS, "none": torch.zeros(0, 3), "one": torch.tensor(1.5).half()}
    turned = {name: t.t() if t.dim() == 2 else t for name, t in tensors.items()}
    path = tmp_path / "x.safetensors"

    safetensors.write_safetensors(path, described(turned), iter(turned.values()))

    file = SafetensorsFile(path)
    assert_equal_tensors({name: file.read(name) for name in file.shapes}, turned)
    assert [file.read(name).dtype for name in turned] == [t.dtype for t in turned.values()]
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize("dtype", [*safetensors.DTYPES.values(), torch.complex32, torch.complex128])
def test_tensors_of_every_type_are_read_as_they_were_written(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    bits = torch.randint(2, (4 * 3 * dtype.itemsize,), dtype=torch.uint8)
    tensor = bits.view(dtype).view(4, 3)
    path = tmp_path / "x.safetensors"
    stored = safetensors.as_stored(tensor)

    assert safetensors.can_be_stored(tensor)
    safetensors.write_safetensors(path, {"x": safetensors.header_of(tensor)}, iter([stored]))

    read = safetensors.as_read(SafetensorsFile(path).read("x"), dtype)
    assert (read.dtype, read.shape) == (dtype, tensor.shape)
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


EMPTY = '{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{{"a": {EMPTY}}}'.replace("[0]", "[1e999]"), "OverflowError"),
        (
            f'{{"a": {EMPTY}, "b": {EMPTY}, "a": {EMPTY}}}',
            "ValueError: the name 'a' is there twice",
        ),
        (
            f'{{"a": {EMPTY}}}'.replace('"shape"', '"dtype"'),
            "ValueError: the name 'dtype' is there",
        ),
        (f'{{"a\\u0000b": {EMPTY}}}', r"ValueError: the name 'a\\x00b' is no text"),
        (f'{{"\\ud800": {EMPTY}}}', r"ValueError: the name '\\ud800' is no text"),
        (f'{{"{"a" * 9_000}": 1, "\xff": {EMPTY}}}', "(UnicodeDecode|Type)Error: .{0,120}; get"),
    ],
)
def test_a_header_that_no_file_should_have_is_refused(text: str, said: str, tmp_path: Path) -> None:
    """Of tensors with one name, readers take the last, and others may take the first."""
    path = tmp_path / "x.safetensors"
    content = text.encode("latin-1")
    path.write_bytes(len(content).to_bytes(8, "little") + content)

    with pytest.raises(
        DataError, match=rf"^{path}: its safetensors header cannot be read \({said}"
    ):
        SafetensorsFile(path)


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []

    def tensors() -> Iterator[Tensor]:
        for _ in range(3):
            assert [ref for ref in made if ref() is not None] == []
            yield noted(torch.zeros(4, 5))

    def noted(tensor: Tensor) -> Tensor:
        made.append(weakref.ref(tensor))
        return tensor

    wanted = {name: TensorHeader(torch.float32, (4, 5)) for name in "abc"}
    safetensors.write_safetensors(tmp_path / "x.safetensors", wanted, tensors())

    assert len(made) == 3


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("precious")

    with pytest.raises(FileExistsError):
        safetensors.write_safetensors(path, described(TENSORS), iter(TENSORS.values()))

    assert path.read_text() == "precious"
