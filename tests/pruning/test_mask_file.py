"""Mask files are the same under every layout, read one mask at a time, and refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.images import write_safetensors as write_named
from support.mask_files import PRUNED, small_mask_file, some_masks
from support.runs import (
    FEW_MICROBATCHES,
    assert_bitwise,
    on_ranks,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
)
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.pruning import mask_file as module
from axsparse.pruning.mask_file import open_masks, write_masks
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import DataError, OutputError
from axsparse.runtime.files.safetensors import TensorHeader, write_safetensors
from axsparse.runtime.grid import Grid
from axsparse.samo.masks import Masks
from axsparse.training.trainer import Trainer

LAYOUTS = [(3, 1), (2, 2)]


# -- of runs --------------------------------------------------------------------------------


def drawn(path: Path, config: Config, g_inter: int, g_data: int, **named: Any) -> list[Trainer]:
    """Train, and have all ranks save their masks at the end; `named` is for `train_in_process`."""
    trainers: dict[int, Trainer] = {}

    def note(trainer: Trainer) -> None:
        trainers[trainer.coords.rank] = trainer
        release = trainer._release

        def save_and_release() -> None:
            if trainer.steps_done == config.train.steps:
                with trainer._within("on_step"):
                    trainer.save_mask(path)
            release()

        trainer._release = save_and_release  # type: ignore[method-assign]  # the last moment of a run

    train_in_process(g_inter, g_data, tiny_gpt(config), config, token_data(), before=note, **named)
    return [trainers[rank] for rank in sorted(trainers)]


def positions(trainers: list[Trainer]) -> dict[str, list[int]]:
    return {
        tensor.name: tensor.index.positions().tolist()
        for trainer in trainers
        for layer in trainer.layers
        for tensor in layer.state.owned
    }


def test_the_file_is_the_same_in_every_layout_and_gives_the_same_run(tmp_path: Path) -> None:
    """A tied weight has one mask, under its first use."""
    search = tiny_config(
        pruning={
            **{"method": "early-bird", "interval": 1, "until_step": 7},
            **{"threshold": 0.5, "include": "all"},
        },
        schedule={"warmup_steps": 1},
        batch=FEW_MICROBATCHES,
    )
    files = []
    for g_inter, g_data in LAYOUTS:
        path = tmp_path / f"{g_inter}x{g_data}"
        masks = positions(drawn(path, search, g_inter, g_data))
        files.append(path)
    # Replicas add in another order, but these masks do not depend on the last bits.
    assert len({path.read_bytes() for path in files}) == 1

    opened = open_masks(files[0])
    bools = {name: opened.mask(name, it.shape) for name, it in opened.entries.items()}
    plain = {name: mask.view(opened.entries[name].shape) for name, mask in bools.items()}
    foreign = write_named(tmp_path / "foreign", plain)
    traces = []
    for path, (g_inter, g_data) in ((files[0], (1, 1)), (files[0], (3, 1)), (foreign, (2, 1))):
        start = tiny_config(pruning={"mask": str(path)}, train={"steps": 4}, batch=FEW_MICROBATCHES)
        for trainer, trace in train_in_process(
            g_inter, g_data, tiny_gpt(start), start, token_data()
        ):
            traces.append(trace)
            assert_bitwise(trace, traces[0])
            for name, kept in positions([trainer]).items():
                assert kept == masks[name], name


@pytest.mark.parametrize("distribution", ["uniform", "global"])
def test_of_equal_scores_the_first_stay_in_every_layout_and_index(
    distribution: str, tmp_path: Path
) -> None:
    files = []
    layouts = {"int32": (1, 1, 1), "mask": (2, 2, 1), "auto": (1, 1, 2)}
    for index, (g_inter, g_data, g_tensor) in layouts.items():
        search = tiny_config(
            pruning={
                **{"method": "early-bird", "interval": 1, "until_step": 7, "include": "all"},
                "distribution": distribution,
            },
            samo={"index": index},
            schedule={"warmup_steps": 1},
            batch=FEW_MICROBATCHES,
        )
        files.append(tmp_path / index)
        named = {"g_tensor": g_tensor, "score": lambda _, weight: torch.zeros_like(weight)}
        drawn(files[-1], search, g_inter, g_data, **named)

    assert len({path.read_bytes() for path in files}) == 1
    opened = open_masks(files[0])
    in_part = 0
    for name, entry in opened.entries.items():
        mask = opened.mask(name, entry.shape)
        assert torch.equal(mask, torch.arange(mask.numel()) < opened.kept[name]), name
        in_part += 0 < opened.kept[name] < mask.numel()
    # Of all tensors together, earlier ones stay.
    assert in_part == len(opened.entries) if distribution == "uniform" else in_part <= 1


# -- reading --------------------------------------------------------------------------------


def test_other_libraries_read_the_bits_and_write_bools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="comes with transformers")
    bits = safetensors.load_file(small_mask_file(tmp_path))
    bools = {
        name: torch.from_numpy(np.unpackbits(bits[name].numpy(), count=mask.numel()) > 0)
        for name, mask in some_masks().items()
    }
    shaped = {name: mask.view(PRUNED[name]) for name, mask in bools.items()}
    safetensors.save_file(shaped, tmp_path / "bools")

    for path in (tmp_path, tmp_path / "bools"):
        masks: Masks = open_masks(path)
        assert dict(masks.kept) == {name: int(mask.sum()) for name, mask in some_masks().items()}
        for name, mask in some_masks().items():
            assert torch.equal(masks.mask(name, PRUNED[name], mask.clone), mask)


# -- damage ---------------------------------------------------------------------------------


def test_what_is_cut_short_is_refused_wherever_that_is(tmp_path: Path) -> None:
    path = small_mask_file(tmp_path)
    whole = path.read_bytes()

    for length in {*range(12), *range(12, len(whole), 41), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"^{path}: .*; get it anew$"):
            open_masks(path)


# -- writing --------------------------------------------------------------------------------


def write_on(
    g_inter: int, g_data: int, path: Path, noting: Callable[[int, str], None] = lambda *_: None
) -> None:
    """Write on all ranks of a layout; tensor n is on stage n, or on the last stage."""
    grid = Grid(g_inter, g_data)

    def main(transport: Transport) -> None:
        def mask(name: str) -> Tensor:
            noting(transport.rank, name)
            return some_masks()[name]

        coords = grid.coords(transport.rank)
        own = {
            name: partial(mask, name)
            for number, name in enumerate(PRUNED)
            if min(number, g_inter - 1) == coords.stage
        }
        write_masks(path, PRUNED, own, transport=transport, coords=coords)

    on_ranks(grid.size, main)


@pytest.mark.parametrize(("g_inter", "g_data"), [(3, 1), (2, 2), (1, 3)])
def test_the_file_is_the_same_bytes_whoever_writes_it(
    g_inter: int, g_data: int, tmp_path: Path
) -> None:
    write_on(g_inter, g_data, tmp_path / "new" / "m")

    assert (tmp_path / "new" / "m").read_bytes() == small_mask_file(tmp_path).read_bytes()
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["m"]


def test_only_replica_0_is_asked_for_masks_one_at_a_time(tmp_path: Path) -> None:
    asked: list[tuple[int, str]] = []

    write_on(2, 2, tmp_path / "m", lambda rank, name: asked.append((rank, name)))

    first, second, third = PRUNED
    assert sorted(asked) == sorted([(0, first), (1, second), (1, third)] * 2)


@pytest.mark.parametrize("name", ["m", "file/m"])
def test_a_disk_that_fills_up_ends_all_ranks_and_leaves_what_was_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills_up(
        path: Path,
        one_line: Mapping[str, TensorHeader],
        tensors: Iterator[Tensor],
        metadata: Mapping[str, str],
    ) -> None:
        write_safetensors(path, {}, iter([]))
        next(tensors)
        raise OSError(28, "No space left on device")

    older = module.MASK_MARK
    (tmp_path / "file").touch()
    if name == "m":
        (tmp_path / "m").write_text(older)
        monkeypatch.setattr(module, "write_safetensors", fills_up)

    with pytest.raises(
        OutputError,
        match=rf"^mask file '{tmp_path / name}': cannot be written \(.+\); "
        f"choose another place{', or free the disk' if name == 'm' else '$'}",
    ) as told:
        write_on(3, 1, tmp_path / name)

    assert told.value.on_all_ranks
    assert (tmp_path / "file").read_text() == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"file", name.partition("/")[0]})
    assert name != "m" or (tmp_path / "m").read_text() == older
