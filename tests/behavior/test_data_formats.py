"""Blends of tokens in several formats are evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.preparing import SEPARATOR, run, write_jsonl, write_megatron

from axsparse.config.load import configure
from axsparse.data.dataset import Datasets
from axsparse.data.preparation import Request
from axsparse.data.sources import open_datasets

SETTINGS = ("data.source=tokens", "data.sequence_length=16", "train.eval_steps=all")
IDS = [[*f"Document {number}: and so on.".encode(), SEPARATOR] for number in range(9)]


def test_evaluations_read_the_validation_parts_of_all_sources_or_one(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        training, held_out = (
            write_jsonl(tmp_path / f"{text}.jsonl", [{"text": text * 50}])
            for text in (2 * folder.name, folder.name.upper())
        )
        run(Request((training,), folder, validation=(held_out,)))
    blend = f"data.blend=[{folders[0]}=1, {folders[1]}=2]"

    def read(*settings: str) -> tuple[Datasets, list[int]]:
        data: Any = open_datasets(configure(None, [*SETTINGS, blend, *settings]))
        (inputs,), _ = data.validation.read(np.arange(len(data.validation)))
        return data, inputs[:, 0].tolist()

    data, begins = read()
    assert begins == [ord("A")] * 3 + [ord("B")] * 3
    assert data.training.name == "blend of a train 33.33%, b train 66.67%"
    assert read(f"data.validation={write_megatron(tmp_path / 'c', IDS)}")[1][0] == IDS[0][0]
