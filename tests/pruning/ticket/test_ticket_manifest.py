"""The manifest of a ticket, and how one that is wrong is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tickets import PARAMETERS, PRUNED, forge, small_ticket

from axsparse.pruning.ticket.ticket_manifest import (
    TicketManifest,
    hash_of,
    make_manifest,
    read_manifest,
)
from axsparse.runtime.errors import DataError
from axsparse.runtime.files.safetensors import SafetensorsFile

PATH = Path("t.safetensors")


def small_manifest(**changed: Any) -> TicketManifest:
    known: dict[str, Any] = {
        "algorithm": "magnitude",
        "step": 3,
        "seed": 1,
        "parameters": PARAMETERS,
        "tensors": {name: (shape, 4, "00") for name, shape in PRUNED.items()},
    }
    return make_manifest(**{**known, **changed})


def refusal(metadata: dict[str, Any]) -> str:
    with pytest.raises(DataError) as told:
        read_manifest(PATH, metadata)
    return str(told.value)


def forged(change: Callable[[dict[str, Any]], None], folder: Path) -> str:
    """The error for a ticket with a changed manifest, without the path."""
    path = forge(small_ticket(folder), lambda manifest, header, data: change(manifest))
    metadata = SafetensorsFile(path).metadata
    return refusal(dict(metadata)).removeprefix(f"{PATH}: ")


def test_sparsity_is_exact_per_tensor_and_in_total() -> None:
    manifest = small_manifest()

    assert {name: entry.sparsity for name, entry in manifest.tensors.items()} == {
        "block0.fc.weight": 0.8,
        "block1.fc.weight": 0.75,
        "block2.conv.weight": 1 - 4 / 18,
    }
    assert (manifest.kept, manifest.numel) == (12, 54)
    assert manifest.sparsity == 1 - 12 / 54


def test_a_model_without_pruned_tensors_has_a_sparsity_of_zero() -> None:
    assert small_manifest(tensors={}).sparsity == 0


def test_what_is_written_is_read_again() -> None:
    manifest = small_manifest()

    assert read_manifest(PATH, manifest.metadata()) == manifest


def test_the_hash_of_masks_depends_on_names_shapes_and_bits_only() -> None:
    one = small_manifest()
    tensors = {name: (shape, 4, "00") for name, shape in PRUNED.items()}

    def hash_with(name: str, entry: tuple[tuple[int, ...], int, str]) -> str:
        return small_manifest(tensors={**tensors, name: entry}).hash

    assert small_manifest(step=9, seed=2, algorithm="snip", version="9").hash == one.hash
    assert hash_with("block0.fc.weight", ((5, 4), 4, "01")) != one.hash
    assert hash_with("block0.fc.weight", ((4, 5), 4, "00")) != one.hash
    assert hash_with("block9.fc.weight", ((5, 4), 4, "00")) != one.hash


def test_the_signature_depends_on_every_parameter() -> None:
    one = small_manifest().model_hash

    assert small_manifest(parameters={**PARAMETERS, "head.weight": (8, 4)}).model_hash != one
    assert small_manifest(parameters={**PARAMETERS, "more.bias": (1,)}).model_hash != one
    assert small_manifest(step=9).model_hash == one


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"ticket": 3}])
def test_a_file_without_a_manifest_is_no_ticket(metadata: dict[str, Any]) -> None:
    assert refusal(metadata) == (
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
    assert refusal({"ticket": text}) == (
        f"t.safetensors: its manifest cannot be read ({reason}); get the ticket anew"
    )


def test_tickets_of_other_formats_are_refused(tmp_path: Path) -> None:
    assert forged(lambda manifest: manifest.update(version=2), tmp_path) == (
        "a ticket of format 2, and this axsparse reads 1; take the version that wrote it, or draw "
        "the ticket again"
    )


def test_a_manifest_that_was_changed_is_told_by_its_hash() -> None:
    metadata = small_manifest().metadata()
    metadata["ticket"] = metadata["ticket"].replace('"step": 3', '"step": 4')

    assert refusal(metadata) == (
        "t.safetensors: its manifest has another hash than it says; get the ticket anew"
    )


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("step", -1, "greater_than_equal"),
        ("step", 2**63, "less_than"),
        ("step", 1.0, "int_type"),
        ("version", True, "int_type"),
        ("algorithm", "two\nlines", "value_error"),
        ("algorithm", None, "string_type"),
        ("tensors", [], "dict_type"),
        ("parameters", {"a": [1] * 65}, "too_long"),
        ("extra", 1, "extra_forbidden"),
    ],
)
def test_malformed_manifests_are_refused(
    key: str, value: object, kind: str, tmp_path: Path
) -> None:
    place = f"{key}.a" if key == "parameters" else key

    assert forged(lambda manifest: manifest.update({key: value}), tmp_path) == (
        f"its manifest is malformed at {place!r} ({kind}); get the ticket anew"
    )


@pytest.mark.parametrize("key", ["sparsity", "hash", "model_hash", "tensors"])
def test_a_manifest_that_contradicts_itself_is_refused(key: str, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        if key == "tensors":
            manifest["tensors"]["block1.fc.weight"]["sparsity"] += 1e-9
        elif key == "sparsity":
            manifest[key] = float("nan")
        else:
            manifest[key] = hash_of(b"")

    assert forged(change, tmp_path) == (
        f"its manifest contradicts itself at {key!r}; get the ticket anew"
    )


@pytest.mark.parametrize("shape", [[4, 5], None])
def test_what_is_pruned_has_to_be_a_parameter_of_the_model(
    shape: list[int] | None, tmp_path: Path
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        if shape is None:
            del manifest["parameters"]["block0.fc.weight"]
        else:
            manifest["parameters"]["block0.fc.weight"] = shape

    assert forged(change, tmp_path) == (
        "prunes 'block0.fc.weight' of shape (5, 4), which is no parameter of the model that it "
        "names; get the ticket anew"
    )
