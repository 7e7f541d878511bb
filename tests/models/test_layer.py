"""The outputs that a layer may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from axsparse.models.layer import as_tuple
from axsparse.runtime.errors import ConfigError


class Wrapped(Tensor):
    """Handles operations by itself, like a masked or distributed tensor."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


class Labelled(Tensor):
    """Adds a name for something, and no data."""


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor + 1


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (torch.view_as_complex, "a complex"),
        (Tensor.to_sparse, "a sparse"),
        (lambda pair: torch.nested.nested_tensor([pair, pair[:1]]), "a nested"),
        (lambda pair: torch.quantize_per_tensor(pair, 0.1, 0, torch.qint8), "a qint8"),
        (inference, "an inference-mode"),
        (lambda pair: Tensor._make_subclass(Wrapped, pair), "a Wrapped"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_does_not_travel_is_refused(made: Callable[[Tensor], Tensor], what: str) -> None:
    pair = torch.zeros(2)

    with pytest.raises(ConfigError, match=rf"layer a: its forward returned {what} tensor, which"):
        as_tuple("a", (pair, made(pair)))


def test_a_tensor_of_a_subclass_is_handed_on_as_it_would_arrive() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    labelled = (weight * 2).as_subclass(Labelled)

    plain, kept = as_tuple("a", (labelled, weight))

    assert type(plain) is Tensor
    plain.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]
    assert kept is weight
