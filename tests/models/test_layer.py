"""The outputs that a layer may return."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from axsparse.models.layer import as_tuple
from axsparse.runtime.errors import ConfigError


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
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_does_not_travel_is_refused(made: Callable[[Tensor], Tensor], what: str) -> None:
    pair = torch.zeros(2)

    with pytest.raises(ConfigError, match=rf"layer a: its forward returned {what} tensor, which"):
        as_tuple("a", (pair, made(pair)))
