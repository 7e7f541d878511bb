"""Tickets are read one mask at a time, and refused for other models, when damaged, and forged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import lines_beside, refusal
from support.tickets import PARAMETERS, PRUNED, forge, small_ticket, some_masks

from axsparse.pruning.ticket import ticket_reader as module
from axsparse.pruning.ticket.ticket_reader import (
    TicketManifest,
    TicketOrigin,
    count_kept,
    hash_of,
    make_manifest,
    open_ticket,
    pack,
    read_manifest,
)
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError
from axsparse.runtime.files.safetensors import SafetensorsFile
from axsparse.samo.masks import Masks

Forgery = Callable[[dict[str, Any], dict[str, Any], bytearray], None]


# -- reading --------------------------------------------------------------------------------


def test_masks_are_read_as_they_were_written(tmp_path: Path) -> None:
    masks = some_masks()

    ticket = open_ticket(str(small_ticket(tmp_path)))

    assert list(ticket.kept) == list(PRUNED)
    for name, mask in masks.items():
        assert torch.equal(ticket.mask(name), mask)
        assert ticket.mask(name).dtype == torch.bool
        assert ticket.kept[name] == mask.sum()
    with pytest.raises(KeyError):
        ticket.mask("block0.fc.bias")


@given(st.integers(0, 70), st.integers(0, 2**70))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_bits_are_packed_in_order_highest_first(numel: int, seed: int) -> None:
    mask = [bool(seed >> at & 1) for at in range(numel)]

    packed = pack(torch.tensor(mask, dtype=torch.bool))

    digits = "".join("1" if bit else "0" for bit in mask)
    digits += "0" * (-numel % 8)
    assert packed.tolist() == [int(digits[at : at + 8], 2) for at in range(0, len(digits), 8)]
    assert count_kept(packed) == sum(mask)


def test_counting_goes_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 3)

    assert count_kept(torch.arange(256, dtype=torch.uint8)) == 1024


def test_the_format_is_what_other_libraries_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="comes with transformers")
    masks = some_masks()
    path = small_ticket(tmp_path)

    with safetensors.safe_open(path, "np") as file:
        assert sorted(file.keys()) == sorted(masks)
        for name, mask in masks.items():
            bits = np.unpackbits(file.get_tensor(name), count=mask.numel()).astype(bool)
            assert np.array_equal(bits, mask.numpy())
        assert file.metadata().keys() == {"format", "ticket", "ticket_hash"}


def test_it_is_a_source_of_masks_like_others_and_asks_for_no_weights(tmp_path: Path) -> None:
    masks: Masks = open_ticket(small_ticket(tmp_path))

    def weight() -> torch.Tensor:
        raise AssertionError("what is kept is in the ticket")

    found = masks.mask("block0.fc.weight", (5, 4), weight, within=torch.arange(20))
    assert torch.equal(found, some_masks()["block0.fc.weight"])
    with pytest.raises(AssertionError, match=r"check\(\) comes first"):
        masks.mask("block0.fc.weight", (4, 5), weight)
    with pytest.raises(AssertionError, match="is pruned already"):
        masks.mask("block0.fc.weight", (5, 4), weight, within=(~found).nonzero().view(-1))


def test_reading_a_mask_holds_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = SafetensorsFile.read

    def noted(self: SafetensorsFile, name: str) -> torch.Tensor:
        read.append(name)
        return original(self, name)

    ticket = open_ticket(small_ticket(tmp_path))
    monkeypatch.setattr(SafetensorsFile, "read", noted)

    assert ticket.kept["block1.fc.weight"] > 0
    ticket.check(PARAMETERS)
    assert read == []
    ticket.mask("block1.fc.weight")
    assert read == ["block1.fc.weight"]


# -- for which model ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {**PARAMETERS, "head.weight": (8, 4), "block0.fc.bias": (6,)},
            # Nothing is pruned there.
            ": drawn from another model, in which block0.fc.bias has shape (5,) and not (6,); make",
        ),
        (
            {"front.weight": (3, 2), **PARAMETERS, "head.bias": (7,), "embed.weight": (8, 4)},
            ": drawn from another model, which has no parameter front.weight (3, 2); make",
        ),
        (
            {name: shape for name, shape in PARAMETERS.items() if name.startswith(("e", "block0"))},
            ": drawn from another model, which has a parameter block1.fc.weight (4, 4) that this "
            "one lacks; make",
        ),
    ],
)
def test_the_first_parameter_that_differs_is_named(
    changed: dict[str, tuple[int, ...]], words: str, tmp_path: Path
) -> None:
    ticket = open_ticket(small_ticket(tmp_path))
    ticket.check({name: [*shape] for name, shape in PARAMETERS.items()})

    with pytest.raises(ConfigError) as told:
        ticket.check(changed)

    assert str(told.value) == (
        f"{ticket.path}{words} the model's settings those, or draw a ticket from this model"
    )


# -- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["nothing", "folder", "lost"])
def test_a_file_that_cannot_be_read_is_missing(what: str, tmp_path: Path) -> None:
    path = tmp_path / "ticket.safetensors"
    if what == "folder":
        path.mkdir()
    elif what == "lost":
        ticket = open_ticket(small_ticket(tmp_path))
        path.unlink()

    with pytest.raises(
        MissingInputError,
        match=rf"^ticket '{path}': cannot be read \(.+\); name a file that pruning wrote$",
    ):
        ticket.mask("block0.fc.weight") if what == "lost" else open_ticket(path)


def test_what_is_cut_short_is_refused_wherever_that_is(tmp_path: Path) -> None:
    path = small_ticket(tmp_path)
    whole = path.read_bytes()

    for length in {*range(12), *range(12, len(whole), 41), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"^{path}: .*; get it anew$"):
            open_ticket(path)


def hash_of_json(value: object) -> str:
    return hash_of(json.dumps(value).encode())


def sealed(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
    """Give a manifest the correct hashes of its first tensor and of all masks."""
    first = manifest["tensors"]["block0.fc.weight"]
    begin, end = header["block0.fc.weight"]["data_offsets"]
    first["hash"] = hash_of(bytes(data[begin:end]))
    rows = [[name, e["shape"], e["hash"]] for name, e in manifest["tensors"].items()]
    manifest["hash"] = hash_of_json(rows)


def flipped(bit: int, at: int = 0, seal: bool = True) -> Forgery:
    """Changes bits of the first mask, and if asked its hashes."""

    def change(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
        data[at] ^= bit
        if seal:
            sealed(manifest, header, data)

    return change


def dropped(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
    del header["block1.fc.weight"]


def added(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
    header["more"] = header["block1.fc.weight"]


def retyped(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
    header["block0.fc.weight"]["dtype"] = "I8"


def changed(**values: Any) -> Forgery:
    return lambda manifest, header, data: manifest.update(values)


def tampered(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
    manifest["tensors"]["block1.fc.weight"]["sparsity"] += 1e-9


def reshaped(shape: list[int] | None) -> Forgery:
    def change(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
        manifest["parameters"]["block0.fc.weight"] = shape
        if shape is None:
            del manifest["parameters"]["block0.fc.weight"]

    return change


FORGERIES: dict[str, Forgery] = {
    "another bit": flipped(1, seal=False),
    "another bit, of the right hash": flipped(1),
    "a bit behind the last": flipped(1, at=2),
    "the last bit": flipped(8, at=2),
    "a tensor less": dropped,
    "a tensor more": added,
    "another type": retyped,
    "another format": changed(version=2),
    "a step before the first": changed(step=-1),
    "a step of 64 bits": changed(step=2**63),
    "half a step": changed(step=1.0),
    "true for one": changed(version=True),
    "two lines": changed(algorithm="two\nlines"),
    "no algorithm": changed(algorithm=None),
    "a list": changed(tensors=[]),
    "many dimensions": changed(parameters={"a": [1] * 65}),
    "a key more": changed(extra=1),
    "another sparsity": changed(sparsity=float("nan")),
    "another hash": changed(hash=hash_of(b"")),
    "another model": changed(model_hash=hash_of(b"")),
    "another sparsity of a tensor": tampered,
    "another shape of the model": reshaped([4, 5]),
    "a parameter less": reshaped(None),
}


@pytest.mark.parametrize(("case", "line"), lines_beside(__file__).items())
def test_what_was_forged_is_refused_by_name(case: str, line: str, tmp_path: Path) -> None:
    path = forge(small_ticket(tmp_path), FORGERIES[case])

    assert refusal(lambda: open_ticket(path), DataError, path) == line


def test_bits_that_changed_after_opening_are_told_as_well(tmp_path: Path) -> None:
    ticket = open_ticket(small_ticket(tmp_path))
    contents = bytearray(ticket.path.read_bytes())
    contents[-1] ^= 128
    ticket.path.write_bytes(contents)

    ticket.mask("block0.fc.weight")
    with pytest.raises(DataError, match=r"the mask of block2.conv.weight has another hash"):
        ticket.mask("block2.conv.weight")


@pytest.mark.parametrize("size", [2, 10**15, 2**62])
def test_sizes_are_compared_with_the_file_before_anything_is_made(
    size: int, tmp_path: Path
) -> None:
    def grow(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
        manifest["tensors"]["block0.fc.weight"]["shape"] = [size, 4]
        manifest["parameters"]["block0.fc.weight"] = [size, 4]
        entry = manifest["tensors"]["block0.fc.weight"]
        entry["sparsity"] = 1 - entry["kept"] / (4 * size)
        kept = sum(e["kept"] for e in manifest["tensors"].values())
        manifest["sparsity"] = 1 - kept / (4 * size + 16 + 18)
        manifest["model_hash"] = hash_of_json(list(manifest["parameters"].items()))
        sealed(manifest, header, data)

    path = forge(small_ticket(tmp_path), grow)
    assert refusal(lambda: open_ticket(path), DataError, path) == (
        "PLACE: the mask of block0.fc.weight is a tensor of shape (3,), which does not fit its "
        f"{4 * size} entries; get the ticket anew"
    )


# -- the manifest ---------------------------------------------------------------------------

PATH = Path("t.safetensors")


MASKS = dict.fromkeys(PRUNED, (4, "00"))


def small_manifest(
    masks: dict[str, tuple[int, str]] = MASKS, version: str = "1", **changed: Any
) -> TicketManifest:
    origin = TicketOrigin("magnitude", 3, 1, PARAMETERS)
    return make_manifest(replace(origin, **changed), masks, version)


def test_sparsity_is_exact_per_tensor_and_in_total() -> None:
    manifest = small_manifest()

    assert {name: entry.sparsity for name, entry in manifest.tensors.items()} == {
        "block0.fc.weight": 0.8,
        "block1.fc.weight": 0.75,
        "block2.conv.weight": 1 - 4 / 18,
    }
    assert (manifest.kept, manifest.numel) == (12, 54)
    assert manifest.sparsity == 1 - 12 / 54
    assert small_manifest({}).sparsity == 0
    assert read_manifest(PATH, manifest.metadata()) == manifest


def test_the_hash_of_masks_depends_on_names_shapes_and_bits_only() -> None:
    one = small_manifest().hash
    renamed = {name.replace("block2", "block9"): shape for name, shape in PARAMETERS.items()}
    masks = {name.replace("block2", "block9"): mask for name, mask in MASKS.items()}

    assert small_manifest(step=9, seed=2, algorithm="snip", version="9").hash == one
    assert small_manifest({**MASKS, "block0.fc.weight": (4, "01")}).hash != one
    assert small_manifest(parameters={**PARAMETERS, "block0.fc.weight": (4, 5)}).hash != one
    assert small_manifest(masks, parameters=renamed).hash != one


def test_the_signature_depends_on_every_parameter() -> None:
    one = small_manifest().model_hash

    assert small_manifest(parameters={**PARAMETERS, "head.weight": (8, 4)}).model_hash != one
    assert small_manifest(parameters={**PARAMETERS, "more.bias": (1,)}).model_hash != one
    assert small_manifest(step=9).model_hash == one


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"ticket": 3}])
def test_a_file_without_a_manifest_is_no_ticket(metadata: dict[str, Any]) -> None:
    assert refusal(lambda: read_manifest(PATH, metadata), DataError) == (
        "t.safetensors: no ticket, since it has no manifest; name a file that pruning wrote"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ('{"version": "1"}', "TypeError"),
        ('{"version": 1.0}', "TypeError"),
        ("[" * 200_000, "RecursionError"),
        ("\ud800", "UnicodeEncodeError"),
    ],
    ids=range(7),
)
def test_what_is_no_manifest_is_refused(text: str, reason: str) -> None:
    assert refusal(lambda: read_manifest(PATH, {"ticket": text}), DataError) == (
        f"t.safetensors: its manifest cannot be read ({reason}); get the ticket anew"
    )


def test_a_manifest_that_was_changed_is_told_by_its_hash() -> None:
    metadata = small_manifest().metadata()
    metadata["ticket"] = metadata["ticket"].replace('"step": 3', '"step": 4')

    assert refusal(lambda: read_manifest(PATH, metadata), DataError) == (
        "t.safetensors: its manifest has another hash than it says; get the ticket anew"
    )
