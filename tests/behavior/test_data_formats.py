"""Blends of tokens in several formats resume anywhere, and are evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.preparing import SEPARATOR, run, write_jsonl, write_megatron
from support.resuming import Ran, ran

from axsparse.config.load import configure
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.data.preparation import Request
from axsparse.data.sources import open_datasets
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import DataError

TEXTS = [
    f"Document {number}: " + f"{number * 7919} and so on. " * (4 + number) for number in range(9)
]
IDS = [[*text.encode(), SEPARATOR] for text in TEXTS]
SETTINGS = (
    *("model.num_layers=2", "model.hidden_size=16", "model.num_heads=2", "model.vocab_size=256"),
    *("model.sequence_length=16", "batch.global_batch_size=8", "batch.microbatch_size=2"),
    *("precision=fp32", "samo.gradient=exact", "pruning.sparsity=0.5", "data.source=tokens"),
    *("train.steps=4", "train.eval_steps=0", "train.eval_every=0", "train.peak_flops=1e12"),
    *("optimizer.learning_rate=0.01", "schedule.warmup_steps=1"),
)


def loaded_of(*settings: str) -> Config:
    return configure(None, [*SETTINGS, *settings])


# -- blends ---------------------------------------------------------------------------------


@pytest.fixture
def blend(tmp_path: Path) -> str:
    """Three sources of different lengths and formats; the small one is read many times."""
    first = write_megatron(tmp_path / "first", IDS)
    texts, second = write_jsonl(tmp_path / "b.jsonl", [{"text": "b" * 300}]), tmp_path / "out"
    run(Request((texts,), second))
    third = write_megatron(tmp_path / "third", [[7] * 40], 4)
    return f"data.blend=[{first}=0.5, {second}=0.3, {third}=0.2]"


def test_a_blend_goes_on_where_it_was_and_a_changed_source_is_refused(
    blend: str, tmp_path: Path
) -> None:
    loaded = loaded_of(blend, "train.steps=5")

    def go(name: str, layout: tuple[int, int], **options: Any) -> Ran:
        data: Any = open_datasets(loaded)
        model = lambda _: named_model(loaded)  # noqa: E731
        return ran(layout, loaded, tmp_path / name, model=model, data=data.training, **options)

    whole = go("whole", (1, 1))
    go("cut", (2, 1), stop_after=2)
    for ending in ("bin", "idx"):
        (tmp_path / f"third.{ending}").rename(tmp_path / f"moved.{ending}")
    loaded = loaded_of(blend.replace("/third=", "/moved="), "train.steps=5")
    rest = go("cut", (1, 2), resume="auto")
    assert rest.losses == {step: whole.losses[step] for step in (3, 4, 5)}

    file = tmp_path / "moved.bin"
    file.write_bytes(b"\x08" + file.read_bytes()[1:])
    with pytest.raises(DataError, match=r"data: blend of .* has fingerprint \w+, checkpoint"):
        go("cut", (1, 1), resume="auto")


def test_evaluations_read_the_validation_parts_of_all_sources_or_one(tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        held_out = write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name * 100}])
        request = Request(
            (held_out,),
            tmp_path / name,
            validation=(
                write_jsonl(tmp_path / f"{name}-held.jsonl", [{"text": name.upper() * 50}]),
            ),
        )
        run(request)
        folders.append(tmp_path / name)
    blend = f"data.blend=[{folders[0]}=1, {folders[1]}=2]"

    def read(*settings: str) -> tuple[Datasets, list[int]]:
        data: Any = open_datasets(loaded_of(blend, "train.eval_steps=all", *settings))
        (inputs,), _ = data.validation.read(np.arange(len(data.validation)))
        return data, inputs[:, 0].tolist()

    data, begins = read()
    assert begins == [ord("A")] * 3 + [ord("B")] * 3
    assert data.training.name == "blend of tokens a train 33.33%, tokens b train 66.67%"
    assert read(f"data.validation={write_megatron(tmp_path / 'c', IDS)}")[1][0] == IDS[0][0]
