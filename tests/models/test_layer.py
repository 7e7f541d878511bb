"""What layers may return."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axsparse.errors import ConfigError
from axsparse.models.layer import as_tuple


@pytest.mark.parametrize(
    ("made", "what"),
    [(torch.zeros(2, dtype=torch.complex64), "complex"), (torch.zeros(2).to_sparse(), "sparse")],
)
def test_what_does_not_travel_is_refused(made: Tensor, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer a: its forward returned a {what} tensor, which"):
        as_tuple("a", (torch.zeros(2), made))
