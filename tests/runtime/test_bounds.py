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
    ("run", "indices", "told"),
    [
        (
            lambda x: F.embedding(x, TABLE),
            of(0, 1, 9, 2),
            "sample 8, position 0: 9 is no row of a table",
        ),
        (
            lambda x: F.embedding(x, TABLE),
            of(0, -1, 1, 2),
            "sample 7, position 1: -1 is no row of a",
        ),
        (
            lambda x: F.embedding(x, TABLE),
            of(0, 1, 9),
            "position 2: 9 is no row of a table of 4, 0 to 3",
        ),
        (
            lambda x: F.embedding_bag(x.view(1, 2), TABLE),
            of(0, 9),
            "sample 8, position 0: 9 is no row",
        ),
        (
            lambda x: F.cross_entropy(TABLE, x, reduction="sum"),
            of(0, -100, 2, 3),
            "sample 8, position 1: 3 is none of 3 classes, 0 to 2, or -100",
        ),
        (
            lambda x: F.nll_loss(TABLE[:2], x),
            of(-1, 0),
            "sample 7, position 0: -1 is none of 3 classes",
        ),
        (
            lambda x: TABLE.gather(1, x.view(1, 2)),
            of(0, 5),
            "sample 8, position 0: 5 is no entry of 3",
        ),
        (
            lambda x: torch.index_select(TABLE, 0, x),
            of(0, 9),
            "sample 8, position 0: 9 is no entry of 4",
        ),
        (lambda x: TABLE[x], of(-4, 9), "sample 8, position 0: 9 is no row of 4, 0 to 3"),
        (lambda x: F.one_hot(x, 3), of(0, 3), "sample 8, position 0: 3 is none of 3 classes, 0 to"),
        (
            lambda x: linear_cross_entropy(torch.randn(2, 3), torch.randn(2**21, 3), x),
            of(0, 2**21),
            "sample 8, position 0: 2097152 is no word of a vocabulary of 2097152",
        ),
        (
            lambda x: F.embedding(x.view(2, 3).T + 0, TABLE),
            of(0, 1, 9, 1, 1, 1),
            "position 4: 9 is no row of a table of 4, 0 to 3",  # of a sample that is not told
        ),
    ],
)
def test_sample_position_value_and_bound_are_told(
    run: Callable[[Tensor], Tensor], indices: Tensor, told: str
) -> None:
    def of_layer() -> Tensor:
        with noted("layer table"):
            return run(indices)

    with pytest.raises(DataError) as refused:
        telling_sample(of_layer, (indices, None), SAMPLES, "mine")

    said = str(refused.value)
    assert said.startswith(f"data (mine): {told}")
    assert said.endswith("(layer table); mend the sample, or make the model larger")


POSITIONS = torch.arange(6)


@pytest.mark.parametrize(
    ("positions", "first"),
    [
        (lambda x: torch.arange(x.shape[1]), 4),
        (lambda _: POSITIONS, 4),
        (lambda x: torch.arange(x.shape[1]).expand_as(x), 4),
        (lambda x: torch.ones_like(x).cumsum(1) - 1, 4),
    ],
    ids=["made", "kept", "expanded", "counted"],
)
def test_no_sample_is_blamed_for_positions_that_all_share(
    positions: Callable[[Tensor], Tensor], first: int
) -> None:
    """Six positions of two samples are a multiple of the samples."""
    inputs = torch.zeros(2, 6, dtype=torch.int64)

    with pytest.raises(DataError) as refused:
        telling_sample(lambda: F.embedding(positions(inputs), TABLE), (inputs,), SAMPLES)

    assert str(refused.value) == (
        f"data: position {first} of indices that all samples share, such as their positions: 4 is "
        "no row of a table of 4, 0 to 3 (the loss); give shorter samples, or make the model larger"
    )


def test_what_is_computed_from_the_samples_by_way_of_another_tensor_names_the_sample() -> None:
    inputs = torch.tensor([[0, 1], [1, 9]])

    def run() -> Tensor:
        padded = torch.zeros(2, 4, dtype=torch.int64)
        padded[:, 1:3] = inputs
        return F.embedding(torch.stack(padded.unbind(1), 1), TABLE)

    with pytest.raises(DataError, match="sample 8, position 2: 9 is no row of a table of 4"):
        telling_sample(run, (inputs,), SAMPLES)


@pytest.mark.parametrize(
    "run", [lambda: torch.ones(2) @ torch.ones(3), lambda: [][1], lambda: torch.ones(2)[5]]
)
def test_other_errors_stay_as_they_are(run: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as raised:
        telling_sample(run, (), SAMPLES)

    assert not isinstance(raised.value, DataError)


def test_what_fails_once_and_not_again_keeps_its_error() -> None:
    errors = [IndexError("once")]

    def run() -> None:
        if errors:
            raise errors.pop()

    with pytest.raises(IndexError, match=r"^once$"):
        telling_sample(run, (), SAMPLES)
