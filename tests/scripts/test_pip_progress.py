"""What `make train` shows while it installs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "pip_progress.py"
INSTALLATION = """
import sys
print("Collecting torch")
print("  Downloading torch-2.13.0-cp311.whl (187.2 MB)")
print("  Downloading idna-3.20.whl (71 kB)")
print("Installing collected packages: idna, torch")
print("the end", file=sys.stderr)
sys.exit({code})
"""
"""Says what pip says, as far as it matters here."""


@pytest.mark.parametrize("code", [0, 3])
def test_large_downloads_are_announced_and_a_failure_is_told(
    code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = runpy.run_path(str(SCRIPT))["watched"]

    assert watched([sys.executable, "-uc", INSTALLATION.format(code=code)]) == code

    screen, errors = capsys.readouterr()
    assert [line.split("  ")[2] for line in screen.splitlines()] == [
        "Downloading torch-2.13.0-cp311.whl (187.2 MB)",
        "Installing collected packages: idna, torch",
    ]
    assert errors.endswith("the end\n") if code else errors == ""
