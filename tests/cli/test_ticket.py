"""`axsparse ticket show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line
from support.tickets import PARAMETERS, small_ticket, some_masks

from axsparse.pruning.ticket.ticket_reader import open_ticket


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_ticket_is_shown_as_a_table(tmp_path: Path, axsparse: Axsparse) -> None:
    manifest = open_ticket(small_ticket(tmp_path)).manifest
    kept = [int(mask.sum()) for mask in some_masks().values()]

    code, screen, errors = axsparse("ticket", "show", "ticket.safetensors")

    assert (code, errors) == (0, "")
    lines = screen.splitlines()
    assert lines[:4] == [
        f"early-bird, step 640, seed 7, axsparse {manifest.axsparse}",
        f"masks {manifest.hash}",
        f"model {manifest.model_hash}, 6 parameter tensors",
        "",
    ]
    percent = [f"{100 * (1 - k / n):.3f} %" for k, n in zip(kept, (20, 16, 18), strict=True)]
    total = f"{100 * (1 - sum(kept) / 54):.3f} %"
    assert lines[4:] == [
        "tensor                      shape  entries  kept  sparsity",
        f"block0.fc.weight            5 × 4       20  {kept[0]:4}  {percent[0]}",
        f"block1.fc.weight            4 × 4       16  {kept[1]:4}  {percent[1]}",
        f"block2.conv.weight  2 × 1 × 3 × 3       18  {kept[2]:4}  {percent[2]}",
        f"total                                   54  {sum(kept):4}  {total}",
    ]


def test_the_whole_manifest_is_shown_as_json(tmp_path: Path, axsparse: Axsparse) -> None:
    manifest = open_ticket(small_ticket(tmp_path)).manifest

    code, out, err = axsparse("ticket", "show", "--json", "ticket.safetensors")

    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert shown == json.loads(manifest.text())
    assert shown["parameters"] == {name: list(shape) for name, shape in PARAMETERS.items()}
    assert shown["tensors"]["block0.fc.weight"]["shape"] == [5, 4]


def test_a_run_stands_for_the_ticket_that_it_found(tmp_path: Path, axsparse: Axsparse) -> None:
    small_ticket(tmp_path)

    assert axsparse("ticket", "show", str(tmp_path)) == axsparse(
        "ticket", "show", "ticket.safetensors"
    )


def test_a_mistake_is_told_in_one_line(tmp_path: Path, axsparse: Axsparse) -> None:
    (tmp_path / "short").write_bytes(b"short")

    for file, code, message in (
        (".", 66, "ticket: . has no ticket.safetensors, which a run writes when it finds"),
        ("none", 66, "ticket 'none': cannot be read (No such file or directory); name"),
        ("short", 65, "short: no safetensors file, or cut short; get it anew"),
    ):
        assert_one_line(axsparse("ticket", "show", file), code, message)
