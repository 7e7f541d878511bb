"""One SLURM for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm.loopback import loopback


@pytest.fixture(scope="session", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with loopback(tmp_path_factory.mktemp("slurm")):
        yield
