"""Tokens and targets beyond the model end a run in one line that names the sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.runs import summed_loss, tiny_config, train_in_process
from torch import Tensor, nn

from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Model
from axsparse.models.sequential import from_sequential
from axsparse.runtime.errors import DataError

INPUT = "data (arrays): sample 13, position 2: 70 is no row of a table of 10, 0 to 9 (layer 0)"
TARGET = "data (arrays): sample 13, position 0: 5 is none of 3 classes, 0 to 2, or -100 (the loss)"
MEND = "; mend the sample, or make the model larger"


def model() -> Model:
    modules = [nn.Embedding(10, 8), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)]
    return from_sequential(modules, summed_loss)


def samples(wrong: str) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.arange(16 * 4).view(16, 4) % 10, torch.arange(16) % 3
    if wrong == INPUT:
        inputs[13, 2] = 70
    if wrong == TARGET:
        targets[13] = 5
    return inputs, targets


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("wrong", [INPUT, TARGET])
@pytest.mark.parametrize("when", ["training", "evaluation", "calibration"])
def test_the_sample_is_named(wrong: str, when: str, layout: tuple[int, int]) -> None:
    sections: dict[str, Any] = {"pruning": {"sparsity": 0.5}}
    if when == "calibration":
        sections["pruning"] |= {"method": "wanda", "calibration_samples": 16}
    # The loss of the first microbatch of calibration samples is shown.
    size = 8 if when == "calibration" else 4
    config = tiny_config(
        batch={"global_batch_size": 16, "microbatch_size": size},
        train={"steps": 1, "eval_every": 1 if when == "evaluation" else 0, "eval_steps": "all"},
        **sections,
    )
    good, bad = ArrayDataset(*samples("")), ArrayDataset(*samples(wrong))
    training, validation = (good, bad) if when == "evaluation" else (bad, good)

    with pytest.raises(DataError) as refused:
        train_in_process(*layout, model(), config, training, validation=validation)

    assert str(refused.value) == wrong + MEND
