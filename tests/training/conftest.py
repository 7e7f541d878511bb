"""A run that was saved, for tests that read, forge or go on with its checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.resuming import ran
from support.runs import FEW_MICROBATCHES, tiny_config


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps, saved after the second, the fourth and the fifth."""
    run = tmp_path_factory.mktemp("original") / "run"
    config = tiny_config(train={"steps": 5}, batch=FEW_MICROBATCHES, checkpoint={"every": 2})
    ran((1, 1), config, run)
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(original, tmp_path / "run"))
