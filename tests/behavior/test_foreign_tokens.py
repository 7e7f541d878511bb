"""Tokens beyond the vocabulary end a run in one line that names the sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.runs import summed_loss, tiny_config, train_in_process
from torch import nn

from axsparse.data.dataset import ArrayDataset
from axsparse.models.layer import Model
from axsparse.models.sequential import from_sequential
from axsparse.runtime.errors import DataError

MODEL = "arrays): sample 13, position 2: 70 is no word of a vocabulary of 10, 0 to 9"
DATA = "arrays): sample 13, position 2: 8 is no word of a vocabulary of 6, 0 to 5"
TARGET = "arrays): sample 13, position 0: -1 is no word of a vocabulary of 6, 0 to 5"
MEND = "; mend the sample, or make the vocabulary of model and data larger"


def model() -> Model:
    after = [nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 6)]
    return from_sequential([nn.Embedding(10, 8), *after], summed_loss)


def samples(wrong: str) -> ArrayDataset:
    inputs, targets = torch.arange(16 * 4).view(16, 4) % 6, torch.arange(16) % 3
    targets[3] = -100
    if wrong == TARGET:
        targets[13] = -1
    elif wrong:
        inputs[13, 2] = 70 if wrong == MODEL else 8
    data = ArrayDataset(inputs, targets)
    if wrong != MODEL:
        vars(data)["vocab_size"] = 6
    return data


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("wrong", [MODEL, DATA, TARGET])
@pytest.mark.parametrize("when", ["training", "evaluation", "calibration"])
def test_the_sample_is_named(wrong: str, when: str, layout: tuple[int, int]) -> None:
    sections: dict[str, Any] = {"pruning": {"sparsity": 0.5}}
    if when == "calibration":
        sections["pruning"] |= {"method": "wanda", "calibration_samples": 16}
    size = 8 if when == "calibration" else 4
    config = tiny_config(
        batch={"global_batch_size": 16, "microbatch_size": size},
        train={"steps": 1, "eval_every": 1 if when == "evaluation" else 0, "eval_steps": "all"},
        **sections,
    )
    good, bad = samples(""), samples(wrong)
    training, validation = (good, bad) if when == "evaluation" else (bad, good)

    with pytest.raises(DataError) as rejected:
        train_in_process(*layout, model(), config, training, validation=validation)

    assert str(rejected.value) == f"data ({wrong}{MEND}"
