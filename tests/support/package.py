"""The package as text."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import axsparse

PACKAGE = Path(axsparse.__file__).parent
BUNDLED = sorted(path.stem for path in (PACKAGE.parent / "configs").glob("*.yaml"))
"""The names of the bundled configurations."""


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package but the empty folder heads, without "axsparse." in front."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] != "__init__":
            found[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found
