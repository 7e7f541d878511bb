"""The outputs that a layer may return."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from axsparse.models.layer import as_tuple
from axsparse.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("made", "what"), [(torch.view_as_complex, "complex"), (Tensor.to_sparse, "sparse")]
)
def test_what_does_not_travel_is_refused(made: Callable[[Tensor], Tensor], what: str) -> None:
    pair = torch.zeros(2)

    with pytest.raises(ConfigError, match=rf"layer a: its forward returned a {what} tensor, which"):
        as_tuple("a", (pair, made(pair)))
