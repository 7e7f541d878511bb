"""An index beyond a table is told with its sample; other errors stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axsparse.models.losses import linear_cross_entropy
from axsparse.runtime.bounds import telling_sample
from axsparse.runtime.errors import DataError, noted

TABLE = torch.randn(4, 3)
SAMPLES = (7, 8)


def of(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (
            lambda: F.embedding(of(0, 1, 9, 2), TABLE),
            "sample 8, position 0: 9 is no row of a table",
        ),
        (lambda: F.embedding(of(0, -1, 1, 2), TABLE), "sample 7, position 1: -1 is no row of a"),
        (
            lambda: F.embedding(of(0, 1, 9), TABLE),
            "position 2: 9 is no row of a table of 4, 0 to 3",
        ),
        (lambda: F.embedding_bag(of(0, 9).view(1, 2), TABLE), "sample 8, position 0: 9 is no row"),
        (
            lambda: F.cross_entropy(TABLE, of(0, -100, 2, 3), reduction="sum"),
            "sample 8, position 1: 3 is none of 3 classes, 0 to 2, or -100",
        ),
        (lambda: F.nll_loss(TABLE[:2], of(-1, 0)), "sample 7, position 0: -1 is none of 3 classes"),
        (lambda: TABLE.gather(1, of(0, 5).view(1, 2)), "sample 8, position 0: 5 is no entry of 3"),
        (
            lambda: torch.index_select(TABLE, 0, of(0, 9)),
            "sample 8, position 0: 9 is no entry of 4",
        ),
        (lambda: TABLE[of(-4, 9)], "sample 8, position 0: 9 is no row of 4, 0 to 3"),
        (lambda: F.one_hot(of(0, 3), 3), "sample 8, position 0: 3 is none of 3 classes, 0 to 2"),
        (
            lambda: linear_cross_entropy(torch.randn(2, 3), torch.randn(2**21, 3), of(0, 2**21)),
            "sample 8, position 0: 2097152 is no word of a vocabulary of 2097152",
        ),
    ],
)
def test_sample_position_value_and_bound_are_told(run: Callable[[], Tensor], told: str) -> None:
    def of_layer() -> Tensor:
        with noted("layer table"):
            return run()

    with pytest.raises(DataError) as refused:
        telling_sample(of_layer, SAMPLES, "mine")

    said = str(refused.value)
    assert said.startswith(f"data (mine): {told}")
    assert said.endswith("(layer table); mend the sample, or make the model larger")


@pytest.mark.parametrize(
    "run", [lambda: torch.ones(2) @ torch.ones(3), lambda: [][1], lambda: torch.ones(2)[5]]
)
def test_other_errors_stay_as_they_are(run: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as raised:
        telling_sample(run, SAMPLES)

    assert not isinstance(raised.value, DataError)


def test_what_fails_once_and_not_again_keeps_its_error() -> None:
    errors = [IndexError("once")]

    def run() -> None:
        if errors:
            raise errors.pop()

    with pytest.raises(IndexError, match=r"^once$"):
        telling_sample(run, SAMPLES)
