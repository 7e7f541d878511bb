"""`axsparse prune --dry-run`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.hf import write_llama

from axsparse.__main__ import main
from axsparse.cli.prune import lines
from axsparse.config.load import configure

SMALL = ["model.num_layers=1", "model.hidden_size=8", "model.num_heads=2", "model.vocab_size=16"]


def test_a_dry_run_names_every_tensor_and_why_it_is_dense() -> None:
    settings = [*SMALL, "pruning.exclude=['*.proj.weight']", "pruning.layers=['*.fc1.weight=0.5']"]

    said = list(lines(configure(None, settings)))

    assert said[:6] == [
        "pruned by magnitude:",
        "tensor                        shape  entries  kept  sparsity",
        "block0.attention.qkv.weight  24 × 8      192    19  90.104 %",
        "block0.fc1.weight            32 × 8      256   128  50.000 %",
        "block0.fc2.weight            8 × 32      256    26  89.844 %",
        "total                                    704   173  75.426 %",
    ]
    assert "dense, 64 entries: named in pruning.exclude" in said
    assert "  embed.token.weight  16 × 8" in said
    assert any(line.endswith(" entries: vectors") for line in said)


def test_a_dry_run_of_a_mask_file_has_its_kept_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mask = torch.zeros(32, 8, dtype=torch.bool)
    mask[:5, 0] = True
    save_file({"block0.fc1.weight": mask}, "mask.safetensors")

    said = list(lines(configure(None, [*SMALL, "pruning.mask=mask.safetensors"])))

    assert said[0] == "pruned by mask.safetensors:"
    assert said[2] == "block0.fc1.weight  32 × 8      256     5  98.047 %"


@pytest.mark.parametrize(
    ("options", "by", "sparsity"),
    [
        ("--sparsity 0.5", "wanda", "50.000 %"),
        ("--sparsity 0.7", "sparsegpt", None),
        ("--sparsity 0.7 --schedule gradual", "wanda, then magnitude while the model trains", None),
        ("--sparsity 0.9", "sparsegpt", None),
        ("--sparsity 0.6 --distribution owl", "wanda", None),
        ("--sparsity 0.7 --distribution uniform", "sparsegpt", "70.0"),
        ("--sparsity 0.9 --method magnitude", "magnitude", "90.0"),
    ],
)
def test_a_dry_run_of_a_folder_chooses_as_the_command_does(
    options: str,
    by: str,
    sparsity: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_llama(tmp_path / "model")

    with pytest.raises(SystemExit) as end:
        main(["prune", "--dry-run", "--from", str(tmp_path / "model"), *options.split()])

    said = capsys.readouterr().out.splitlines()
    total = next(line for line in said if line.startswith("total"))
    assert not end.value.code and said[0] == f"pruned by {by}:"
    if sparsity is None:
        assert said[1].endswith("OWL finds each layer's sparsity from samples")
        assert "sparsity" not in said[2] and "%" not in total
    else:
        assert f" {sparsity}" in total
