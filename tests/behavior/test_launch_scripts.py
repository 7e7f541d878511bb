"""The templates of `launch/`."""

from __future__ import annotations

from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize("name", ["slurm.sh", "lsf.sh"])
def test_templates_are_for_bash(name: str) -> None:
    assert (LAUNCH / name).read_text().startswith("#!/bin/bash\n")
