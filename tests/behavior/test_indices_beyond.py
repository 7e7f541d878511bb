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


def model_after_words() -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)]


def model() -> Model:
    return from_sequential([nn.Embedding(10, 8), *model_after_words()], summed_loss)


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


class Placed(nn.Module):
    """Words, and their places, of which the table has too few."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 8), nn.Embedding(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        sums: Tensor = self.words(x) + self.places(torch.arange(x.shape[1]))
        return sums


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("wrong", ["word", "place"])
def test_a_place_is_no_sample_also_where_layers_are_recomputed(wrong: str, recompute: int) -> None:
    """Four places are as many as two microbatches' samples, so that one could be blamed."""
    inputs, targets = samples(INPUT if wrong == "word" else "")
    model = from_sequential([Placed(), *model_after_words()], summed_loss)
    config = tiny_config(
        batch={"global_batch_size": 16, "microbatch_size": 4},
        train={"steps": 1, "eval_steps": 0},
        pipeline={"checkpoint_activations": recompute},
    )

    with pytest.raises(DataError) as refused:
        train_in_process(1, 1, model, config, ArrayDataset(inputs, targets))

    said = {
        "word": INPUT + MEND,
        "place": "data (arrays): position 3 of indices that all samples share, such as their "
        "positions: 3 is no row of a table of 3, 0 to 2 (layer 0); give shorter samples, or make "
        "the model larger",
    }
    assert str(refused.value) == said[wrong]
