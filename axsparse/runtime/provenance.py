"""Provenance of a run's numbers: versions of packages, and the commit of the checkout."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder that the package lies in: a checkout of the project, or one of installed packages."""


def versions() -> dict[str, str]:
    """Versions of packages that a run's numbers may depend on, and the type of the machine."""
    # Imported late, since every command reads the version of the package.
    import numpy as np
    import torch

    return {
        "axsparse": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


@cache
def checkout_commit() -> str | None:
    """The commit of the checkout that axsparse runs from, with "-dirty" if files differ from it;
    None if the package is installed, or git, which takes 40 ms, fails."""
    if not (CHECKOUT / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
