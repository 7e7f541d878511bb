"""Tickets from and to dense tensors of zeros and ones, under our names and those of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.hf import SMALL_LLAMA
from support.images import write_safetensors
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process
from support.tickets import small_ticket
from torch import Tensor

from axsparse.models.start_weights import open_weights
from axsparse.models.survey import Survey, survey
from axsparse.models.zoo.hf_models import GPT2, turned
from axsparse.models.zoo.hf_models import LLAMA as LLAMA_NAMES
from axsparse.models.zoo.llama import llama
from axsparse.pruning.ticket.dense_masks import export_masks, import_masks
from axsparse.pruning.ticket.ticket_reader import open_ticket
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.files.safetensors import SafetensorsFile

LLAMA = survey(llama(SMALL_LLAMA, 12))
MATRICES = ("block0.attention.k.weight", "block1.mlp.down.weight")


def some_masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.rand(LLAMA.shapes[name], generator=generator) < 0.4 for name in MATRICES}


def imported(masks: dict[str, Tensor], folder: Path, surveyed: Survey = LLAMA) -> Path:
    write_safetensors(folder / "masks.safetensors", masks)
    import_masks(open_weights(folder / "masks.safetensors"), surveyed, folder / "ticket")
    return folder / "ticket"


def refusal(masks: dict[str, Tensor], folder: Path) -> str:
    with pytest.raises(DataError) as told:
        imported(masks, folder)
    assert not (folder / "ticket").exists()
    return str(told.value).removeprefix(f"{folder}/masks.safetensors: ")


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.bool, "{}"),
        (torch.uint8, "hf {}"),
        (torch.bfloat16, "body {}"),
        (torch.int64, "{}_mask"),
    ],
)
def test_masks_of_any_type_and_name_become_a_ticket(
    dtype: torch.dtype, form: str, tmp_path: Path
) -> None:
    def renamed(name: str) -> str:
        foreign = {"hf {}": "model.", "body {}": ""}
        name = LLAMA_NAMES.named(name, foreign[form]) if form in foreign else name
        return form.split()[-1].format(name)

    masks = some_masks()

    ticket = open_ticket(
        imported({renamed(name): mask.to(dtype) for name, mask in masks.items()}, tmp_path)
    )

    assert ticket.manifest.algorithm == "imported"
    assert list(ticket.kept) == list(MATRICES)
    for name, mask in masks.items():
        assert torch.equal(ticket.mask(name), mask.view(-1))
    ticket.check(LLAMA.shapes)


def test_a_ticket_goes_out_and_in_again_the_same(tmp_path: Path) -> None:
    ticket = open_ticket(imported(some_masks(), tmp_path))
    export_masks(ticket, tmp_path / "ours.safetensors", foreign=False)
    export_masks(ticket, tmp_path / "theirs.safetensors", foreign=True)

    ours = SafetensorsFile(tmp_path / "ours.safetensors")
    assert list(ours.shapes) == list(MATRICES)
    assert torch.equal(ours.read(MATRICES[0]), some_masks()[MATRICES[0]].to(torch.uint8))
    assert list(SafetensorsFile(tmp_path / "theirs.safetensors").shapes) == [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ]
    for name in ("ours", "theirs"):
        import_masks(open_weights(tmp_path / f"{name}.safetensors"), LLAMA, tmp_path / name)
        assert open_ticket(tmp_path / name).manifest == ticket.manifest


def test_matrices_of_gpt2_are_turned(tmp_path: Path) -> None:
    config = tiny_config()
    surveyed = survey(tiny_gpt(config))
    name = "block1.fc1.weight"
    mask = torch.rand(surveyed.shapes[name], generator=torch.Generator().manual_seed(1)) < 0.5

    path = imported({GPT2.named(name): turned(name, mask).contiguous()}, tmp_path, surveyed)
    export_masks(open_ticket(path), tmp_path / "again.safetensors", foreign=True)

    assert torch.equal(open_ticket(path).mask(name), mask.view(-1))
    again = SafetensorsFile(tmp_path / "again.safetensors").read(GPT2.named(name))
    assert torch.equal(again, mask.t().to(torch.uint8))
    # A run starts from it.
    pruned = tiny_config(pruning={"ticket": str(path)}, train={"steps": 2})
    for trainer, _ in train_in_process(2, 1, tiny_gpt(pruned), pruned, token_data()):
        for layer in trainer.parts.layers:
            for tensor in layer.state.owned:
                if tensor.name == name:
                    assert torch.equal(tensor.positions(), mask.view(-1).nonzero().view(-1))


def test_what_is_no_mask_is_refused_by_name(tmp_path: Path) -> None:
    masks = some_masks()
    first = masks[MATRICES[0]]

    assert refusal({}, tmp_path) == "holds no masks; name another file"
    assert refusal({"block9.mlp.up.weight": first}, tmp_path) == (
        "'block9.mlp.up.weight' is the mask of no parameter of the model; leave it out, or name "
        "the model that it was drawn from"
    )
    assert refusal({MATRICES[0]: first, LLAMA_NAMES.named(MATRICES[0]): first}, tmp_path).endswith(
        f"are both masks of {MATRICES[0]}; keep one"
    )
    assert refusal({MATRICES[0]: first[1:]}, tmp_path) == (
        f"{MATRICES[0]!r} has shape (15, 32), {MATRICES[0]} of the model has (16, 32); name the "
        "model that it was drawn from"
    )
    assert refusal({MATRICES[0]: 0.5 * first}, tmp_path) == (
        f"{MATRICES[0]!r} has other values than 0 and 1; write masks, not weights (pruning.method "
        "zeros takes those)"
    )
    nowhere = torch.full(LLAMA.shapes[MATRICES[0]], float("nan"))
    assert "other values than 0 and 1" in refusal({MATRICES[0]: nowhere}, tmp_path)
    assert refusal({"block0.norm1.weight": torch.ones(32)}, tmp_path) == (
        "'block0.norm1.weight' is a mask of block0.norm1.weight, which is a vector; only matrices "
        "are pruned: leave it out"
    )


def test_models_that_transformers_has_not_have_no_names_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is of a model that transformers has not; choose ax"):
        export_masks(open_ticket(small_ticket(tmp_path)), tmp_path / "x", foreign=True)
    assert not (tmp_path / "x").exists()
